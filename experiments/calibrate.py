"""What an engine's steps take on this machine: serves loads that visit all kinds of steps, and fits costs to them.

It is no ablation: nothing is compared. Its result is a file of conf/costs/, which simulated engines read.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from itertools import groupby, product
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig

from experiments.lab.config.axes import CONF
from experiments.lab.config.points import Point
from experiments.lab.config.spec import Count, ExperimentSpec, Positive, Several
from experiments.lab.experiment import Experiment, Findings, run_rounds
from experiments.lab.judge import logit_gate
from experiments.lab.judge.exact_gate import ExactGate
from experiments.lab.judge.gate import ErrorGate, Gate
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.measure import costs, hardware
from experiments.lab.measure.costs import CostFile, Layout
from experiments.lab.measure.fit import Fit, MeasuredStep, Residuals, device_seconds, fit, residuals
from experiments.lab.measure.traces import Served, StepRow, step_rows
from experiments.lab.measure.witness import Timed, wall_s
from experiments.lab.show.progress import Steps
from experiments.lab.store.result import COMPLETE
from experiments.lab.store.rows import Row
from mini_infer import LLMEngine, SamplingParams
from mini_infer.core.config import When
from mini_infer.core.errors import ConfigError
from mini_infer.core.plan import StepRecord
from mini_infer.simulation.costs import Work, require_simulated

VARIANT = "engine"
PASSES = WARM_UP, FIT, CHECK = "warm-up", "fit", "check"  # each with prompts of its own
EVERY = 6  # steps between two prompts that come beside requests that decode
MARGIN = 0.9  # of the KV memory: nobody is to be preempted
METRICS = {
    "steps": Metric("steps that were predicted", "steps", Better.higher),
    "median_error": Metric("error of a step's time, median", "", Better.lower, share=True),
    "p90_error": Metric("error of a step's time, P90", "", Better.lower, share=True),
    "bias": Metric("error of all steps' time together", "", Better.lower),
}
KINDS = {
    "decode": Point("rows alone", {"steps": "rows alone"}),
    "prompts": Point("with prompts", {"steps": "with prompts"}),
}


@dataclass(frozen=True)
class CalibrateSpec(ExperimentSpec):
    rows: tuple[Count, ...] = (1, 2, 4, 8)  # numbers of requests that decode together
    contexts: tuple[Count, ...] = (16, 128)  # their prompts' tokens; what does not fit into KV memory is left out
    prompts: tuple[Count, ...] = (8, 32, 128)  # tokens of prompts that come alone
    decodes: tuple[Count, ...] = (2, 6)  # rows that prompts come beside
    beside_prompts: tuple[Count, ...] = (16, 64)  # tokens of these prompts
    output_tokens: Several = 24  # of a request that decodes
    gate_logit_error: Positive | None = None  # see logit_gate.py


@dataclass(frozen=True)
class Arrival:
    step: int  # it comes when so many steps of its load have been done; sooner, where nobody else is there
    prompt_tokens: int
    output_tokens: int


class Calibrate(Experiment):
    reads = ("engine", "hardware", "measure.gates", "measure.seed")
    spec: CalibrateSpec
    generates = True
    variants: Mapping[str, str] = {VARIANT: "mini-infer"}
    metrics: Mapping[str, Metric] = METRICS
    points: Sequence[Point] = tuple(KINDS.values())

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.device = self.engine.model.device
        if self.settings.processes > 1:
            raise ConfigError("one process calibrates: set measure.processes=1")
        if self.engine.parallel.replicas > 1 or self.engine.parallel.pipeline > 1 or self.engine.speculation.most:
            raise ConfigError(
                "one engine without stages and drafts is calibrated: set engine.parallel.replicas=1, "
                "engine.parallel.pipeline=1 and engine/speculation=none"
            )
        require_simulated(self.engine)  # else there is nothing that costs are for
        self._folder = costs.FOLDER if self.paths.recorded else CONF.parent / self.paths.results / "costs"
        self._name = config.axes.model or self.engine.model.path.rstrip("/").rpartition("/")[2]

    def measure(self, steps: Steps) -> Findings:
        # Steps that leave out some of the work are short; of the loads' own tokens nobody knows which are right.
        device = hardware.resolve(self.device)
        gates, errors = list[Gate](), list[ErrorGate]()
        if self.settings.gates:
            gates = [ExactGate(device).of_probes(VARIANT, self.engine)]
            errors = logit_gate.gates({VARIANT: self.engine}, self.spec.gate_logit_error)
        engine = LLMEngine(self.engine)
        rows: dict[str, list[StepRow]] = {name: [] for name in PASSES}
        self._outside: dict[str, list[float]] = {name: [] for name in PASSES}  # seconds of each load
        with closing(engine):
            loads = dict.fromkeys(PASSES, self._loads(engine, self.spec.contexts))
            loads[WARM_UP] = self._loads(engine, self.spec.contexts[:1])  # longer ones launch the same kernels
            steps.plan(sum(map(len, loads.values())))
            status, error = run_rounds(
                [(name, partial(self._pass, engine, own, name, rows[name], steps)) for name, own in loads.items()]
            )
        timed = [*rows[FIT], *rows[CHECK]]
        told = self.told(timed, self._problem(timed))
        return Findings(told, status=status, error=error, steps=timed, gates=gates, error_gates=errors)

    def _problem(self, steps: Sequence[StepRow]) -> str:
        """Why what a fit takes the loads to have taken does not count, beside what passed outside meanwhile."""
        overlap = self._layout(hardware.resolve(self.device)).overlap
        loads, counts = list[tuple[float, float]](), list[int]()
        groups = groupby(steps, key=lambda row: (row.variant, row.point))
        for (_, group), took in zip(groups, [*self._outside[FIT], *self._outside[CHECK]], strict=False):
            own = list(group)
            host_s = 0.0 if overlap else sum(row.host_s or 0.0 for row in own)
            loads.append((sum(device_seconds(own, overlap)) + host_s, took))
            counts.append(len(own))
        return Timed.of(loads, min(counts), on_gpu=hardware.resolve(self.device) == "cuda").problem if loads else ""

    def told(self, steps: Sequence[StepRow], problem: str = "") -> list[Row]:
        """How far a fit to the steps of one pass is from those of the other. `problem`: why that does not count."""
        return [
            Row(VARIANT, KINDS[kind].name, 0, name, float(value), metric.unit, not problem, problem)
            for kind, found in self._fitted(steps)[1].items()
            for (name, metric), value in zip(METRICS.items(), astuple(found), strict=True)
        ]

    def finish(self, findings: Findings) -> None:
        if findings.status == COMPLETE and all(row.valid for row in findings.rows):
            device, today = hardware.resolve(self.device), datetime.now(timezone.utc).date().isoformat()
            where = hardware.name(device), hardware.device_key(device)
            path = self.save(findings.steps, self._folder, *where, torch.__version__, today)
            print(f"costs    {path}", file=sys.stderr)

    def save(
        self,
        steps: Sequence[StepRow],
        folder: Path,
        machine: str,
        key: str,
        version: str,
        measured: str,
        anew: str = "",
    ) -> Path:
        """Writes the file of costs of a machine, and of a torch, on which the steps were measured; `anew`: when they
        were fitted, where that was later."""
        found, checked = self._fitted(steps)
        layout = self._layout(hardware.resolve(self.device))
        marks = [f"tp{layout.tensor}"] if layout.tensor > 1 else []
        marks += [_slug(mark) for mark in (layout.quantization, layout.kv, layout.numerics) if mark not in _USUAL]
        names = [_slug(self._name), key, *marks]
        path = folder / f"{'.'.join(names)}.yaml"
        known, held, fitted = costs.read(path) if path.exists() else None, "", found.costs
        if known is not None and (known.layout, known.machine) != (layout, machine):
            own = costs.differences(known.layout, layout).items()  # what is known stays
            names += [_slug(f"{name}-{value}") for name, value in own] or [_slug(machine)]
            path = folder / f"{'.'.join(names)}.yaml"
            known = costs.read(path) if path.exists() else None
        if known is not None:
            held, fitted = known.held, replace(fitted, held_block_s=known.costs.held_block_s)
        how = (
            f"torch {version}: {sum(row.variant == FIT for row in steps)} steps of one pass over "
            f"{len({row.point for row in steps})} loads; residuals are of another pass"
        )
        how += f"; fitted anew on {anew}" if anew else ""
        costs.save(path, CostFile(machine, layout, measured, how, fitted, found.far_off, checked, held))
        return path

    def _loads(self, engine: LLMEngine, contexts: Sequence[int]) -> dict[str, list[Arrival]]:
        spec, limits = self.spec, engine.executor.limits
        capacity = MARGIN * limits.num_blocks * self.engine.cache.block_size
        most, block = self.engine.scheduler.max_num_seqs, self.engine.cache.block_size

        def fits(load: Sequence[Arrival], at_once: int) -> bool:
            longest = max(a.prompt_tokens + a.output_tokens for a in load)
            taken = sorted((a.prompt_tokens + a.output_tokens + block for a in load), reverse=True)[:at_once]
            return longest <= limits.max_model_len and at_once <= most and sum(taken) <= capacity

        loads = [(f"{length} alone", [Arrival(1000 * i, length, 2) for i in range(3)], 1) for length in spec.prompts]
        for context, count in product(contexts, spec.rows):
            loads.append((f"{count} of {context}", [Arrival(0, context, spec.output_tokens)] * count, count))
        for count, length in product(spec.decodes, spec.beside_prompts):
            coming = [Arrival(EVERY * (i + 1), length, 2) for i in range(3)]
            running = [Arrival(0, min(spec.contexts), EVERY * 5)] * count
            loads.append((f"{length} beside {count}", running + coming, count + 1))
        return {name: load for name, load, at_once in loads if fits(load, at_once)}

    def _pass(
        self, engine: LLMEngine, loads: dict[str, list[Arrival]], name: str, rows: list[StepRow], steps: Steps
    ) -> None:
        rng = np.random.default_rng([self.settings.seed, PASSES.index(name)])
        begin = None
        for load, arrivals in loads.items():
            steps.next(f"{load}, {name}")
            engine.core.reset()
            records, took = _serve(engine, arrivals, rng)
            begin = records[0].start_time if begin is None else begin
            rows += step_rows(name, load, Served((), begin, records[-1].end_time, tuple(records)))
            self._outside[name].append(took)

    def _fitted(self, rows: Sequence[StepRow]) -> tuple[Fit, dict[str, Residuals]]:
        overlap = self._layout(hardware.resolve(self.device)).overlap
        target = self.simulator.target(self.engine)
        block_s = 0.0 if target.ceilings is None else costs.Roofline(target).copy_s(1)
        graphs = self.engine.graphs
        captured = 0 if graphs.capture is When.never else graphs.max_prefill_tokens
        found = fit(
            measured([row for row in rows if row.variant == FIT], overlap), block_s, captured if overlap else None
        )
        return found, residuals(found.costs, measured([row for row in rows if row.variant == CHECK], overlap))

    def _layout(self, device: str) -> Layout:
        return Layout.of(self.engine, *costs.served(self.engine, device), device, self.threads)


_USUAL = ("none", "model's", "fast")


def measured(rows: Sequence[StepRow], overlap: bool) -> list[MeasuredStep]:
    """Of one or several passes. Those of runs of before 2026-11-29 have a clock for each load, and are taken to follow
    each other without a pause."""
    found, until = list[MeasuredStep](), -math.inf
    for _, group in groupby(rows, key=lambda row: (row.variant, row.point)):
        own = list(group)
        behind = max(0.0, until - own[0].start_s)
        until = behind + own[-1].start_s + own[-1].duration_s
        seconds, launches = _told_in_time(own, device_seconds(own, overlap))
        for row, device_s, launch_s in zip(own, seconds, launches, strict=True):
            slots = row.decode_context or 0, row.prompt_reach or 0, row.prompt_context or 0
            work = Work(row.verified_tokens or 0, row.prefill_tokens, *slots, row.prompt_pairs or 0)
            num_rows = row.decode_tokens + row.num_prefilling + bool(row.prefill_tokens)
            end_s = behind + row.start_s + row.duration_s
            found.append(MeasuredStep(work, num_rows, device_s, row.host_s or 0.0, end_s, launch_s))
    return [step for step in found if step.work.tokens]


def _told_in_time(rows: Sequence[StepRow], seconds: list[float]) -> tuple[list[float], list[float | None]]:
    """Where the host was still launching prompts when the step of rows before them ended, that end was told late: what
    it took longer than the step before it is the prompts'. And what these took to be launched, as far as it is told."""
    launches: list[float | None] = [None] * len(rows)
    for before, late, prompts in zip(range(len(rows)), range(1, len(rows)), range(2, len(rows)), strict=False):
        alike = rows[before].decode_tokens == rows[late].decode_tokens > 0
        if alike and rows[prompts].prefill_tokens and not (rows[before].prefill_tokens or rows[late].prefill_tokens):
            launches[prompts] = seconds[late] - (rows[late].host_s or 0.0)  # which planned it, too
            shift = max(0.0, seconds[late] - seconds[before])
            seconds[late] -= shift
            seconds[prompts] += shift
    return seconds, launches


def _serve(engine: LLMEngine, arrivals: Sequence[Arrival], rng: np.random.Generator) -> tuple[list[StepRecord], float]:
    """Its steps, and the seconds from the first one's start to the last one's end by a clock that knows of none."""
    records, done, begun = list[StepRecord](), 0, math.inf
    engine.observers.append(records.append)
    waiting = sorted(arrivals, key=lambda arrival: arrival.step)
    prompts = [rng.integers(0, engine.vocab_size, arrival.prompt_tokens).tolist() for arrival in waiting]
    try:
        while waiting or engine.has_unfinished_requests():
            while waiting and (waiting[0].step <= done or not engine.has_unfinished_requests()):
                params = SamplingParams(temperature=0, max_tokens=waiting.pop(0).output_tokens, ignore_eos=True)
                engine.add_request(prompts.pop(0), params, stream=False)
            begun = min(begun, wall_s())
            engine.step()
            done += 1
    finally:
        engine.observers.remove(records.append)
    return records, wall_s() - begun


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
