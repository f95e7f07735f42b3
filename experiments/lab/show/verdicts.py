"""What gates and claims found, in words: of a variant's gates one line where they passed and one for each that did not,
of claims one a quantity, with its target and its aim."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.lab.judge.claims import Judgement, Verdict
from experiments.lab.judge.gate import ErrorGate, Gate
from experiments.lab.show import wording
from experiments.lab.show.effects import is_aim, quantity
from experiments.lab.store.result import Result, RunInfo

SHOWN = "shown"  # the verdict on tokens of which nothing is asked


@dataclass(frozen=True)
class Line:
    claim: str
    verdict: str
    measured: str
    source: str
    why: str = ""  # there is no other verdict
    aim: str = ""  # the verdict on the bound that lies further


def lines(result: Result) -> list[Line]:
    gates: dict[tuple[str, ...], list[Gate | ErrorGate]] = {}
    for gate in sorted(result.info.every_gate, key=lambda gate: (isinstance(gate, ErrorGate), not gate.passed)):
        kind = (gate.variant, type(gate).__name__, "" if isinstance(gate, ErrorGate) else gate.against)
        gates.setdefault(kind if gate.passed else (*kind, str(gate.point)), []).append(gate)
    claims: dict[object, list[Judgement]] = {}
    for judged in result.judgements:
        claims.setdefault((quantity(judged.claim), judged.claim.bound), []).append(judged)
    return [
        *(_of_gates(alike, result.info) for alike in gates.values()),
        *(line for alike in claims.values() for line in _of_claims(alike, result.info)),
    ]


def counted(result: Result) -> str:
    """`2 supported, 1 refuted; aims: 1 supported`"""
    parts = []
    for start, aims in (("", False), ("aims: ", True)):
        counts = Counter(j.verdict for j in result.judgements if is_aim(j.claim) is aims)
        parts += [start + ", ".join(f"{counts[v]} {v.value}" for v in Verdict if counts[v])] if counts else []
    return "; ".join(parts)


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
        if count == 1:
            measured += _difference(first)
        if first.against:
            claim = f"{label} answers each request as {first.against}"
        elif first.needed_share > 0:
            claim = f"{label} generates the same greedy tokens as {other}"
        else:
            claim = f"{label}: greedy tokens up to each request's first difference from {other}"
            verdict = SHOWN if first.passed else verdict
    every = "all " if count == len(info.points) else ""
    where = f", at {every}{count} points" if count > 1 else f" at {first.point}" if first.point else ""
    return Line(claim + where, verdict, measured, "the gate")


def _difference(gate: Gate) -> str:
    needed = f", {wording.share(gate.needed_share)} needed" if 0 < gate.needed_share < 1 else ""
    at = gate.first_difference
    if at is None:
        return needed
    return f"{needed} (first difference: request {at.request}, token {at.position}: {at.expected} became {at.got})"


def _of_claims(alike: Sequence[Judgement], info: RunInfo) -> list[Line]:
    """On one quantity: an aim stands beside the bound before it."""
    found: list[Line] = []
    aims = [j for j in alike if is_aim(j.claim)]
    for judged in [j for j in alike if not is_aim(j.claim)] or aims:
        beside = aims.pop(0) if aims and not is_aim(judged.claim) else None
        words, source = wording.claim(judged.claim, info), judged.claim.source
        if beside is not None:
            words += f" (aim: {wording.bound(beside.claim, info)})"
            source += f"; {beside.claim.source}" if beside.claim.source != "aim" else ""
        measured = wording.measured(judged, info)
        aim = beside.verdict.value if beside else ""
        found.append(Line(words, judged.verdict.value, measured, source, judged.reason, aim))
    return found
