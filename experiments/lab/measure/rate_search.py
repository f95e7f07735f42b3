"""The highest rate of arrivals at which the requests keep their SLO, found by bisection while the run measures."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from experiments.lab.check import Checked, FromZero, Positive, PositiveShare
from experiments.lab.judge import formulas
from experiments.lab.judge.knees import FOUND, KEPT, PASS
from experiments.lab.points import Point
from experiments.lab.spec import IN_TIME, RATE
from experiments.lab.store.rows import NOT_SHOWN, Row
from experiments.lab.workloads import Inputs
from mini_infer.core.errors import ConfigError

if TYPE_CHECKING:
    from experiments.lab.measure.session import Session

MOST_STEPS = 8
OUTSIDE = f"{NOT_SHOWN}the knee lies outside of the range"  # the notes say on which side, and so do the passes
ATTEMPTS = 3  # at a pass that does not count, because the client fell behind, say


@dataclass(frozen=True)
class RateSearch(Checked, section="experiment.search"):
    # The range of rates; without it nothing is searched.
    low_per_s: Positive | None = None
    high_per_s: Positive | None = None
    share: PositiveShare = IN_TIME  # of the requests, which must keep every bound of experiment.slo
    # Passes of each search. The range holds 2 ** steps - 1 rates, each above the last by the same factor.
    steps: int = 4
    # Requests of each rate come for so long at least: workload.count is raised for it. 0: it is as it is.
    seconds: FromZero = 0.0
    # Settings of its points beside the rate, such as {workload.arrivals: poisson}.
    at: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        low, high = self.low_per_s, self.high_per_s
        if (low is None) != (high is None):
            raise ConfigError("experiment.search needs both low_per_s and high_per_s, or neither")
        super().__post_init__()
        if low is not None and high is not None and low >= high:
            raise ConfigError(f"experiment.search: low_per_s={low:g} must be below high_per_s={high:g}")
        if not 2 <= self.steps <= MOST_STEPS:
            raise ConfigError(f"experiment.search.steps must be from 2 to {MOST_STEPS}, got {self.steps}")
        if RATE in self.at:
            raise ConfigError(f"experiment.search.at must not give {RATE}, which is what is searched")

    @property
    def rates(self) -> list[float]:
        """Rounded, so that they can be named; empty where nothing is searched."""
        if self.low_per_s is None or self.high_per_s is None:
            return []
        last = 2**self.steps - 2
        spread = self.high_per_s / self.low_per_s
        return [float(f"{self.low_per_s * spread ** (index / last):.4g}") for index in range(last + 1)]

    @property
    def points(self) -> list[Point]:
        """One a rate."""

        def lasting(rate: float) -> dict[str, int]:
            return {"workload.count": math.ceil(rate * self.seconds)} if self.seconds else {}

        return [Point(f"{PASS}{rate:g}/s", {**self.at, RATE: rate, **lasting(rate)}) for rate in self.rates]

    @property
    def result(self) -> list[Point]:
        """Where what is found stands; none where nothing is searched."""
        return [Point("search", dict(self.at), {"search": "result"})] if self.rates else []


class Undecided(Exception):
    """A pass does not count, so that nobody knows where to go on."""


class Searches:
    """The searches of a run: one a variant and repeat. `visited` are the names of the points that were measured."""

    def __init__(self, session: Session, settings: RateSearch, inputs: Callable[[Point], Inputs]) -> None:
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.visited: set[str] = set()
        self._session = session
        self._settings = settings
        self._inputs = inputs

    def round(self, repeat: int) -> None:
        for variant in self._session.order(repeat):
            self._search(variant, repeat)

    def _search(self, variant: str, repeat: int) -> None:
        session, settings, points = self._session, self._settings, self._settings.points
        shares: dict[int, float] = {}
        bursts: set[float] = set()

        def meets(index: int) -> bool:
            point = points[index]
            self.visited.add(point.name)
            why = ""
            for _ in range(ATTEMPTS):
                rows = session.alone(session.cells[variant, point.name], self._inputs(point), repeat, why)
                kept = next(row for row in reversed(rows) if row.metric == KEPT)
                why = kept.reason
                if kept.valid:
                    break
            else:
                raise Undecided(f"the pass at {settings.rates[index]:g}/s does not count: {why}")
            shares[index] = kept.value
            if any(row.reason.startswith(NOT_SHOWN + formulas.BURST) for row in rows):
                bursts.add(settings.rates[index])
            return kept.value >= settings.share

        rates = settings.rates
        try:
            found = bisect_left(range(len(points)), True, key=lambda index: not meets(index)) - 1
        except Undecided as why:
            value, reason = 0.0, str(why)
        else:
            inside = 0 <= found < len(rates) - 1
            value, reason = (rates[found], "") if inside else (0.0, OUTSIDE)
            self.notes.append(f"{self._session.labels[variant]}, search {repeat + 1}: {self._bracket(found, shares)}.")
        if bursts:
            label, listed = session.labels[variant], ", ".join(f"{rate:g}" for rate in sorted(bursts))
            self.notes.append(
                f"{label}, search {repeat + 1}: the requests at {listed}/s were a burst, over before a queue could "
                "form. Raise workload.count or experiment.search.seconds."
            )
        unit = formulas.describe(FOUND).unit
        (at,) = settings.result
        self.rows.append(Row(variant, at.name, repeat, FOUND, value, unit, not reason, reason))

    def _bracket(self, found: int, shares: Mapping[int, float]) -> str:
        rates = self._settings.rates
        told = [
            f"{100 * shares[index]:.0f} % of the requests kept the SLO at {rates[index]:g}/s"
            for index in (found, found + 1)
            if 0 <= index < len(rates)
        ]
        return " and ".join(told) + (", the end of the range" if len(told) == 1 else "")
