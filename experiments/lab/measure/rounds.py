"""Work that can be stopped: what was finished is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiments.lab.store.result import COMPLETE
from mini_infer.core.errors import MiniInferError


class IncompleteRun(MiniInferError):
    """A run was stopped by an error, or could not be stored or reported where it should be. What was measured is kept;
    the message says where."""


@dataclass(frozen=True)
class Outcome:
    status: str  # "complete", or "incomplete: <why, where, and what is kept>"
    error: BaseException | None = None


def run(rounds: Sequence[tuple[str, Callable[[], None]]]) -> Outcome:
    """Runs named rounds in order, each of which keeps its findings at its very end. An error or Ctrl-C ends the run
    there; where no round has been finished, it is raised."""
    for done, (name, work) in enumerate(rounds):
        try:
            work()
        except (Exception, KeyboardInterrupt) as error:
            if not done:
                raise
            why = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
            return Outcome(f"incomplete: {why} in {name}; {done} of {len(rounds)} rounds are kept", error)
    return Outcome(COMPLETE)
