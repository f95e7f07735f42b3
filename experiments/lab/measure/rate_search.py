"""The highest rate of arrivals at which the requests keep their SLO, found by bisection while the run measures."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from experiments.lab.config.points import Point
from experiments.lab.config.spec import (
    IN_TIME,
    PREDICTED,
    RATE,
    Checked,
    Count,
    FromZero,
    Natural,
    Positive,
    PositiveShare,
)
from experiments.lab.judge import formulas
from experiments.lab.judge.knees import FOUND, KEPT, PASS, SEARCH
from experiments.lab.store.rows import NOT_SHOWN, Row
from experiments.lab.workloads import Inputs, Workload
from experiments.lab.workloads.base import Arriving
from mini_infer.core.errors import ConfigError

if TYPE_CHECKING:
    from experiments.lab.measure.session import Session

MOST_STEPS = 8


@dataclass(frozen=True)
class RateSearch(Checked, section="experiment.search"):
    # The range of rates; without it nothing is searched.
    low_per_s: Positive | None = None
    high_per_s: Positive | None = None
    share: PositiveShare = IN_TIME  # of the requests, which must keep every bound of experiment.slo
    # Passes of each search. The range holds 2 ** steps - 1 rates, each above the last by the same factor.
    steps: int = 4
    # Where even high_per_s is kept, the range goes on by the same factor, a doubling at a time, so often at most.
    doublings: Natural = 0
    # Requests of each rate come for so long at least: as many more are made as that takes. 0: they are as they are.
    seconds: FromZero = 0.0
    # The variants whose rates are searched; left out: all.
    variants: tuple[str, ...] = ()
    # Searches of each of them in each process, 1 or as many as measure.repeats, which is what is left out.
    repeats: Count | None = None
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
        """Rounded, so that they can be named, with those above high_per_s; empty where nothing is searched."""
        if self.low_per_s is None:
            return []
        every = range(self.own + self.doublings * self.doubling)
        return [float(f"{self.low_per_s * 2 ** (index * self._octaves):.4g}") for index in every]

    @property
    def own(self) -> int:
        """So many of the rates, the first ones, are in the range."""
        return 2**self.steps - 1

    @property
    def doubling(self) -> int:
        """The least number of steps from rate to rate that together double it."""
        return math.ceil(1 / self._octaves - 1e-9)

    @property
    def _octaves(self) -> float:
        """From a rate to the next one."""
        assert self.low_per_s is not None
        assert self.high_per_s is not None
        return math.log2(self.high_per_s / self.low_per_s) / (self.own - 1)

    @property
    def outside(self) -> str:
        """Why a row has no value; the notes say on which side the knee lies, and so do the passes."""
        return f"{NOT_SHOWN}there is no knee from {self.rates[0]:g} to {self.rates[-1]:g} requests/s"

    def among(self, variants: Iterable[str]) -> list[str]:
        """Those of `variants` whose rates are searched, with what is predicted for them."""
        return [name for name in variants if not self.variants or name.removesuffix(PREDICTED) in self.variants]

    def points(self, load: Workload) -> list[Point]:
        """One a rate; `load` is what comes at the first of them."""
        found = []
        for rate in self.rates:
            values = {**self.at, RATE: rate}
            if self.seconds and isinstance(load, Arriving) and load.counted_by:
                wanted, key = math.ceil(rate * self.seconds), f"workload.{load.counted_by}"
                values[key] = max(self.at.get(key, load.num_arrivals), min(wanted, load.most or wanted))
            found.append(Point(f"{PASS}{rate:g}/s", values))
        return found

    @property
    def result(self) -> list[Point]:
        """Where what is found stands; none where nothing is searched."""
        return [Point(SEARCH, dict(self.at), {"search": "result"})] if self.rates else []


class Undecided(Exception):
    """A pass does not count, so that nobody knows where to go on. Only where the machine changed its speed is it made
    again, as every pass is."""


@dataclass
class Searches:
    """The searches of a run: one a variant and repeat. `visited` are the names of the points that were measured."""

    session: Session
    settings: RateSearch
    points: Sequence[Point]  # of the settings
    inputs: Callable[[Point], Inputs]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    visited: set[str] = field(default_factory=set)

    def round(self, repeat: int) -> None:
        for variant in self.settings.among(self.session.order(repeat)):
            self._search(variant, repeat)

    def _search(self, variant: str, repeat: int) -> None:
        session, settings, rates = self.session, self.settings, self.settings.rates
        shares: dict[int, float] = {}
        of = f"{session.labels[variant]}, search {repeat + 1}"

        def meets(index: int) -> bool:
            point = self.points[index]
            self.visited.add(point.name)
            planned = index < settings.own
            rows = session.alone(session.cells[variant, point.name], self.inputs(point), repeat, planned)
            kept = next(row for row in reversed(rows) if row.metric == KEPT)
            if not kept.valid:
                raise Undecided(f"the pass at {rates[index]:g}/s does not count: {kept.reason}")
            shares[index] = kept.value
            met = kept.value >= settings.share
            if met and any(row.is_burst for row in rows):
                raise Undecided(  # where requests had to wait, a queue has formed
                    f"{NOT_SHOWN}the requests at {rates[index]:g}/s had all come before a queue could form; raise "
                    "workload.count or experiment.search.seconds"
                )
            return met

        def highest(first: int, end: int) -> int:
            """Of the rates from `first` to `end`, or the one before them."""
            return first + bisect_left(range(first, end), True, key=lambda index: not meets(index)) - 1

        try:
            end = settings.own
            found = highest(0, end)
            while found == end - 1 and end < len(rates):
                found, end = highest(end, end + settings.doubling), end + settings.doubling
        except Undecided as why:
            value, reason = 0.0, str(why)
        else:
            inside = 0 <= found < len(rates) - 1
            value, reason = (rates[found], "") if inside else (0.0, settings.outside)
            told = [
                f"{100 * shares[index]:.0f} % of the requests kept the SLO at {rates[index]:g}/s"
                for index in (found, found + 1)
                if 0 <= index < len(rates)
            ]
            if not inside:
                told[0] += ", the end of the range"
                if settings.doublings and found >= 0:
                    told[0] += f", {settings.doublings} doublings above it"
            self.notes.append(f"{of}: {' and '.join(told)}.")
        (at,) = settings.result
        self.rows.append(Row(variant, at.name, repeat, FOUND, value, formulas.describe(FOUND).unit, not reason, reason))
