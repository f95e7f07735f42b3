"""What an ablation has found so far, round by round: rows, comparisons of tokens, notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from experiments.lab.judge import timing, validity
from experiments.lab.judge.evidence import Evidence
from experiments.lab.judge.gate import Comparison, Gate, compare, gate
from experiments.lab.judge.metrics import Context
from experiments.lab.measure import cells
from experiments.lab.measure.cells import Cell, Pass
from experiments.lab.measure.steps import RequestRow, StepRow, request_rows, step_rows
from experiments.lab.measure.traces import RAMP
from experiments.lab.store.rows import Row
from mini_infer.core.config import LoadFormat

Key = tuple[str, str]  # variant, point
Tokens = Sequence[Sequence[int]]  # of each request
RAMPS = f"the first and the last {100 * RAMP:.0f} % of the time in which requests arrive, with what falls into them"


@dataclass(frozen=True)
class Round:
    """All variants at one point, once."""

    rows: list[Row] = field(default_factory=list)
    comparisons: dict[Key, Comparison] = field(default_factory=dict)  # with the baseline
    tokens: dict[Key, Tokens] = field(default_factory=dict)
    steps: list[StepRow] = field(default_factory=list)
    requests: list[RequestRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Terms:
    """What passes are judged by.

    Attributes:
        labels: of the variants, for notes.
        exact: whether greedy tokens must be the same in all repeats.
        timeline: the point whose steps are kept; None: no point's.
    """

    metrics: Sequence[str]
    baseline: str
    labels: Mapping[str, str]
    contexts: Mapping[Key, Context]
    vocab_size: int
    exact: bool
    timeline: str | None


class Ledger:
    """A round is entered whole: what stops a run in the middle of one leaves nothing of it."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.rounds: list[Round] = []

    def enter(
        self, repeat: int, passes: Sequence[tuple[Cell, Sequence[Pass]]], absent: Sequence[tuple[Cell, str]] = ()
    ) -> None:
        """Of several attempts at a cell the last one counts; the rows of the others are kept, and are invalid.

        Args:
            absent: what could not be measured, and why.
        """
        found, labels = Round(), self._terms.labels
        baseline = next(((c, _tokens(each[-1])) for c, each in passes if c.variant == self._terms.baseline), None)
        for cell, attempts in passes:
            key, last = (cell.variant, cell.point.name), attempts[-1]
            for measured in attempts:
                self._judge(found, repeat, cell, measured)
            found.requests.extend(request_rows(*key, repeat, last.served))
            if repeat == 0 and cell.kind.can.steps and cell.point.name == self._terms.timeline:
                found.steps.extend(step_rows(*key, last.served))
            tokens = _tokens(last)
            why = "because it does not tell their ids"
            if tokens is not None:
                found.tokens[key] = tokens
                if baseline is None or baseline[1] is None:
                    continue
                if _weights(cell) == _weights(baseline[0]):
                    found.comparisons[key] = compare(baseline[1], tokens)
                    continue
                why = "because the random weights of the two differ"
            others = " with the baseline's" if tokens is not None else ""
            found.notes.append(f"{labels[cell.variant]}: its tokens are not compared{others}, {why}.")
        for cell, why in absent:
            found.rows.extend(cells.absent_rows(cell, repeat, self._terms.metrics, why))
        self.rounds.append(found)

    def tokens(self, key: Key) -> Tokens | None:
        """Of the first repeat."""
        return next((r.tokens[key] for r in self.rounds if key in r.tokens), None)

    def gates(self, keys: Sequence[Key], needed_share: float) -> list[Gate]:
        """Of those that have been measured."""
        found = {key: [r.comparisons[key] for r in self.rounds if key in r.comparisons] for key in keys}
        return [gate(*key, comparisons, needed_share) for key, comparisons in found.items() if comparisons]

    def _judge(self, found: Round, repeat: int, cell: Cell, measured: Pass) -> None:
        terms, served = self._terms, measured.served
        key = (cell.variant, cell.point.name)
        against, label = terms.contexts[key], terms.labels[cell.variant]
        first = self.tokens(key) if terms.exact else None
        evidence = Evidence(
            served,
            terms.vocab_size,
            measured.drift,
            first,
            made_up_prompts=cells.drafts_on_made_up_prompts(cell),
            items=measured.items,
            before=measured.before,
            floors_s=[floor.seconds for floor in against.floors(served.records)] if against.floors else (),
        )
        found.rows.extend(cells.rows(cell, repeat, terms.metrics, against, evidence))
        found.notes.extend(f"{label}: {reason}." for reason in cells.left_out(terms.metrics, against, served))
        caches = cell.kind.can.caches and cell.engine.cache.prefix_caching
        at = f" at {cell.point.name}" if cell.point.name else ""
        for remark in (validity.few_hits(served, caches), timing.shared_times(evidence)):
            if remark:
                found.notes.append(f"{label}{at}, repeat {repeat + 1}: {remark}.")
        if served.steady().window is not None:
            found.notes.append(f"Ramps of the open loop are left out{at}: {RAMPS}.")


def _tokens(measured: Pass) -> Tokens | None:
    """Of each request; None where one does not tell them."""
    requests = measured.served.requests
    return [r.token_ids for r in requests] if all(r.tells_tokens for r in requests) else None


def _weights(cell: Cell) -> str:
    """Whose weights it has: of random ones vLLM makes its own, and transformers gets the engine's. A server elsewhere
    is asked for the same model, but who knows what random weights it has."""
    own = cell.kind.can.own_weights and cell.engine.model.load_format is LoadFormat.dummy
    return "its own" if own else "the engine's"
