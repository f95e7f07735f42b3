"""What run.py does beside running an experiment. For the help text nothing heavy is imported before one is called."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

RUN = "a result file (.json or .csv), or experiment[/scale.via[/hardware[/run]]]: what is left out must be the only one"


@dataclass(frozen=True)
class Command:
    usage: str  # what may follow its name
    help: str
    run: Callable[[Sequence[str], Path], None]  # the arguments after its name, and the folder of run.py


def report(arguments: Sequence[str], root: Path) -> None:
    parser = _parser("report", root / "results")
    parser.add_argument("--reports", type=Path, default=root / "reports", metavar="DIR", help="default: reports/")
    chosen = parser.parse_args(arguments)
    from experiments.lab.show.report import rebuild
    from experiments.lab.store.runs import exclusive

    with exclusive(chosen.results) if chosen.results.is_dir() else nullcontext():
        written = rebuild(chosen.results, chosen.reports)
    for path in written:
        print(path.relative_to(root) if path.is_relative_to(root) else path)


def compare(arguments: Sequence[str], root: Path) -> None:
    parser = _parser("compare", root / "results")
    parser.add_argument("A", nargs="?", help=f"{RUN}; with --rev it may be left out, for all that differ")
    parser.add_argument("B", nargs="?", help="likewise; left out with --rev")
    parser.add_argument("--rev", help="compares what was published at this revision of git (A) with what A is now (B)")
    chosen = parser.parse_args(arguments)
    if (chosen.B is None) == (chosen.rev is None):
        parser.error("name two runs, or one and --rev REVISION, or --rev REVISION alone for all runs that differ")
    from experiments.lab.show.compare import compare as compared
    from experiments.lab.show.compare import since
    from experiments.lab.store import runs

    if chosen.A is None:
        print(since(chosen.results, chosen.rev))
        return
    first = runs.find(chosen.results, chosen.A)
    with TemporaryDirectory() as folder:
        if chosen.rev is None:
            print(compared(first, runs.find(chosen.results, chosen.B)))
        else:
            print(compared(runs.published(first, chosen.rev, Path(folder)), first, chosen.rev))


def stale(arguments: Sequence[str], root: Path) -> None:
    chosen = _parser("stale", root / "results").parse_args(arguments)
    from experiments.lab.store import result as store
    from experiments.lab.store import runs

    print(runs.table(store.read_all(chosen.results), root))


def list_experiments(arguments: Sequence[str], root: Path) -> None:
    _parser("list").parse_args(arguments)
    from experiments.lab import catalog

    print(catalog.experiment_list(root / "conf"))


def show(arguments: Sequence[str], root: Path) -> None:
    parser = _parser("show")
    parser.add_argument("experiment")
    parser.add_argument("override", nargs="*", help="as for a run: scale=7b via=http workload.count=8 ...")
    chosen = parser.parse_args(arguments)
    from experiments.lab import catalog

    print(catalog.outlook(chosen.experiment, chosen.override, root))


def trace(arguments: Sequence[str], root: Path) -> None:
    parser = _parser("trace", root / "results")
    parser.add_argument("run", metavar="RUN", help=RUN)
    parser.add_argument("--out", type=Path, help="default: outputs/<page>-<hardware>-<run>.trace.json")
    chosen = parser.parse_args(arguments)
    from experiments.lab.show import perfetto
    from experiments.lab.store import result as store
    from experiments.lab.store import runs

    result = store.read(runs.find(chosen.results, chosen.run))
    name = f"{store.page_name(result.info)}-{result.info.hardware}-{result.info.run}.trace.json"
    path = chosen.out or root / "outputs" / name
    count = perfetto.write(result, path)
    print(f"{path}: {count:,} events. Open it in ui.perfetto.dev or chrome://tracing.")


def predict(arguments: Sequence[str], root: Path) -> None:
    parser = _parser("predict", root / "results")
    parser.add_argument("run", metavar="RUN", help=RUN)
    parser.add_argument("override", nargs="*", help="workload.path=FILE, where the run's trace lies elsewhere now")
    chosen = parser.parse_args(arguments)
    from experiments.lab.predict import again
    from experiments.lab.store import runs

    print(again(runs.find(chosen.results, chosen.run), chosen.override, root))


COMMANDS: dict[str, Command] = {
    "list": Command("", "the experiments, with their scales and questions", list_experiments),
    "show": Command("EXPERIMENT [key=value ...]", "what a run would measure, and how long the last one took", show),
    "report": Command("[--results DIR] [--reports DIR]", "all reports again, from results/ alone", report),
    "compare": Command(
        "A B | [A] --rev REVISION", "two results side by side: two commits, two machines, two settings", compare
    ),
    "stale": Command("", "results whose code or question has changed since they were measured", stale),
    "predict": Command(
        "RUN [workload.path=FILE]",
        "the predictions of a stored run, made anew or for the first time, by the costs of today",
        predict,
    ),
    "trace": Command("RUN [--out FILE]", "a run's stored steps and requests, for Perfetto", trace),
}


def _parser(name: str, results: Path | None = None) -> argparse.ArgumentParser:
    """Of a command that reads results, those are its default folder."""
    about = COMMANDS[name].help
    parser = argparse.ArgumentParser(prog=f"python run.py {name}", description=about, allow_abbrev=False)
    if results is not None:
        parser.add_argument("--results", type=Path, default=results, metavar="DIR", help="default: results/")
    return parser
