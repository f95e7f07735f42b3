"""Fleets of a few replicas, of which it can be said by hand what becomes of their requests."""

from collections.abc import Callable
from typing import Any

import pytest

from experiments.fleet import Fleet
from mini_infer.core.errors import ConfigError


@pytest.fixture
def values(compose_config: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    def of(*changes: str, **case: float) -> dict[str, Any]:
        told = ", ".join(f"{key}: {value}" for key, value in ({"replicas": 4} | case).items())
        cases = "~experiment.cases", f"+experiment.cases={{it: {{{told}}}}}"
        fleet = Fleet.from_config(compose_config("experiment=fleet", *cases, "experiment.claims=[]", *changes))
        return fleet.values("fleet", fleet.points[0])

    return of


def test_replicas_with_room_keep_every_promise(values):
    found = values(load=0.2)
    assert (found["kept_share"], found["broken_share"], found["kept_down_share"]) == (1, 0, None)


def test_what_is_found_is_what_was_shared(values):
    """One beginning, which is half of a prompt: it is found by all that have it, but for the first ones."""
    found = values("+experiment.shared=1", prefixes=1, replicas=1, load=0.5)
    assert 0.45 < found["hit_rate"] <= 0.5
    assert values("+experiment.shared=0", replicas=1, load=0.5)["hit_rate"] == 0


def test_half_of_the_replicas_down_break_streams_and_promises(values):
    """Half of them at a load of 1 have what all of them have at 2; and at a load of a half what all have at 1."""
    whole, broken, spared = values(replicas=8), values(replicas=8, down=0.5), values(replicas=8, down=0.5, load=0.4)
    assert whole["broken_share"] == 0 < broken["broken_share"] < 0.1
    assert broken["kept_down_share"] < spared["kept_down_share"] > 0.8
    assert broken["kept_share"] < whole["kept_share"]


def test_routers_that_know_less_of_each_other_find_less(values):
    """Many beginnings over few replicas: who shares requests out by them, or knows where they went, finds more."""
    many = {"replicas": 8, "prefixes": 20, "load": 0.5}
    hits = {
        name: values(**many, **how)["hit_rate"]
        for name, how in {
            "one": {},
            "alone": {"routers": 8},
            "homes": {"routers": 8, "homes": "true"},
            "by prefix": {"routers": 8, "by_prefix": "true"},
        }.items()
    }
    assert hits["alone"] < 0.97 * hits["one"]
    assert hits["homes"] > hits["alone"] < hits["by prefix"]


def test_what_no_fleet_can_be_is_refused(compose_config):
    with pytest.raises(ConfigError, match=r"experiment.window_s must be"):
        Fleet.from_config(compose_config("experiment=fleet", "experiment.window_s=0"))
