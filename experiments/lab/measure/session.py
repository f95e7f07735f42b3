"""An ablation while it measures: its rounds, the clocks, and what has been found so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from experiments.lab.config.ablation_spec import AblationSpec
from experiments.lab.config.points import Point
from experiments.lab.judge import stats
from experiments.lab.measure import cells, hardware
from experiments.lab.measure.block_map import NoMap
from experiments.lab.measure.cells import Cell, Lending, Pass
from experiments.lab.measure.clocks import Watch
from experiments.lab.measure.kinds import Kind, PeerAbsent, PeerError, why_lost
from experiments.lab.measure.profile import KernelRow, NoProfile, StepProfile
from experiments.lab.measure.schedule import CutOff
from experiments.lab.measure.traces import BlockRow
from experiments.lab.show.progress import Steps
from experiments.lab.store.ledger import Key, Ledger
from experiments.lab.store.rows import Row
from experiments.lab.workloads import Inputs

ATTEMPTS = 3  # at a pass, where the machine changes its speed


@dataclass
class Session:
    ledger: Ledger
    cells: Mapping[Key, Cell]
    repeats: int
    steps: Steps
    spec: AblationSpec
    lending: Lending
    aa: str | None = None  # the baseline's second arm, of which some points have no cell
    left_out: Set[str] = frozenset()  # variants that this process does not measure
    profiles: list[StepProfile] = field(default_factory=list)
    kernels: list[KernelRow] = field(default_factory=list)
    blocks: list[BlockRow] = field(default_factory=list)
    profile_rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    begun: str = ""  # what is kept of the first round, where Ctrl-C came before its end

    def __post_init__(self) -> None:
        self.labels = self.ledger.labels
        self._absent: dict[str, str] = {}  # variant -> why
        devices = [cell.engine.model.device for cell in self.cells.values() if not cell.kind.can.virtual]
        self.watch = Watch(hardware.resolve(devices[0]) if devices else "cpu")
        for cell in self.cells.values() if self.lending.keep else ():  # which all have room side by side
            if cell.variant not in self.left_out and cells.starts_untimed(cell):
                self.lending.peers.begin(cell.kind, cell.engine)

    def prepare(self, inputs: Mapping[str, Inputs]) -> None:
        """While peers load, engines that are kept start, and are warmed up at each point of `inputs`. Comes back when
        those peers are there: nothing is timed while they load."""
        if not self.lending.peers.begun:
            return
        self.steps.note("engines start, and others load")
        for cell in self.cells.values():
            first = cell.variant == cell.engine_of and cell.variant not in self.left_out
            here = cell.kind is Kind.engine and cell.point.name in inputs
            if first and here and cells.starts_untimed(cell):
                with self.lending.lend(cell) as lent:
                    cells.warm_up(cell, inputs[cell.point.name], lent)
        self.lending.peers.await_begun()

    def round(self, repeat: int, point: Point, inputs: Inputs) -> None:
        """All variants at one point, once. Rows of a peer that is not there, or has failed by now, say why."""
        passes: list[tuple[Cell, list[Pass]]] = []
        order = [variant for variant in self.order(repeat, again=True) if (variant, point.name) in self.cells]
        for cell in (self.cells[variant, point.name] for variant in order):
            try:
                self._next(cell, f"repeat {repeat + 1} of {self.repeats}")
                passes.append((cell, self._steady(cell, inputs)))
            except KeyboardInterrupt as stop:
                began = [stop.begun] if isinstance(stop, CutOff) and stop.begun and not passes else []
                passes += [(cell, began)] if began else []
                if passes and not self.ledger.rounds:  # else whole rounds tell more
                    self.ledger.enter(repeat, passes)
                    kept = ", ".join(self.labels[done.variant] for done, _ in passes)
                    self.begun = f"of the first round is kept: {kept}"
                    for requests in (one.served.requests for one in began):
                        ended = sum(not request.error for request in requests)
                        self.begun += f", {ended} of {len(requests)} requests, which count in no figure"
                raise
            except (PeerAbsent, PeerError) as lost:
                if len(self._absent) + 1 == len(self.labels):
                    raise  # there is nothing else to measure
                self._absent[cell.variant] = why = why_lost(lost)
                self.notes.append(f"{self.labels[cell.variant]} is absent: {why}.")
        lost_cells = ((self.cells.get((variant, point.name)), why) for variant, why in self._absent.items())
        self.ledger.enter(repeat, passes, [(cell, why) for cell, why in lost_cells if cell is not None])

    def profile(self, repeat: int, point: Point, inputs: Inputs) -> None:
        """Of the first repeat the kernels are kept, of all of them how long the GPU waited."""
        for cell in (self.cells[variant, point.name] for variant in self.order(repeat)):
            self._next(cell, f"profile {repeat + 1}")
            if not cell.kind.can.profiled:
                continue
            try:
                with self.lending.lend(cell) as lent:
                    items = inputs.measured[: cell.workload.in_flight]
                    found, kernels = lent.subject.profile(items, cell.variant, point.name)
            except (NoProfile, PeerError) as why:
                self.notes.append(f"{self.labels[cell.variant]}: no decode step was profiled, because {why}.")
                continue
            if repeat == 0:
                self.profiles.append(found)
                self.kernels += kernels
            if "gpu_idle_share" in self.spec.metrics:
                self.profile_rows.append(Row(*cell.key, repeat, "gpu_idle_share", found.idle_share, ""))

    def map_blocks(self, mapped: Sequence[Cell], inputs: Inputs) -> None:
        for cell in mapped:
            self._next(cell, "whose blocks are which")
            try:
                self.blocks += cells.map_blocks(cell, inputs, self.lending)
            except NoMap as why:
                self.notes.append(f"{self.labels[cell.variant]}: there is no map of its blocks, because {why}.")

    def order(self, repeat: int, again: bool = False) -> list[str]:
        """The variants that are there, in the order of this repeat; the baseline's second arm where it is asked for."""
        left_out = {*self._absent, *self.left_out, *(() if again else (self.aa,))}
        return [v for v in stats.abba(list(self.labels), repeat) if v not in left_out]

    def alone(self, cell: Cell, inputs: Inputs, repeat: int, planned: bool = True) -> list[Row]:
        """One variant at one point, once: its rows, repeated attempts first. `planned`: among the steps to be made."""
        if planned:
            self._next(cell, f"repeat {repeat + 1} of {self.repeats}")
        else:
            self.steps.note(f"{self.labels[cell.variant]}, beyond the range, {cell.point.name}")
        self.ledger.enter(repeat, [(cell, self._steady(cell, inputs))])
        return self.ledger.rounds[-1].rows

    def _next(self, cell: Cell, what: str) -> None:
        self.steps.next(f"{self.labels[cell.variant]} {cell.point.name}".strip() + f", {what}")

    def _steady(self, cell: Cell, inputs: Inputs) -> list[Pass]:
        """A pass, after those that had to be repeated because the machine changed its speed meanwhile."""
        passes = [cells.serve(cell, inputs, self.watch, self.lending)]
        while (problem := passes[-1].drift.problem) and len(passes) < ATTEMPTS:
            self.steps.note(f"again, because {problem}")
            passes.append(cells.serve(cell, inputs, self.watch, self.lending))
        return passes
