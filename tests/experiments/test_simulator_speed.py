"""The measurement of the simulator's own speed: what is simulated, in which time, on how much memory."""

from __future__ import annotations

import pytest

from experiments.simulator_speed import VARIANT, SimulatorSpeed

SHORT = ("experiment=simulator_speed", "experiment.simulated_s=20")


def test_as_it_is_it_measures_an_hour_of_64_replicas_in_two_halves(compose_config) -> None:
    speed = SimulatorSpeed.from_config(compose_config("experiment=simulator_speed"))
    assert (speed.spec.simulated_s, speed.spec.rate_per_s * 64) == (3600, 200)
    assert [point.name for point in speed.points] == [
        "1 replica behind one router",
        "8 replicas, 4 behind each of 2 routers",
        "64 replicas, 32 behind each of 2 routers",
    ]
    (claim,) = speed.claims
    assert (claim.metric, claim.point, claim.value) == ("hour_wall_s", speed.points[-1].name, 60)


@pytest.mark.parametrize("replicas", [1, 4])
def test_wall_time_and_memory_are_those_of_all_processes(compose_config, replicas: int) -> None:
    speed = SimulatorSpeed.from_config(
        compose_config(*SHORT, f"experiment.replicas=[{replicas}]", "experiment.claims=[]")
    )
    found = speed.values(VARIANT, speed.points[0])
    assert set(found) == set(speed.metrics)
    assert found["hour_wall_s"] >= found["hour_s"] > 0, "of an hour, as CPU time is"
    assert found["hour_s"] <= found["hour_cpu_s"] <= 2 * found["hour_s"]
    assert 0 <= found["late_mib"] <= found["grown_mib"] < found["peak_mib"]
    assert found["ttft_ms"] > 6, "a step with a prompt in it"
