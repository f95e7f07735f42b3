"""The loop of every experiment: rounds that can be stopped, what was finished is kept; and of those that time something
directly, without an engine that serves requests, what is in a round."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from experiments.lab.experiment import Experiment, Findings
from experiments.lab.judge import stats
from experiments.lab.points import Point
from experiments.lab.show.progress import Steps
from experiments.lab.store.result import COMPLETE
from experiments.lab.store.rows import Row
from mini_infer.core.errors import MiniInferError


class IncompleteRun(MiniInferError):
    """A run was stopped by an error, or could not be stored or reported. The message says what is kept, and where."""


def run(
    rounds: Sequence[tuple[str, Callable[[], None]]], begun: Callable[[], str] = str
) -> tuple[str, BaseException | None]:
    """Runs named rounds in order, each of which keeps its findings at its very end. An error or Ctrl-C ends the run
    there; where nothing is kept, it is raised. Returns "complete" or "incomplete: <why, where, and what is kept>", and
    what stopped it.

    Args:
        begun: says what is kept of the first round where that was not finished; empty: nothing.

    What is alive now is out of the garbage collector's sight meanwhile: a full pass over a process that has imported
    torch takes a few tenths of a second, and would fall on whoever happens to trigger it."""
    gc.collect()
    gc.freeze()
    try:
        for done, (name, work) in enumerate(rounds):
            try:
                work()
            except (Exception, KeyboardInterrupt) as error:
                kept = f"{done} of {len(rounds)} rounds are kept" if done else begun()
                if not kept:
                    raise
                return f"incomplete: {words(error)} in {name}; {kept}", error
    finally:
        gc.unfreeze()
    return COMPLETE, None


def words(error: BaseException) -> str:
    return "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"


class Probe(Experiment):
    """Every (variant, point) of `timed`, in this order and back (ABBA); a repeat is kept whole."""

    timed: Sequence[tuple[str, Point]] = ()  # where it is not every variant at every point
    repeat = 0  # the number of the one that is measured

    def values(self, variant: str, point: Point) -> Mapping[str, float | None]:
        """One measurement: metric -> value, None where a sample is too small for it."""
        raise NotImplementedError

    def problem(self) -> str:
        """Why the latest of them do not count; empty where they do."""
        return ""

    def derived(self, found: Sequence[Row]) -> Sequence[tuple[str, Point, Mapping[str, float | None]]]:
        """What follows from all values of a repeat."""
        return ()

    def measure(self, steps: Steps) -> Findings:
        repeats = self.settings.repeats
        self.timed = self.timed or [(variant, point) for variant in self.variants for point in self.points]
        steps.plan(repeats * len(self.timed))
        rows: list[Row] = []
        names = [f"repeat {repeat + 1} of {repeats}" for repeat in range(repeats)]
        status, error = run([(name, partial(self._repeat, i, name, rows, steps)) for i, name in enumerate(names)])
        return Findings(rows, status=status, error=error)

    def _repeat(self, repeat: int, name: str, rows: list[Row], steps: Steps) -> None:
        self.repeat, found = repeat, list[Row]()
        for variant, point in stats.abba(self.timed, repeat):
            label = f"{self.variants[variant]} " if len(self.variants) > 1 else ""
            steps.next(f"{label}{point.name}, {name}")
            gc.collect()
            values = self.values(variant, point)
            found += self._rows(variant, point, repeat, values, self.problem())
        for variant, point, values in self.derived(found):
            found += self._rows(variant, point, repeat, values)
        rows += found

    def _rows(
        self, variant: str, point: Point, repeat: int, values: Mapping[str, float | None], problem: str = ""
    ) -> list[Row]:
        return [
            Row(variant, point.name, repeat, name, value, self.metrics[name].unit, not problem, problem)
            for name, value in values.items()
            if value is not None
        ]
