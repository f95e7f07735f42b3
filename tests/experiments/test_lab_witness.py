"""The second witness of what is timed without requests: a timer of each experiment that tells another time than passes
is found, and a sound one is not suspected."""

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace

import hydra
import pytest
from omegaconf import OmegaConf
from small_runs import measured

from experiments import calibrate as calibration
from experiments import ceilings, disaggregation, fleet, scheduler_overhead, simulator_speed
from experiments.ablation import Ablation
from experiments.all_reduce import AllReduceExperiment
from experiments.calibrate import Calibrate
from experiments.capacity import Capacity
from experiments.disaggregation import TOGETHER, Disaggregation
from experiments.expert_exchange import ExpertExchangeExperiment
from experiments.expert_quantization import ExpertQuantization
from experiments.kernels import KernelSweep
from experiments.lab.config.axes import CONF
from experiments.lab.judge.marks import OF_TIME
from experiments.lab.kernels import case
from experiments.lab.measure.together import Heard
from experiments.lab.measure.traces import RequestTrace
from experiments.lab.measure.witness import Timed
from experiments.quantization import Quantization
from mini_infer.parallel import mailboxes

pytestmark = pytest.mark.usefixtures("peers_are_forked")
FACTORS = [0.6, 1.7]
UNTIMED = {Capacity, Quantization, ExpertQuantization}
SMALL = {
    ceilings.CeilingsExperiment: ["experiment=ceilings", "experiment.mib.cpu=[1]", "experiment.matmul.cpu=[64]"],
    scheduler_overhead.SchedulerOverhead: [
        *("experiment=scheduler_overhead", "measure.gates=false", "experiment.steps=20", "experiment.matches=3"),
        *("experiment.running=[8,16,32]", "experiment.prompt_tokens=[512]", "experiment.waiting=[10]"),
        *("experiment.waiting_running=16", "experiment.rows=[1]"),
    ],
    AllReduceExperiment: [
        *("experiment=all_reduce", "experiment.dtype=float32", "experiment.hidden=32", "experiment.rows=[1,3]"),
    ],
    ExpertExchangeExperiment: [
        *("experiment=expert_exchange", "experiment.dtype=float32", "experiment.hidden=16", "experiment.tokens=[1]"),
        *("experiment.inner=8", "experiment.experts=4", "experiment.chosen=2", "experiment.routing=[zipf]"),
    ],
    fleet.Fleet: [
        *("experiment=fleet", "experiment.window_s=2", "~experiment.cases"),
        *("+experiment.cases={small: {replicas: 2}}", "experiment.prefix_tokens=64"),
    ],
    simulator_speed.SimulatorSpeed: [
        *("experiment=simulator_speed", "experiment.simulated_s=8", "experiment.replicas=[2]"),
    ],
}
TIMERS = [  # of each, the module whose clock is wrong, and which of its clocks
    (ceilings.CeilingsExperiment, case, "perf_counter"),
    (scheduler_overhead.SchedulerOverhead, scheduler_overhead, "perf_counter"),
    (AllReduceExperiment, mailboxes, "perf_counter"),
    (ExpertExchangeExperiment, mailboxes, "perf_counter"),
    (fleet.Fleet, fleet, "process_time"),
    (simulator_speed.SimulatorSpeed, simulator_speed, "process_time"),
    (simulator_speed.SimulatorSpeed, simulator_speed, "perf_counter"),
]


@pytest.fixture
def rows_of(compose_config, monkeypatch):
    monkeypatch.setattr(ceilings, "TOTAL_S", 0.02)

    def measure(cls, repeats):
        settings = ("experiment.claims=[]", f"measure.repeats={repeats}", "engine.model.device=cpu")
        own = settings if any(key == "engine.model.device" for key in cls.reads) else settings[:2]
        return measured(cls.from_config(compose_config(*SMALL[cls], *own))).rows

    return measure


def scaled(monkeypatch, module, clock, factor):
    """The clock as this module alone reads it."""
    wrong = {**vars(time), clock: lambda: factor * getattr(time, clock)()}
    monkeypatch.setattr(module, "time", SimpleNamespace(**wrong))


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize(("cls", "module", "clock"), TIMERS, ids=[f"{c.__name__}-{clock}" for c, _, clock in TIMERS])
def test_a_timer_that_tells_another_time_is_found(rows_of, monkeypatch, cls, module, clock, factor):
    """In every sample, which is kept and says so."""
    scaled(monkeypatch, module, clock, factor)
    rows = rows_of(cls, 1)
    assert rows
    assert all("said to take" in row.reason and "by the host's clock" in row.reason for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("cls", SMALL)
def test_a_sound_timer_is_not_suspected(rows_of, cls):
    """30 times: an alarm is a sample that is marked, not a run that ends."""
    repeats = {
        ExpertExchangeExperiment: 6,
        scheduler_overhead.SchedulerOverhead: 6,
        AllReduceExperiment: 8,
    }  # of points
    rows = rows_of(cls, repeats.get(cls, 30))
    assert len({(row.variant, row.point, row.repeat) for row in rows}) >= 30
    assert {row.reason for row in rows} == {""}


def test_ceilings_of_a_wrong_timer_are_not_kept(compose_config, monkeypatch, tmp_path):
    monkeypatch.setattr(ceilings, "TOTAL_S", 0.02)
    small = *SMALL[ceilings.CeilingsExperiment], "engine.model.device=cpu", "experiment.claims=[]"
    made = ceilings.CeilingsExperiment.from_config(compose_config(*small, f"paths.results={tmp_path}"))
    scaled(monkeypatch, case, "perf_counter", 0.6)
    found = measured(made)
    assert found.ceilings is None
    made.finish(found)
    assert not [*tmp_path.iterdir()]


# --- steps of an engine --------------------------------------------------------------------------------------------

STEPS = [
    *("experiment=calibrate", "model=tiny", "engine.model.path=tiny-draft", "engine.model.device=cpu"),
    *("engine.cache.memory_gib=0.03", "engine.model.load_format=auto", "engine.model.hf_config=null"),
    *("engine.model.dtype=float32", "measure.gates=false", "experiment.claims=[]", "experiment.rows=[1,2]"),
    *("engine.model.routing=learned", "experiment.contexts=[16]", "experiment.prompts=[2,4,8,16]"),
    *("experiment.decodes=[2]", "experiment.beside_prompts=[4,8,16]"),
]


@pytest.mark.parametrize("factor", [1.0, *FACTORS])
def test_steps_that_are_told_to_take_another_time_are_found(compose_config, monkeypatch, tmp_path, factor):
    real = calibration.step_rows

    def told(*served):
        names = "start_s", "duration_s", "host_s"
        return [replace(row, **{name: factor * getattr(row, name) for name in names}) for row in real(*served)]

    monkeypatch.setattr(calibration, "step_rows", told)
    made = Calibrate.from_config(compose_config(*STEPS, f"paths.results={tmp_path}"))
    found = measured(made)
    assert {bool(row.reason) for row in found.rows} == {factor != 1}
    assert all("said to take" in row.reason for row in found.rows if row.reason)
    made.finish(found)
    assert bool([*tmp_path.iterdir()]) == (factor == 1), "costs of a wrong timer are not kept"


# --- prompts that engines with roles compute -----------------------------------------------------------------------


@pytest.mark.parametrize("spans", [1.0, *FACTORS])
@pytest.mark.parametrize("answer", [1.0, *FACTORS])
def test_answers_and_their_spans_that_are_told_to_take_another_time_are_found(
    compose_config, monkeypatch, answer, spans
):
    plain = ("experiment.claims=[]", "experiment.prompt_tokens=[40]", "model=dry", "engine.model.device=cpu")
    made = Disaggregation.from_config(compose_config("experiment=disaggregation", *plain, "experiment.prompts=3"))

    async def ask(engine, prompt, length, due=None):
        start = time.perf_counter()
        await asyncio.sleep(0.01)
        parts, first = {"queue": 0.001, "prefill": spans * (time.perf_counter() - start - 0.001)}, time.perf_counter()
        await asyncio.sleep(0.002)
        times = tuple(start + answer * (at - start) for at in (first, time.perf_counter()))
        return RequestTrace(len(prompt), length, start, times, (5, 6), spans=parts)

    monkeypatch.setattr(disaggregation, "ask", ask)
    asyncio.run(made._alone(SimpleNamespace(), TOGETHER, 40))
    assert ("said to take" in made.problem()) == ((answer, spans) != (1.0, 1.0))


# --- whoever is added ----------------------------------------------------------------------------------------------


def test_every_experiment_that_times_something_is_among_those_with_a_second_witness():
    """Passes over requests are test_lab_time_faults.py's, kernels test_lab_kernels.py's."""
    targets = {OmegaConf.load(path).experiment._target_ for path in (CONF / "experiment").glob("*.yaml")
               if "_target_:" in path.read_text()}  # fmt: skip
    found = {hydra.utils.get_class(target) for target in targets}
    assert found == {*SMALL, Calibrate, Disaggregation, Ablation, KernelSweep, *UNTIMED}
    for cls in UNTIMED - {Capacity}:  # which shows what it simulates
        assert not {metric.unit for metric in cls.metrics.values()} & {*OF_TIME}


# --- the rule itself -----------------------------------------------------------------------------------------------


def test_what_the_host_adds_to_begin_and_end_is_no_fault():
    assert not Timed(10.0, 11.4, 100, on_gpu=True).problem  # a millisecond, and 140 us
    told = "100 calls are said to take 1 ms, and by the host's clock they took 1.4 ms"
    assert Timed(10.0, 14.0, 100, on_gpu=True).problem == told
    assert Timed(10.0, 13.0, 100).problem, "on a CPU nothing is launched and waited for"
    assert Timed(10.0, 6.0, 100).problem
    assert Timed(1000.0, 1500.0, 1).problem == "a call is said to take 1 ms, and by the host's clock it took 1.5 ms"


def test_calls_ahead_of_a_burst_are_in_what_passes_outside():
    assert not Timed(100.0, 125.0, 4, on_gpu=True, beside=1).problem
    assert Timed(100.0, 190.0, 4, on_gpu=True, beside=1).problem
    assert Timed(170.0, 125.0, 4, on_gpu=True, beside=1).problem


@pytest.mark.parametrize(("captured", "replayed"), [(9, 0), (0, 8)])
def test_on_a_gpu_a_burst_is_heard_from_when_the_call_ahead_of_it_was_launched(captured, replayed):
    """Of calls in a graph, which are captured and then launched as one, and of others."""
    heard = Heard(lambda: time.sleep(0.02 * launches), lambda told: [[0]], ahead=1)
    launches = False
    for _ in range(captured + 1):  # the first one compiles
        heard.call()
    for _ in range(3):
        heard.exchange([])
        launches = True
        heard.call()
        launches = False
        for _ in range(replayed):
            heard.call()
        time.sleep(0.005)
    heard.exchange([7])
    assert heard.burst == max(captured, replayed)
    assert 0.005 <= heard.fastest_s < 0.02


def test_a_call_that_was_interrupted_is_no_reason_to_suspect_the_others():
    bursts = [(1e-3, 1.01e-3)] * 8 + [(1e-3, 9e-3)] * 7
    assert not Timed.of(bursts).problem
    assert Timed.of([(0.6 * told, outside) for told, outside in bursts]).problem
    assert not Timed.of([(1e-3, 1.01e-3), (1e-3, 9e-3), (1e-3, 9e-3)], typical=min).problem
