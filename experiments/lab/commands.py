"""What run.py does beside running an experiment. catalog.py lists these in the help text, so nothing heavy is imported
before a command is called."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

RUN = "a result file (.json or .csv), or experiment[/scale.via[/hardware[/run]]]: what is left out must be the only one"


@dataclass(frozen=True)
class Command:
    usage: str  # what may follow its name
    help: str
    run: Callable[[Sequence[str], Path], None]  # the arguments after its name, and the folder of run.py


def report(arguments: Sequence[str], root: Path) -> None:
    parser = _parser("report")
    parser.add_argument("--results", type=Path, default=root / "results", metavar="DIR", help="default: results/")
    parser.add_argument("--reports", type=Path, default=root / "reports", metavar="DIR", help="default: reports/")
    chosen = parser.parse_args(arguments)
    from experiments.lab.show.report import rebuild
    from experiments.lab.store.lock import exclusive

    with exclusive(chosen.results) if chosen.results.is_dir() else nullcontext():
        written = rebuild(chosen.results, chosen.reports)
    for path in written:
        print(path.relative_to(root) if path.is_relative_to(root) else path)


def compare(arguments: Sequence[str], root: Path) -> None:
    parser = _parser("compare")
    for name in ("A", "B"):
        parser.add_argument(name, help=RUN)
    parser.add_argument("--results", type=Path, default=root / "results", metavar="DIR", help="default: results/")
    chosen = parser.parse_args(arguments)
    from experiments.lab.show.compare import compare as compared
    from experiments.lab.store import runs

    print(compared(runs.find(chosen.results, chosen.A), runs.find(chosen.results, chosen.B)))


def trace(arguments: Sequence[str], root: Path) -> None:
    parser = _parser("trace")
    parser.add_argument("run", metavar="RUN", help=RUN)
    parser.add_argument("--out", type=Path, help="default: outputs/<page>-<hardware>-<run>.trace.json")
    parser.add_argument("--results", type=Path, default=root / "results", metavar="DIR", help="default: results/")
    chosen = parser.parse_args(arguments)
    from experiments.lab.show import perfetto
    from experiments.lab.store import result as store
    from experiments.lab.store import runs

    result = store.read(runs.find(chosen.results, chosen.run))
    name = f"{store.page_name(result.info)}-{result.info.hardware}-{result.info.run}.trace.json"
    path = chosen.out or root / "outputs" / name
    count = perfetto.write(result, path)
    print(f"{path}: {count:,} events. Open it in ui.perfetto.dev or chrome://tracing.")


COMMANDS: dict[str, Command] = {
    "report": Command("[--results DIR] [--reports DIR]", "all reports again, from results/ alone", report),
    "compare": Command("A B", "two results side by side: two commits, two machines, two settings", compare),
    "trace": Command("RUN [--out FILE]", "a run's stored steps and requests, for Perfetto", trace),
}


def _parser(name: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"python run.py {name}", description=COMMANDS[name].help, allow_abbrev=False)
