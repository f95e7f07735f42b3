"""Prompts computed by one engine and decoded by another, beside engines that do both: where the time to the first token
goes, what a transfer takes, and which load is served better by which of the two.

The engines are processes, as behind mini-infer-serve; they are asked without HTTP. Where vLLM can be measured, two of
its engines serve the same loads beside them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, product, repeat
from typing import Any

import numpy as np
from omegaconf import DictConfig

from experiments.lab.config.points import Point, find_point
from experiments.lab.config.spec import IN_TIME, PREDICTED, TAKE, Count, ExperimentSpec, Positive, Several
from experiments.lab.experiment import Findings, Probe
from experiments.lab.judge import formulas, logit_gate, prediction, stats, validity
from experiments.lab.judge.exact_gate import Ask, ExactGate, Question, plain
from experiments.lab.judge.gate import ALONE, ErrorGate, Gate, Tokens, compare
from experiments.lab.judge.metrics import SLO, Better, Context, Metric, Missing
from experiments.lab.judge.validity import Evidence
from experiments.lab.measure import hardware
from experiments.lab.measure.engine_processes import EngineProcesses, PeerReplicas, as_served, ask
from experiments.lab.measure.kinds import Kind
from experiments.lab.measure.simulated import drive
from experiments.lab.measure.traces import RequestRow, RequestTrace, Served, request_rows
from experiments.lab.measure.witness import Timed
from experiments.lab.show.progress import Steps
from experiments.lab.store.result import SIMULATED
from experiments.lab.store.rows import ABSENT, Row
from experiments.lab.workloads.base import Item, Vocabulary
from mini_infer import LLMEngine, SamplingParams
from mini_infer.core.config import Connector, Device, EngineConfig, HandOver, Numerics
from mini_infer.core.config import replace as changed
from mini_infer.core.errors import ConfigError
from mini_infer.serving.link.link import EngineDead
from mini_infer.serving.processes.async_engine import AsyncEngine

TOGETHER, APART, STREAM, AUTO, VLLM = "together", "apart", "stream", "auto", "vllm"
ALWAYS = HandOver.always
ONE_OF_EACH = {"prefill": 1, "decode": 1}
ROLES: dict[str, tuple[str, dict[str, Any]]] = {
    TOGETHER: ("2 engines that do both", {"replicas": 2}),
    APART: ("prefill and decode, memory", {**ONE_OF_EACH, "hand_over": ALWAYS}),
    STREAM: ("prefill and decode, socket", {**ONE_OF_EACH, "hand_over": ALWAYS, "connector": Connector.stream}),
    AUTO: ("prefill and decode, by cost", ONE_OF_EACH),
}
SPLIT = {  # parts of the time to the first token, in their order
    "queue": "waiting for the engine of prompts",
    "prefill": "prefill",
    "transfer_exposed": "transfer after it",
    "decode_wait": "waiting for a decode step",
    "first_decode_step": "first decode step",
}
LOW, HIGH = Better.lower, Better.higher
OF_LOADS = ("itl_p99_ms", "goodput_rps", "slo_share")
METRICS = {
    "ttft_ms": Metric("time to first token, median", "ms", LOW),
    **{f"{name}_ms": Metric(f"{label}, mean", "ms", LOW) for name, label in SPLIT.items()},
    "transfer_ms": Metric("copies of a prompt's KV, mean", "ms", LOW),
    "transfer_gb_s": Metric("rate of the copies", "GB/s", HIGH),
    "exposed_share": Metric("transfer after prefill, share of TTFT", "", LOW, share=True),
    **{name: formulas.describe(name) for name in OF_LOADS},
    "slo_rate_per_s": Metric(f"highest measured rate at which {100 * IN_TIME:.0f} % met the SLO", "requests/s", HIGH),
    "moved_share": Metric("share of prompts computed apart", "", HIGH, share=True),
}
NOT_SIMULATED = (
    "Not simulated are prompts that come alone, whose time to the first token has parts; loads beside streams; and "
    "vLLM's engines."
)
GATE_TOKENS = 24


@dataclass(frozen=True)
class Mix:
    """Requests of an open loop, and streams that run beside them all the time."""

    name: str
    prompt_tokens: int  # of each request
    output_tokens: int
    rates_per_s: tuple[float, ...]  # at which they arrive
    seconds: Positive = 10.0  # in which they arrive
    streams: int = 0  # endless answers to short prompts
    even: bool = False  # whether they come at even intervals; else as a Poisson process
    by: tuple[str, ...] = (TOGETHER, APART)  # variants that serve it

    def __post_init__(self) -> None:
        known = (TOGETHER, APART, AUTO, *(() if self.streams else (VLLM,)))
        if unknown := set(self.by).difference(known):
            beside = " beside streams" if self.streams else ""
            raise ConfigError(
                f"experiment.mixes: {', '.join(sorted(unknown))} cannot serve the load {self.name!r}{beside}. Choose "
                f"in its `by` from {', '.join(known)}"
            )


@dataclass(frozen=True)
class DisaggregationSpec(ExperimentSpec):
    prompt_tokens: tuple[Several, ...] = ()  # of prompts that come alone, whose time to the first token is split
    prompts: Count = 10  # of each length
    mixes: tuple[Mix, ...] = ()  # loads
    again_at: tuple[dict[str, Any], ...] = ()  # the points of the baseline's second arm; left out: all of its own
    slo: SLO = field(default_factory=SLO)  # what a request keeps that counts as goodput
    stream_tokens: int = 256  # of a stream's answer
    keep_engines: bool = False  # of all variants side by side; else a variant's end before another's start
    gate_logit_error: Positive | None = None  # of an engine by itself: see logit_gate.py


class Disaggregation(Probe):
    reads = (
        *("engine.attention", "engine.cache", "engine.graphs", "engine.model", "engine.numerics", "engine.scheduler"),
        *("engine.parallel.routing", "engine.speculation", "hardware"),
        *("measure.aa", "measure.costs", "measure.gates", "measure.predict", "measure.repeats", "measure.seed"),
        *("measure.system", "peers.vllm"),
    )
    spec: DisaggregationSpec
    baseline = TOGETHER
    generates = True
    metrics: Mapping[str, Metric] = METRICS
    _peer: PeerReplicas | None = None

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        spec, system = self.spec, self.settings.system
        if system not in (None, Kind.simulated):
            raise ConfigError(
                f"system={system.value}: disaggregation measures engines of mini-infer, and vLLM's beside them where "
                f"experiment.mixes have {VLLM} in `by`. Choose system=simulated, or leave it out"
            )
        self._only_simulated = system is not None
        # What is only simulated asks nothing of this machine.
        self.device = Device.cpu if self._only_simulated else self.engine.model.device
        self.generates = not self._only_simulated
        alone = [Point.of({"prompt_tokens": length}) for length in spec.prompt_tokens]
        self._rng = np.random.default_rng(self.settings.seed)
        self._requests: list[RequestRow] = []  # of loads
        self._mixes = {mix.name: mix for mix in spec.mixes}
        rates = [(mix.name, rate) for mix in spec.mixes for rate in mix.rates_per_s]
        loads = [Point.of({"mix": name, "rate_per_s": rate}) for name, rate in rates]
        # Where several rates are compared.
        self._whole = [Point.of({"load": mix.name}) for mix in spec.mixes if len(mix.rates_per_s) > 1]
        self.points = [*alone, *loads, *self._whole]
        labels = {**{name: label for name, (label, _) in ROLES.items()}, VLLM: "2 engines of vLLM that do both"}
        of = {
            variant: (alone if variant in (TOGETHER, APART, STREAM) else [])
            + [load for load in loads if variant in self._mixes[load.values["mix"]].by]
            for variant in labels
        }
        labels = self.with_baseline_again(labels)
        if self.aa is not None:
            own, asked = of[TOGETHER], enumerate(spec.again_at)
            of[self.aa] = [find_point(own, at, f"experiment.again_at[{i}]") for i, at in asked] or own
        endless = [mix.name for mix in spec.mixes if mix.streams]
        known = {  # to the simulator
            variant: [point for point in own if point in loads and point.values["mix"] not in endless]
            for variant, own in of.items()
            if self.of_arm(variant) in (TOGETHER, APART, AUTO)
        }
        self._simulated_as, self._predictions = dict[str, str](), dict[str, str]()
        if self._only_simulated:
            self._simulated_as = {variant: self.of_arm(variant) for variant in known}
            of = {variant: known.get(variant, []) for variant in of}
            self.spec = replace(spec, claims=())  # which it proves nothing of
            self.points = [*(load for load in loads if any(load in own for own in of.values())), *self._whole]
        elif self.settings.predict:
            self._predictions = {variant + PREDICTED: variant for variant in known if variant != self.aa}
            self._simulated_as = self._predictions
            labels |= {name: f"{labels[variant]}, predicted" for name, variant in self._predictions.items()}
            of |= {name: known[variant] for name, variant in self._predictions.items()}
        self.variants = {variant: label for variant, label in labels.items() if of[variant]}
        # The baseline's arms one behind the other, which the same engines serve.
        order = sorted(of, key=lambda variant: self.of_arm(variant) != TOGETHER)
        self.timed = [(variant, point) for variant in order for point in of[variant]]

    @property
    def hardware_key(self) -> str:
        return f"{SIMULATED}{self.simulator.key(self.engine)}" if self._only_simulated else super().hardware_key

    def measure(self, steps: Steps) -> Findings:
        if self._only_simulated:
            configs = [_config(self.engine, self.of_arm(variant)) for variant in self.variants]
            sources = dict.fromkeys(self.simulator.setup(config).found.source for config in configs)
            notes = [NOT_SIMULATED, *(f"{TAKE}{source}." for source in sources)]
            found = super().measure(steps)
            return replace(found, notes=[*notes, *self.simulator.beyond()])
        keep = self.spec.keep_engines
        with ExitStack() as beside:  # it loads while the gates are asked
            if VLLM in self.variants:
                two = _config(self.engine, TOGETHER)
                self._peer = beside.enter_context(closing(PeerReplicas(Kind.vllm, two, self.peers.vllm)))
            gates, error_gates = self._gates() if self.settings.gates else ([], [])
            hardware.give_back()
            with EngineProcesses(keep) as self._engines:
                if keep:
                    self._engines.start([*self._roles.values()])
                if self._peer is not None:
                    self._peer.ready()
                found = super().measure(steps)
        whole = {row.repeat for row in found.rows}  # repeats: of one that was stopped nothing is kept
        rows = [row for row in self._requests if row.repeat in whole]
        notes = prediction.remarks(found.rows, self._predictions, self.variants)
        absent, about = ("", {}) if self._peer is None else (self._peer.absent, self._peer.about)
        notes += [f"{self.variants[VLLM]}: absent, because {absent}."] if absent else []
        peers = {VLLM: (dict(about),)} if about else {}
        return replace(found, gates=gates, error_gates=error_gates, requests=rows, notes=notes, peers=peers)

    def values(self, variant: str, point: Point) -> Mapping[str, float | None]:
        if variant == VLLM:
            assert self._peer is not None
            return self._beside(self._peer, point)
        if variant in self._simulated_as:
            return self._simulated(variant, point)
        engines = self._engines
        engines.use(_config(self.engine, self.of_arm(variant)))
        if "mix" in point.values:
            return engines.run(self._load(engines.asked, variant, point))
        return engines.run(self._alone(engines.asked, variant, point.values["prompt_tokens"]))

    def problem(self) -> str:
        if self._reason or not all(request.tells_tokens for request in self._served.requests):  # of simulated ones
            return self._reason
        return super().problem() or validity.problem(Evidence(self._served, self._vocabulary))

    def derived(self, found: Sequence[Row]) -> Sequence[tuple[str, Point, Mapping[str, float | None]]]:
        """The knees of the loads; none where a rate's pass does not count, or even the lowest is too high."""
        shares = {(row.variant, row.point): row.value for row in found if row.metric == "slo_share" and row.valid}
        knees = list[tuple[str, Point, Mapping[str, float | None]]]()
        for whole, variant in product(self._whole, self.variants):
            mix = whole.values["load"]
            loads = [load for load in self.points if load.values.get("mix") == mix]
            at = {load.values["rate_per_s"]: shares.get((variant, load.name)) for load in loads}
            kept = [rate for rate, share in at.items() if share is not None and share >= IN_TIME]
            told = None not in at.values()
            knees.append((variant, whole, {"slo_rate_per_s": max(kept, default=None) if told else None}))
        return knees

    async def _alone(self, engine: AsyncEngine, variant: str, length: int) -> dict[str, float | None]:
        """Prompts one after the other, the first of which warms up."""
        told = [await _seen(engine, self._prompt(length), 2) for _ in range(1 + self.spec.prompts)][1:]
        answers, on_gpu = [answer for answer, _ in told], hardware.resolve(self.device) == "cuda"
        latencies = [(answer.e2e or 0.0, seconds) for answer, seconds in told]
        parts = [(sum(answer.spans.get(name, 0.0) for name in SPLIT), answer.ttft or 0.0) for answer in answers]
        self.witnessed = [Timed.of(each, on_gpu=on_gpu) for each in (latencies, parts)]
        self._served, self._reason = as_served(answers), _unmoved(variant, answers)
        ttft = _ttft(answers)
        split = [answer.spans for answer in answers if "transfer" in answer.spans]
        if not split:
            return {"ttft_ms": 1e3 * ttft}
        means = {name: float(np.mean([spans[name] for spans in split])) for name in split[0]}
        sent = (length - 1) * engine.info.startup["kv_token_bytes"]
        return {
            "ttft_ms": 1e3 * ttft,
            **{f"{name}_ms": 1e3 * seconds for name, seconds in means.items()},
            "transfer_gb_s": sent / means["transfer"] / 1e9 if sent else None,
            "exposed_share": max(0.0, means["transfer_exposed"]) / ttft,
        }

    async def _load(self, engine: AsyncEngine, variant: str, point: Point) -> dict[str, float | None]:
        spec, mix = self.spec, self._mixes[point.values["mix"]]
        items = self._items(point)
        asked = [(list(item.prompt), item.output_tokens, item.arrival_s or 0.0) for item in items]
        await asyncio.gather(*(ask(engine, self._prompt(mix.prompt_tokens), 2) for _ in engine.replicas))  # warm-up
        # Their answers end one after the other, and so does what comes next begin.
        firsts = [1 + number * spec.stream_tokens // mix.streams for number in range(mix.streams)]
        heard = list[list[float]]()  # when each answer's tokens came
        streams = [asyncio.ensure_future(self._stream(engine, first, heard)) for first in firsts]
        before = _moved(engine)
        await asyncio.sleep(0.5 if streams else 0)
        start = time.perf_counter()
        told = await asyncio.gather(*(_seen(engine, prompt, length, start + due) for prompt, length, due in asked))
        took = time.perf_counter() - start - min(due for *_, due in asked)
        answers = [answer for answer, _ in told]
        self._reason = _unmoved(variant, answers)
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        moved, computed_here = (after - first for after, first in zip(_moved(engine), before, strict=True))
        served = replace(as_served(answers), outside_s=took, in_flight_s=sum(seconds for _, seconds in told))
        found = self._of_load(variant, point, served)
        if streams:
            beside = ([at for at in times if at >= start] for times in heard)
            itl = stats.percentile([gap for times in beside for gap in np.diff(times)], 99)
            found["itl_p99_ms"] = None if itl is None else 1e3 * itl
        share = None if self.of_arm(variant) == TOGETHER else moved / max(1, moved + computed_here)
        return {**found, "moved_share": share}

    def _items(self, point: Point) -> list[Item]:
        """Evenly spaced, or of a Poisson process of which it is known how many come: for all variants, in all repeats,
        at the same times, and at a higher rate others beside them."""
        mix, rate = self._mixes[point.values["mix"]], point.values["rate_per_s"]
        count = max(1, round(rate * mix.seconds))
        rng = np.random.default_rng(self.settings.seed)
        dues = [i / rate for i in range(count)] if mix.even else sorted(rng.uniform(0, mix.seconds, count))
        return [Item(tuple(self._prompt(mix.prompt_tokens)), mix.output_tokens, arrival_s=float(due)) for due in dues]

    def _of_load(self, variant: str, point: Point, served: Served) -> dict[str, float | None]:
        """Of the requests that come while there is a steady state, if there are enough."""
        self._requests += request_rows(variant, point.name, self.repeat, served)
        self._served = served = served.without_ramps()
        found = formulas.measure(served, OF_LOADS, Context(self.spec.slo))
        told = {name: None if isinstance(value, Missing) else value for name, value in found.items()}
        return {"ttft_ms": 1e3 * _ttft(served.counted), **told}

    def _simulated(self, variant: str, point: Point) -> Mapping[str, float | None]:
        """What is predicted of the load: the same each time, and so once."""
        if self.repeat:
            return {}
        items, setup = self._items(point), self.simulator.setup(_config(self.engine, self._simulated_as[variant]))
        self._reason = ""
        return self._of_load(variant, point, drive(setup.cluster(), items, len(items)))

    def _beside(self, peer: PeerReplicas, point: Point) -> Mapping[str, float | None]:
        """The load on vLLM, in the first repeat."""
        if self.repeat:
            return {}
        items = self._items(point)
        peer.serve([replace(item, output_tokens=2, arrival_s=None) for item in items[:2]], 1)  # warm-up
        served = peer.serve(items, len(items))
        self._reason = f"{ABSENT}{peer.absent}" if served is None else ""
        return dict.fromkeys(OF_LOADS, 0.0) if served is None else self._of_load(VLLM, point, served)

    async def _stream(self, engine: AsyncEngine, first: int, heard: list[list[float]]) -> None:
        """Answers one after the other, the first one of so many tokens, until it is cancelled."""
        for length in chain([first], repeat(self.spec.stream_tokens)):
            heard.append([])
            await ask(engine, self._prompt(8), length, times=heard[-1])

    @cached_property
    def _vocabulary(self) -> int:
        return Vocabulary(self.engine.model).size

    def _prompt(self, length: int) -> list[int]:
        """Unlike all others."""
        return self._rng.integers(3, self._vocabulary - 1, length).tolist()

    def _gates(self) -> tuple[list[Gate], list[ErrorGate]]:
        """Through the engines of every variant each request gets the tokens that it gets alone: of the shipped model;
        and on a GPU of the one that is measured, whose weights are random."""
        exact, roles = ExactGate(hardware.resolve(self.device)), self._roles
        asked = ((name, config, partial(self._answering, name)) for name, config in roles.items())
        found = [exact.of_served(*one, way="through processes") for one in asked]
        found += self._own_gates(Numerics.batch_invariant) if exact.device == "cuda" else []
        one = replace(self.engine, parallel=self.engine.parallel.of_one)
        return found, logit_gate.gates(dict.fromkeys(roles, one), self.spec.gate_logit_error)

    def _own_gates(self, numerics: Numerics) -> list[Gate]:
        """Of the model as it is measured: prompts of the measured lengths and shorter ones, half of them greedy."""
        engine, asked = replace(self.engine, numerics=numerics), list[Question]()
        for length in [most for each in self.spec.prompt_tokens for most in (each - GATE_TOKENS, each // 3)]:
            number = len(asked)
            params = SamplingParams(temperature=number % 2, seed=number, max_tokens=GATE_TOKENS, ignore_eos=True)
            asked.append((self._prompt(max(2, length)), params))
        with closing(LLMEngine(plain(engine))) as alone:
            right = [alone.generate([prompt], params)[0].outputs[0].token_ids for prompt, params in asked]
        found, against = list[Gate](), f"{ALONE} (the model that is measured; {numerics.value} numerics)"
        for variant in self._roles:
            with self._answering(variant, _config(engine, variant)) as ask_all:
                found.append(compare(variant, "", right, ask_all(asked), against))
        return found

    @property
    def _roles(self) -> dict[str, EngineConfig]:
        return {name: _config(self.engine, name) for name in ROLES if name in self.variants}

    @contextmanager
    def _answering(self, variant: str, config: EngineConfig) -> Iterator[Ask]:
        """Engines of the variant, for as long as they are asked."""
        with EngineProcesses(keep=False) as engines:
            engines.use(config)

            def at_once(questions: Sequence[Question]) -> Tokens:
                answers = engines.run(_answers(engines.asked, questions))
                if reason := _unmoved(variant, answers):
                    raise EngineDead(f"{ROLES[variant][0]}: {reason}")
                return [answer.token_ids for answer in answers]

            yield at_once


async def _answers(engine: AsyncEngine, questions: Sequence[Question]) -> list[RequestTrace]:
    """All at once."""
    names = ("temperature", "top_p", "top_k", "seed")
    asked = [(prompt, p.max_tokens or 0, {name: getattr(p, name) for name in names}) for prompt, p in questions]
    return await asyncio.gather(*(ask(engine, prompt, length, **drawn) for prompt, length, drawn in asked))


async def _seen(
    engine: AsyncEngine, prompt: list[int], length: int, due: float | None = None
) -> tuple[RequestTrace, float]:
    """And the seconds that it was in flight, by a clock that knows nothing of tokens."""
    begun = time.perf_counter() if due is None else due
    answer = await ask(engine, prompt, length, due)
    return answer, time.perf_counter() - begun


def _unmoved(variant: str, answers: Sequence[RequestTrace]) -> str:
    """Why answers of engines with roles do not count: whose prompts were all computed where they are decoded."""
    apart = variant in (APART, STREAM) and not any("transfer" in answer.spans for answer in answers)
    return "no prompt was computed by the engine for prompts" if apart else ""


def _ttft(answers: Sequence[RequestTrace]) -> float:
    """The median. Every request gets its tokens, or an error."""
    return stats.median([answer.ttft for answer in answers if answer.ttft is not None])


def _moved(engine: AsyncEngine) -> tuple[int, int]:
    """Prompts that came from another engine so far, and those that might have."""
    every = [replica.stats for replica in engine.replicas]
    return sum(each.kv_transfers for each in every), sum(each.prompts_computed_here for each in every)


def _config(engine: EngineConfig, variant: str) -> EngineConfig:
    return changed(engine, parallel=ROLES[variant][1])
