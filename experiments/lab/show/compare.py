"""Two runs of one experiment side by side: two commits, two machines, two settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.lab.config import points
from experiments.lab.judge import stats
from experiments.lab.judge.metrics import Better
from experiments.lab.show import wording
from experiments.lab.show.grids import SCREEN, Grid, Sheet, metric_title
from experiments.lab.store import runs
from experiments.lab.store.provenance import git
from experiments.lab.store.result import COMPLETE, INCOMPLETE, TABLES, RunInfo, StoreError, read

SPEED = ("s", "ms", "us", "ns")  # units, and any rate a second: faster or slower; of others: better or worse
OTHER_MACHINE = "Measured on DIFFERENT MACHINES: faster and slower below are the machines' as much as the code's."
FOOTNOTE = """\
B/A is the ratio of the medians with a 95 % interval (Welch). The runs were not interleaved, so a drift of the machine
between them counts in full. Of rows without any difference, about one in twenty shows one by chance."""


def compare(a: Path, b: Path, revision: str = "") -> str:
    """As text; `revision`: of git, at which `a` was what is compared. Raises StoreError where it makes no sense."""
    results = read(a), read(b)
    first, second = (result.info for result in results)
    title = f"{second.experiment}: {second.title}"
    if a.resolve() == b.resolve():
        raise StoreError(f"A and B are the same result, {a}")
    if results[0] == results[1]:
        when = f"of {first.provenance.started}, {wording.commit(first.provenance)}"
        return f"{title}\n\nA and B are the same measurement, {when}."
    if first.experiment != second.experiment and not revision:  # by which it may have had another name
        names = f"A is a run of {first.experiment} and B of {second.experiment}"
        raise StoreError(f"{names}: compare two runs of one experiment")
    grids = _grids(*map(Sheet, results))
    parts = [
        title,
        "\n".join([_origin("A", f"{b} at {revision}" if revision else a, first), _origin("B", b, second)]),
        OTHER_MACHINE if wording.device(first) != wording.device(second) else "",
        *(grid.text() for grid in grids),
        f"{_counted(grids)}.\n{FOOTNOTE}",
        "\n".join(_left_out(first, second)),
        "\n".join(["What differs beside the numbers (A -> B):", *_differences(first, second)]),
    ]
    return "\n\n".join(filter(None, parts))


def since(results: Path, revision: str) -> str:
    """A line for each run below `results` whose rows are not those of a revision of git. Raises StoreError."""
    found = git(results, "diff", "--name-only", "--relative", "-M", revision, "--", "*.csv")
    if found is None:
        raise StoreError(f"git knows no revision {revision!r}")
    names = [name for name in found.splitlines() if not name.endswith(tuple(TABLES.keys() - {".csv"}))]
    # An unfinished run beside a complete one is not published.
    unfinished = f"{INCOMPLETE}.csv"
    names = [n for n in names if not (n.endswith(unfinished) and (results / n.replace(unfinished, ".csv")).exists())]
    told = {name: _since(results / name, revision) for name in (name.removesuffix(".csv") for name in names)}
    lines = [f"{name}: {text}" for name, text in told.items() if text]
    if not lines:
        return f"No recorded result has other rows than at {revision}."
    lines.append(f"A is {revision}, B is now: python run.py compare RUN --rev {revision} shows the tables.")
    return "\n".join(lines)


def _since(run: Path, revision: str) -> str:
    """What became of a run's rows; nothing where they were only moved. `run` is without its ending."""
    path = run.with_name(f"{run.name}.json")
    if not path.is_file():
        return "gone since"
    try:
        with TemporaryDirectory() as folder:
            a, b = read(runs.published(path, revision, Path(folder))), read(path)
        names = dict.fromkeys([a.info.machine, b.info.machine])
        named = f" ({', then '.join(names)})" if len(names) > 1 else ""
        machines = f"on DIFFERENT MACHINES{named}, " if wording.device(a.info) != wording.device(b.info) else ""
        return "" if a.rows == b.rows else machines + _counted(_grids(Sheet(a), Sheet(b)))
    except StoreError as error:
        return str(error)


def _counted(grids: Sequence[Grid]) -> str:
    verdicts = Counter(row[-1] for grid in grids for row in grid.rows)
    return f"{verdicts.total()} rows: {', '.join(f'{count} {verdict}' for verdict, count in verdicts.most_common())}"


def _origin(name: str, path: Path | str, info: RunInfo) -> str:
    incomplete = "" if info.status == COMPLETE else f"; {info.status.upper()}"
    measured = f"{info.provenance.started}, {wording.commit(info.provenance)}{incomplete}"
    return f"{name}  {path}\n   {measured}\n   {wording.device(info)}"


def _grids(a: Sheet, b: Sheet) -> list[Grid]:
    """Raises StoreError where there is none."""
    if grids := [grid for name in a.info.metrics for grid in _of_metric(a, b, name)]:
        return grids
    raise StoreError("A and B have no variant, point and metric in common: there is nothing to compare")


def _of_metric(a: Sheet, b: Sheet, metric: str) -> list[Grid]:
    """One table; where that is too wide for a screen, one a point."""
    info, others = a.info, b.info
    if metric not in others.metrics or info.metrics[metric].unit != others.metrics[metric].unit:
        return []
    rows: dict[str, list[tuple[str, ...]]] = {}
    for variant, point in info.cells:
        if (variant, point) in others.cells and (cells := _cells(a, b, variant, point, metric)):
            rows.setdefault(point, []).append((info.variants[variant], *cells))
    title, header = metric_title(info.metrics[metric]), ("", "A", "B", "B/A", "")
    joined = [(f"{line[0]} {point}".strip(), *line[1:]) for point, lines in rows.items() for line in lines]
    grid = Grid(title, header, tuple(joined))
    if rows and grid.width <= SCREEN:
        return [grid]
    return [Grid(f"{title} at {point}" if point else title, header, tuple(lines)) for point, lines in rows.items()]


def _cells(a: Sheet, b: Sheet, variant: str, point: str, metric: str) -> tuple[str, ...]:
    """Median of A, of B, their ratio, and the verdict; nothing where one of them has no row."""
    shown = [sheet.value(variant, point, metric) for sheet in (a, b)]
    if wording.NOTHING in shown:
        return ()
    theirs, ours = (sheet.result.values(variant, point, metric) for sheet in (a, b))
    for name, sheet, values, text in (("A", a, theirs, shown[0]), ("B", b, ours, shown[1])):
        if not values or sheet.info.fails(variant, point):
            return (*shown, wording.NOTHING, f"{'gate FAILED' if values else text} in {name}")
    every = {*theirs.values(), *ours.values()}
    if not stats.in_range(theirs) or not stats.in_range(ours):
        return (*shown, wording.NOTHING, "a knee outside of the range")
    if len(every) == 1:
        return (*shown, "1" if every != {0.0} else wording.NOTHING, "the same")
    if min(every) <= 0:
        return (*shown, wording.NOTHING, "no ratio to 0")
    found, about = stats.apart(ours, theirs), a.info.metrics[metric]
    told = "no difference shown" if found.low is not None else "one repeat"
    if found.told:
        is_speed, gains = about.unit in SPEED or about.unit.endswith("/s"), about.better is Better.higher
        worse, better = ("B slower", "B faster") if is_speed else ("B worse", "B better")
        told = better if (found.told > 0) == gains else worse
    return (*shown, wording.interval(found, "x"), told)


def _left_out(a: RunInfo, b: RunInfo) -> list[str]:
    lines = []
    for what, (name, ours, theirs) in product(("variants", "points", "metrics"), (("A", a, b), ("B", b, a))):
        only = [key or "(one point)" for key in getattr(ours, what) if key not in getattr(theirs, what)]
        lines += [f"Only in {name}, {what}: {', '.join(only)}"] if only else []
    return lines


def _differences(*infos: RunInfo) -> list[str]:
    origins = [{"device": info.provenance.device, "versions": info.provenance.versions} for info in infos]
    both = [points.flat(info.config | origin) for info, origin in zip(infos, origins, strict=True)]
    keys = [key for key in dict.fromkeys(key for each in both for key in each) if not key.startswith("paths.")]
    told = {key: [str(each.get(key, wording.NOTHING)) for each in both] for key in keys}
    short = lambda text: text if len(text) <= 40 else f"{text[:37]}..."  # noqa: E731
    return [f"  {key}: {short(a)} -> {short(b)}" for key, (a, b) in told.items() if a != b] or ["  nothing"]
