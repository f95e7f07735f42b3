"""Metrics of speculation: what becomes of drafts, and what Leviathan's formula says of a pass beforehand.

The prediction takes two things: the pass's own rate of acceptance, and costs that were measured outside it, when the
engine started (`Served.step_costs`). Step by step, over those without prompts,

    tokens    rows + a for each row's first draft + a^2 for its second ...: where all have k, rows (1 + a + ... + a^k)
    seconds   of a step with so many rows and drafts, proposing included, from the table

and their ratio is the formula's tokens a second: expected tokens / (k c + v) of a step without drafts. With overlap
some rows are of requests that have ended by then: they take their time, and their tokens, which nobody gets, do not
count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from experiments.lab.judge.metrics import (
    NOT_A_PEERS,
    NOTHING,
    Better,
    Compute,
    Context,
    Missing,
    of_engine,
    of_pass,
    total,
)
from experiments.lab.measure.traces import Served
from mini_infer.core.plan import StepRecord
from mini_infer.speculative.policy.costs import StepCosts

PLACES = 8  # behind a request's last token, of which acceptance is told one by one
NO_DRAFTS = Missing("there were no drafts", applies=False)
NO_DRAFT_MODEL = Missing("no draft model proposes", applies=False)
NO_COSTS = Missing("what its steps cost was not measured when the engine started", applies=False)
_HIGH, _LOW = Better.higher, Better.lower


# ------------------------------------------------------------------------------------------------ what became of drafts


def _accepted(served: Served) -> int:
    return sum(sum(record.accepted) for record in served.records)


def _drafted(served: Served) -> int:
    return sum(sum(record.drafted) for record in served.records)


def _at(place: int, counts: Callable[[StepRecord], tuple[int, ...]]) -> Callable[[StepRecord], int]:
    return lambda record: counts(record)[place] if place < len(counts(record)) else 0


def _of_drafts(compute: Callable[[Served], tuple[float, float]]) -> Compute:
    """A ratio, where there were drafts at all."""

    def ratio(served: Served) -> float | Missing:
        above, below = compute(served)
        return above / below if below else NO_DRAFTS

    return of_engine(ratio)


def _tried(served: Served) -> int:
    """Drafts before which all were accepted. Those behind a rejected one were never tried."""
    tried = 0
    for record in served.records:
        before = (*record.drafted[:1], *record.accepted)
        tried += sum(map(min, before, record.drafted))
    return tried


def _acceptance_at(place: int) -> Compute:
    def ratio(served: Served) -> tuple[float, float]:
        accepted, drafted = _at(place, lambda r: r.accepted), _at(place, lambda r: r.drafted)
        return sum(map(accepted, served.records)), sum(map(drafted, served.records))

    return _of_drafts(ratio)


def _verified_rows(served: Served) -> int:
    return sum(map(_at(0, lambda r: r.drafted), served.records))


def _draft_time_share(served: Served) -> float | Missing:
    drafting = [record for record in served.records if record.draft_s or record.drafted]
    if not drafting:
        return NO_DRAFTS
    proposing = sum(record.draft_s for record in drafting)
    return proposing / _seconds(drafting) if proposing else NO_DRAFT_MODEL


# ------------------------------------------------------------------------------------------------------- the prediction


def expected_tokens(acceptance: float, k: int) -> float:
    """Tokens a step brings on average with k drafts, each accepted with probability `acceptance` if those before it
    are: (1 - a^(k+1)) / (1 - a), the capped geometric of Leviathan et al. 2023 (arXiv:2211.17192, equation 1)."""
    return sum(acceptance**i for i in range(k + 1))


def leviathan_speedup(acceptance: float, k: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Tokens a second with k drafts over those without (theorem 3.8 of Leviathan et al., with verify_cost = 1).

    Args:
        draft_cost: of one draft token, in steps of the target without drafts.
        verify_cost: of a step with 1 + k tokens a row, in the same unit.
    """
    return expected_tokens(acceptance, k) / (k * draft_cost + verify_cost)


@dataclass(frozen=True)
class _Prediction:
    """Of the steps without prompts, all of them together. Seconds are the table's."""

    tokens: float
    seconds: float
    rows: int  # that brought tokens
    plain_s: float  # of the same steps without drafts

    # Of the steps with drafts:
    drafted_s: float  # without their drafts
    verify_s: float  # verification alone
    draft_s: float  # a token of the draft for every row


def _decoding(served: Served) -> list[StepRecord]:
    """Steps in which nothing but decoding was done."""
    return [record for record in served.records if record.decode_rows and not record.prefill_tokens]


def _seconds(records: list[StepRecord]) -> float:
    return sum(record.end_time - record.start_time for record in records)


def _decode_rate(served: Served) -> float | Missing:
    steps = _decoding(served)
    seconds = _seconds(steps)
    return sum(record.sampled_tokens for record in steps) / seconds if seconds > 0 else NOTHING


def _predict(served: Served) -> _Prediction | Missing:
    steps, costs = _decoding(served), served.step_costs
    if costs is None:
        return NO_COSTS if _drafted(served) else NO_DRAFTS
    if not steps:
        return NOTHING
    decoding = replace(served, records=tuple(steps))
    tried = _tried(decoding)
    acceptance = _accepted(decoding) / tried if tried else 0.0
    tokens = seconds = plain_s = drafted_s = verify_s = draft_s = 0.0
    for record in steps:
        rows = record.decode_rows
        step_s, without_s = _step_seconds(record, costs), costs.verify_seconds(rows, 1)
        computed = rows + sum(count * acceptance ** (place + 1) for place, count in enumerate(record.drafted))
        tokens += computed * record.decode_tokens / rows
        seconds += step_s
        plain_s += without_s
        if record.drafted:
            drafted_s += without_s
            verify_s += step_s - sum(map(costs.draft_seconds, record.drafted))
            draft_s += costs.draft_seconds(rows)
    return _Prediction(tokens, seconds, sum(r.decode_tokens for r in steps), plain_s, drafted_s, verify_s, draft_s)


def _step_seconds(record: StepRecord, costs: StepCosts) -> float:
    lengths = np.zeros(record.decode_rows, dtype=np.int64)
    for count in record.drafted:  # rows with at least one draft, with at least two, ...
        lengths[:count] += 1
    return costs.step_seconds(lengths)


def _predicted(part: Callable[[_Prediction], float | Missing]) -> Compute:
    def compute(served: Served) -> float | Missing:
        found = _predict(served)
        return found if isinstance(found, Missing) else part(found)

    return of_engine(compute)


def _draft_cost(found: _Prediction) -> float | Missing:
    if not found.drafted_s:
        return NO_DRAFTS
    return found.draft_s / found.drafted_s if found.draft_s else NO_DRAFT_MODEL


def _share_of_formula(served: Served, context: Context) -> float | Missing:
    if not served.records:
        return NOT_A_PEERS
    measured, found = _decode_rate(served), _predict(served)
    if isinstance(found, Missing):
        return found
    return measured if isinstance(measured, Missing) else measured / (found.tokens / found.seconds)


DRAFTS = {
    "acceptance": of_pass(
        "share of the tried drafts that were accepted", "", _HIGH, _of_drafts(lambda s: (_accepted(s), _tried(s)))
    ),
    "accepted_of_drafted": of_pass(
        "share of all drafts that were accepted", "", _HIGH, _of_drafts(lambda s: (_accepted(s), _drafted(s)))
    ),
    **{
        f"acceptance_{place + 1}": of_pass(
            f"share of the drafts in place {place + 1} that were accepted", "", _HIGH, _acceptance_at(place)
        )
        for place in range(PLACES)
    },
    "accepted_length": of_pass(
        "tokens that a request with drafts gets in a step, mean",
        "tokens",
        _HIGH,
        _of_drafts(lambda s: (_verified_rows(s) + _accepted(s), _verified_rows(s))),
    ),
    "tokens_per_decode": of_pass(
        "tokens that a running request gets in a step, mean",
        "tokens",
        _HIGH,
        of_engine(lambda s: 1 + _accepted(s) / max(1, sum(r.decode_rows for r in s.records))),
    ),
    "drafts_per_decode": of_pass(
        "drafts of a running request in a step, mean",
        "tokens",
        _LOW,
        of_engine(lambda s: _drafted(s) / max(1, sum(r.decode_rows for r in s.records))),
    ),
    "decode_tokens_per_s": of_pass(
        "output tokens per second of the steps without prompts", "tokens/s", _HIGH, of_engine(_decode_rate)
    ),
    "formula_tokens_per_s": of_pass(
        "output tokens per second of the steps without prompts, by Leviathan's formula",
        "tokens/s",
        _HIGH,
        _predicted(lambda p: p.tokens / p.seconds),
    ),
    "formula_share": of_pass(
        "output tokens per second of the steps without prompts, measured / by Leviathan's formula",
        "",
        _HIGH,
        _share_of_formula,
    ),
    "formula_speedup": of_pass(
        "speed-up of steps without prompts, by Leviathan's formula",
        "",
        _HIGH,
        _predicted(lambda p: p.tokens / p.seconds / (p.rows / p.plain_s)),
    ),
    "draft_cost": of_pass(
        "time of one draft token a row, in steps without drafts",
        "",
        _LOW,
        _predicted(_draft_cost),
    ),
    "verify_cost": of_pass(
        "time of a step that verifies drafts, in steps without drafts",
        "",
        _LOW,
        _predicted(lambda p: p.verify_s / p.drafted_s if p.drafted_s else NO_DRAFTS),
    ),
    "draft_time_share": of_pass(
        "share of the time of steps with drafts that the draft model takes", "", _LOW, of_engine(_draft_time_share)
    ),
    "wasted_tokens": of_pass(
        "drafts that were rejected", "tokens", _LOW, total(lambda r: sum(r.drafted) - sum(r.accepted))
    ),
}
