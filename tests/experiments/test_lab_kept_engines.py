"""One engine a variant for all its passes: when it is warmed up, what it forgets, and what does not go with it."""

from types import SimpleNamespace

import pytest
from small_runs import measured, probe

from experiments import ablation
from experiments.lab.config import points
from experiments.lab.config.points import Point
from experiments.lab.judge.gate import compare
from experiments.lab.measure import cells
from experiments.lab.measure.hardware import Hardware
from experiments.lab.measure.kinds import Kind, Subject
from experiments.lab.measure.simulated import Simulator
from experiments.lab.measure.subjects import EngineSubject
from experiments.lab.measure.traces import Served
from experiments.lab.peers.pool import Peers
from experiments.lab.show.progress import Steps
from experiments.lab.workloads import Inputs, Item
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError

DRAFTS = {"method": "synthetic", "acceptance": 0.5, "adaptive": False}
LOADS = {
    "load": {
        "short": {"workload.count": 3, "workload.prompt_tokens": 20},
        "one long": {"workload.count": 1, "workload.prompt_tokens": 200},
    }
}


@pytest.fixture
def build(compose_config):
    settings = ("model=dry", "engine.model.device=cpu", "measure.repeats=2", "engine.cache.num_blocks=256")
    load = ("workload=fixed", "workload.output_tokens=4")
    kept = {"keep_engines": True, "metrics": ["ttft_ms", "prefix_hit_rate"], "points": LOADS}
    return lambda *more, **experiment: probe(compose_config, *settings, *load, *more, **{**kept, **experiment})


@pytest.fixture
def calls(monkeypatch):
    """(what, engine's seed, requests) of everything that engines are asked."""
    noted = []
    for name in ("__init__", "serve", "forget", "close"):
        real = getattr(EngineSubject, name)

        def noting(self, *arguments, _real=real, _name=name):
            found = _real(self, *arguments)
            count = len(arguments[0]) if _name == "serve" else 0
            noted.append((_name, self.engine.config.seed, count))
            return found

        monkeypatch.setattr(EngineSubject, name, noting)
    return noted


def test_an_engine_serves_all_passes_of_its_variant(build, calls):
    found = measured(build())
    assert [call for call in calls if call[0] == "__init__"] == [("__init__", 0, 0), ("__init__", 7, 0)]
    own = [(name, count) for name, seed, count in calls if seed == 7 and name != "__init__"]
    assert own == [
        *(("serve", 3), ("serve", 3)),  # warmed up, and measured
        *(("forget", 0), ("serve", 2), ("serve", 1)),  # every other pass begins as the first one did
        *(("forget", 0), ("serve", 2), ("serve", 3)),  # it has been warm: two requests are enough
        *(("forget", 0), ("serve", 2), ("serve", 1)),
        ("close", 0),
    ]
    assert all(row.valid for row in found.rows)
    assert {row.value for row in found.rows if row.metric == "prefix_hit_rate"} == {0.0}  # of the repeat before
    assert all(gate.passed for gate in found.gates)
    assert "one engine for all its passes" in found.procedure


def test_while_peers_load_engines_start_and_are_warmed_up(build, calls, monkeypatch):
    monkeypatch.setattr(Peers, "begun", True)
    monkeypatch.setattr(Peers, "await_begun", lambda self: calls.append(("peers are there", 0, 0)))
    variants = {"transformers": {"label": "base"}, "engine": {"seed": 7}, "drafts": {"seed": 8, "speculation": DRAFTS}}
    found = measured(build("measure.aa=always", variants=variants))
    before = calls[: calls.index(("peers are there", 0, 0))]
    assert {call for call in before if call[0] == "__init__"} == {("__init__", 0, 0), ("__init__", 7, 0)}
    warm_ups = [(name, count) for name, seed, count in before if seed == 7][1:]
    assert warm_ups == [("serve", 3), ("forget", 0), ("serve", 2)]  # of both points, in full
    assert next(call for call in calls if call[1] == 8) == ("__init__", 8, 0)  # which times its own steps as it starts
    own = [(name, count) for name, seed, count in calls[len(before) + 1 :] if seed == 7]
    assert own[:3] == [("forget", 0), ("serve", 2), ("serve", 3)]
    assert {row.value for row in found.rows if row.metric == "prefix_hit_rate"} == {0.0}


@pytest.mark.parametrize(
    ("settings", "untimed"),
    [
        ({}, True),
        ({"speculation": DRAFTS}, False),
        ({"parallel": {"tensor": 2}}, False),
        ({"parallel": {"tensor": 2, "all_reduce": "library"}}, True),
        ({"parallel": {"pipeline": 2}}, True),
    ],
)
def test_what_times_its_own_steps_or_sums_starts_alone(settings, untimed):
    cell = SimpleNamespace(kind=Kind.engine, engine=EngineConfig.from_dict({"model": {"path": "dry"}, **settings}))
    assert cells.starts_untimed(cell) == untimed


def test_an_engine_that_was_warm_is_warmed_up_briefly():
    asked = []
    subject = SimpleNamespace(
        serve=lambda items, concurrency: asked.append(items) or Served((), 0.0, 0.0), forget=lambda: None
    )
    lent = cells.Lent(subject)
    items = [Item((index,), length) for index, length in enumerate((100, 8, 30))]
    for point in ("a", "a", "b"):
        cell = SimpleNamespace(point=SimpleNamespace(name=point), workload=SimpleNamespace(in_flight=3))
        cells.warm_up(cell, SimpleNamespace(warmup=items), lent)
    assert [[item.output_tokens for item in one] for one in asked] == [[100, 8, 30], [16, 8], [100, 8, 30]]


def test_primed_prefixes_are_found_in_every_repeat(build):
    shared = [
        *("workload=shared_prefix", "workload.prefix_tokens=64", "workload.suffix_tokens=20", "workload.count=4"),
        "workload.prime=true",
    ]
    found = measured(build(*shared, points={}))
    rates = [row for row in found.rows if row.metric == "prefix_hit_rate"]
    assert len(rates) == 4
    assert {row.value for row in rates} == {64 / 84}
    assert all(row.valid for row in rates)


def test_the_baselines_second_arm_may_be_left_to_some_points(build):
    found = measured(build("measure.aa=always", again_at=[{"load": "one long"}]))
    again = {row.point for row in found.rows if row.variant == "transformers again"}
    assert again == {"one long"}
    assert {row.point for row in found.rows if row.variant == "engine"} == {"short", "one long"}
    with pytest.raises(ConfigError, match=r"experiment.again_at\[0\]=.*names no measured point"):
        build("measure.aa=always", again_at=[{"load": "nowhere"}])


def test_the_gate_may_be_left_to_some_points(build, monkeypatch):
    asked = []

    def gate(variant, point):
        asked.append((variant, point))
        return compare(variant, point, [[1]], [[1]], "it is answered alone")

    monkeypatch.setattr(ablation.ExactGate, "of_own", lambda _, variant, __, loads: [gate(variant, p) for p in loads])
    monkeypatch.setattr(ablation.ExactGate, "of_probes", lambda self, variant, _: gate(variant, ""))
    own = property(lambda self: {v: self._cell(v, self._grid[0]).engine for v in self._alone})
    monkeypatch.setattr(ablation.Ablation, "_gated", own)  # of a dry model there is none
    experiment = build(gate_at=[{"load": "one long"}])
    empty = dict.fromkeys(("short", "one long"), Inputs((), ()))
    assert len(experiment._exact_gates("cuda", empty, Steps(""))) == 4
    assert asked == [(variant, point) for variant in ("transformers", "engine") for point in ("", "one long")]
    with pytest.raises(ConfigError, match=r"experiment.gate_at\[0\]=.*names no measured point"):
        build(gate_at=[{"load": "nowhere"}])


def test_without_it_every_pass_has_its_own(build, calls):
    assert not measured(build(keep_engines=False)).procedure
    assert sum(name == "__init__" for name, *_ in calls) == 8
    assert not any(name == "forget" for name, *_ in calls)


def test_what_fails_in_the_middle_closes_all_engines(build, calls, monkeypatch):
    real = cells.serve

    def serve(cell, *arguments):
        if cell.variant == "engine" and cell.point.name == "one long":
            raise KeyboardInterrupt
        return real(cell, *arguments)

    monkeypatch.setattr(cells, "serve", serve)
    found = measured(build())
    assert found.status.startswith("incomplete: interrupted in repeat 1 of 2 at one long; 1 of 4 rounds are kept")
    assert sorted(call for call in calls if call[0] == "close") == [("close", 0, 0), ("close", 7, 0)]


def test_an_engine_takes_its_memory_again_when_its_turn_comes_again(build, monkeypatch):
    """A fresh one has it, and within a turn nobody takes it away."""
    noted = []
    for name in ("reserve_memory", "serve"):
        real = getattr(EngineSubject, name)

        def noting(self, *arguments, _real=real, _name=name):
            noted.append((_name, self.engine.config.seed))
            return _real(self, *arguments)

        monkeypatch.setattr(EngineSubject, name, noting)
    measured(build(points={}))
    own = [name for name, seed in noted if seed == 7]
    assert own == ["serve", "serve", "reserve_memory", "serve", "serve"]


def test_a_peers_process_that_was_stopped_is_opened_again():
    opened = []

    class Peer(Subject):
        alive, about = True, {"version": 1}

    class Pool:
        def open(self, kind, config):
            opened.append(Peer())
            return opened[-1]

    lender = cells.Lending(True, Pool(), Simulator(Hardware(), 1), lambda done, total: None)
    used = []
    for stopped in (False, False, True, False):
        if stopped:
            opened[-1].alive = False
        with lender.lend(SimpleNamespace(engine_of="vllm", kind=Kind.vllm, engine=EngineConfig())) as lent:
            assert lent.subject is opened[-1]
            used.append(bool(lent.served))
            lent.served.append(None)
    assert used == [False, True, False, True]
    assert len(opened) == 2
    assert lender.about == {"vllm": ({"version": 1, "process": "its own, kept from pass to pass"},)}


@pytest.mark.parametrize(
    ("overrides", "settings", "message"),
    [
        (
            (),
            {"points": {"engine.seed": [1, 2]}},
            "points that change the workload alone, and seed=2 changes the engine",
        ),
        (
            ("engine.cache.num_blocks=null", "engine.model.device=auto"),
            {},
            "transformers would take all of a GPU's free memory .*set cache.memory_gib or cache.num_blocks",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(build, overrides, settings, message):
    with pytest.raises(ConfigError, match=message):
        build(*overrides, **settings)


# --- named points ---


def test_points_may_be_bundles_with_names():
    made = points.grid({"workload.rate": [1, 2], **LOADS})
    assert [point.name for point in made] == ["rate=1 short", "rate=1 one long", "rate=2 short", "rate=2 one long"]
    assert made[3] == Point(
        "rate=2 one long",
        {"workload.rate": 2, "workload.count": 1, "workload.prompt_tokens": 200},
        {"load": "one long"},
    )
    assert points.find_point(made, {"load": "short", "workload.rate": 2}, "at") is made[2]
    assert points.find_point(made, {"workload.count": 3, "workload.rate": 1}, "at") is made[0]
    with pytest.raises(ConfigError, match="fits 2 points: give more keys"):
        points.find_point(made, {"load": "short"}, "at")


@pytest.mark.parametrize("values", [{}, {"a": 3}, "short", []])
def test_what_is_neither_a_list_nor_bundles_is_refused(values):
    with pytest.raises(ConfigError, match=r"experiment.points\[load\] must be a list of values"):
        points.grid({"load": values})


def test_a_bundle_is_checked_like_anything_else(build):
    with pytest.raises(Exception, match="conut"):
        build(points={"load": {"short": {"workload.conut": 3}}})
