"""The fixed work that shows a changed clock."""

import pytest

from experiments.lab.measure import clocks

REAL_TAKE = clocks.take


def test_the_fixed_work_takes_time_and_has_an_end(monkeypatch):
    monkeypatch.setattr(clocks, "PATIENCE_S", 0.02)
    found = REAL_TAKE("cpu")
    assert 0 < found.host_s < 1
    assert found.gpu_s is None
    assert REAL_TAKE("cpu", clocks.Speed(1e-9)).host_s > 0  # nobody gets so fast: it gives up


def test_a_busy_neighbour_is_waited_for(monkeypatch):
    times = iter([3.0, 2.0, 1.01, 9.9])
    monkeypatch.setattr(clocks, "_host_work", lambda: next(times))
    assert REAL_TAKE("cpu", clocks.Speed(1.0)) == clocks.Speed(1.01)
    assert next(times) == pytest.approx(9.9)
