"""Prompts computed by one engine and decoded by another, beside engines that do both: where the time to the first token
goes, what a transfer takes, and which load is served better by which of the two.

The engines are processes, as behind mini-infer-serve; they are asked without HTTP.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any, TypeVar

import numpy as np
from omegaconf import DictConfig

from experiments.lab import points
from experiments.lab.check import Count, Several
from experiments.lab.experiment import Findings
from experiments.lab.judge import stats, validity
from experiments.lab.judge.gate import Gate, compare
from experiments.lab.judge.metrics import SLO, Better, Metric
from experiments.lab.judge.validity import Evidence
from experiments.lab.measure.rounds import Probe
from experiments.lab.measure.traces import RequestRow, RequestTrace, Served, request_rows
from experiments.lab.points import Point
from experiments.lab.show.progress import Steps
from experiments.lab.spec import ExperimentSpec
from experiments.lab.workloads.base import gamma_times
from mini_infer import SamplingParams
from mini_infer.core.config import Connector, Device, EngineConfig, HandOver, Numerics
from mini_infer.core.config import replace as changed
from mini_infer.serving.link.link import EngineDead
from mini_infer.serving.processes.async_engine import AsyncEngine
from mini_infer.serving.processes.engines import ways_to_make
from mini_infer.serving.processes.gpus import engines_asked
from mini_infer.serving.processes.launch import EngineProcess

TOGETHER, APART, STREAM, AUTO = "together", "apart", "stream", "auto"
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
METRICS = {
    "ttft_ms": Metric("time to first token, median", "ms", LOW),
    **{f"{name}_ms": Metric(f"{label}, mean", "ms", LOW) for name, label in SPLIT.items()},
    "transfer_ms": Metric("copies of a prompt's KV, mean", "ms", LOW),
    "transfer_gb_s": Metric("rate of the copies", "GB/s", HIGH),
    "exposed_share": Metric("transfer after prefill, share of TTFT", "", LOW, share=True),
    "itl_p99_ms": Metric("inter-token latency, P99", "ms", LOW),
    "goodput_per_s": Metric("requests that met the SLO", "1/s", HIGH),
    "slo_share": Metric("share of requests that met the SLO", "", HIGH, share=True),
    "moved_share": Metric("share of prompts computed apart", "", HIGH, share=True),
}
STARTUP_S = 600.0
GATE_TOKENS, GATE_REQUESTS = 24, 6
T = TypeVar("T")


@dataclass(frozen=True)
class Mix:
    """Requests of an open loop, and streams that run beside them all the time."""

    name: str
    prompt_tokens: int  # of each request
    output_tokens: int
    rates_per_s: tuple[float, ...]  # at which they arrive
    streams: int = 0  # endless answers to short prompts
    even: bool = False  # whether they come at even intervals; else as a Poisson process


@dataclass(frozen=True)
class DisaggregationSpec(ExperimentSpec):
    prompt_tokens: tuple[Several, ...] = ()  # of prompts that come alone, whose time to the first token is split
    prompts: Count = 10  # of each length
    mixes: tuple[Mix, ...] = ()  # loads
    count: Count = 100  # requests of a load at each rate
    slo: SLO = field(default_factory=SLO)  # what a request keeps that counts as goodput
    stream_tokens: int = 256  # of a stream's answer
    keep_engines: bool = False  # of all variants side by side; else a variant's end before another's start


class Disaggregation(Probe):
    reads = (
        *("engine.attention", "engine.cache", "engine.graphs", "engine.model", "engine.numerics", "engine.scheduler"),
        *("engine.parallel.routing", "engine.speculation", "hardware"),
        *("measure.gates", "measure.repeats", "measure.seed"),
    )
    spec: DisaggregationSpec
    baseline = TOGETHER
    generates = True
    metrics: Mapping[str, Metric] = METRICS
    variants: Mapping[str, str] = {name: label for name, (label, _) in ROLES.items()}

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        spec, self.device = self.spec, self.engine.model.device
        self._rng = np.random.default_rng(self.settings.seed)
        alone = [points.point({"prompt_tokens": length}) for length in spec.prompt_tokens]
        self._mixes = {mix.name: mix for mix in spec.mixes}
        rates = [(mix.name, rate) for mix in spec.mixes for rate in mix.rates_per_s]
        loads = [points.point({"mix": name, "rate_per_s": rate}) for name, rate in rates]
        self.points = [*alone, *loads]
        most = {mix.name: max(mix.rates_per_s) for mix in spec.mixes}
        busiest = [load for load in loads if load.values["rate_per_s"] == most[load.values["mix"]]]
        of = {TOGETHER: self.points, APART: self.points, STREAM: alone, AUTO: busiest}
        self.timed = [(variant, point) for variant, own in of.items() for point in own]

    def measure(self, steps: Steps) -> Findings:
        keep = self.spec.keep_engines
        with _Engines(keep) as self._engines:  # those of the gates end before others take their memory
            gates = self._gates() if self.settings.gates else []
        with _Engines(keep) as self._engines:
            if keep:
                self._engines.start([_config(self.engine, variant) for variant in ROLES])
            self._requests: dict[tuple[str, str], list[RequestRow]] = {}  # of each load, the first time
            found = super().measure(steps)
            return replace(found, gates=gates, requests=[row for rows in self._requests.values() for row in rows])

    def values(self, variant: str, point: Point) -> Mapping[str, float | None]:
        engines = self._engines
        engines.use(_config(self.engine, variant))
        if "mix" in point.values:
            return engines.run(self._load(engines.asked, variant, point))
        return engines.run(self._alone(engines.asked, variant, point.values["prompt_tokens"]))

    def problem(self) -> str:
        return self._reason or validity.problem(Evidence(self._served, self._engines.asked.info.vocab_size))

    async def _alone(self, engine: AsyncEngine, variant: str, length: int) -> dict[str, float | None]:
        """Prompts one after the other, the first of which warms up."""
        answers = [await _ask(engine, self._prompt(length), 2) for _ in range(1 + self.spec.prompts)][1:]
        self._served, self._reason = _served(answers), _unmoved(variant, answers)
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
        spec, mix, rate = self.spec, self._mixes[point.values["mix"]], point.values["rate_per_s"]
        count = spec.count
        dues = [i / rate for i in range(count)] if mix.even else gamma_times(count, rate, 1.0, self._rng)
        prompts = [self._prompt(mix.prompt_tokens) for _ in range(count)]
        await asyncio.gather(*(_ask(engine, self._prompt(mix.prompt_tokens), 2) for _ in engine.replicas))  # warm-up
        # Their answers end one after the other, and so does what comes next begin.
        firsts = [1 + number * spec.stream_tokens // mix.streams for number in range(mix.streams)]
        streams = [asyncio.ensure_future(self._stream(engine, first)) for first in firsts]
        before = _moved(engine)
        await asyncio.sleep(0.2 if streams else 0)
        start, asked = time.perf_counter(), zip(prompts, dues, strict=True)
        answers = await asyncio.gather(*(_ask(engine, p, mix.output_tokens, start + due) for p, due in asked))
        self._served = served = _served(answers)
        self._reason = _unmoved(variant, answers)
        self._requests.setdefault((variant, point.name), request_rows(variant, point.name, 0, served))
        for task in streams:
            task.cancel()
        running = [gaps for gaps in await asyncio.gather(*streams, return_exceptions=True) if isinstance(gaps, list)]
        good = sum(map(spec.slo.met_by, served.requests))
        gaps = [gap for own in running or [request.gaps for request in served.requests] for gap in own]
        itl = stats.percentile(gaps, 99)
        moved, computed_here = (after - first for after, first in zip(_moved(engine), before, strict=True))
        return {
            "ttft_ms": 1e3 * _ttft(served.requests),
            "itl_p99_ms": None if itl is None else 1e3 * itl,
            "goodput_per_s": good / (served.end - start),
            "slo_share": good / count,
            "moved_share": None if variant == TOGETHER else moved / max(1, moved + computed_here),
        }

    async def _stream(self, engine: AsyncEngine, first: int) -> list[float]:
        """Answers one after the other, the first one of so many tokens, until it is cancelled: the gaps in them."""
        gaps: list[float] = []
        with suppress(asyncio.CancelledError):
            for length in chain([first], repeat(self.spec.stream_tokens)):
                gaps += (await _ask(engine, self._prompt(8), length)).gaps
        return gaps

    def _prompt(self, length: int) -> list[int]:
        """Unlike all others."""
        return self._rng.integers(3, self._engines.asked.info.vocab_size - 1, length).tolist()

    def _gates(self) -> list[Gate]:
        """Tokens of engines apart are those of one engine: on a GPU in batch-invariant numerics, to the bit."""
        config = self.engine
        if config.model.device is not Device.cpu:
            config = replace(config, numerics=Numerics.batch_invariant)
        lengths = [2 + (17 * i) % max(self.spec.prompt_tokens) for i in range(1, 1 + GATE_REQUESTS)]
        configs = {variant: _config(config, variant) for variant in (TOGETHER, APART, STREAM)}
        if self.spec.keep_engines:
            self._engines.start([*configs.values()])
        found: dict[str, list[tuple[int, ...]]] = {}
        prompts: list[list[int]] = []
        for variant, of_variant in configs.items():
            self._engines.use(of_variant)
            prompts = prompts or [self._prompt(length) for length in lengths]
            answers = self._engines.run(_drawn(self._engines.asked, prompts))
            if reason := _unmoved(variant, answers):
                raise EngineDead(f"{ROLES[variant][0]}: {reason}")
            found[variant] = [answer.token_ids for answer in answers]
        return [compare(variant, "", found[TOGETHER], found[variant], "one engine's") for variant in (APART, STREAM)]


async def _ask(
    engine: AsyncEngine, prompt: list[int], output_tokens: int, due: float | None = None, **params: Any
) -> RequestTrace:
    """At once, or when it is due."""
    if due is not None:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
    sent = time.perf_counter()
    given = {"temperature": 0.0, **params}
    stream = engine.submit(prompt, SamplingParams(max_tokens=output_tokens, ignore_eos=True, **given))
    times: list[float] = []
    tokens: list[int] = []
    spans: dict[str, float] = {}
    async for delta in stream:
        times += [time.perf_counter()] * len(delta.token_ids)
        tokens += delta.token_ids
        spans = delta.spans or spans
    to_first = sum(seconds for name, seconds in spans.items() if name not in ("queue", "transfer"))
    return RequestTrace(
        prompt_tokens=len(prompt),
        asked_tokens=output_tokens,
        arrival=sent if due is None else due,
        token_times=tuple(times),
        token_ids=tuple(tokens),
        sent=None if due is None else sent,
        first_scheduled=times[0] - to_first if spans else None,
        spans=spans,
    )


def _served(answers: Sequence[RequestTrace]) -> Served:
    start = min(answer.arrival for answer in answers)
    named = (replace(answer, request_id=f"request {number}") for number, answer in enumerate(answers, 1))
    return Served(tuple(named), start, max(answer.token_times[-1] for answer in answers))


async def _drawn(engine: AsyncEngine, prompts: Sequence[list[int]]) -> list[RequestTrace]:
    """Half of the answers drawn at random, all at once."""
    drawn = ({"temperature": float(index % 2), "seed": index} for index in range(len(prompts)))
    asked = zip(prompts, drawn, strict=True)
    return await asyncio.gather(*(_ask(engine, prompt, GATE_TOKENS, **params) for prompt, params in asked))


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


class _Engines:
    """Engine processes of one config at a time; or of several side by side, which are kept to the end."""

    asked: AsyncEngine

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._loop = asyncio.new_event_loop()
        self._there: list[tuple[EngineConfig, AsyncEngine]] = []
        self._open = ExitStack()

    def __enter__(self) -> _Engines:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()
        left = asyncio.all_tasks(self._loop)  # those that would connect again
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left))
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def use(self, config: EngineConfig) -> None:
        """It is the one that is `asked` from here on."""
        if config not in [known for known, _ in self._there]:
            if not self._keep:
                self._open.close()
                self._there = []
            self.start([config])
        (self.asked,) = (engine for known, engine in self._there if known == config)

    def start(self, configs: Sequence[EngineConfig]) -> None:
        """All at once."""
        begun = []
        for config in configs:
            folder = self._open.enter_context(tempfile.TemporaryDirectory())
            processes: dict[str, EngineProcess] = {}  # by where they listen
            for number, make in enumerate(ways_to_make(config, max_queued=2**20)):
                path = os.path.join(folder, f"engine-{number}")
                processes[path] = make(path)
                self._open.callback(processes[path].stop)
            begun.append((config, processes))
        for config, processes in begun:
            engine = self.run(self._serving(config, processes))
            self._open.callback(self._end, engine)
            self._there.append((config, engine))

    def _end(self, engine: AsyncEngine) -> None:
        self.run(engine.close())

    async def _serving(self, config: EngineConfig, processes: Mapping[str, EngineProcess]) -> AsyncEngine:
        """When all of them do. Raises EngineDead where one ends instead."""
        connect = AsyncEngine.connect(*processes, parallel=config.parallel, startup_timeout=STARTUP_S)
        engine = asyncio.ensure_future(connect)
        while not engine.done() or any(replica.failure is not None for replica in engine.result().replicas):
            for ending in filter(None, [process.ending() for process in processes.values()]):
                engine.cancel()
                raise EngineDead(f"an engine of {engines_asked(config)} {ending} before it served")
            await asyncio.sleep(0.1)
        return engine.result()
