"""What an ablation has found so far, round by round: rows, comparisons of tokens, notes."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from experiments.lab.judge import validity
from experiments.lab.judge.gate import Gate, Tokens, compare
from experiments.lab.judge.metrics import Context
from experiments.lab.measure import cells, traces
from experiments.lab.measure.cells import Cell, Pass
from experiments.lab.measure.clocks import HOST_BESIDE_GPU, MAX_DRIFT
from experiments.lab.store.rows import ABSENT, LATE, Row

Key = tuple[str, str]  # variant, point


@dataclass(frozen=True)
class Round:
    rows: list[Row] = field(default_factory=list)
    gates: dict[Key, Gate] = field(default_factory=dict)  # of tokens, against the baseline's
    tokens: dict[Key, Tokens] = field(default_factory=dict)
    steps: list[traces.StepRow] = field(default_factory=list)
    requests: list[traces.RequestRow] = field(default_factory=list)
    gaps: list[traces.GapRow] = field(default_factory=list)
    experts: list[traces.ExpertRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Ledger:
    """A round is entered whole: what stops a run in the middle of one leaves nothing of it, unless it is the first."""

    metrics: Sequence[str]
    baseline: str
    labels: Mapping[str, str]  # of the variants, for notes
    contexts: Mapping[Key, Context]
    vocab_size: int
    timeline: str | None  # the point whose steps are kept; None: no point's

    def __post_init__(self) -> None:
        self.rounds: list[Round] = []
        self._host_drifts: list[float] = []  # of all passes
        self._late_readings: list[float] = []  # of all passes, the share of steps
        self._tried = Counter[tuple[Key, int]]()  # how often each pass was

    def enter(
        self, repeat: int, passes: Sequence[tuple[Cell, Sequence[Pass]]], absent: Sequence[tuple[Cell, str]] = ()
    ) -> None:
        """Of several attempts at a cell the last one counts; rows and requests of the others are kept, and are invalid.
        `absent` is what could not be measured, and why."""
        found = Round()
        judging = [attempts[-1] for cell, attempts in passes
                   if cell.variant == self.baseline and cells.tokens_must_agree(cell)]  # fmt: skip
        right = _told(judging[0]) if judging else None
        for cell, attempts in passes:
            for measured in attempts:
                self._judge(found, repeat, cell, measured)
            if repeat == 0 and cell.kind.can.steps and cell.point.name == self.timeline:
                found.steps.extend(traces.step_rows(*cell.key, attempts[-1].served))
            if (told := _told(attempts[-1])) is None:
                label = self.labels[cell.variant]
                found.notes.append(f"{label}: its tokens are not compared, because it does not tell their ids.")
                continue
            found.tokens[cell.key] = told
            if right is not None and cells.tokens_must_agree(cell):
                found.gates[cell.key] = compare(*cell.key, right, told)
        for cell, why in absent:
            found.rows.extend(cells.row(cell, repeat, name, 0.0, f"{ABSENT}{why}") for name in self.metrics)
        self.rounds.append(found)

    @property
    def notes(self) -> list[str]:
        notes = [note for found in self.rounds for note in found.notes]
        if many := [drift for drift in self._host_drifts if drift > MAX_DRIFT]:
            drifts = " to ".join(dict.fromkeys(f"{100 * drift:.0f}" for drift in (min(many), max(many))))
            counts = f"where a GPU computes, a pass is INVALID only from {100 * HOST_BESIDE_GPU:.0f} % on"
            passes = f"{len(many)} of {len(self._host_drifts)} passes"
            notes.append(f"The host's speed changed by {drifts} % during {passes}; {counts}.")
        if late := [share for share in self._late_readings if share]:
            notes.append(LATE.format(f"{len(late)} of {len(self._late_readings)}", f"{100 * max(late):.2g}"))
        return list(dict.fromkeys(notes))

    def tokens(self, key: Key) -> Tokens | None:
        """Of the first repeat."""
        return next((r.tokens[key] for r in self.rounds if key in r.tokens), None)

    def gates(self, keys: Sequence[Key]) -> list[Gate]:
        found = [[r.gates[key] for r in self.rounds if key in r.gates] for key in keys]
        return [functools.reduce(Gate.joined, own) for own in found if own]

    def _judge(self, found: Round, repeat: int, cell: Cell, measured: Pass) -> None:
        served = measured.served
        self._host_drifts.append(0.0 if measured.drift.gpu is None else measured.drift.host)
        against, label = self.contexts[cell.key], self.labels[cell.variant]
        floors = against.floors(served.records) if against.floors else ()  # once, for all metrics
        if against.floors:
            against = replace(against, floors=lambda _: floors)
        evidence = validity.Evidence(
            served,
            self.vocab_size,
            measured.drift,
            self.tokens(cell.key) if cells.tokens_must_agree(cell) else None,
            made_up_prompts=cells.drafts_on_made_up_prompts(cell),
            items=measured.items,
            before=measured.before,
            floors_s=[floor.seconds for floor in floors],
            stages=cell.engine.parallel.pipeline,
        )
        problem = validity.problem(evidence)
        rows, left_out = cells.rows(cell, repeat, self.metrics, against, served, problem)
        found.rows.extend(rows)
        attempt = self._tried[cell.key, repeat]
        self._tried[cell.key, repeat] += 1
        found.requests.extend(traces.request_rows(*cell.key, repeat, served, attempt=attempt, valid=not problem))
        found.gaps.extend([] if problem else traces.gap_rows(*cell.key, repeat, served))
        found.experts.extend([] if problem or repeat else traces.expert_rows(*cell.key, served))
        found.notes.extend(f"{label}: {reason}." for reason in left_out)
        caches = cell.kind.can.caches and cell.engine.cache.prefix_caching
        at = f" at {cell.point.name}" if cell.point.name else ""
        if remark := validity.few_hits(served, caches):
            found.notes.append(f"{label}{at}, repeat {repeat + 1}: {remark}.")
        self._late_readings.append(validity.late_readings(evidence))
        if served.window is not None:
            share = f"{100 * traces.RAMP:.0f} % of the time in which requests arrive, with what falls into them"
            found.notes.append(f"Ramps of the open loop are left out{at}: the first and the last {share}.")


def _told(measured: Pass) -> Tokens | None:
    """The tokens of each request; None where somebody does not tell them."""
    requests = measured.served.requests
    return [r.token_ids for r in requests] if all(r.tells_tokens for r in requests) else None
