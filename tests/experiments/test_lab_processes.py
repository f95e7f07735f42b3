"""A result is made of processes: their seeds, what they find together, and what is kept where one fails."""

import gc
import pickle
from dataclasses import replace
from itertools import combinations
from multiprocessing import Pipe, get_context
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from experiments.ablation import Ablation
from experiments.lab.config import schema
from experiments.lab.experiment import Findings
from experiments.lab.judge.gate import ErrorGate, Gate
from experiments.lab.measure import processes
from experiments.lab.show import progress
from experiments.lab.show.progress import Steps
from experiments.lab.store.rows import Row
from experiments.lab.workloads.base import Vocabulary
from mini_infer.core.config import LoadFormat
from mini_infer.core.errors import ConfigError, MiniInferError
from mini_infer.modeling.loader import load_model, load_spec

SETTINGS = [
    *("experiment=probe", "model=dry", "experiment.samples=0", "experiment.plots=[]", "experiment.claims=[]"),
    *("engine.cache.num_blocks=64", "workload=fixed", "workload.count=3", "workload.prompt_tokens=20"),
    *("workload.output_tokens=5", "measure.processes=3", "measure.repeats=2"),
]


@pytest.fixture
def config(compose_config):
    def make(*overrides):
        made = compose_config(*SETTINGS, *overrides)
        OmegaConf.set_struct(made, False)
        made.experiment.variants = {"transformers": {}, "engine": {"scheduler": {"max_num_seqs": 1}}}
        made.experiment.points = {"workload.concurrency": [1, 3]}
        OmegaConf.set_struct(made, True)
        return made

    return make


def measure(config):
    with Steps("test") as steps:
        return processes.measure(config, steps)


def found_by(monkeypatch, *outcomes):
    """What each process finds, or is stopped by, instead of being started. Returns the configs that they get."""
    given = []

    def in_child(config, steps):
        given.append(config)
        outcome = outcomes[len(given) - 1]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    for where in ("_in_child", "_here"):  # several, and a single one
        monkeypatch.setattr(processes, where, in_child)
    return given


def findings(value, **more):
    return Findings([Row("engine", "", 0, "ttft_ms", value, "ms")], **more)


# --- seeds ---------------------------------------------------------------------------------------------------------


def test_each_process_has_seeds_of_its_own(config):
    keys = ("measure.seed", "engine.seed", "engine.model.seed", "engine.speculation.draft.seed")
    stated = config()
    own = [[OmegaConf.select(processes.seeded(stated, index), key) for key in keys] for index in range(3)]
    assert own[0] == [OmegaConf.select(stated, key) for key in keys]  # the first one's are the config's
    assert all(len(set(seeds)) == 3 for seeds in zip(*own, strict=True))
    assert own == [[OmegaConf.select(processes.seeded(stated, index), key) for key in keys] for index in range(3)]
    other = config("measure.seed=1")
    assert all(processes.seeded(other, index).engine.model.seed not in [s[2] for s in own] for index in range(3))


def test_each_process_has_prompts_lengths_and_weights_of_its_own(compose_config):
    stated = compose_config("experiment=measure", "workload=uniform", "workload.count=8", "hardware=cpu")
    found = []
    for index in range(3):
        experiment = Ablation.from_config(processes.seeded(stated, index))
        model, point = experiment.engine.model, experiment._grid[0]
        items = experiment._inputs(point, Vocabulary(model)).measured
        drawn = replace(model, load_format=LoadFormat.dummy)
        weights = load_model(drawn, load_spec(drawn), torch.float32, torch.device("cpu")).embed_tokens.weight
        found.append(([item.prompt for item in items], [item.output_tokens for item in items], weights[5].tolist()))
    for one, other in combinations(found, 2):
        assert all(ours != theirs for ours, theirs in zip(one, other, strict=True))


def test_steps_are_profiled_once_unless_every_profile_counts(config):
    made = config("+experiment.profile=[{}]")
    assert [len(processes.seeded(made, index).experiment.profile) for index in range(2)] == [1, 0]
    made.experiment.metrics = [*made.experiment.metrics, "gpu_idle_share"]
    assert len(processes.seeded(made, 1).experiment.profile) == 1


def test_blocks_are_mapped_once(config):
    made = config("+experiment.timeline={}", "+experiment.block_map=true")
    assert [processes.seeded(made, index).experiment.block_map for index in range(2)] == [True, False]


def test_a_config_reaches_another_process_whole(config):
    made = config("workload.arrivals=poisson", "workload.rate_per_s=5", "measure.threads=1")
    made.experiment.points = {"workload.count": [1, 2]}
    again = pickle.loads(pickle.dumps(made))
    assert schema.plain(again) == schema.plain(made)
    assert schema.workload(again) == schema.workload(made)
    assert Ablation.from_config(again).points == Ablation.from_config(made).points


@pytest.mark.parametrize(("error", "told"), [(ConfigError("a setting"), False), (ValueError("a bug"), True)])
def test_what_a_setting_forbids_is_told_without_a_traceback(monkeypatch, capsys, error, told):
    def forbidden(*arguments):
        raise error

    monkeypatch.setattr(processes, "_here", forbidden)
    sent = []
    processes._answer(SimpleNamespace(send=sent.append), None)
    assert [(kind, str(what)) for kind, what in sent] == [("error", str(error))]
    assert ("Traceback" in capsys.readouterr().err) == told


# --- together ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_measure_and_hand_back_what_they_found(config, monkeypatch):
    """Here they are forked, which have all imported; test_lab_stopped.py has one that is started clean."""
    gc.collect()
    gc.freeze()  # a child must not collect what threads of this process have left, which it does not have
    monkeypatch.setattr(processes, "get_context", lambda method: get_context("fork"))
    found = measure(config("measure.processes=2", "measure.aa=always"))
    assert found.status == "complete"
    assert {(row.process, row.repeat) for row in found.rows} == {(p, r) for p in (0, 1) for r in (0, 1)}
    assert {row.variant for row in found.rows} == {"transformers", "engine", "transformers again"}
    # The machine that runs the tests is busy; whatever else it is, the passes are sound.
    assert not [row for row in found.rows if row.reason and "speed changed by" not in row.reason]
    assert [about.index for about in found.processes] == [0, 1]
    assert found.processes[0].seed != found.processes[1].seed
    assert len(found.requests) == 2 * 2 * 2 * 3 * 3  # processes, repeats, points, variants, requests
    assert {(gate.variant, gate.total_tokens) for gate in found.gates} == {("engine", 2 * 2 * 15)}
    assert all(gate.passed for gate in found.gates)


def test_a_long_pass_in_another_process_is_told_of_here(monkeypatch):
    monkeypatch.setattr(progress, "TOLD_S", 0.0)
    here, there = Pipe(duplex=False)
    relay = processes._Relay(there)
    relay.within(0, 8)  # engines start
    relay.next("engine")
    relay.within(3, 8)
    assert [here.recv() for _ in range(3)] == [("tell", (0, 8)), ("next", ("engine",)), ("tell", (3, 8))]
    told = []
    monkeypatch.setattr(Steps, "_say", lambda self, text, before="": told.append(text))
    Steps("run").tell(3, 8)
    assert told == ["run: 3 of 8 requests"]


def test_numbers_and_gates_are_put_together(config, monkeypatch):
    gate, worse = Gate("engine", "", 10, 10, None), Gate("engine", "", 3, 10, object())
    alone = Gate("engine", "", 50, 50, None, "every request alone")
    errors = [ErrorGate("engine", None, error, 0.02, "fp32") for error in (0.01, float("nan"), 0.5)]
    gpu = {"power_w": 600.0, "busy_others": 1}
    given = found_by(
        monkeypatch,
        findings(1.0, gates=[gate, alone], error_gates=errors[:1], notes=["all", "one"], gpu=gpu),
        findings(2.0, gates=[worse], error_gates=errors[1:2], notes=["all"]),
        findings(3.0, gates=[gate], error_gates=errors[2:], notes=["all", "other"]),
    )
    found = measure(config())
    assert [(row.process, row.value) for row in found.rows] == [(0, 1.0), (1, 2.0), (2, 3.0)]
    joined, other = found.gates
    assert other == alone  # against something else
    assert (joined.equal_tokens, joined.total_tokens, joined.passed) == (23, 30, False)
    assert found.error_gates == errors[1:2]  # no number is worse than any
    shared = "Other GPUs of this machine, 1 at most, computed for somebody else when passes ended."
    assert found.notes == [shared, "all", "Process 1: one", "Process 3: other"]
    assert [about.power_w for about in found.processes] == [600.0, None, None]
    assert [schema.workload(own) for own in given] == [schema.workload(config())] * 3


def test_peers_may_be_measured_in_fewer_processes(config, monkeypatch):
    made = config("peers.processes=1")
    OmegaConf.update(made, "experiment.variants.engine.kind", "hf", force_add=True)
    own = [Ablation.from_config(processes.seeded(made, index)) for index in range(3)]
    assert [experiment._left_out for experiment in own] == [set(), {"engine"}, {"engine"}]
    assert [experiment._left_out for experiment in [Ablation.from_config(made)]] == [set()]
    found_by(monkeypatch, *[findings(1.0)] * 3)
    assert measure(made).notes[0].startswith("Other systems than mini-infer are measured in 1 of 3 processes")
    OmegaConf.update(made, "peers.hf.processes", 2)  # its own count goes before that of all
    own = [Ablation.from_config(processes.seeded(made, index)) for index in range(3)]
    assert [experiment._left_out for experiment in own] == [set(), set(), {"engine"}]
    alone = config("peers.processes=0", "system=hf")  # what is measured alone is measured
    assert Ablation.from_config(alone)._left_out == set()


def test_what_a_process_leaves_out_has_no_rows(config):
    made = config("peers.processes=0", "measure.processes=1", "measure.gates=false", "model=tiny")
    OmegaConf.update(made, "experiment.variants.engine.kind", "hf", force_add=True)
    assert {row.variant for row in measure(made).rows} == {"transformers"}


# --- stopped -------------------------------------------------------------------------------------------------------


def test_an_error_in_one_process_keeps_the_others(config, monkeypatch):
    found_by(monkeypatch, findings(1.0), MiniInferError("planted"), findings(3.0))
    found = measure(config())
    assert [(row.process, row.value) for row in found.rows] == [(0, 1.0), (2, 3.0)]
    assert found.status == (
        "incomplete: process 2 of 3: MiniInferError: planted; nothing of it is kept; 2 of 3 processes are complete"
    )
    assert str(found.error) == "planted"
    assert [process.index for process in found.processes] == [0, 2], "no row is of the other one"


def test_an_interrupt_ends_the_run_and_keeps_what_was_finished(config, monkeypatch):
    stopped = findings(2.0, status="incomplete: interrupted in repeat 2 of 2", error=KeyboardInterrupt())
    given = found_by(monkeypatch, findings(1.0), stopped, findings(3.0))
    found = measure(config())
    assert len(given) == 2
    assert [row.value for row in found.rows] == [1.0, 2.0]
    assert found.status == ("incomplete: process 2 of 3: interrupted in repeat 2 of 2; 1 of 3 processes are complete")
    assert isinstance(found.error, KeyboardInterrupt)


def test_with_nothing_finished_the_first_error_is_raised(config, monkeypatch):
    found_by(monkeypatch, MiniInferError("planted"))
    with pytest.raises(MiniInferError, match="planted"):
        measure(config())


def test_processes_that_are_there_are_not_measured_again(config, monkeypatch):
    kept = []

    def run(*outcomes, earlier=None, **changed):
        asked = found_by(monkeypatch, *outcomes)
        made = config(*(f"{key}={value}" for key, value in changed.items()))
        with Steps("test") as steps:
            found = processes.measure(made, steps, ["of all"], earlier, kept.append)
        return found, [own.measure.seed for own in asked]

    one = findings(1.0, notes=["all", "one"], gates=[Gate("engine", "", 10, 10, None)])
    first, seeds = run(one, **{"measure.processes": 1})
    assert (first.status, first.notes, kept) == ("complete", ["of all", "all", "one"], [])
    found, others = run(findings(2.0, notes=["all", "one"]), findings(3.0, notes=["all"]), earlier=first)
    assert [(row.process, row.value) for row in found.rows] == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert (found.status, found.gates, [p.index for p in found.processes]) == ("complete", first.gates, [0, 1, 2])
    assert found.notes == ["of all", "all", "Process 1, 2: one"]
    assert len({*seeds, *others}) == 3
    [so_far] = kept  # for whoever goes on, should nobody be left to store the third
    assert (so_far.status, so_far.error) == ("incomplete: 2 of 3 processes are complete", None)
    assert [row.value for row in so_far.rows] == [1.0, 2.0]

    cut, _ = run(MiniInferError("planted"), findings(3.0, notes=["all"]), earlier=first)
    assert cut.status.endswith("planted; nothing of it is kept; 2 of 3 processes are complete")
    rest = replace(cut, processes=[p for p in cut.processes if p.complete], status="complete", error=None)
    whole, asked = run(findings(4.0), earlier=rest)
    assert [(row.process, row.value) for row in whole.rows] == [(0, 1.0), (1, 4.0), (2, 3.0)]
    assert (whole.notes, len(asked)) == (["of all", "Process 1, 3: all", "Process 1: one"], 1)
    assert run(earlier=whole) == (whole, []), "nothing is left to measure"


class Stubborn(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


@pytest.mark.parametrize(
    ("error", "raised"),
    [(ConfigError("planted"), ConfigError("planted")), (Stubborn("a", "b"), MiniInferError("Stubborn: a b"))],
)
def test_what_a_process_raises_is_raised_here_even_if_it_cannot_travel(config, monkeypatch, error, raised):
    def fails(self, steps):
        steps.plan(7)
        raise error

    monkeypatch.setattr(Ablation, "measure", fails)
    ours, theirs = Pipe()
    processes._answer(theirs, config())
    theirs.close()
    with Steps("test") as steps, pytest.raises(type(raised), match=str(raised)):
        processes._follow(ours, steps)
    assert steps._total == 7
    with pytest.raises(EOFError):  # as where it has been killed
        processes._follow(ours, steps)
