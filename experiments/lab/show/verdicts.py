"""What gates and claims found, in words: one line for a variant's gates that passed, for each other, for each claim."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.lab.judge.claims import Judgement, Verdict
from experiments.lab.judge.gate import ErrorGate, Gate
from experiments.lab.show import wording
from experiments.lab.store.result import Result, RunInfo


@dataclass(frozen=True)
class Line:
    claim: str
    verdict: str
    measured: str
    source: str
    why: str = ""  # there is no other verdict


def lines(result: Result) -> list[Line]:
    gates: dict[tuple[str, ...], list[Gate | ErrorGate]] = {}
    for gate in sorted(result.info.every_gate, key=lambda gate: (isinstance(gate, ErrorGate), not gate.passed)):
        kind = (gate.variant, type(gate).__name__, "" if isinstance(gate, ErrorGate) else gate.against)
        gates.setdefault(kind if gate.passed else (*kind, str(gate.point)), []).append(gate)
    return [
        *(_of_gates(alike, result.info) for alike in gates.values()),
        *(of_claim(judged, result.info) for judged in result.judgements),
    ]


def counted(result: Result) -> str:
    """`2 supported, 1 refuted`"""
    counts = Counter(judged.verdict for judged in result.judgements)
    return ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict])


def _of_gates(gates: Sequence[Gate | ErrorGate], info: RunInfo) -> Line:
    """Of one variant and kind; they are several where all have passed."""
    first, count = gates[0], len(gates)
    label, other = info.variants[first.variant], info.variants.get(str(info.baseline), "")
    verdict = (Verdict.supported if first.passed else Verdict.refuted).value
    if isinstance(first, ErrorGate):
        claim = f"{label}: relative error at most {wording.number(first.allowed)} against {first.against}"
        worst = max((gate for gate in gates if isinstance(gate, ErrorGate)), key=lambda gate: gate.error)
        agreed = f"; {worst.equal_rows:,} of {worst.rows:,} greedy tokens agree" if worst.rows else ""
        measured = f"{wording.number(worst.error)}{agreed}"
    else:
        tokens = [gate for gate in gates if isinstance(gate, Gate)]
        measured = f"{sum(g.equal_tokens for g in tokens):,} of {sum(g.total_tokens for g in tokens):,} tokens"
        if count == 1 and (at := first.first_difference) is not None:
            where = f"request {at.request}, token {at.position}"
            measured += f" (first difference: {where}: {at.expected} became {at.got})"
        if first.against:
            claim = f"{label} answers each request as {first.against}"
        else:
            claim = f"{label} generates the same greedy tokens as {other}"
    every = "all " if count == len(info.points) else ""
    where = f", at {every}{count} points" if count > 1 else f" at {first.point}" if first.point else ""
    return Line(claim + where, verdict, measured, "the gate")


def of_claim(judged: Judgement, info: RunInfo) -> Line:
    words, figure = wording.claim(judged.claim, info), wording.measured(judged, info)
    return Line(words, judged.verdict.value, figure, judged.claim.source, judged.reason)
