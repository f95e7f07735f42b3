"""Engines with roles under measurement, and a peer's beside them: one that ends is told of, and so is a transfer that
never was one; requests are dealt in turns, and a load's knee is where they keep the SLO."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments import disaggregation
from experiments.disaggregation import APART, AUTO, STREAM, TOGETHER, VLLM, Disaggregation, Mix
from experiments.lab.config.spec import PREDICTED
from experiments.lab.judge import exact_gate
from experiments.lab.judge.stats import abba
from experiments.lab.measure import engine_processes
from experiments.lab.measure.engine_processes import EngineProcesses, PeerReplicas
from experiments.lab.measure.kinds import Kind, VLLMSettings
from experiments.lab.measure.traces import RequestTrace, Served
from experiments.lab.peers.process import PeerProcess
from experiments.lab.show.progress import Steps
from experiments.lab.store.rows import Row
from experiments.lab.workloads import Item
from mini_infer.core.config import EngineConfig, Numerics, replace
from mini_infer.core.errors import ConfigError
from mini_infer.serving.link.link import EngineDead
from mini_infer.serving.processes import gpus
from mini_infer.transfer import pusher
from mini_infer.transfer.blocks import Pairs


def test_an_engine_that_ends_before_it_serves_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else would start another one, and whoever connects waits for one for ten minutes."""
    stopped = []

    def make(path: str) -> Any:
        ended = path.endswith("1")
        ending = "was killed by SIGKILL" if ended else None
        return SimpleNamespace(ending=lambda: ending, stop=lambda: stopped.append(path))

    monkeypatch.setattr(engine_processes, "ways_to_make", lambda config, max_queued: [make, make])
    apart = EngineConfig.from_dict({"parallel": {"prefill": 1, "decode": 1}})
    message = r"an engine of parallel\.prefill=1 and parallel\.decode=1 was killed by SIGKILL before it served"
    with pytest.raises(EngineDead, match=message), EngineProcesses(keep=True) as engines:
        engines.start([apart])
    assert len(stopped) == 2


def test_prompts_that_never_moved_are_no_result_of_engines_apart() -> None:
    here, moved = (SimpleNamespace(spans=spans) for spans in ({"queue": 0.1}, {"queue": 0.1, "transfer": 0.2}))
    for variant in (APART, STREAM):
        assert disaggregation._unmoved(variant, [here, here]) == "no prompt was computed by the engine for prompts"
        assert disaggregation._unmoved(variant, [here, moved]) == ""
    for variant in (TOGETHER, AUTO):  # which may compute all where they are decoded
        assert disaggregation._unmoved(variant, [here]) == ""


TWO = EngineConfig.from_dict({"parallel": {"replicas": 2}})
HERE = str(Path(__file__).resolve().parent)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The environments of a peer's engines, whose processes run fake_peer.py."""
    seen = list[dict[str, str]]()

    def start(name: str, module: str, *rest: Any, environment: dict[str, str], **more: Any) -> PeerProcess:
        seen.append(environment)
        return PeerProcess(name, "fake_peer", *rest, environment=environment, **more)

    monkeypatch.setattr(engine_processes, "PeerProcess", start)
    monkeypatch.setattr(engine_processes, "require_device", lambda kind, device: None)
    monkeypatch.setattr(engine_processes, "settled", lambda config: config)
    monkeypatch.setattr(gpus, "needs_no_gpu", lambda config: False)
    monkeypatch.setattr(engine_processes, "count_gpus", lambda environment: 2)
    return seen


def test_a_peers_engines_have_gpus_of_their_own_and_take_turns(fakes: list[dict[str, str]]) -> None:
    with closing(PeerReplicas(Kind.vllm, TWO, VLLMSettings(pythonpath=HERE, args={"threads": 1}))) as peer:
        assert [own["CUDA_VISIBLE_DEVICES"] for own in fakes] == ["0", "1"]
        peer.ready()
        assert peer.about["engines"] == 2
        served = peer.serve([Item((10 + number,), 2) for number in range(5)], 5)
        assert served is not None
        assert [one.token_ids[0] for one in served.requests] == [10, 11, 12, 13, 14]  # in the order of the items
        of_first, of_second = ({served.requests[index].arrival for index in own} for own in ([0, 2, 4], [1, 3]))
        assert len(of_first) == len(of_second) == 1  # each has served its own at once
        assert of_first != of_second
        assert served.start == min(of_first | of_second)


def test_a_peer_that_is_lost_is_absent_from_then_on(fakes: list[dict[str, str]], capsys: Any) -> None:
    with closing(PeerReplicas(Kind.vllm, TWO, VLLMSettings(pythonpath=HERE, args={"fault": "die"}))) as peer:
        peer.ready()
        assert peer.serve([Item((1,), 2), Item((2,), 2)], 2) is None
        assert peer.absent.startswith("it has failed, and is not asked again: vLLM could not serve: its process ended")
        assert "the last words" in capsys.readouterr().err
        assert peer.serve([Item((1,), 2)], 1) is None


MIX = "{name: long prompts, prompt_tokens: 9, output_tokens: 3, rates_per_s: [20, 40], seconds: 5"


def made(compose_config: Any, *typed: str, by: str = "together, vllm", mix: str = MIX) -> Disaggregation:
    plain = ("experiment.claims=[]", "experiment.prompt_tokens=[40]", f"experiment.mixes=[{mix}, by: [{by}]}}]")
    return Disaggregation.from_config(
        compose_config("experiment=disaggregation", "model=dry", "engine.model.device=cpu", *plain, *typed)
    )


@pytest.fixture
def loads(compose_config: Any) -> Disaggregation:
    return made(compose_config)


def test_vllm_beside_engines_on_a_cpu_is_absent_and_its_rows_say_so(loads: Disaggregation) -> None:
    assert AUTO not in loads.variants
    names = [point.name for variant, point in loads.timed if variant == VLLM]
    assert names == ["mix=long prompts rate_per_s=20.0", "mix=long prompts rate_per_s=40.0"]
    loads._peer = PeerReplicas(Kind.vllm, TWO, VLLMSettings())
    assert loads.values(VLLM, loads.points[1]) == {"itl_p99_ms": 0, "goodput_rps": 0, "slo_share": 0}
    assert loads.problem() == "absent: vLLM is measured on a CUDA device, and this run is on the CPU"
    loads.repeat = 1
    assert loads.values(VLLM, loads.points[1]) == {}  # of the first repeat alone


@pytest.mark.parametrize(
    ("scale", "found"),
    [(1.0, ()), (0.5, ("latencies add up to",)), (0.1, ("latencies add up to", "from outside it took"))],
)
def test_who_waits_for_the_answers_is_a_second_witness(
    compose_config: Any, monkeypatch: pytest.MonkeyPatch, scale: float, found: tuple[str, ...]
) -> None:
    """Of times that an answer tells of itself, here each after so much of what it took."""
    loads = made(compose_config, by="together", mix=MIX.replace("seconds: 5", "seconds: 0.4"))

    async def ask(engine: Any, prompt: list[int], length: int, due: float | None = None) -> RequestTrace:
        due = time.perf_counter() if due is None else due
        await asyncio.sleep(max(0.0, due + 0.3 - time.perf_counter()))
        times = (due + scale * (time.perf_counter() - due),) * length
        told = {"prompt_tokens": len(prompt), "asked_tokens": length, "token_ids": tuple(range(3, 3 + length))}
        return RequestTrace(arrival=due, token_times=times, sent=due, **told)

    monkeypatch.setattr(disaggregation, "ask", ask)
    monkeypatch.setattr(disaggregation, "_moved", lambda engine: (0, 0))
    asyncio.run(loads._load(SimpleNamespace(replicas=[0]), TOGETHER, loads.points[1]))  # type: ignore[arg-type]
    assert all(words in loads.problem() for words in found)
    assert bool(found) == bool(loads.problem())


def test_a_load_comes_at_the_same_times_and_its_ramps_do_not_count(loads: Disaggregation) -> None:
    asked = []

    def serve(items: Any, concurrency: int) -> Served:
        asked.append(items)
        dues = [item.arrival_s or 0.0 for item in items]
        # Those in the first and in the last tenth miss the SLO, and do not count.
        ttft = [0.001 if 0.4 < due < 4.6 else 9.0 for due in dues]
        traces = [
            RequestTrace(9, 3, due, (due + first, due + first, due + first), (5, 6, 7))
            for due, first in zip(dues, ttft, strict=True)
        ]
        return Served(tuple(traces), 0.0, 20.0)

    loads._peer = SimpleNamespace(serve=serve)  # type: ignore[assignment]
    first, again, _ = (loads.values(VLLM, loads.points[number]) for number in (1, 1, 2))
    _, once, _, same, _, faster = asked
    assert (len(once), len(faster)) == (100, 200)
    assert max(item.arrival_s for item in once) < 5
    assert [item.arrival_s for item in once] == [item.arrival_s for item in same]
    assert {item.arrival_s for item in once} < {item.arrival_s for item in faster}
    assert {item.prompt for item in once}.isdisjoint(item.prompt for item in same)
    assert first == again
    assert first["slo_share"] == 1.0
    assert first["goodput_rps"] == pytest.approx(20, rel=0.3)


def test_the_knee_is_the_highest_rate_at_which_requests_keep_the_slo(loads: Disaggregation) -> None:
    _, low, high, whole = loads.points

    def knees(low_share: float, high_share: float, **of_high: Any) -> list[Any]:
        shares = [Row(TOGETHER, low.name, 0, "slo_share", low_share, ""), Row(TOGETHER, high.name, 0, "slo_share",
                  high_share, "", **of_high)]  # fmt: skip
        return [(point, *values.values()) for variant, point, values in loads.derived(shares) if variant == TOGETHER]

    assert knees(0.95, 0.9) == [(whole, 40.0)]
    assert knees(0.95, 0.89) == [(whole, 20.0)]
    assert knees(0.5, 0.4) == [(whole, None)]
    assert knees(0.95, 0.95, valid=False) == [(whole, None)]


def test_the_baseline_s_second_arm_is_served_by_the_same_engines_next_to_the_first(compose_config: Any) -> None:
    at = "+experiment.again_at=[{mix: long prompts, rate_per_s: 40}]"
    loads = made(compose_config, "measure.aa=always", at, by="together, apart")
    timed = [(variant, point.values.get("rate_per_s")) for variant, point in loads.timed]
    assert timed[:4] == [(TOGETHER, None), (TOGETHER, 20), (TOGETHER, 40), ("together again", 40)]
    assert [variant for variant, _ in timed].count("together again") == 1
    used = list[Any]()
    loads._engines = SimpleNamespace(  # type: ignore[assignment]
        use=used.append, asked=None, run=lambda work: work.close() or {}
    )
    for variant, point in loads.timed[2:4]:
        loads.values(variant, point)
    assert used == 2 * [replace(loads.engine, parallel={"replicas": 2})]
    with pytest.raises(ConfigError, match=r"experiment.again_at\[0\].* names no measured point"):
        made(compose_config, "measure.aa=always", at, by="apart")


def test_requests_of_all_whole_repeats_are_kept(compose_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ("measure.gates=false", "measure.repeats=4", "experiment.keep_engines=false")  # none starts
    loads = made(compose_config, *typed, by="together")

    def values(variant: str, point: Any) -> dict[str, float | None]:
        served = Served((RequestTrace(9, 3, 0.0, (0.1, 0.2, 0.3), (5, 6, 7)),), 0.0, 1.0)
        loads._reason = ""
        if loads.repeat == 2 and point is loads.timed[-1][1]:
            raise EngineDead("it was killed")
        return loads._of_load(variant, point, served)

    monkeypatch.setattr(loads, "values", values)
    with Steps("test") as steps:
        found = loads.measure(steps)
    assert [(row.point, row.repeat) for row in found.requests] == [
        (point.name, repeat) for repeat in (0, 1) for _, point in abba(loads.timed, repeat)
    ]
    assert {row.repeat for row in found.rows} == {0, 1}


def test_loads_are_predicted_by_the_simulator(compose_config: Any) -> None:
    loads = made(compose_config, "measure.predict=true", "engine.model.dry.step_ms=5", by="together, apart")
    predicted = [(variant, point) for variant, point in loads.timed if variant.endswith(PREDICTED)]
    assert [variant for variant, _ in predicted] == 2 * [TOGETHER + PREDICTED] + 2 * [APART + PREDICTED]
    for variant, point in predicted:
        found = loads.values(variant, point)
        assert loads.problem() == ""
        assert found["slo_share"] == 1.0
        # A prompt takes a step of the engine that answers, with roles one of another before it.
        assert found["ttft_ms"] == pytest.approx(5 if variant == TOGETHER + PREDICTED else 10, abs=4)
    loads.repeat = 1
    assert loads.values(*predicted[0]) == {}


def test_loads_are_simulated_alone(compose_config: Any) -> None:
    """By engines that do both and engines apart; nothing is started, and what is not simulated is told."""
    beside = "{name: beside streams, prompt_tokens: 9, output_tokens: 2, rates_per_s: [4], streams: 2}"
    mixes = f"experiment.mixes=[{MIX}, by: [together, apart, auto, vllm]}}, {beside}]"
    loads = made(compose_config, "system=simulated", "engine.model.dry.step_ms=5", mixes, "measure.repeats=2")
    assert [*loads.variants] == [TOGETHER, APART, AUTO]
    assert [point.name for point in loads.points] == [
        *("mix=long prompts rate_per_s=20.0", "mix=long prompts rate_per_s=40.0", "load=long prompts")
    ]
    assert (loads.hardware_key, loads.generates) == ("simulated-cpu", False)
    with Steps("test") as steps:
        found = loads.measure(steps)
    ttft = {row.variant: row.value for row in found.rows if row.metric == "ttft_ms" and "20.0" in row.point}
    assert ttft == pytest.approx({TOGETHER: 5, APART: 10, AUTO: ttft[AUTO]}, abs=4)
    knees = {row.variant: row.value for row in found.rows if row.metric == "slo_rate_per_s"}
    assert knees == {TOGETHER: 40, APART: 40, AUTO: 40}
    assert (found.status, found.gates, found.peers) == ("complete", (), {})
    left_out, *sources = found.notes
    assert left_out == disaggregation.NOT_SIMULATED
    assert all(source.startswith("What simulated steps take: the dry model's own") for source in sources)


def _loses(numbers: Any, here: Any, there: Any) -> Pairs:
    """The last block of a step never comes, where there are several."""
    kept = max(1, len(numbers) - 1)
    return Pairs(numbers[:kept], here[:kept], there[:kept])


def _shifts(numbers: Any, here: Any, there: Any) -> Pairs:
    """Each block comes where the one before it belongs."""
    turned = [(source, numbers[index - 1][1]) for index, (source, _) in enumerate(numbers)]
    return Pairs(turned, here, there.roll(1))


@pytest.mark.usefixtures("engines_are_threads")
@pytest.mark.parametrize("fault", [None, _loses, _shifts])
def test_every_request_gets_through_engines_apart_what_it_gets_alone(
    compose_config: Any, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Pairs] | None
) -> None:
    """A handover that loses or shifts a block is found by both gates, whichever way blocks go."""
    monkeypatch.setattr(exact_gate, "MODEL", exact_gate.DRAFT)
    few = [
        (prompt, dataclasses.replace(params, max_tokens=6))
        for prompt, params in exact_gate.probes()[exact_gate.CROWD :][2:8]
    ]
    monkeypatch.setattr(exact_gate, "probes", lambda whole: few)
    model = ("model=tiny", "engine.model.path=tiny-draft", "engine.cache.memory_gib=0.03")
    own = ("experiment.claims=[]", f"experiment.mixes=[{MIX}, by: [together, apart]}}]")
    loads = Disaggregation.from_config(compose_config("experiment=disaggregation", *model, *own, "scale=tiny"))
    loads.spec = dataclasses.replace(loads.spec, prompt_tokens=(40, 64))
    if fault is not None:
        monkeypatch.setattr(pusher, "Pairs", fault)
    trained, errors = loads._gates()
    assert errors == []
    for gates in (trained, loads._own_gates(Numerics.fast)):
        assert [gate.variant for gate in gates] == [TOGETHER, APART, STREAM]
        assert [gate.variant for gate in gates if not gate.passed] == ([APART, STREAM] if fault else [])
    assert all(gate.equal_tokens == 2 * 6 * 6 for gate in trained if gate.passed)
    assert "trained weights of tiny-draft" in trained[0].against
    assert "through processes" in trained[0].against


def test_a_system_that_has_no_roles_is_refused(compose_config: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"system=hf: disaggregation measures .* Choose system=simulated, or leave it"
    ):
        made(compose_config, "system=hf")


def test_what_cannot_serve_a_load_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"stream cannot serve the load 'x'. Choose in its `by` from together, apart"):
        Mix("x", 4, 4, (1.0,), by=(TOGETHER, STREAM))
    with pytest.raises(ConfigError, match=r"vllm cannot serve the load 'x' beside streams"):
        Mix("x", 4, 4, (1.0,), streams=2, by=(VLLM,))
