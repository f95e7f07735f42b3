"""What run.py does beside running an experiment. For the help text nothing heavy is imported before one is called."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mini_infer.core.errors import ConfigError

Arguments = dict[str, dict[str, Any]]  # as argparse takes them
NAME = "experiment[/scale.via[/hardware[/run]]]"
WHICH = f"a result file (.json or .csv), or {NAME}: what is left out must be the only one"
RESULTS: Arguments = {"--results": {"type": Path, "metavar": "DIR", "help": "default: results/"}}
RUN: Arguments = {**RESULTS, "run": {"metavar": "RUN", "help": WHICH}}


@dataclass(frozen=True)
class Command:
    usage: str  # what may follow its name
    help: str
    work: Callable[[Namespace, Path], None]  # of what was typed, and the folder of run.py
    arguments: Arguments

    def run(self, name: str, arguments: Sequence[str], root: Path) -> None:
        parser = ArgumentParser(prog=f"python run.py {name}", description=self.help, allow_abbrev=False)
        for argument, settings in self.arguments.items():
            parser.add_argument(argument, **settings)
        parser.set_defaults(**{folder: root / folder for folder in ("results", "reports")})
        self.work(parser.parse_args(arguments), root)


def report(chosen: Namespace, root: Path) -> None:
    from experiments.lab.show.report import rebuild
    from experiments.lab.store.runs import exclusive

    with exclusive(chosen.results) if chosen.results.is_dir() else nullcontext():
        written = rebuild(chosen.results, chosen.reports)
    for path in written:
        print(path.relative_to(root) if path.is_relative_to(root) else path)


def compare(chosen: Namespace, root: Path) -> None:
    if (chosen.B is None) == (chosen.rev is None):
        raise ConfigError("name two runs, or one and --rev REVISION, or --rev REVISION alone for all runs that differ")
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


def stale(chosen: Namespace, root: Path) -> None:
    from experiments.lab.store import runs
    from experiments.lab.store.result import read_all, without_beside

    print(runs.table(without_beside(read_all(chosen.results)), root))


def list_experiments(chosen: Namespace, root: Path) -> None:
    from experiments.lab.config import catalog

    print(catalog.experiment_list(root / "conf"))


def show(chosen: Namespace, root: Path) -> None:
    from experiments.lab.config import catalog

    print(catalog.outlook(chosen.experiment, chosen.override, root))


def trace(chosen: Namespace, root: Path) -> None:
    from experiments.lab.show import perfetto
    from experiments.lab.store import result as store
    from experiments.lab.store import runs

    result = store.read(runs.find(chosen.results, chosen.run))
    name = f"{store.page_name(result.info)}-{result.info.hardware}-{result.info.run}.trace.json"
    path = chosen.out or root / "outputs" / name
    count = perfetto.write(result, path)
    print(f"{path}: {count:,} events. Open it in ui.perfetto.dev or chrome://tracing.")


def predict(chosen: Namespace, root: Path) -> None:
    from experiments.lab.predict import again
    from experiments.lab.store import runs

    print(again(runs.find(chosen.results, chosen.run), chosen.override, root))


COMMANDS: dict[str, Command] = {
    "list": Command("", "the experiments, with their scales and questions", list_experiments, {}),
    "show": Command("EXPERIMENT [key=value ...]", "what a run would measure, and how long the last one took", show, {
        "experiment": {}, "override": {"nargs": "*", "help": "as for a run: scale=7b via=http workload.count=8 ..."}}),
    "report": Command("[--results DIR] [--reports DIR]", "all reports again, from results/ alone", report, {
        **RESULTS, "--reports": {"type": Path, "metavar": "DIR", "help": "default: reports/"}}),
    "compare": Command(
        "A B | [A] --rev REVISION", "two results side by side: two commits, two machines, two settings", compare, {
            **RESULTS,
            "A": {"nargs": "?", "help": f"{WHICH}; with --rev it may be left out, for all that differ"},
            "B": {"nargs": "?", "help": "likewise; left out with --rev"},
            "--rev": {"help": "compares what was published at this revision of git (A) with what A is now (B)"}}),
    "stale": Command("", "results whose code or question has changed since they were measured", stale, RESULTS),
    "predict": Command(
        "RUN [workload.path=FILE]",
        "the predictions of a stored run, made anew or for the first time, by the costs of today", predict, {
            **RUN,
            "override": {"nargs": "*", "help": "workload.path=FILE, where the run's trace lies elsewhere now"}}),
    "trace": Command("RUN [--out FILE]", "a run's stored steps and requests, for Perfetto", trace, {
        **RUN, "--out": {"type": Path, "help": "default: outputs/<page>-<hardware>-<run>.trace.json"}}),
}  # fmt: skip
