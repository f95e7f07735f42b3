"""One variant at one point, how it is measured once, and who serves that: a fresh engine or peer, or the one that its
variant keeps from the first pass to the last."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from experiments.lab.config.points import Point
from experiments.lab.judge import formulas, roofline
from experiments.lab.judge.metrics import SLO, Context, Missing
from experiments.lab.measure import hardware
from experiments.lab.measure.clocks import Drift, Watch
from experiments.lab.measure.costs import served as served_as
from experiments.lab.measure.hardware import Ceilings
from experiments.lab.measure.kinds import Kind, Subject
from experiments.lab.measure.schedule import CutOff, from_outside
from experiments.lab.measure.simulated import SimulatedSubject, Simulator
from experiments.lab.measure.subjects import EngineSubject
from experiments.lab.measure.traces import BlockRow, Served
from experiments.lab.peers.pool import Peers
from experiments.lab.store.rows import Row
from experiments.lab.workloads import Inputs, Item, Workload
from mini_infer.core.config import AllReduce, EngineConfig, LoadFormat
from mini_infer.core.speculation_config import SpeculationMethod
from mini_infer.modeling.loader import load_spec, resolve_device, resolve_dtype

WARM_AGAIN, WARM_TOKENS = 2, 16  # requests, and tokens of each, before a pass of an engine that has been warm
OF_WORDS = ("text",)  # workloads whose prompts mean something


@dataclass(frozen=True)
class Cell:
    variant: str
    point: Point
    kind: Kind
    engine: EngineConfig
    workload: Workload
    engine_of: str  # the variant whose engine serves it, where engines are kept: of the A/A arm the baseline

    @property
    def key(self) -> tuple[str, str]:
        return self.variant, self.point.name


@dataclass(frozen=True)
class Pass:
    served: Served
    drift: Drift  # of the clocks, while it ran
    items: Sequence[Item]
    before: Sequence[Item]  # what the subject had served, and not forgotten, when the pass began


@dataclass
class Lent:
    subject: Subject
    stays: bool = False  # when its turn is over: `Peers` ends it
    # What it was asked for since it was opened, or has forgotten what it knew.
    served: list[Item] = field(default_factory=list)
    warm: set[str] = field(default_factory=set)  # the points at which it has been warmed up in full

    def serve(self, items: Sequence[Item], concurrency: int) -> Served:
        served = from_outside(self.subject.serve, items, concurrency)
        self.served += items
        return served


@dataclass
class Lending:
    # What was opened for a variant stays open, whatever else runs meanwhile, until `close`. Its settings may then not
    # change.
    keep: bool
    peers: Peers
    simulator: Simulator
    tell: Callable[[int, int], None]  # as of subjects.drive, of engines in this process
    # Of each variant, its peer's version and settings (of one whose settings differ between points, several), or what
    # its first engine turned out to be.
    about: dict[str, tuple[dict[str, Any], ...]] = field(default_factory=dict)
    _kept: dict[str, Lent] = field(default_factory=dict)

    @contextmanager
    def lend(self, cell: Cell) -> Iterator[Lent]:
        variant = cell.engine_of
        lent = self._kept.get(variant)
        if lent is None or not lent.subject.alive:
            lent = self._open(cell.kind, cell.engine)
        else:
            lent.subject.reserve_memory()
        about, told = self.about.get(variant, ()), dict(lent.subject.about)
        told |= {"process": "its own, kept from pass to pass"} if lent.stays else {}
        if told and told not in about and not (about and cell.kind.can.steps):  # which takes another time to start
            self.about[variant] = (*about, told)
        if self.keep:
            self._kept[variant] = lent
        with nullcontext() if self.keep or lent.stays else closing(lent.subject):
            yield lent

    def close(self) -> None:
        """All that is kept, and every peer's process."""
        with closing(self.peers):
            for lent in reversed([*self._kept.values()]):
                if not lent.stays:
                    lent.subject.close()

    def _open(self, kind: Kind, config: EngineConfig) -> Lent:
        if kind.can.virtual:
            return Lent(SimulatedSubject(self.simulator.setup(config)))
        if (peer := self.peers.open(kind, config)) is not None:
            return Lent(peer, stays=True)
        if kind.can.module:  # which imports all of transformers
            settings = {"threads": torch.get_num_threads()}
            return Lent(importlib.import_module(kind.can.module).open_peer(config, settings))
        return Lent(EngineSubject(config, self.tell))


def serve(cell: Cell, inputs: Inputs, watch: Watch, lending: Lending) -> Pass:
    """An engine that has been warmed up on other prompts, priming of the prefix cache where the workload wants it, and
    the timed pass. Raises CutOff where one was interrupted."""
    with lending.lend(cell) as lent:
        _prepare(cell, inputs, lent)
        before, watched = tuple(lent.served), not cell.kind.can.virtual
        gc.collect()
        speed = watch.before() if watched else None
        try:
            served = lent.serve(inputs.measured, cell.workload.in_flight)
        except CutOff as stop:
            stop.begun = Pass(stop.served, watch.after(speed) if speed else Drift(), inputs.measured, before)
            raise
        drift = watch.after(speed) if speed else Drift()
        if cell.workload.has_ramps:
            served = served.without_ramps()
        return Pass(replace(served, joules=drift.joules), drift, inputs.measured, before)


def map_blocks(cell: Cell, inputs: Inputs, lending: Lending) -> list[BlockRow]:
    """Of a pass like those that are timed. Raises NoMap."""
    with lending.lend(cell) as lent:
        _prepare(cell, inputs, lent)
        lent.served += inputs.measured
        return lent.subject.map_blocks(inputs.measured, cell.workload.in_flight, *cell.key)


def _prepare(cell: Cell, inputs: Inputs, lent: Lent) -> None:
    warm_up(cell, inputs, lent)
    if inputs.prime:
        lent.serve(inputs.prime, 1)


def warm_up(cell: Cell, inputs: Inputs, lent: Lent) -> None:
    """Forgets passes before. At the measured concurrency; with some short requests where that was done before, since
    what is compiled and allocated once is there, and only the machine has rested."""
    if lent.served:
        lent.subject.forget()
        lent.served.clear()
    items: Sequence[Item] = inputs.warmup
    if cell.point.name in lent.warm:
        items = [replace(item, output_tokens=min(item.output_tokens, WARM_TOKENS)) for item in items[:WARM_AGAIN]]
    if items:
        lent.serve(items, cell.workload.in_flight)
        lent.warm.add(cell.point.name)


def context(cell: Cell, slo: SLO, ceilings: Ceilings | None, problem: str) -> Context:
    """What the cell's metrics are measured against; `problem` says why there are no ceilings."""
    if cell.engine.model.load_format is LoadFormat.dry:
        return Context(slo, None, "a dry model moves no bytes")
    if ceilings is None:
        return Context(slo, None, problem)
    costs = roofline.StepCosts(*served_as(cell.engine, hardware.resolve(cell.engine.model.device)))
    together = ceilings.of(cell.engine.parallel.ranks)
    return Context(slo, lambda records: [roofline.floor(costs.of(roofline.work(r)), together) for r in records])


def starts_untimed(cell: Cell) -> bool:
    """Whether others may load beside it while it starts: an engine of ours with drafts takes the time of its own steps
    then, and one that chooses how ranks add up that of sums."""
    parallel = cell.engine.parallel
    chooses = parallel.tensor > 1 and parallel.all_reduce is AllReduce.auto
    return not cell.kind.can.ours or not (cell.engine.speculation.most or chooses)


def drafts_on_made_up_prompts(cell: Cell) -> bool:
    """Whether drafts are to be really verified, and that on random tokens: by the config, before anything runs."""
    methods = (SpeculationMethod.none, SpeculationMethod.synthetic)
    return cell.engine.speculation.method not in methods and cell.workload.kind not in OF_WORDS


def tokens_must_agree(cell: Cell) -> bool:
    """Whether greedy tokens must be the baseline's and the same in every repeat: on a CPU in fp32, unless somebody
    draws random weights of its own, has adapters or accepts drafts by decree. Elsewhere rounding chooses: ExactGate is
    for that."""
    model, lora = cell.engine.model, cell.engine.lora
    if cell.kind.can.virtual:
        return False
    if model.load_format is LoadFormat.dry:
        return True
    drawn = cell.kind.can.own_weights and model.load_format is LoadFormat.dummy
    if drawn or lora.dummy or lora.adapters or cell.engine.speculation.method is SpeculationMethod.synthetic:
        return False
    device = resolve_device(model)
    return device.type == "cpu" and resolve_dtype(model, load_spec(model), device) is torch.float32


def rows(
    cell: Cell, repeat: int, names: Sequence[str], measured: Context, served: Served, problem: str
) -> tuple[list[Row], list[str]]:
    """One row a metric; and why others have no meaning for this pass, a line a reason. `problem`: why it does not
    count."""
    found, meaningless = list[Row](), dict[str, list[str]]()
    for name, value in formulas.measure(served, names, measured).items():
        if not isinstance(value, Missing):
            found.append(row(cell, repeat, name, value, problem))
        elif value.applies:
            found.append(row(cell, repeat, name, 0.0, "; ".join(filter(None, (problem, value.reason)))))
        else:
            meaningless.setdefault(value.reason, []).append(formulas.describe(name).label)
    left_out = ((why, "; ".join(of), ":" if len(of) > 1 else " is") for why, of in meaningless.items())
    return found, [f"{labels}{verb} left out, because {why}" for why, labels, verb in left_out]


def row(cell: Cell, repeat: int, name: str, value: float, problem: str) -> Row:
    reason = " ".join(problem.split())  # an error may have lines
    return Row(*cell.key, repeat, name, float(value), formulas.describe(name).unit, not reason, reason)
