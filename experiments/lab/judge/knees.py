"""What is kept of a rate at which requests arrive: goodput; and where the knees of a run's searches lie, by the passes
that each search has made: rate_search.py makes them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments.lab.config.spec import IN_TIME, RATE
from experiments.lab.judge.stats import Kept, Part
from experiments.lab.store.rows import Row, Turn

FOUND = "slo_rate_rps"  # the metric that a search gives
KEPT = "slo_share"  # and the one that it looks at
GOODPUT = "goodput_rps"
SEARCH = "search"  # the point that it is, and
PASS = f"{SEARCH} at "  # what begins the name of that of each of its passes


def share(config: Mapping[str, Any]) -> float:
    """Of the requests, which must come in time at a rate that a run of this config calls sustained."""
    return float((config.get("experiment", {}).get("search") or {}).get("share", IN_TIME))


def offered(settings: Mapping[str, Any]) -> float | None:
    """The rate of arrivals that a point states, in requests a second."""
    return next((value for key, value in settings.items() if key in (RATE, RATE.rpartition(".")[2])), None)


def with_goodput(rows: Sequence[Row], points: Mapping[str, Mapping[str, Any]], config: Mapping[str, Any]) -> list[Row]:
    """The rows, with goodput at a stated rate of arrivals as the share in time times that rate. Over the time of the
    whole pass, which a row may be, it loses by the answers that are still under way when the last request arrives. What
    passes were too short to tell is told here where in all of them fewer than `share` were in time, so that a queue has
    formed: else nobody knows whether that rate could be kept up."""
    rates = {name: rate for name, settings in points.items() if (rate := offered(settings)) is not None}
    place = lambda row: (row.variant, row.point, row.process, row.repeat)  # noqa: E731
    kept = {place(row): row.value for row in rows if row.metric == KEPT and row.valid and row.point in rates}
    least, best = share(config), defaultdict[tuple[str, str], float](float)
    for (variant, point, *_), value in kept.items():
        best[variant, point] = max(best[variant, point], value)

    def told(row: Row) -> bool:
        late = row.is_burst and best[row.variant, row.point] < least
        return row.metric == GOODPUT and place(row) in kept and (row.valid or late)

    return [
        replace(row, value=Part(kept[place(row)] * rates[row.point], rates[row.point]), valid=True, reason="")
        if told(row)
        else row
        for row in rows
    ]


def bracketed(rows: Sequence[Row], points: Mapping[str, Mapping[str, Any]], config: Mapping[str, Any]) -> list[Row]:
    """The rows, with those of searches that came to an end as `Kept`, also where the knee lies outside of the range.
    What is at other points than `points`, as a figure has some of them, stays as it is."""
    if not any(row.metric == FOUND and row.point in points for row in rows):
        return list(rows)
    least, asked = share(config), config.get("experiment", {}).get("search") or {}
    # A run keeps the points that its searches have visited; which rates there were to find is in its config alone.
    from experiments.lab.measure.rate_search import RateSearch

    ends = RateSearch(**asked).rates
    passes = defaultdict[tuple[str, Turn], list[Row]](list)
    for row in rows:
        if row.metric == KEPT and row.valid and PASS in row.point and row.point in points:
            passes[row.variant, (row.process, row.repeat)].append(row)

    def knee(found: Row) -> Row:
        if found.metric != FOUND or found.is_fault or found.is_absent or found.point not in points:
            return found
        at = points[found.point].items()
        own = [row for row in passes[found.variant, (found.process, found.repeat)] if at <= points[row.point].items()]
        kept = [points[row.point][RATE] for row in own if row.value >= least]
        missed = [points[row.point][RATE] for row in own if row.value < least]
        rates = [*ends, *kept, *missed]
        if not own:
            return found
        value = Kept(max(kept, default=0.0), min(missed, default=math.inf), (min(rates), max(rates)))
        return replace(found, value=value, valid=True, reason="")

    return [knee(row) for row in rows]
