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


def test_beside_a_gpu_the_host_is_hardly_waited_for(monkeypatch):
    times = iter([1.5, 1.2, 9.9])
    monkeypatch.setattr(clocks, "_host_work", lambda: next(times))
    monkeypatch.setattr(clocks, "_gpu_work", lambda: 0.1)
    assert REAL_TAKE("cuda", clocks.Speed(1.0)) == clocks.Speed(1.2, 0.1)


def test_a_clock_that_a_hot_pass_has_lowered_is_waited_for(monkeypatch):
    times = iter([0.12, 0.11, 0.101, 9.9])
    monkeypatch.setattr(clocks, "_host_work", lambda: 1.0)
    monkeypatch.setattr(clocks, "_gpu_work", lambda: next(times))
    assert REAL_TAKE("cuda", clocks.Speed(1.0, 0.1)) == clocks.Speed(1.0, 0.101)
    monkeypatch.setattr(clocks, "PATIENCE_S", 0.0)
    assert REAL_TAKE("cuda", clocks.Speed(1.0, 0.1)).gpu_s == pytest.approx(9.9), "one that stays low shows"


class Library:
    """NVML of a GPU at 700 W that uses 70 J from reading to reading."""

    def __init__(self, failed=0):
        self.failed, self.energy = failed, 1_000_000

    def nvmlDeviceGetClockInfo(self, handle, kind, value):
        value._obj.value = 1980
        return self.failed

    def nvmlDeviceGetPowerUsage(self, handle, value):
        value._obj.value = 700_000
        return 0

    def nvmlDeviceGetTemperature(self, handle, sensor, value):
        value._obj.value = 61
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, value):
        self.energy += 70_000
        value._obj.value = self.energy
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle, value):
        value._obj.gpu = handle  # percent
        return 0


def test_a_gpu_tells_clock_power_temperature_and_energy(monkeypatch):
    gpu = clocks.Gpu(Library(), None)
    assert gpu.read() == clocks.GpuState(1980.0, 700.0, 61.0, 1070.0)
    monkeypatch.setattr(clocks, "find_gpu", lambda device: gpu)
    watch = clocks.Watch("cuda")
    assert watch.after(watch.before()).joules == 70.0
    assert watch.summary() == {"clock_mhz": 1980.0, "power_w": 700.0, "temperature_c": 61.0, "busy_others": 0}
    assert clocks.Gpu(Library(failed=3), None).read() is None


def test_other_gpus_that_compute_for_somebody_else_are_counted(monkeypatch):
    library = Library()
    monkeypatch.setattr(clocks, "find_gpu", lambda device: clocks.Gpu(library, None, others=[0, 85, 3]))
    watch = clocks.Watch("cuda")
    watch.after(watch.before())
    assert watch.summary()["busy_others"] == 2


def test_where_nobody_knows_the_gpu_nothing_depends_on_it():
    assert clocks.find_gpu("cpu") is None
    watch = clocks.Watch("cpu")
    assert (watch.after(watch.before()).joules, watch.summary()) == (None, {})
