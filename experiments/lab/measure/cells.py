"""One variant at one point, and how it is measured once."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from experiments.lab.judge import formulas, roofline
from experiments.lab.judge.metrics import SLO, Context, Missing
from experiments.lab.measure.clocks import Drift, Watch
from experiments.lab.measure.costs import device_of
from experiments.lab.measure.costs import served as served_as
from experiments.lab.measure.hardware import Ceilings
from experiments.lab.measure.kinds import Kind
from experiments.lab.measure.lending import Lending, Lent
from experiments.lab.measure.schedule import CutOff
from experiments.lab.measure.traces import Served
from experiments.lab.points import Point
from experiments.lab.store.rows import ABSENT, Row
from experiments.lab.workloads import Inputs, Item, Workload
from mini_infer.core.config import AllReduce, EngineConfig, LoadFormat
from mini_infer.core.speculation_config import SpeculationMethod
from mini_infer.modeling.loader import load_spec, resolve_device, resolve_dtype

OF_WORDS = ("text",)  # workloads whose prompts mean something


@dataclass(frozen=True)
class Cell:
    """Everything that is needed to measure a variant at a point."""

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


def serve(cell: Cell, inputs: Inputs, watch: Watch, lending: Lending) -> Pass:
    """An engine that has been warmed up on other prompts, priming of the prefix cache where the workload wants it, and
    the timed pass. Raises CutOff where one was interrupted."""
    with lending.lend(cell.engine_of, cell.kind, cell.engine) as lent:
        warm_up(cell, inputs, lent)
        if inputs.prime:
            lent.serve(inputs.prime, 1)
        before = tuple(lent.served)
        gc.collect()
        speed = watch.before()
        try:
            served = lent.serve(inputs.measured, cell.workload.in_flight)
        except CutOff as stop:
            stop.begun = Pass(stop.served, watch.after(speed), inputs.measured, before)
            raise
        drift = watch.after(speed)
        if cell.workload.has_ramps:
            served = served.without_ramps()
        return Pass(replace(served, joules=drift.joules), drift, inputs.measured, before)


def warm_up(cell: Cell, inputs: Inputs, lent: Lent) -> None:
    lent.forget()
    if inputs.warmup:
        lent.warm_up(cell.point.name, inputs.warmup, cell.workload.in_flight)


def context(cell: Cell, slo: SLO, ceilings: Ceilings | None, problem: str) -> Context:
    """What the cell's metrics are measured against; `problem` says why there are no ceilings."""
    if cell.engine.model.load_format is LoadFormat.dry:
        return Context(slo, None, "a dry model moves no bytes")
    if ceilings is None:
        return Context(slo, None, problem)
    device = device_of(cell.engine, simulated=cell.kind is Kind.simulated)
    costs = roofline.StepCosts(*served_as(cell.engine, device.type))
    together = ceilings.of(cell.engine.parallel.ranks)
    return Context(slo, lambda records: roofline.floors(costs, records, together))


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
    model = cell.engine.model
    if cell.kind is Kind.simulated:
        return False
    if model.load_format is LoadFormat.dry:
        return True
    lora = cell.engine.lora
    if cell.engine.speculation.method is SpeculationMethod.synthetic or lora.dummy or lora.adapters:
        return False
    if cell.kind.can.own_weights and model.load_format is LoadFormat.dummy:
        return False
    device = resolve_device(model)
    return device.type == "cpu" and resolve_dtype(model, load_spec(model), device) is torch.float32


def rows(cell: Cell, repeat: int, names: Sequence[str], measured: Context, served: Served, problem: str) -> list[Row]:
    """One row a metric; none where a metric has no meaning for the cell (see `left_out`). `problem`: why the pass does
    not count."""
    found = []
    for name, value in formulas.measure(served, names, measured).items():
        if not isinstance(value, Missing):
            found.append(_row(cell, repeat, name, value, problem))
        elif value.applies:
            found.append(_row(cell, repeat, name, 0.0, "; ".join(part for part in (problem, value.reason) if part)))
    return found


def absent_rows(cell: Cell, repeat: int, names: Sequence[str], why: str) -> list[Row]:
    """Of a peer that is not there."""
    return [_row(cell, repeat, name, 0.0, f"{ABSENT}{why}") for name in names]


def _row(cell: Cell, repeat: int, name: str, value: float, problem: str) -> Row:
    reason = " ".join(problem.split())  # an error may have lines
    return Row(*cell.key, repeat, name, float(value), formulas.describe(name).unit, not reason, reason)


def left_out(names: Sequence[str], measured: Context, served: Served) -> list[str]:
    """Why metrics have no meaning for this pass, a line a reason."""
    why: dict[str, list[str]] = {}
    for name, value in formulas.measure(served, names, measured).items():
        if isinstance(value, Missing) and not value.applies:
            why.setdefault(value.reason, []).append(formulas.describe(name).label)
    return [
        f"{'; '.join(labels)}: left out, because {reason}"
        if len(labels) > 1
        else f"{labels[0]} is left out, because {reason}"
        for reason, labels in why.items()
    ]
