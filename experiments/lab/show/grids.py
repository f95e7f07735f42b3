"""Tables for reading, as markdown for a report and as aligned text for a terminal; and how predictions did: their
errors load by load, and the gains that they promised beside those that were measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from experiments.lab.config.spec import BOUND, ESTIMATE, PREDICTED, STEPS
from experiments.lab.judge import prediction, stats
from experiments.lab.judge.draft_formulas import PLACES
from experiments.lab.judge.gate import ALONE
from experiments.lab.judge.metrics import Metric
from experiments.lab.show import effects, wording
from experiments.lab.store.result import Result, RunInfo

SCREEN = 110  # columns: what a terminal and a code-hosting page show without scrolling
ROOFLINE = {"floor_ms": "floor", "mbu": "MBU", "mfu": "MFU"}  # how near the hardware's limits a pass came
BY_PLACE = [f"acceptance_{place + 1}" for place in range(PLACES)]
LONG_LABEL = 24
INVALID = "INVALID"
FEW = "not shown"  # the sample is too small
ABSENT = "absent"
Cell = tuple[str, str, str]  # variant, point, metric
Column = Callable[[str, str, str], str]  # what stands there of a cell
Columns = dict[str, Column]  # by their headers


@dataclass(frozen=True)
class Grid:
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def width(self) -> int:
        return len(self.markdown().rpartition("\n")[2])

    def _lines(self, between: str) -> list[str]:
        """Columns stand below each other, so that the file itself can be read too; below the header is a rule."""
        rows = [[wording.cell(text) for text in row] for row in (self.header, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rows.insert(1, ["-" * width for width in widths])
        return [between.join(map(str.ljust, row, widths)) for row in rows]

    def markdown(self) -> str:
        header, rule, *lines = self._lines(" | ")
        ruled = f"|-{rule.replace(' | ', '-|-')}-|"
        title = [f"### {self.title}", ""] if self.title else []
        return "\n".join([*title, f"| {header} |", ruled, *(f"| {line} |" for line in lines)])

    def text(self) -> str:
        header, _, *lines = self._lines("  ")
        return "\n".join([*filter(None, [self.title]), *(f"  {line.rstrip()}" for line in (header, *lines))])


def metric_title(metric: Metric) -> str:
    unit = f", {metric.unit}" if metric.unit else ""
    return f"{metric.label[0].upper()}{metric.label[1:]}{unit} ({metric.better.value} is better)"


def predictions_of(info: RunInfo) -> dict[str, str]:
    """Simulated variant -> the measured one of the same settings. What nobody has measured misses nothing."""
    known = {name + PREDICTED: name for name in info.variants if name + PREDICTED in info.variants}
    guesses = BOUND, ESTIMATE
    guessed = [v for v in known if any(str(about.get(STEPS)).startswith(guesses) for about in info.peers.get(v, ()))]
    return {variant: name for variant, name in known.items() if variant not in guessed}


class Sheet:
    """The numbers of one result as tables, one a metric."""

    def __init__(self, result: Result) -> None:
        self.result, self.info = result, result.info
        self._turns = len({(row.process, row.repeat) for row in result.rows})
        self._lacking: dict[Cell, str] = {}  # what stands where a cell that was tried has no value
        for row in result.rows:
            cell = (row.variant, row.point, row.metric)
            why = ABSENT if row.is_absent else INVALID if row.is_fault else FEW
            self._lacking[cell] = max(self._lacking.get(cell, FEW), why, key=(FEW, INVALID, ABSENT).index)
        misses = prediction.misses(result.rows, predictions_of(result.info))
        self._misses = {(m.variant, m.point, m.metric): m.by for m in misses}

    def grids(self, names: Sequence[str]) -> list[Grid]:
        """Nearness to the hardware's limits stands beside the first metric, if it fits. One variant has one table."""
        measured = [name for name in names if self._points(name)]
        places = [name for name in measured if name in BY_PLACE]
        measured = [name for name in measured if name not in places[1:]]  # the first of them stands for all
        if len(self.info.variants) == 1 and measured:
            metrics = self.info.metrics
            columns: Columns = {
                "metric": lambda v, p, m: metrics[m].label,
                "unit": lambda v, p, m: metrics[m].unit,
                "point": _point,
                "median [95 %]": self.value,
                "better": lambda v, p, m: metrics[m].better.value,
            }
            (only,) = self.info.variants
            cells = [(only, point, name) for name in measured for point in self._points(name)]
            joined = _grid("", columns, cells)
            if joined.width <= SCREEN:
                return [joined]
        speeds = [name for name in measured if name not in ROOFLINE]
        limits = [name for name in ROOFLINE if name in measured]
        for beside in (limits, [n for n in limits if n != "floor_ms"], [n for n in limits if n == "mbu"]):
            first = self._long(speeds[0], True, beside) if speeds and beside else None
            if first is not None and first.width <= SCREEN:
                others = [*speeds[1:], *(name for name in limits if name not in beside)]
                return [first, *(grid for name in others for grid in self._of(name, False))]
        return [grid for place, name in enumerate([*speeds, *limits]) for grid in self._of(name, place == 0)]

    def _of(self, name: str, first: bool) -> list[Grid]:
        """Acceptance by place is one table. Two variants stand side by side, one row a point; more of them below each
        other; and where names are too long for that, each point has its own table."""
        info, points = self.info, self._points(name)
        places = [other for other in info.metrics if other in BY_PLACE and self._points(other)]
        if name in places and len(places) > 1:  # medians, a column a place behind a request's last token
            title = "Share of the drafts that were accepted, by place (higher is better)"
            columns = self._named(len(info.points) > 1, True)
            columns |= {name.rpartition("_")[2]: partial(self._median, name) for name in places}
            return [_grid(title, columns, self._cells(self._points(places[0]), places))]
        if len(info.variants) == 2 and len(points) > 1 and info.baseline is not None and not info.error_gates:
            columns = {"point": _point}
            of_variant = lambda own, _, point, metric: self.value(own, point, metric)  # noqa: E731
            columns |= {label: partial(of_variant, v) for v, label in info.variants.items()}
            columns |= {"ratio": self.ratio, **self._gate(first)}
            (other,) = (variant for variant in info.variants if variant != info.baseline)
            wide = _grid(metric_title(info.metrics[name]), columns, [(other, point, name) for point in points])
            if wide.width <= SCREEN:
                return [wide]
        joined = self._long(name, first)
        return [joined] if joined.width <= SCREEN else [self._long(name, first, points=[point]) for point in points]

    def _long(self, name: str, first: bool, beside: Sequence[str] = (), points: Sequence[str] = ()) -> Grid:
        info = self.info
        points = points or self._points(name)
        columns = self._named(len(points) > 1, len(info.variants) > 1) | {"median [95 %]": self.value}
        off = any(point in points and metric == name for _, point, metric in self._misses)
        if info.baseline is not None:
            label = info.variants[info.baseline]
            columns[f"ratio to {label if len(label) <= LONG_LABEL and not off else 'baseline'}"] = self.ratio
        if off:  # of what a simulated variant says, against the measured one of the same name
            columns["off by"] = lambda *cell: self._misses.get(cell, wording.NOTHING)
        columns |= self._gate(first) if info.baseline is not None else {}
        if info.error_gates:
            columns["error"] = self.error
        for other in beside:
            unit = info.metrics[other].unit
            columns[ROOFLINE[other] + (f", {unit}" if unit else "")] = partial(self._median, other)
        title = metric_title(info.metrics[name]) + (f", at {points[0]}" if points[0] and len(points) == 1 else "")
        return _grid(title, columns, self._cells(points, [name]))

    def _cells(self, points: Sequence[str], names: Sequence[str]) -> list[Cell]:
        """Of the variants that were tried: a peer has no engine steps, and a kernel not every implementation."""
        cells = [(v, p) for v, p in self.info.cells if p in points]
        return [(v, p, names[0]) for v, p in cells if any((v, p, name) in self._lacking for name in names)]

    def _named(self, point: bool, variant: bool) -> Columns:
        named: Columns = {"point": _point} if point else {}
        return named | ({"variant": lambda v, p, m: self.info.variants[v]} if variant else {})

    def value(self, variant: str, point: str, metric: str) -> str:
        """Median and interval; and how many repeats, where some are missing."""
        found = self.result.estimate(variant, point, metric)
        if found is None:
            return self._lacking.get((variant, point, metric), wording.NOTHING)
        return wording.interval(found) + (f" (n={found.n})" if found.n != self._turns else "")

    def ratio(self, variant: str, point: str, metric: str) -> str:
        """Of a prediction to the baseline's: what it promises."""
        baseline = str(self.info.baseline)
        if variant.endswith(PREDICTED) and baseline + PREDICTED in self.info.variants:
            baseline += PREDICTED
        if variant == baseline:
            return "1" if self.result.values(variant, point, metric) else wording.NOTHING
        found = self.result.ratio((variant, point), (baseline, point), metric)
        return wording.NOTHING if found is None else wording.interval(found, "x")

    def error(self, variant: str, point: str, _: str = "") -> str:
        gates = (gate for gate in self.info.error_gates if gate.covers(variant, point))
        told = (f"{'' if gate.passed else 'FAILED: '}{wording.number(gate.error)}" for gate in gates)
        return next(told, wording.NOTHING)

    def _gate(self, first: bool) -> Columns:
        """The gates of tokens, beside the first metric; beside every speed where one has failed."""
        gates = self.info.gates if first or not all(gate.passed for gate in self.info.gates) else ()
        against = [gate.against for gate in gates]
        if not against:
            return {}
        other = "alone" if against[0].startswith(ALONE) else against[0]
        return {"same tokens" if "" in against else f"gate: {other}": self.same_tokens}

    def same_tokens(self, variant: str, point: str, _: str = "") -> str:
        """As the baseline's in the timed passes, where any were compared; else whether its own gates passed."""
        own = [gate for gate in self.info.gates if gate.covers(variant, point)]
        if failed := next((gate for gate in own if not gate.passed), None):
            return f"FAILED: {wording.share(failed.share)} of {failed.total_tokens:,}"
        timed = [gate for gate in self.info.gates if not gate.against]
        if variant == self.info.baseline and any(gate.covers(gate.variant, point) for gate in timed):
            return "baseline"
        told = [gate for gate in own if gate in timed] or own
        if not told or (timed and told[0].against):
            return "as alone" if told else wording.NOTHING
        return f"all {sum(gate.total_tokens for gate in told):,}"

    def _points(self, metric: str) -> list[str]:
        """Those that have anything to say of it: a value, or why there is none that counts."""
        cells = ((*cell, metric) for cell in self.info.cells)
        told = (cell for cell in cells if self._lacking.get(cell, FEW) != FEW or self.result.values(*cell))
        return list(dict.fromkeys(point for _, point, _ in told))

    def _median(self, metric: str, variant: str, point: str, _: str) -> str:
        values = self.result.values(variant, point, metric)
        return wording.number(stats.median([*values.values()])) if values else wording.NOTHING


_point: Column = lambda variant, point, metric: point  # noqa: E731


def _grid(title: str, columns: Columns, cells: Sequence[Cell]) -> Grid:
    return Grid(title, tuple(columns), tuple(tuple(text(*cell) for text in columns.values()) for cell in cells))


REPORTED = {  # of the error table
    "output_tokens_per_s": "tokens/s",
    "ttft_p50_ms": "median TTFT",
    "itl_p99_ms": "P99 ITL",
    "goodput_rps": "goodput",
}


def errors_of_predictions(result: Result) -> list[Grid]:
    """A row a load: of each metric the errors of all variants' predictions, in the variants' order, and the worst."""
    info, predictions = result.info, predictions_of(result.info)
    found = {(m.point, m.metric, m.variant): m for m in _asked_for(result)}
    metrics = [name for name in REPORTED if any(name == metric for _, metric, _ in found)]
    if not metrics:
        return []
    rows, many = [], len(predictions) > 1
    for point in info.points:
        every = [[found.get((point, name, variant)) for variant in predictions] for name in metrics]
        told = [" / ".join(miss.by if miss else wording.NOTHING for miss in of_metric) for of_metric in every]
        worst = max((miss for of_metric in every for miss in of_metric if miss), key=abs, default=None)
        whose = f", {info.variants[predictions[worst.variant]]}" if worst and many else ""
        rows.append((point, *told, f"{REPORTED[worst.metric]}{whose}: {worst.by}" if worst else wording.NOTHING))
    order = f": {' / '.join(info.variants[name] for name in predictions.values())}" if many else ""
    header = ("load", *(REPORTED[name] for name in metrics), "worst")
    return [Grid(f"Errors of the predictions{order}", header, tuple(rows))]


def gains_predicted(result: Result) -> list[Grid]:
    """Over the baseline, and of predictions over the baseline's: of the metrics of the claims, or of all."""
    info, measured = result.info, predictions_of(result.info).values()
    baseline, rows = str(info.baseline), []
    for metric in dict.fromkeys(claim.metric for claim in info.claims) or info.metrics:
        for point, variant in ((point, name) for point in info.points for name in measured if name != baseline):
            cells = (((variant + mark, point), (baseline + mark, point)) for mark in ("", PREDICTED))
            both = [effects.between(result, metric, *pair).gain for pair in cells] if baseline in measured else []
            if any(both):
                told = (wording.interval(gain, "x") if gain else wording.NOTHING for gain in both)
                rows.append((REPORTED.get(metric) or wording.short(metric, info), point, info.variants[variant], *told))
    title = f"Gains over {info.variants.get(baseline)}, above 1 where it is better"
    header = ("metric", "point", "variant", "gain measured", "gain predicted")
    return [Grid(title, header, tuple(rows))] if rows else []


def misses_in_words(result: Result) -> str:
    """Of a run that asks how good predictions are: their errors, metric by metric. Empty of any other."""
    told, found = [], _asked_for(result)
    for name, short in REPORTED.items():
        own = [miss for miss in found if miss.metric == name]
        if own:
            told.append(f"{short} {stats.median(map(abs, own)):.1%} (worst {max(own, key=abs).by})")
    return f"Predictions are off by, in the median: {'; '.join(told)}." if told else ""


def _asked_for(result: Result) -> list[prediction.Miss]:
    """The errors of predictions, where claims are on these themselves."""
    predictions = predictions_of(result.info)
    asked = any(claim.variant in predictions for claim in result.info.claims)
    return list(prediction.misses(result.rows, predictions)) if asked else []
