"""Variants of the engine, and peers, on one workload: most experiments are a YAML on this and nothing else."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig

from experiments.lab import claims, heap, metrics, points, schema, stats
from experiments.lab.experiment import Findings
from experiments.lab.gate import Comparison, Gate, compare, gate
from experiments.lab.metrics import RequestTrace, Served
from experiments.lab.points import Point
from experiments.lab.progress import Steps
from experiments.lab.rows import Row
from experiments.lab.spec import ExperimentSpec
from experiments.lab.store import Sample
from experiments.lab.subjects import Kind, open_subject
from experiments.lab.vocabulary import ModelVocabulary
from experiments.lab.workloads import Inputs, Workload
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError

VARIANT_KEYS = ("kind", "label")  # beside the engine's sections


@dataclass(frozen=True)
class AblationSpec(ExperimentSpec):
    """
    Attributes:
        variants: name -> changes to the engine's config, and optionally `kind` (see subjects.Kind) and `label`.
        baseline: the variant that ratios and the gate refer to.
        points: dotted config key -> values; every variant is measured at every combination.
        gate_share: share of greedy tokens that must equal the baseline's; 1.0 in fp32, less where rounding differs.
        samples: so many prompts of the workload are shown in the report with what was generated.
    """

    variants: dict[str, Any] = field(default_factory=dict)
    baseline: str = ""
    points: dict[str, Any] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    gate_share: float = 1.0
    samples: int = 0

    def __post_init__(self) -> None:
        if not self.variants:
            raise ConfigError("experiment.variants is empty: name at least one variant and its changes")
        if self.baseline not in self.variants:
            raise ConfigError(
                f"experiment.baseline={self.baseline!r} is no variant; variants: {', '.join(self.variants)}"
            )
        if not self.metrics:
            raise ConfigError("experiment.metrics is empty: name what to measure")
        metrics.require_known(self.metrics)
        if not 0 < self.gate_share <= 1:
            raise ConfigError(f"experiment.gate_share must be above 0 and at most 1, got {self.gate_share}")


@dataclass(frozen=True)
class Cell:
    """One variant at one point: everything that is needed to measure it."""

    variant: str
    point: Point
    kind: Kind
    engine: EngineConfig
    workload: Workload


class Ablation:
    """For every repeat, point and variant, in ABBA order: a fresh engine, a warm-up on other prompts, a timed pass."""

    def __init__(self, spec: AblationSpec, cells: Sequence[Cell], repeats: int, seed: int) -> None:
        self.spec = spec
        self.baseline: str | None = spec.baseline
        self.device = cells[0].engine.model.device
        self.points = list({cell.point.name: cell.point for cell in cells}.values())
        self.variants = {
            name: (changes or {}).get("label") or name.replace("_", " ") for name, changes in spec.variants.items()
        }
        self.metrics = {name: metrics.SERVING[name][0] for name in spec.metrics}
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
        self._cells = {(cell.point.name, cell.variant): cell for cell in cells}
        self._repeats = repeats
        self._seed = seed

    @classmethod
    def from_config(cls, config: DictConfig) -> Ablation:
        spec = schema.experiment_spec(AblationSpec, config)
        measure = schema.build(schema.Measure, config.measure, "measure")
        cells = []
        for point in points.grid(spec.points):
            at_point = schema.with_values(config, point.values)
            load = schema.workload(at_point)
            for variant, changes in spec.variants.items():
                kind, engine = _variant(at_point, variant, changes or {})
                cells.append(Cell(variant, point, kind, engine, load))
        return cls(spec, cells, measure.repeats, measure.seed)

    def measure(self, steps: Steps) -> Findings:
        with heap.frozen():
            return self._measure(steps)

    def _measure(self, steps: Steps) -> Findings:
        steps.plan(self._repeats * len(self._cells))
        baseline = self.spec.baseline
        vocabulary = ModelVocabulary(self._cells[self.points[0].name, baseline].engine.model)
        # The same prompts in every repeat, so that repeats differ by nothing but the machine's mood.
        inputs = {p.name: self._cells[p.name, baseline].workload.make(vocabulary, self._seed) for p in self.points}
        rows: list[Row] = []
        comparisons: dict[tuple[str, str], list[Comparison]] = {}
        last: dict[tuple[str, str], Served] = {}
        for repeat in range(self._repeats):
            for point in self.points:
                served: dict[str, Served] = {}
                for variant in stats.abba(list(self.variants), repeat):
                    where = f"{self.variants[variant]} {point.name}".strip()
                    steps.next(f"{where}, repeat {repeat + 1} of {self._repeats}")
                    cell = self._cells[point.name, variant]
                    served[variant] = _serve(cell, inputs[point.name])
                    rows += _rows(cell, repeat, served[variant], self.spec.metrics)
                expected = [request.token_ids for request in served[baseline].requests]
                for variant, result in served.items():
                    got = [request.token_ids for request in result.requests]
                    comparisons.setdefault((variant, point.name), []).append(compare(expected, got))
                    last[variant, point.name] = result
        return Findings(rows, self._gates(comparisons), self._samples(inputs, last, vocabulary))

    def _gates(self, comparisons: Mapping[tuple[str, str], Sequence[Comparison]]) -> list[Gate]:
        return [
            gate(variant, point.name, comparisons[variant, point.name], self.spec.gate_share)
            for point in self.points
            for variant in self.variants
            if variant != self.spec.baseline
        ]

    def _samples(
        self, inputs: Mapping[str, Inputs], last: Mapping[tuple[str, str], Served], vocabulary: ModelVocabulary
    ) -> list[Sample]:
        """From the last point: the prompts with the longest outputs, and what the variants made of them."""
        point = self.points[-1].name
        items = inputs[point].measured
        longest = sorted(range(len(items)), key=lambda index: -items[index].output_tokens)
        samples = []
        for index in longest[: self.spec.samples]:
            authors: dict[str, list[str]] = {}
            for variant in self.variants:
                text = vocabulary.decode(last[variant, point].requests[index].token_ids)
                authors.setdefault(text, []).append(variant)
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


def _serve(cell: Cell, inputs: Inputs) -> Served:
    subject = open_subject(cell.kind, cell.engine)
    try:
        subject.serve(inputs.warmup, cell.workload.in_flight)
        gc.collect()
        return subject.serve(inputs.measured, cell.workload.in_flight)
    finally:
        subject.close()


def _rows(cell: Cell, repeat: int, served: Served, names: Sequence[str]) -> list[Row]:
    problem = _invalid(served.requests)
    rows = []
    for name, value in metrics.measure(served, names).items():
        reason = problem or ("" if value is not None else "the sample is too small for this percentile")
        rows.append(
            Row(
                variant=cell.variant,
                point=cell.point.name,
                repeat=repeat,
                metric=name,
                value=0.0 if value is None else value,
                unit=metrics.SERVING[name][0].unit,
                valid=not reason,
                reason=reason,
            )
        )
    return rows


def _invalid(requests: Sequence[RequestTrace]) -> str:
    """Why a pass does not count; empty when it does."""
    short = [r for r in requests if len(r.token_ids) != r.asked_tokens or len(r.token_times) != r.asked_tokens]
    if short:
        return f"{len(short)} of {len(requests)} requests did not get the output length they asked for"
    cached = sum(r.cached_tokens for r in requests)
    if cached:
        return f"{cached} prompt tokens of unrelated prompts came from a prefix cache"
    return ""
