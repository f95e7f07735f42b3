"""Variants of the engine, and peers, on one workload: most experiments are a YAML on this and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig

from experiments.lab import axes, points, schema
from experiments.lab.ablation_spec import AblationSpec
from experiments.lab.experiment import Experiment, Findings
from experiments.lab.judge import claims, exact_gate, logit_gate, metrics
from experiments.lab.judge.exact_gate import ExactGate
from experiments.lab.judge.gate import ErrorGate, Gate
from experiments.lab.measure import ceilings, cells, hardware, heap, rounds
from experiments.lab.measure.ceilings import Found
from experiments.lab.measure.cells import Cell
from experiments.lab.measure.hardware import Hardware
from experiments.lab.measure.rate_search import Searches
from experiments.lab.measure.session import Session
from experiments.lab.measure.subjects import Kind, require_servable
from experiments.lab.peers.settings import PeerSettings
from experiments.lab.points import Point
from experiments.lab.schema import Again
from experiments.lab.show.progress import Steps
from experiments.lab.spec import VARIANT_KEYS
from experiments.lab.store.ledger import Terms
from experiments.lab.store.result import Sample
from experiments.lab.workloads import Inputs
from experiments.lab.workloads.vocabulary import ModelVocabulary
from mini_infer.core.config import Device, EngineConfig, LoadFormat
from mini_infer.core.errors import ConfigError
from mini_infer.modeling.loader import resolve_device

KEPT = (
    "each has one engine for all its passes, which live side by side; before each pass an engine forgets all it has "
    "served, blocks and drafts included, and is warmed up on other prompts"
)


class Ablation(Experiment):
    """For every repeat, point and variant, in ABBA order: an engine, a warm-up on other prompts, a timed pass."""

    def __init__(
        self,
        spec: AblationSpec,
        measured: Sequence[Cell],
        repeats: int,
        seed: int,
        threads: int,
        chosen: Hardware,
        peers: PeerSettings,
        aa: str | None = None,
        gates: bool = True,
    ) -> None:
        """`chosen` is what `hardware=<name>` put into the config; `aa` the variant that is the baseline again; with
        `gates` engines are checked first."""
        self.spec = spec
        self.aa = aa
        self.baseline: str | None = spec.baseline
        self.device = measured[0].engine.model.device
        searched = {point.name for point in spec.search.points}
        every = list({cell.point.name: cell.point for cell in measured}.values())
        self._grid = [point for point in every if point.name not in searched]
        self.points = [*every, *spec.search.result]  # of those that a search may visit it knows in the end which
        synthetic = {cell.variant for cell in measured if cell.engine.speculation.rate is not None}
        self.variants = {
            name: _label(name, changes or {}, synthetic=name in synthetic) for name, changes in spec.variants.items()
        }
        self.metrics = {name: metrics.describe(name) for name in spec.metrics}
        self.claims = claims.resolve_all(
            spec.claims,
            variants=list(self.variants),
            baseline=spec.baseline,
            metrics=spec.metrics,
            points=[*self._grid, *spec.search.result],
        )
        self._timeline: str | None = None
        if spec.timeline is not None:
            self._timeline = points.find_point(self._grid, spec.timeline, "experiment.timeline").name
        self._profiled = [
            points.find_point(self._grid, at, f"experiment.profile[{index}]") for index, at in enumerate(spec.profile)
        ]
        self._cells = {(cell.variant, cell.point.name): cell for cell in measured}
        if spec.keep_engines:
            _require_keepable(measured)
        if any(cell.kind is Kind.http for cell in measured) and peers.http.url is None:
            raise ConfigError("via=url needs the server's address: peers.http.url=http://localhost:8000, say")
        self._repeats = repeats
        self._seed = seed
        self._threads = threads
        self._chosen = chosen
        self._peers = peers
        self._gates = gates

    @classmethod
    def from_config(cls, config: DictConfig) -> Ablation:
        spec = schema.experiment_spec(AblationSpec, config)
        measure = schema.build(schema.Measure, config.measure, "measure")
        system = Kind.http if config.axes.via == axes.URL else measure.system
        if system is not None:
            spec = spec.served_by(system)
        own = schema.engine_config(config.engine).model.device
        aa = None
        if measure.aa is Again.always or (measure.aa is Again.auto and hardware.resolve(own) == "cuda"):
            spec, aa = spec.with_baseline_again()
        measured = []
        asked = schema.of_points(config)
        for point in [*points.grid(spec.points), *spec.search.points]:
            at_point = schema.with_values(asked, point.values)
            load = schema.workload(at_point)
            for variant, changes in spec.variants.items():
                kind, engine = _variant(at_point, variant, changes or {})
                measured.append(Cell(variant, point, kind, engine, load, spec.baseline if variant == aa else variant))
        chosen = schema.build(Hardware, config.hardware, "hardware")
        threads = measure.threads or torch.get_num_threads()
        peers = schema.build(PeerSettings, config.peers, "peers")
        return cls(spec, measured, measure.repeats, measure.seed, threads, chosen, peers, aa, measure.gates)

    def measure(self, steps: Steps) -> Findings:
        for cell in self._cells.values():
            if cell.engine.model.load_format is not LoadFormat.dry:
                resolve_device(cell.engine.model)  # before anything is loaded
        with heap.frozen():
            return self._measure(steps)

    def _measure(self, steps: Steps) -> Findings:
        spec, device = self.spec, hardware.resolve(self.device)
        profiles = self._profile_repeats if _can_profile(device) else 0
        alone = [variant for variant in self.variants if variant != self.aa]
        each = len(self._grid) * len(self.variants) + (spec.search.steps if spec.search.rates else 0) * len(alone)
        steps.plan(self._repeats * each + profiles * len(self._profiled) * len(alone))
        known = ceilings.find(ceilings.FOLDER, self._chosen, device, self._threads)
        vocabulary = ModelVocabulary(self._cell(spec.baseline, self._grid[0]).engine.model)
        inputs = {point.name: self._inputs(point, vocabulary) for point in self._grid}
        searches = Searches(spec.search, self._cells, self.variants, partial(self._inputs, vocabulary=vocabulary))
        error_gates, exact_gates = self._error_gates(), self._exact_gates(device, inputs)
        terms = self._terms(vocabulary.size, known)
        with closing(Session(terms, self._cells, self._repeats, steps, spec, self._peers, self.aa)) as session:
            work = [
                (
                    f"repeat {repeat + 1} of {self._repeats}" + (f" at {point.name}" if point.name else ""),
                    partial(session.round, repeat, point, inputs[point.name]),
                )
                for repeat in range(self._repeats)
                for point in self._grid
            ]
            if spec.search.rates:
                work += [
                    (f"search {repeat + 1} of {self._repeats}", partial(searches.round, session, repeat))
                    for repeat in range(self._repeats)
                ]
            work += [
                (f"profile {repeat + 1} at {point.name}", partial(session.profile, repeat, point, inputs[point.name]))
                for repeat in range(profiles)
                for point in self._profiled
            ]
            outcome = rounds.run(work)
        ledger = session.ledger
        compared = [(v, p.name) for p in self._grid for v in alone if v != spec.baseline]
        not_visited = {point.name for point in spec.search.points} - searches.visited
        return Findings(
            rows=[*(row for found in ledger.rounds for row in found.rows), *searches.rows, *session.profile_rows],
            gates=[
                *exact_gates,
                # Where tokens may differ by rounding their comparison would show nothing.
                *(ledger.gates(compared, spec.gate_share) if spec.gate_share else []),
            ],
            samples=self._samples(inputs, session, vocabulary),
            status=outcome.status,
            error=outcome.error,
            steps=[row for found in ledger.rounds for row in found.steps],
            requests=[row for found in ledger.rounds for row in found.requests],
            workload=self._workload(inputs),
            ceilings=known.ceilings,
            notes=[*self._notes(session, device), *searches.notes],
            error_gates=error_gates,
            profiles=session.profiles,
            kernels=session.kernels,
            procedure=KEPT if spec.keep_engines else "",
            peers=session.peers,
            points=[point for point in self.points if point.name not in not_visited],
            gpu=session.gpu,
        )

    @property
    def _profile_repeats(self) -> int:
        return self._repeats if any(name in metrics.OF_PROFILES for name in self.spec.metrics) else 1

    def _terms(self, vocab_size: int, known: Found) -> Terms:
        spec = self.spec
        return Terms(
            metrics=[name for name in spec.metrics if name not in (*metrics.OF_PROFILES, *metrics.OF_SEARCHES)],
            baseline=spec.baseline,
            labels=self.variants,
            contexts={
                key: cells.context(cell, spec.slo, known.ceilings, known.problem) for key, cell in self._cells.items()
            },
            vocab_size=vocab_size,
            exact=spec.gate_share >= 1,
            timeline=self._timeline,
        )

    def _error_gates(self) -> list[ErrorGate]:
        """Of all engines, the baseline's too; what points change of them is nothing that logits depend on."""
        if self.spec.gate_logit_error is None or not self._gates:
            return []
        at = [self._cell(variant, self._grid[0]) for variant in self.variants if variant != self.aa]
        engines = {c.variant: c.engine for c in at if c.kind.can.steps and logit_gate.applies(c.engine)}
        return logit_gate.gates(engines, self.spec.gate_logit_error)

    def _exact_gates(self, device: str, inputs: Mapping[str, Inputs]) -> list[Gate]:
        """Of all engines, the baseline's too."""
        exact, found = ExactGate(device), []
        for variant in self.variants if self._gates else ():
            cells = [self._cell(variant, point) for point in self._grid]
            if variant == self.aa or not cells[0].kind.can.steps or not exact_gate.applies(cells[0].engine):
                continue
            found.append(exact.of_probes(variant, cells[0].engine))
            if device == "cuda":
                asked = [(cell, inputs[cell.point.name]) for cell in cells]
                found += [exact.of_own(variant, c.point.name, c.engine, i.prime, i.measured) for c, i in asked]
        return found

    def _inputs(self, point: Point, vocabulary: ModelVocabulary) -> Inputs:
        """The same requests in every repeat, so that repeats differ by nothing but the machine's mood."""
        load = self._cell(self.spec.baseline, point).workload
        inputs = load.make(vocabulary, self._seed)
        metrics.require_classes(self.spec.metrics, [item.name for item in inputs.measured], f"workload={load.kind}")
        for variant in self.variants:
            require_servable(self._cell(variant, point).kind, inputs.measured, variant)
        return inputs

    def _cell(self, variant: str, point: Point) -> Cell:
        return self._cells[variant, point.name]

    def _workload(self, inputs: Mapping[str, Inputs]) -> dict[str, Any]:
        """How the requests were made; a list, point by point, where that differs between points."""
        described = [self._cell(self.spec.baseline, p).workload.describe(inputs[p.name]) for p in self._grid]
        keys = dict.fromkeys(key for one in described for key in one)
        values = {key: [one.get(key) for one in described] for key in keys}
        return {key: of[0] if all(value == of[0] for value in of) else of for key, of in values.items()}

    def _notes(self, session: Session, device: str) -> list[str]:
        notes = [note for found in session.ledger.rounds for note in found.notes] + session.notes
        if self._profiled and not _can_profile(device):
            notes.append("No decode step was profiled: that takes a GPU.")
        return list(dict.fromkeys(notes))

    def _samples(self, inputs: Mapping[str, Inputs], session: Session, vocabulary: ModelVocabulary) -> list[Sample]:
        """From the last point that was measured: the prompts with the longest outputs, and what became of them."""
        tokens_of = session.ledger.tokens
        measured = [p.name for p in self._grid if any(tokens_of((v, p.name)) is not None for v in self.variants)]
        if not measured:
            return []  # nobody told token ids
        point = measured[-1]
        items = inputs[point].measured
        longest = sorted(range(len(items)), key=lambda index: -items[index].output_tokens)
        samples = []
        for index in longest[: self.spec.samples]:
            authors: dict[str, list[str]] = {}
            for variant in (variant for variant in self.variants if variant != self.aa):
                tokens = tokens_of((variant, point))
                if tokens is not None:
                    authors.setdefault(vocabulary.decode(tokens[index]), []).append(variant)
            prompt = vocabulary.decode(items[index].prompt)
            samples += [Sample(tuple(variants), prompt, text) for text, variants in authors.items()]
        return samples


def _label(name: str, changes: Mapping[str, Any], synthetic: bool) -> str:
    """In every table and figure. Acceptance that is a setting is called so."""
    label = changes.get("label") or name.replace("_", " ")
    return f"{label} (synthetic)" if synthetic and "synthetic" not in label else label


def _can_profile(device: str) -> bool:
    return device == "cuda"


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
    if config.axes.via == axes.HTTP and kind is Kind.engine:
        kind = Kind.served
    elif config.axes.via == axes.HTTP and kind is not Kind.served:
        raise ConfigError(f"{where}: {kind.label} is not served over HTTP by us: start its server, and ask it with "
                          "via=url peers.http.url=...")  # fmt: skip
    return kind, schema.engine_config(schema.merged(config.engine, settings, where))


def _require_keepable(measured: Sequence[Cell]) -> None:
    """Raises ConfigError where a variant could not keep its engine, or would keep what the others need."""
    first: dict[str, EngineConfig] = {}
    for cell in measured:
        if cell.kind is Kind.http:
            continue  # its memory is not ours
        if first.setdefault(cell.variant, cell.engine) != cell.engine:
            raise ConfigError(
                "experiment.keep_engines=true needs points that change the workload alone, and "
                f"{cell.point.name} changes the engine: set experiment.keep_engines=false"
            )
        cache, device = cell.engine.cache, cell.engine.model.device
        if device is not Device.cpu and cache.memory_gib is None and cache.num_blocks is None:
            raise ConfigError(
                f"experiment.variants.{cell.variant} would take all of a GPU's free memory for its KV cache, and with "
                "experiment.keep_engines=true others live beside it: set cache.memory_gib or cache.num_blocks"
            )
