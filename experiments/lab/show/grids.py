"""Tables for reading: as markdown for a report, as aligned text for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiments.lab.judge import stats
from experiments.lab.judge.draft_formulas import PLACES
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.show import wording
from experiments.lab.store.result import Result
from experiments.lab.store.rows import Table

SCREEN = 110  # columns: what a terminal and a code-hosting page show without scrolling
ROOFLINE = {"floor_ms": "floor", "mbu": "MBU", "mfu": "MFU"}  # how near the hardware's limits a pass came
BY_PLACE = [f"acceptance_{place + 1}" for place in range(PLACES)]
LONG_LABEL = 24
MISSING = "-"
INVALID = "INVALID"
FEW = "not shown"  # the sample is too small
ABSENT = "absent"


@dataclass(frozen=True)
class Grid:
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def width(self) -> int:
        return sum(self._widths) + 3 * len(self.header) + 1

    @property
    def _widths(self) -> list[int]:
        return [max(len(line[i]) for line in (self.header, *self.rows)) for i in range(len(self.header))]

    def markdown(self) -> str:
        """Columns stand below each other, so that the file itself can be read too."""
        cells = Grid("", _escaped(self.header), tuple(_escaped(row) for row in self.rows))
        rule = "|" + "|".join("-" * (width + 2) for width in cells._widths) + "|"
        lines = [f"| {' | '.join(_padded(row, cells._widths))} |" for row in (cells.header, *cells.rows)]
        return "\n".join([*([f"### {self.title}", ""] if self.title else []), lines[0], rule, *lines[1:]])

    def text(self) -> str:
        lines = ["  ".join(_padded(row, self._widths)).rstrip() for row in (self.header, *self.rows)]
        return "\n".join([*([self.title] if self.title else []), *(f"  {line}" for line in lines)])


def metric_title(metric: Metric) -> str:
    unit = f", {metric.unit}" if metric.unit else ""
    better = "higher" if metric.better is Better.higher else "lower"
    return f"{metric.label[0].upper()}{metric.label[1:]}{unit} ({better} is better)"


class Sheet:
    """The numbers of one result as tables, one a metric."""

    def __init__(self, result: Result) -> None:
        self.info = result.info
        self.repeats = max((row.repeat + 1 for row in result.rows), default=0)
        self._turns = len({(row.process, row.repeat) for row in result.rows})
        self._table = Table(result.rows)
        self._tried = {(row.variant, row.point, row.metric) for row in result.rows}
        self._absent = {(row.variant, row.point, row.metric) for row in result.rows if row.is_absent}
        self._faulty = {(row.variant, row.point, row.metric) for row in result.rows if row.is_fault}
        # Of several gates at a point, the one against the baseline in the timed passes.
        ordered = sorted(result.info.gates, key=lambda gate: not gate.against)
        self._gates = {(gate.variant, gate.point): gate for gate in ordered}

    def grids(self, names: Sequence[str]) -> list[Grid]:
        """How near the hardware's limits a pass came stands beside the first metric, where there is room. A single
        variant has one table for all of them."""
        measured = [name for name in names if self._points(name)]
        places = [name for name in measured if name in BY_PLACE]
        if len(places) > 1:  # the first of them stands for all
            measured = [name for name in measured if name not in places[1:]]
        if len(self.info.variants) == 1 and measured:
            joined = self._joined(measured)
            if joined.width <= SCREEN:
                return [joined]
        speeds = [name for name in measured if name not in ROOFLINE]
        limits = [name for name in ROOFLINE if name in measured]
        for beside in (limits, [n for n in limits if n != "floor_ms"], [n for n in limits if n == "mbu"]):
            first = self._long(speeds[0], beside) if speeds and beside else None
            if first is not None and first.width <= SCREEN:
                others = [*speeds[1:], *(name for name in limits if name not in beside)]
                return [first, *(grid for name in others for grid in self._grids(name))]
        return [grid for name in (*speeds, *limits) for grid in self._grids(name)]

    def _grids(self, name: str) -> list[Grid]:
        """Acceptance by place is one table. Two variants stand side by side, one row a point; more of them below each
        other; and where names are too long for that, each point has its own table."""
        points = self._points(name)
        places = [other for other in self.info.metrics if other in BY_PLACE and self._points(other)]
        if name in places and len(places) > 1:
            return [self._by_place(places)]
        plain = self.info.baseline is not None and not self.info.error_gates
        if len(self.info.variants) == 2 and len(points) > 1 and plain:
            wide = self._wide(name)
            if wide.width <= SCREEN:
                return [wide]
        joined = self._long(name)
        return [joined] if joined.width <= SCREEN else [self._long(name, points=[point]) for point in points]

    def _long(self, name: str, beside: Sequence[str] = (), points: Sequence[str] = ()) -> Grid:
        info = self.info
        points = points or self._points(name)
        compared, pointed, many = info.baseline is not None, len(points) > 1, len(info.variants) > 1
        header = [*(["point"] if pointed else []), *(["variant"] if many else []), "median [95 %]"]
        if compared:
            label = info.variants[str(info.baseline)]
            header += [f"ratio to {label if len(label) <= LONG_LABEL else 'baseline'}"]
        header += self._gated
        for other in beside:
            unit = info.metrics[other].unit
            header.append(ROOFLINE[other] + (f", {unit}" if unit else ""))
        rows = []
        for point in points:
            for variant, label in info.variants.items():
                if (variant, point, name) not in self._tried:
                    continue  # a peer has no engine steps, and a kernel not every implementation
                cells = [*([point] if pointed else []), *([label] if many else []), self.value(variant, point, name)]
                if compared:
                    cells.append(self.ratio(variant, point, name))
                cells += [self._gated[column](variant, point) for column in self._gated]
                rows.append((*cells, *(self._median(variant, point, other) for other in beside)))
        title = metric_title(info.metrics[name]) + (f", at {points[0]}" if points[0] and not pointed else "")
        return Grid(title, tuple(header), tuple(rows))

    def _wide(self, name: str) -> Grid:
        info = self.info
        (other,) = (variant for variant in info.variants if variant != info.baseline)
        rows = [
            (
                point,
                *(self.value(variant, point, name) for variant in info.variants),
                self.ratio(other, point, name),
                self.same_tokens(other, point),
            )
            for point in self._points(name)
        ]
        header = ("point", *info.variants.values(), "ratio", "same tokens")
        return Grid(metric_title(info.metrics[name]), header, tuple(rows))

    def _by_place(self, names: Sequence[str]) -> Grid:
        """Medians, a column a place behind a request's last token."""
        pointed = len(self.info.points) > 1
        rows = [
            (*([point] if pointed else []), label, *(self._median(variant, point, name) for name in names))
            for point in self._points(names[0])
            for variant, label in self.info.variants.items()
            if any((variant, point, name) in self._tried for name in names)
        ]
        header = (*(["point"] if pointed else []), "variant", *(name.rpartition("_")[2] for name in names))
        return Grid("Share of the drafts that were accepted, by place (higher is better)", header, tuple(rows))

    def _joined(self, names: Sequence[str]) -> Grid:
        (variant,) = self.info.variants
        rows = [
            (metric.label, metric.unit, point, self.value(variant, point, name), metric.better.value)
            for name in names
            for point in self._points(name)
            for metric in [self.info.metrics[name]]
        ]
        return Grid("", ("metric", "unit", "point", "median [95 %]", "better"), tuple(rows))

    def value(self, variant: str, point: str, metric: str) -> str:
        """Median and interval; and how many repeats, where some are missing."""
        values = self._table.values(variant, point, metric)
        if not values:
            if (variant, point, metric) in self._absent:
                return ABSENT
            if (variant, point, metric) in self._faulty:
                return INVALID
            return FEW if (variant, point, metric) in self._tried else MISSING
        text = wording.interval(stats.absolute(values, self.info.metrics[metric].share))
        return text if len(values) == self._turns else f"{text} (n={len(values)})"

    def ratio(self, variant: str, point: str, metric: str) -> str:
        if variant == self.info.baseline:
            return "1" if self._table.values(variant, point, metric) else MISSING
        baseline = self._table.values(str(self.info.baseline), point, metric)
        found = stats.ratio(self._table.values(variant, point, metric), baseline)
        return MISSING if found is None else wording.interval(found, "x")

    @property
    def _gated(self) -> dict[str, Callable[[str, str], str]]:
        """The gates' columns. Kernels give no tokens, so nothing is said of any."""
        tokens = self.info.baseline is not None and (self.info.gates or not self.info.error_gates)
        columns: dict[str, Callable[[str, str], str]] = {"same tokens": self.same_tokens} if tokens else {}
        return {**columns, "error": self.error} if self.info.error_gates else columns

    def error(self, variant: str, point: str) -> str:
        """Against the reference in fp32."""
        gate = next((gate for gate in self.info.error_gates if gate.covers(variant, point)), None)
        if gate is None:
            return MISSING
        return wording.number(gate.error) if gate.passed else f"FAILED: {wording.number(gate.error)}"

    def same_tokens(self, variant: str, point: str) -> str:
        """The gate's figure in a few letters."""
        gate = self._gates.get((variant, point)) or self._gates.get((variant, ""))
        if variant == self.info.baseline and (gate is None or gate.against):
            return "baseline" if gate is None or gate.passed else "FAILED"
        if gate is None:
            return "not compared"
        exact = gate.first_difference is None
        figure = f"all {gate.total_tokens:,}" if exact else f"{wording.share(gate.share)} of {gate.total_tokens:,}"
        return figure if gate.passed else f"FAILED: {figure}"

    def _points(self, metric: str) -> list[str]:
        return [p for p in self.info.points if any((v, p, metric) in self._tried for v in self.info.variants)]

    def _median(self, variant: str, point: str, metric: str) -> str:
        values = self._table.values(variant, point, metric)
        return wording.number(stats.median(list(values.values()))) if values else MISSING


def _escaped(row: Sequence[str]) -> tuple[str, ...]:
    return tuple(wording.cell(text) for text in row)


def _padded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [text.ljust(width) for text, width in zip(row, widths, strict=True)]
