"""Variants of the engine, and peers, on one workload: most experiments are a YAML on this and nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from omegaconf import DictConfig

from experiments.lab.config import ablation_spec, axes, points, schema
from experiments.lab.config.ablation_spec import AblationSpec
from experiments.lab.config.points import Point
from experiments.lab.config.spec import NONE_OF, PREDICTED, RATE, TAKE
from experiments.lab.experiment import Experiment, Findings, run_rounds
from experiments.lab.judge import formulas, logit_gate, prediction, validity
from experiments.lab.judge.exact_gate import ExactGate
from experiments.lab.judge.gate import ErrorGate, Gate
from experiments.lab.load.asked import served
from experiments.lab.measure import ceilings, cells, hardware
from experiments.lab.measure.cells import Cell, Lending
from experiments.lab.measure.kinds import Kind
from experiments.lab.measure.rate_search import Searches
from experiments.lab.measure.session import Session
from experiments.lab.measure.subjects import require_servable
from experiments.lab.peers.pool import Peers
from experiments.lab.show.progress import Steps
from experiments.lab.store.ledger import Ledger
from experiments.lab.store.result import SIMULATED, Sample
from experiments.lab.workloads import Inputs
from experiments.lab.workloads.base import Vocabulary
from mini_infer.core.config import Device, EngineConfig, LoadFormat, ParallelConfig
from mini_infer.core.errors import ConfigError
from mini_infer.core.limits import require_whole_prompts
from mini_infer.modeling.loader import as_served, load_spec, resolve_device
from mini_infer.modeling.model_files import local_folder
from mini_infer.modeling.sharding import require_ranks
from mini_infer.modeling.spec import ModelSpec
from mini_infer.simulation.costs import require_simulated

KEPT = (
    "each has one engine for all its passes, which live side by side; before each pass an engine forgets all it has "
    "served, blocks and drafts included, and is warmed up on other prompts"
)


class Ablation(Experiment):
    """For every repeat, point and variant, in ABBA order: an engine, a warm-up on other prompts, a timed pass."""

    spec: AblationSpec

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        spec = self.spec
        spec.require_searchable(self.settings.repeats)
        system = Kind.http if config.axes.via == axes.URL else self.settings.system
        if system is not None:
            spec = spec.served_by(system)
        if self.settings.predict:
            spec = spec.with_predictions()
        self._simulated = all((changes or {}).get("kind") == Kind.simulated for changes in spec.variants.values())
        # What is only simulated asks nothing of this machine.
        self.device = Device.cpu if self._simulated else self.engine.model.device
        self.notes = list[str]()  # on what is left out
        every = {
            name: (changes or {}).get("label") or name.replace("_", " ") for name, changes in spec.variants.items()
        }
        lacking = ablation_spec.lacking(config, spec.variants, spec.baseline)
        for why in dict.fromkeys(lacking.values()):
            names = [every.pop(name) for name, of in lacking.items() if of == why]
            self.notes.append(f"Left out: {', '.join(names)}: {why}.")
        self.spec = spec = spec.without(lacking)
        self.baseline = spec.baseline
        labels = self.with_baseline_again(every)
        self._grid = points.grid(spec.points)
        self._tried = list[Point]()  # that a search may visit
        if spec.search.rates:
            lowest = {**spec.search.at, RATE: spec.search.low_per_s}
            self._tried = spec.search.points(schema.workload(schema.with_values(schema.of_points(config), lowest)))
        self._again_at = {point.name for point in self._named("again_at") or self._grid}
        self._gate_at = self._named("gate_at") or self._grid
        made = list(self._made(config, labels))
        _require_models(made)
        not_simulated = _not_simulated(made, spec.baseline if self._simulated else None)
        for why in dict.fromkeys(not_simulated.values()):
            names = [labels.pop(name).removesuffix(", predicted") for name, of in not_simulated.items() if of == why]
            self.notes.append(f"{NONE_OF}{', '.join(names)}: {why}.")
        made = [cell for cell in made if cell.variant in labels]
        # Where the baseline itself drafts on random tokens, that was asked for: its passes say that they do not count.
        sound = {cell.variant for cell in made if not cells.drafts_on_made_up_prompts(cell)}
        of_nothing = [name for name in labels if name not in sound] if spec.baseline in sound else []
        left_out = ", ".join([labels.pop(name) for name in of_nothing])
        self.notes += [f"Left out: {left_out}. Of these {validity.OF_NOTHING}."] if of_nothing else []
        self.spec = spec = spec.without({*of_nothing, *not_simulated})
        self._cells = {cell.key: cell for cell in made if cell.variant in labels}
        if spec.keep_engines:
            _require_keepable(list(self._cells.values()))
        if self.peers.http.url is None and any(cell.kind.can.elsewhere for cell in self._cells.values()):
            raise ConfigError(ablation_spec.NO_ADDRESS)
        # Of the points that a search may visit it knows in the end which they were.
        self.points = [*self._grid, *self._tried, *spec.search.result]
        synthetic = {cell.variant for cell in self._cells.values() if cell.engine.speculation.rate is not None}
        # Acceptance that is a setting is called so, in every table and figure.
        called = {name for name in synthetic if "synthetic" not in labels[name]}
        self.variants = {name: f"{label} (synthetic)" if name in called else label for name, label in labels.items()}
        self.metrics = {name: formulas.describe(name) for name in spec.metrics}
        foreign = {cell.variant: cell.kind for cell in self._cells.values() if not cell.kind.can.ours}
        here = {name for name, kind in foreign.items() if self.peers.processes_of(kind) != 0}
        self._left_out = set(foreign) - here if len(foreign) < len(self.variants) else set[str]()
        self._timeline: str | None = None
        if spec.timeline is not None:
            self._timeline = points.find_point(self._grid, spec.timeline, "experiment.timeline").name
        self._profiled = self._named("profile")
        self.generates = bool(self._gated)

    def _named(self, name: str) -> list[Point]:
        return [
            points.find_point(self._grid, at, f"experiment.{name}[{index}]")
            for index, at in enumerate(getattr(self.spec, name))
        ]

    @property
    def claimable(self) -> Sequence[Point]:
        return [*self._grid, *self.spec.search.result]

    def _made(self, config: DictConfig, names: Iterable[str]) -> Iterator[Cell]:
        asked = schema.of_points(config)
        known = dict[tuple[str, str], tuple[Kind, EngineConfig]]()  # most points change the workload alone
        for point in [*self._grid, *self._tried]:
            at_point = schema.with_values(asked, point.values)
            load = schema.workload(at_point)
            of_engine = repr(schema.plain(at_point.engine))
            for name in names:
                if name == self.aa and point.name not in self._again_at:
                    continue
                variant = self.of_arm(name)
                if (variant, of_engine) not in known:
                    known[variant, of_engine] = ablation_spec.made(at_point, variant, self.spec.variants[variant] or {})
                kind, engine = known[variant, of_engine]
                yield Cell(name, point, kind, engine, load, variant)

    def measure(self, steps: Steps) -> Findings:
        sources = dict[str, None]()  # of what simulated steps take
        predictions = dict(self._predictions)
        for cell in self._cells.values():
            if cell.kind.can.virtual:
                found = self.simulator.setup(cell.engine).found  # before anything is measured
                sources[f"{TAKE}{found.source}."] = None
                if not found.measured:  # what is not met is no miss
                    predictions.pop(cell.variant, None)
            elif cell.engine.model.load_format is not LoadFormat.dry:
                resolve_device(cell.engine.model)  # before anything is loaded
        spec, repeats, device = self.spec, range(self.settings.repeats), hardware.resolve(self.device)
        # Of a share of idle time every repeat counts; else profiles are looked at, and one is enough.
        profiles = repeats if set(spec.metrics) & set(formulas.OF_PROFILES) else range(1)
        profiled = [(repeat, point) for repeat in profiles for point in self._profiled if _can_profile(device)]
        searched = repeats[: spec.search.repeats] if spec.search.rates else ()
        grid = {point.name for point in self._grid}
        passes = sum(1 for variant, point in self._cells if point in grid and variant not in self._left_out)
        searching = [name for name in spec.search.among(self._alone) if name not in self._left_out]
        searches = len(searched) * spec.search.steps * len(searching)
        there = [self._cells[variant, self._timeline] for variant in self._alone if self._timeline is not None]
        mapped = [cell for cell in there if cell.kind.can.mapped][:2] if spec.block_map else []
        steps.plan(len(repeats) * passes + searches + len(profiled) * len(self._alone) + len(mapped))
        computed_on = hardware.resolve(self._cell(spec.baseline, self._grid[0]).engine.model.device)
        machine = self.chosen if self._simulated else hardware.Hardware()  # another's floors would be of no use here
        limits, problem = ceilings.find(ceilings.FOLDER, machine, computed_on, self.threads)
        vocabulary = Vocabulary(self._cell(spec.baseline, self._grid[0]).engine.model)
        inputs = {point.name: self._inputs(point, vocabulary) for point in self._grid}
        ledger = Ledger(
            metrics=[name for name in spec.metrics if name not in (*formulas.OF_PROFILES, *formulas.OF_SEARCHES)],
            baseline=spec.baseline,
            labels=self.variants,
            contexts={key: cells.context(c, spec.slo, limits, problem) for key, c in self._cells.items()},
            vocab_size=vocabulary.size,
            timeline=self._timeline,
        )
        keep, error_gates = spec.keep_engines, list[ErrorGate]()
        with closing(Lending(keep, Peers(self.peers, keep), self.simulator, steps.within)) as lending:
            session = Session(ledger, self._cells, len(repeats), steps, spec, lending, self.aa, self._left_out)
            gated = self.settings.gates
            if gated and spec.gate_logit_error is not None:
                steps.note("gates: logits of all variants, beside those in fp32")
                error_gates = logit_gate.gates(self._gated, spec.gate_logit_error)
            exact_gates = self._exact_gates(device, inputs, steps) if gated else []
            session.prepare(inputs)
            search = Searches(session, spec.search, self._tried, partial(self._inputs, vocabulary=vocabulary))
            work: list[tuple[str, Callable[[], None]]] = []
            for repeat, point in product(repeats, self._grid):
                at = f" at {point.name}" if point.name else ""
                measure = partial(session.round, repeat, point, inputs[point.name])
                work.append((f"repeat {repeat + 1} of {len(repeats)}{at}", measure))
            work += [(f"search {repeat + 1} of {len(searched)}", partial(search.round, repeat)) for repeat in searched]
            for repeat, point in profiled:
                profile = partial(session.profile, repeat, point, inputs[point.name])
                work.append((f"profile {repeat + 1} at {point.name}", profile))
            if mapped:
                work.append(("the map of blocks", partial(session.map_blocks, mapped, inputs[mapped[0].point.name])))
            status, error = run_rounds(work, lambda: session.begun)
        compared = [(v, p.name) for p in self._grid for v in self._alone if v != spec.baseline]
        not_visited = {point.name for point in self._tried} - search.visited
        # Of all rounds; what they know of is called as in Findings.
        tables: dict[str, Any] = {
            name: [row for found in ledger.rounds for row in getattr(found, name)]
            for name in ("rows", "steps", "requests", "gaps", "experts")
        }
        notes = [*self.notes, *sources, *self.simulator.beyond(), *ledger.notes, *session.notes]
        notes += prediction.remarks(tables["rows"], predictions, self.variants)
        if self._profiled and not _can_profile(device):
            notes.append("No decode step was profiled: that takes a GPU.")
        return Findings(
            **{**tables, "rows": [*tables["rows"], *search.rows, *session.profile_rows]},
            gates=[*exact_gates, *ledger.gates(compared)],
            samples=self._samples(inputs, session, vocabulary),
            status=status,
            error=error,
            workload=self._workload(inputs),
            ceilings=limits,
            notes=[*notes, *search.notes],
            error_gates=error_gates,
            profiles=session.profiles,
            kernels=session.kernels,
            blocks=session.blocks,
            procedure=KEPT if spec.keep_engines else "",
            peers=lending.about,
            points=[point for point in self.points if point.name not in not_visited],
            gpu=session.watch.summary(),
        )

    @property
    def hardware_key(self) -> str:
        if not self._simulated:
            return super().hardware_key
        return f"{SIMULATED}{self.simulator.key(self._cell(self.spec.baseline, self._grid[0]).engine)}"

    @property
    def _predictions(self) -> dict[str, str]:
        """Simulated variant -> the measured one of the same settings."""
        at = [self._cell(variant, self._grid[0]) for variant in self._alone]
        measured = [cell for cell in at if cell.kind.can.ours]
        return {
            cell.variant: other.variant
            for cell in at
            for other in measured
            if cell.kind.can.virtual and cell.engine == other.engine
        }

    @property
    def _alone(self) -> list[str]:
        """The variants, without the baseline's second arm."""
        return [variant for variant in self.variants if variant != self.aa]

    @property
    def _gated(self) -> dict[str, EngineConfig]:
        """Every variant that is this engine, the baseline too, at the first point; but for dry models."""
        at = [self._cell(variant, self._grid[0]) for variant in self._alone]
        ours = [c for c in at if c.kind.can.ours and c.engine.model.load_format is not LoadFormat.dry]
        return {cell.variant: _one_engine(cell.engine) for cell in ours}

    def _exact_gates(self, device: str, inputs: Mapping[str, Inputs], steps: Steps) -> list[Gate]:
        """Engines alike, such as one behind HTTP and the same one here, are asked once; each server is."""
        exact, known, found = ExactGate(device), dict[str, list[Gate]](), list[Gate]()
        for variant, engine in self._gated.items():
            engines = {point.name: _one_engine(self._cell(variant, point).engine) for point in self._gate_at}
            if (of_all := repr(engines)) not in known:
                steps.note(f"gates: tokens of {self.variants[variant]}, beside each request's alone")
                known[of_all] = [exact.of_probes(variant, engine)]
                loads = dict[str, dict[str, Inputs]]()  # of points, by the settings that they have
                for point, own in engines.items() if device == "cuda" else ():
                    loads.setdefault(repr(own), {})[point] = inputs[point]
                for of_points in loads.values():
                    known[of_all] += exact.of_own(variant, engines[next(iter(of_points))], of_points)
            found += [replace(gate, variant=variant) for gate in known[of_all]]
        for variant in self._gated:
            cell = self._cell(variant, self._grid[0])
            if cell.kind is Kind.served:  # with all that is behind it
                steps.note(f"gates: tokens of {self.variants[variant]} over HTTP, beside each request's alone")
                found.append(exact.of_served(variant, cell.engine, partial(served, self.peers)))
        return found

    def _inputs(self, point: Point, vocabulary: Vocabulary) -> Inputs:
        """The same requests in every repeat, so that repeats differ by nothing but the machine's mood."""
        load = self._cell(self.spec.baseline, point).workload
        inputs = load.make(vocabulary, self.settings.seed)
        formulas.require_classes(self.spec.metrics, [item.name for item in inputs.measured], f"workload={load.kind}")
        for variant in self._alone:
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

    def _samples(self, inputs: Mapping[str, Inputs], session: Session, vocabulary: Vocabulary) -> list[Sample]:
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
            authors = defaultdict[str, list[str]](list)
            for variant in self._alone:
                if (tokens := tokens_of((variant, point))) is not None:
                    authors[vocabulary.tokenizer.decode(tokens[index])].append(variant)
            prompt = vocabulary.tokenizer.decode(items[index].prompt)
            samples += [Sample(tuple(variants), prompt, text) for text, variants in authors.items()]
        return samples


def _one_engine(engine: EngineConfig) -> EngineConfig:
    """What engines behind one server compute together, and nothing of how requests and KV get to them."""
    between = {name: getattr(ParallelConfig, name) for name in ("routing", "hand_over", "connector")}
    return replace(engine, parallel=replace(engine.parallel.of_one, **between))


def _not_simulated(made: Sequence[Cell], baseline: str | None) -> dict[str, str]:
    """Variants that are left out, since the simulator does not know their engines, and why: predictions, and where all
    is simulated and its baseline is given others, too. Raises ConfigError where that leaves nothing to compare, or one
    was asked for by itself."""
    found = dict[str, str]()
    for cell in made:
        try:
            if cell.kind.can.virtual:
                require_simulated(cell.engine)
        except ConfigError as why:
            if cell.engine_of == baseline or (baseline is None and not cell.variant.endswith(PREDICTED)):
                raise
            found[cell.variant] = str(why)
    if baseline is not None and found and all(cell.engine_of == baseline or cell.variant in found for cell in made):
        raise ConfigError(next(iter(found.values())))
    return found


def _require_models(made: Sequence[Cell]) -> None:
    """Raises ConfigError or ModelError where an engine by itself is to be several, its model is not one for its
    settings, these contradict each other, or its ranks cannot share it, as far as it is known without the hub."""
    checked = list[EngineConfig]()
    for engine, kind in ((cell.engine, cell.kind) for cell in made if cell.kind.can.ours):
        if kind is Kind.engine:
            engine.parallel.require_one()
        model = engine.model
        here = model.hf_config is not None or local_folder(model.path) is not None
        if here and model.load_format is not LoadFormat.dry and engine not in checked:
            checked.append(engine)
            spec = as_served(load_spec(model), engine)
            require_whole_prompts(engine, spec.max_model_len, _pool_tokens(engine, spec))
            if engine.parallel.has_ranks:
                require_ranks(spec, engine.parallel)


def _pool_tokens(engine: EngineConfig, spec: ModelSpec) -> int:
    """So many the KV pool holds at least, of numbers of 32 bits; 0 where that is not known, as beside a draft's."""
    if engine.cache.memory_gib is None or engine.speculation.has_draft_model:
        return 0
    return int(engine.cache.memory_gib * 2**30) // spec.kv_layout(torch.float32).bytes_per_token


def _can_profile(device: str) -> bool:
    return device == "cuda"


def _require_keepable(measured: Sequence[Cell]) -> None:
    """Raises ConfigError where a variant could not keep its engine, or would keep what the others need."""
    first: dict[str, EngineConfig] = {}
    for cell in measured:
        if cell.kind.can.elsewhere:
            continue
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
