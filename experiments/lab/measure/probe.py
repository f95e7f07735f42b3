"""The loop of experiments that time something directly, without an engine that serves requests."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from functools import partial

from experiments.lab.experiment import Experiment, Findings
from experiments.lab.judge import stats
from experiments.lab.measure import heap, rounds
from experiments.lab.points import Point
from experiments.lab.show.progress import Steps
from experiments.lab.store.rows import Row


class Probe(Experiment):
    """Every variant at every point of `timed`, in ABBA order; a repeat is kept whole.

    Attributes:
        timed: (variant, point), in the order of the first repeat.
    """

    timed: Sequence[tuple[str, Point]]
    repeats: int

    def values(self, variant: str, point: Point) -> Mapping[str, float | None]:
        """One measurement: metric -> value, None where a sample is too small for it."""
        raise NotImplementedError

    def derived(self, found: Sequence[Row]) -> Sequence[tuple[str, Point, Mapping[str, float | None]]]:
        """What follows from all values of a repeat."""
        return ()

    def measure(self, steps: Steps) -> Findings:
        steps.plan(self.repeats * len(self.timed))
        rows: list[Row] = []
        work = [
            (f"repeat {repeat + 1} of {self.repeats}", partial(self._repeat, repeat, rows, steps))
            for repeat in range(self.repeats)
        ]
        with heap.frozen():
            outcome = rounds.run(work)
        return Findings(rows, status=outcome.status, error=outcome.error)

    def _repeat(self, repeat: int, rows: list[Row], steps: Steps) -> None:
        found: list[Row] = []
        for variant, point in stats.abba(self.timed, repeat):
            name = f"{self.variants[variant]} {point.name}" if len(self.variants) > 1 else point.name
            steps.next(f"{name}, repeat {repeat + 1} of {self.repeats}")
            gc.collect()
            found += self._rows(variant, point, repeat, self.values(variant, point))
        for variant, point, values in self.derived(found):
            found += self._rows(variant, point, repeat, values)
        rows += found

    def _rows(self, variant: str, point: Point, repeat: int, values: Mapping[str, float | None]) -> list[Row]:
        return [
            Row(variant, point.name, repeat, name, value, self.metrics[name].unit)
            for name, value in values.items()
            if value is not None
        ]
