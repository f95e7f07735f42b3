"""Variants of the engine, and peers, on one workload: most experiments are a YAML on this and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from experiments.lab import ceilings, cells, claims, hardware, heap, metrics, points, rounds, schema, stats, validity
from experiments.lab.ceilings import Found
from experiments.lab.cells import Cell, Pass
from experiments.lab.clocks import Watch
from experiments.lab.experiment import Findings
from experiments.lab.ledger import Ledger, Terms
from experiments.lab.metrics import SLO
from experiments.lab.points import Point
from experiments.lab.progress import Steps
from experiments.lab.spec import ExperimentSpec
from experiments.lab.store import Sample
from experiments.lab.subjects import Kind, require_servable
from experiments.lab.vocabulary import ModelVocabulary
from experiments.lab.workloads import Inputs
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError

VARIANT_KEYS = ("kind", "label")  # beside the engine's sections
ATTEMPTS = 3  # at a pass, where the machine changes its speed
HARDWARE = Path(__file__).resolve().parents[1] / "conf" / "hardware"


@dataclass(frozen=True)
class AblationSpec(ExperimentSpec):
    """
    Attributes:
        variants: name -> changes to the engine's config, and optionally `kind` (see subjects.Kind) and `label`.
        baseline: the variant that ratios and the gate refer to.
        points: dotted config key -> values; every variant is measured at every combination.
        metrics: see docs/metrics.md; `metric@name` looks at the requests of that name alone.
        slo: bounds that a request must keep to count in goodput_rps.
        gate_share: share of greedy tokens that must equal the baseline's; 1.0 in fp32, less where rounding differs.
        gate_logprob_error: the most, in nats, by which an equal token's log-probability may differ from the
            baseline's; takes one more, untimed pass of every variant at every point.
        samples: so many prompts of the workload are shown in the report with what was generated.
        timeline: the point whose first repeat is kept step by step, {} where there is only one; left out: none is.
    """

    variants: dict[str, Any] = field(default_factory=dict)
    baseline: str = ""
    points: dict[str, Any] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    slo: SLO = field(default_factory=SLO)
    gate_share: float = 1.0
    gate_logprob_error: float | None = None
    samples: int = 0
    timeline: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.variants:
            raise ConfigError("experiment.variants is empty: name at least one variant and its changes")
        if self.baseline not in self.variants:
            raise ConfigError(
                f"experiment.baseline={self.baseline!r} is no variant; variants: {', '.join(self.variants)}"
            )
        if not self.metrics:
            raise ConfigError("experiment.metrics is empty: name what to measure")
        metrics.require_known(self.metrics, self.slo)
        if not 0 < self.gate_share <= 1:
            raise ConfigError(f"experiment.gate_share must be above 0 and at most 1, got {self.gate_share}")
        if self.gate_logprob_error is not None and self.gate_logprob_error <= 0:
            raise ConfigError(f"experiment.gate_logprob_error must be above 0 nats, got {self.gate_logprob_error}")
        if self.samples < 0:
            raise ConfigError(f"experiment.samples must be 0 or more, got {self.samples}")


class Ablation:
    """For every repeat, point and variant, in ABBA order: a fresh engine, a warm-up on other prompts, a timed pass."""

    def __init__(self, spec: AblationSpec, measured: Sequence[Cell], repeats: int, seed: int, known: Found) -> None:
        """`known` are this machine's ceilings, or why there are none."""
        self.spec = spec
        self.baseline: str | None = spec.baseline
        self.device = measured[0].engine.model.device
        self.points = list({cell.point.name: cell.point for cell in measured}.values())
        self.variants = {
            name: (changes or {}).get("label") or name.replace("_", " ") for name, changes in spec.variants.items()
        }
        self.metrics = {name: metrics.describe(name) for name in spec.metrics}
        self.claims = [
            claims.resolve(
                claim,
                f"experiment.claims[{index}]",
                variants=list(self.variants),
                baseline=spec.baseline,
                metrics=spec.metrics,
                points=self.points,
            )
            for index, claim in enumerate(spec.claims)
        ]
        self._timeline: str | None = None
        if spec.timeline is not None:
            self._timeline = points.find_point(self.points, spec.timeline, "experiment.timeline").name
        self._cells = {(cell.variant, cell.point.name): cell for cell in measured}
        self._contexts = {
            key: cells.context(cell, spec.slo, known.ceilings, known.problem) for key, cell in self._cells.items()
        }
        self._ceilings = known.ceilings
        self._repeats = repeats
        self._seed = seed

    @classmethod
    def from_config(cls, config: DictConfig) -> Ablation:
        spec = schema.experiment_spec(AblationSpec, config)
        measure = schema.build(schema.Measure, config.measure, "measure")
        measured = []
        for point in points.grid(spec.points):
            at_point = schema.with_values(config, point.values)
            load = schema.workload(at_point)
            for variant, changes in spec.variants.items():
                kind, engine = _variant(at_point, variant, changes or {})
                measured.append(Cell(variant, point, kind, engine, load))
        device = hardware.resolve(measured[0].engine.model.device)
        chosen = schema.build(hardware.Hardware, config.hardware, "hardware")
        known = ceilings.find(HARDWARE, chosen, device, measure.threads or torch.get_num_threads())
        return cls(spec, measured, measure.repeats, measure.seed, known)

    def measure(self, steps: Steps) -> Findings:
        with heap.frozen():
            return self._measure(steps)

    def _measure(self, steps: Steps) -> Findings:
        steps.plan(self._repeats * len(self._cells))
        vocabulary = ModelVocabulary(self._cell(self.spec.baseline, self.points[0]).engine.model)
        inputs = {point.name: self._inputs(point, vocabulary) for point in self.points}
        ledger = Ledger(self._terms(vocabulary.size))
        watch = Watch(hardware.resolve(self.device))
        work = [
            (
                f"repeat {repeat + 1} of {self._repeats}" + (f" at {point.name}" if point.name else ""),
                partial(self._round, repeat, point, inputs[point.name], ledger, watch, steps),
            )
            for repeat in range(self._repeats)
            for point in self.points
        ]
        outcome = rounds.run(work)
        return Findings(
            rows=[row for found in ledger.rounds for row in found.rows],
            gates=ledger.gates(
                [(v, p.name) for p in self.points for v in self.variants if v != self.spec.baseline],
                self.spec.gate_share,
                self.spec.gate_logprob_error,
            ),
            samples=self._samples(inputs, ledger, vocabulary),
            status=outcome.status,
            error=outcome.error,
            steps=[row for found in ledger.rounds for row in found.steps],
            requests=[row for found in ledger.rounds for row in found.requests],
            workload=self._workload(inputs),
            ceilings=self._ceilings,
            notes=list(dict.fromkeys(note for found in ledger.rounds for note in found.notes)),
        )

    def _terms(self, vocab_size: int) -> Terms:
        spec = self.spec
        exact = spec.gate_share >= 1
        return Terms(
            spec.metrics, spec.baseline, self.variants, self._contexts, vocab_size, exact, self._timeline
        )  # fmt: skip

    def _inputs(self, point: Point, vocabulary: ModelVocabulary) -> Inputs:
        """The same requests in every repeat, so that repeats differ by nothing but the machine's mood."""
        load = self._cell(self.spec.baseline, point).workload
        inputs = load.make(vocabulary, self._seed)
        metrics.require_classes(self.spec.metrics, [item.name for item in inputs.measured], f"workload={load.kind}")
        for variant in self.variants:
            require_servable(self._cell(variant, point).kind, inputs.measured, variant)
        return inputs

    def _round(self, repeat: int, point: Point, inputs: Inputs, ledger: Ledger, watch: Watch, steps: Steps) -> None:
        passes = []
        for variant in stats.abba(list(self.variants), repeat):
            cell = self._cell(variant, point)
            steps.next(f"{self.variants[variant]} {point.name}".strip() + f", repeat {repeat + 1} of {self._repeats}")
            scored = self.spec.gate_logprob_error is not None and repeat == 0
            passes.append((cell, self._steady(cell, inputs, watch, scored, steps)))
        ledger.enter(repeat, passes)

    def _steady(self, cell: Cell, inputs: Inputs, watch: Watch, scored: bool, steps: Steps) -> list[Pass]:
        """A pass, after those that had to be repeated because the machine changed its speed meanwhile."""
        passes = [cells.serve(cell, inputs, watch, scored)]
        while passes[-1].drift > validity.MAX_DRIFT and len(passes) < ATTEMPTS:
            steps.again(f"the machine's speed changed by {100 * passes[-1].drift:.3g} %")
            passes.append(cells.serve(cell, inputs, watch, scored))
        return passes

    def _cell(self, variant: str, point: Point) -> Cell:
        return self._cells[variant, point.name]

    def _workload(self, inputs: Mapping[str, Inputs]) -> dict[str, Any]:
        """How the requests were made; a list, point by point, where that differs between points."""
        described = [self._cell(self.spec.baseline, p).workload.describe(inputs[p.name]) for p in self.points]
        keys = dict.fromkeys(key for one in described for key in one)
        values = {key: [one.get(key) for one in described] for key in keys}
        return {key: of[0] if all(value == of[0] for value in of) else of for key, of in values.items()}

    def _samples(self, inputs: Mapping[str, Inputs], ledger: Ledger, vocabulary: ModelVocabulary) -> list[Sample]:
        """From the last point that was measured: the prompts with the longest outputs, and what became of them."""
        point = [p.name for p in self.points if ledger.tokens((self.spec.baseline, p.name)) is not None][-1]
        items = inputs[point].measured
        longest = sorted(range(len(items)), key=lambda index: -items[index].output_tokens)
        samples = []
        for index in longest[: self.spec.samples]:
            authors: dict[str, list[str]] = {}
            for variant in self.variants:
                tokens = ledger.tokens((variant, point))
                assert tokens is not None
                authors.setdefault(vocabulary.decode(tokens[index]), []).append(variant)
            prompt = vocabulary.decode(items[index].prompt)
            samples += [Sample(tuple(variants), prompt, text) for text, variants in authors.items()]
        return samples


def _variant(config: DictConfig, name: str, changes: Mapping[str, Any]) -> tuple[Kind, EngineConfig]:
    where = f"experiment.variants.{name}"
    if not isinstance(changes, Mapping):
        raise ConfigError(f"{where} must map engine settings to values, got {changes!r}")
    try:
        kind = Kind(changes.get("kind", "engine"))
    except ValueError:
        allowed = ", ".join(k.value for k in Kind)
        raise ConfigError(f"{where}.kind must be one of {allowed}; got {changes['kind']!r}") from None
    settings = {key: value for key, value in changes.items() if key not in VARIANT_KEYS}
    return kind, schema.engine_config(schema.merged(config.engine, settings, where))
