"""Sweeps (`-m`): a job that fails is reported at the end and does not stop the others.

Each job leaves an `outcome.json` in its own folder of the sweep's folder, wherever a launcher runs it: in this process,
in another one (joblib), or on another machine (submitit). `Summary`, a Hydra callback, reads them when all are through.
"""

from __future__ import annotations

import atexit
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from experiments.lab.config.explain import explain
from mini_infer.core.cores import usable_cores

FILE = "outcome.json"
DONE, FAILED, LOST = "done", "failed", "lost"


@dataclass(frozen=True)
class Outcome:
    number: int
    overrides: tuple[str, ...]
    status: str
    reason: str = ""  # in one line; empty where it is done
    seconds: float = 0.0


def name() -> str | None:
    """The sweep that this job belongs to, by its folder's date and time; None outside a sweep."""
    return " ".join(Path(HydraConfig.get().sweep.dir).parts[-2:]) if _in_sweep() else None


def notes() -> list[str]:
    """What a report must say about how the launcher ran this job."""
    side_by_side = _parallel(HydraConfig.get().launcher) if _in_sweep() else ""
    told = f"Measured in a sweep whose jobs ran {side_by_side}: they disturbed each other's timings."
    return [told] if side_by_side else []


@contextmanager
def job() -> Iterator[None]:
    """Around one job. In a sweep it notes how the job ended, and keeps its failure from ending the sweep."""
    if not _in_sweep():
        yield
        return
    config = HydraConfig.get()
    folder, number, overrides = Path(config.runtime.output_dir), int(config.job.num), tuple(config.overrides.task)
    start = time.monotonic()
    status, reason = DONE, ""
    try:
        yield
    except KeyboardInterrupt:
        status, reason = FAILED, "interrupted"
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit):
            status, reason = (FAILED, f"exit code {error.code}") if error.code else (DONE, "")
        else:
            status, text = FAILED, explain(error)
            if text is None:  # it is no known mistake
                traceback.print_exception(error)
                text = f"{type(error).__name__}: {error}"
            reason = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
        print(f"job {number} {status}: {reason}", file=sys.stderr)
    finally:
        outcome = Outcome(number, overrides, status, reason, round(time.monotonic() - start, 3))
        try:
            (folder / FILE).write_bytes(msgspec.json.encode(outcome) + b"\n")
        except OSError as error:  # the job's own results are stored, or their own error is on its way
            print(f"job {number}: its outcome cannot be noted: {error}", file=sys.stderr)


def outcomes(folder: Path) -> list[Outcome]:
    found = []
    for path in folder.glob("[0-9]*"):
        try:
            found.append(msgspec.json.decode((path / FILE).read_bytes(), type=Outcome))
        except (OSError, msgspec.DecodeError):
            found.append(Outcome(int(path.name), (), LOST, f"its process ended without a word; see {path}"))
    return sorted(found, key=lambda outcome: outcome.number)


def table(found: Sequence[Outcome]) -> str:
    lines = [f"sweep: {sum(o.status == DONE for o in found)} of {len(found)} jobs done"]
    known = [set(o.overrides) for o in found if o.overrides]
    shared = set.intersection(*known) if len(known) > 1 else set()
    for o in found:
        own = " ".join(part for part in o.overrides if part not in shared) or " ".join(o.overrides)
        why = f": {o.reason.removeprefix(f'{own}: ')}" if o.reason else ""
        lines.append(f"  #{o.number:<3} {o.status:<7}{o.seconds:7.0f} s  {own}{why}")
    return "\n".join(lines)


class Summary(Callback):
    """Prints the table of all jobs after the last one, or when the sweep is cut off; exit code 1 where one failed."""

    _folder: Path | None = None  # until the table is printed

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._folder = Path(config.hydra.sweep.dir).absolute()
        atexit.register(self._print)  # for a sweep that never comes to its end: Ctrl-C, a worker that is killed
        if side_by_side := _parallel(config.hydra.launcher):
            fit = "fit to try things out, not for numbers to keep"
            print(f"warning: jobs run {side_by_side} and disturb each other's timings: {fit}", file=sys.stderr)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        found = self._print()
        if not found or any(o.status != DONE for o in found):
            sys.exit(1)  # Hydra turns an Exception of a callback into a warning, and this into an exit

    def _print(self) -> list[Outcome]:
        folder, self._folder = self._folder, None
        if folder is None:
            return []
        found = outcomes(folder)
        print(table(found) if found else "sweep: no jobs; does a glob(...) match nothing?")
        return found


def _in_sweep() -> bool:
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def _parallel(launcher: DictConfig) -> str:
    """`2 at a time on this machine`, or nothing for a launcher whose jobs each have their machine to themselves."""
    target = str(launcher.get("_target_", ""))
    if "joblib" in target:
        wanted = int(launcher.get("n_jobs") or 1)
        count = wanted if wanted > 0 else max(1, usable_cores() + 1 + wanted)  # joblib's meaning of -1, -2, ...
        return f"{count} at a time on this machine" if count > 1 else ""
    return "all at once on this machine" if target.endswith("submitit_launcher.LocalLauncher") else ""
