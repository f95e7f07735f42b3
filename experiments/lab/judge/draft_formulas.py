"""Metrics of speculation: what becomes of drafts, and what Leviathan's formula says of a pass beforehand.

The prediction takes the pass's own rate of acceptance, a, and costs that were measured when the engine started
(`Served.step_costs`). Over steps without prompts, expected tokens (of a row with k drafts 1 + a + ... + a^k) are
divided by the seconds that steps with so many rows and drafts take. With overlap some rows are of requests that have
ended by then: they take their time, and their tokens, which nobody gets, do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from experiments.lab.judge.metrics import HIGHER, LOWER, NOTHING, Missing, Value, of_engine, total
from experiments.lab.measure.traces import Served
from mini_infer.core.plan import StepRecord

PLACES = 8  # behind a request's last token, of which acceptance is told one by one
NO_DRAFTS = Missing("there were no drafts", applies=False)
NO_DRAFT_MODEL = Missing("no draft model proposes", applies=False)
READ_LATE = Missing("drafting took longer than its steps: the ends of those before them were read late")
NO_COSTS = Missing("what its steps cost was not measured when the engine started", applies=False)
Records = Sequence[StepRecord]
Count = Callable[[Records], float]


def _accepted(records: Records) -> int:
    return sum(sum(record.accepted) for record in records)


def _drafted(records: Records) -> int:
    return sum(sum(record.drafted) for record in records)


def _tried(records: Records) -> int:
    """Drafts before which all were accepted. Those behind a rejected one were never tried."""
    return sum(sum(map(min, (*record.drafted[:1], *record.accepted), record.drafted)) for record in records)


def _at(place: int, counts: Callable[[StepRecord], Sequence[int]]) -> Count:
    return lambda records: sum(sum(counts(record)[place : place + 1]) for record in records)


def _ratio(above: Count, below: Count) -> Value:
    return lambda served: above(served.records) / count if (count := below(served.records)) else NO_DRAFTS


def _a_decode(count: Count) -> Callable[[Served], float]:
    return lambda served: count(served.records) / max(1, sum(record.decode_rows for record in served.records))


def _draft_time_share(served: Served) -> float | Missing:
    drafting = [record for record in served.records if record.draft_s or record.drafted]
    if not drafting:
        return NO_DRAFTS
    if not (proposing := sum(record.draft_s for record in drafting)):
        return NO_DRAFT_MODEL
    share = proposing / _seconds(drafting)
    # A step that launches much, such as a draft model that catches up, is told late that the one before it has ended.
    return share if share <= 1 else READ_LATE


def _decoding(served: Served) -> list[StepRecord]:
    return [record for record in served.records if record.decode_rows and not record.prefill_tokens]


def _seconds(records: Records) -> float:
    return sum(record.end_time - record.start_time for record in records)


def _decode_rate(served: Served) -> float | Missing:
    steps = _decoding(served)
    seconds = _seconds(steps)
    return sum(record.sampled_tokens for record in steps) / seconds if seconds > 0 else NOTHING


def _predict(served: Served) -> dict[str, float | Missing] | Missing:
    """What the formula says of the steps without prompts, all of them together, by the metric's name."""
    steps, costs = _decoding(served), served.step_costs
    if costs is None:
        return NO_COSTS if _drafted(served.records) else NO_DRAFTS
    if not steps:
        return NOTHING
    tried = _tried(steps)
    acceptance = _accepted(steps) / tried if tried else 0.0
    tokens = seconds = plain_s = 0.0
    drafted_s = verify_s = draft_s = 0.0  # of the steps with drafts: without them, verification alone, one draft a row
    for record in steps:
        rows = record.decode_rows
        lengths = (np.arange(rows)[:, None] < np.array(record.drafted)).sum(axis=1)  # at least 1 draft, at least 2, ...
        step_s, without_s = costs.step_seconds(lengths), costs.verify_seconds(rows, 1)
        computed = rows + sum(count * acceptance ** (place + 1) for place, count in enumerate(record.drafted))
        tokens += computed * record.decode_tokens / rows
        seconds += step_s
        plain_s += without_s
        if record.drafted:
            drafted_s += without_s
            verify_s += step_s - sum(map(costs.draft_seconds, record.drafted))
            draft_s += costs.draft_seconds(rows)
    draft_cost: float | Missing = draft_s / drafted_s if draft_s else NO_DRAFT_MODEL
    return {
        "formula_tokens_per_s": tokens / seconds,
        "formula_speedup": tokens / seconds / (sum(record.decode_tokens for record in steps) / plain_s),
        "draft_cost": draft_cost if drafted_s else NO_DRAFTS,
        "verify_cost": verify_s / drafted_s if drafted_s else NO_DRAFTS,
    }


def _predicted(name: str) -> Value:
    return lambda served: found if isinstance(found := _predict(served), Missing) else found[name]


def _share_of_formula(served: Served) -> float | Missing:
    measured, told = _decode_rate(served), _predicted("formula_tokens_per_s")(served)
    if isinstance(told, Missing):
        return told
    return measured if isinstance(measured, Missing) else measured / told


_RATE = "output tokens per second of the steps without prompts"
_DRAFTED = [_at(place, lambda record: record.drafted) for place in range(PLACES)]  # by place
_ACCEPTED = [_at(place, lambda record: record.accepted) for place in range(PLACES)]
DRAFTS = {
    "acceptance": of_engine("share of the tried drafts that were accepted", "", HIGHER, _ratio(_accepted, _tried),
                            share=True),
    "accepted_of_drafted": of_engine("share of all drafts that were accepted", "", HIGHER, _ratio(_accepted, _drafted),
                                     share=True),
    **{f"acceptance_{n}": of_engine(f"share of the drafts in place {n} that were accepted", "", HIGHER,
                                    _ratio(accepted, drafted), share=True)
       for n, (accepted, drafted) in enumerate(zip(_ACCEPTED, _DRAFTED, strict=True), start=1)},
    "draft_time_share": of_engine("share of the time of steps with drafts that the draft model takes", "", LOWER,
                                  _draft_time_share, share=True),
    "accepted_length": of_engine("tokens that a request with drafts gets in a step, mean", "tokens", HIGHER, _ratio(
        lambda records: _DRAFTED[0](records) + _accepted(records), _DRAFTED[0])),
    "tokens_per_decode": of_engine("tokens that a running request gets in a step, mean", "tokens", HIGHER,
                                   lambda served: 1 + _a_decode(_accepted)(served)),
    "drafts_per_decode": of_engine("drafts of a running request in a step, mean", "tokens", LOWER, _a_decode(_drafted)),
    "wasted_tokens": of_engine("drafts that were rejected", "tokens", LOWER,
                               total(lambda r: sum(r.drafted) - sum(r.accepted))),
    "decode_tokens_per_s": of_engine(_RATE, "tokens/s", HIGHER, _decode_rate),
    "formula_tokens_per_s": of_engine(f"{_RATE}, by Leviathan's formula", "tokens/s", HIGHER,
                                      _predicted("formula_tokens_per_s")),
    "formula_share": of_engine(f"{_RATE}, measured / by Leviathan's formula", "", HIGHER, _share_of_formula),
    "formula_speedup": of_engine("speed-up of steps without prompts, by Leviathan's formula", "", HIGHER,
                                 _predicted("formula_speedup")),
    "draft_cost": of_engine("time of one draft token a row, in steps without drafts", "", LOWER,
                            _predicted("draft_cost")),
    "verify_cost": of_engine("time of a step that verifies drafts, in steps without drafts", "", LOWER,
                             _predicted("verify_cost")),
}  # fmt: skip
