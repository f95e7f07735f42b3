"""What the gates found, in words: one line a variant where it passed, one for each point where it did not."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.lab.judge.claims import Verdict
from experiments.lab.judge.gate import ErrorGate, Gate
from experiments.lab.show import wording
from experiments.lab.store.result import RunInfo

Line = tuple[str, str, str]


def gate_lines(info: RunInfo) -> list[Line]:
    """Claim, verdict, figure."""
    return [*_token_lines(info), *_error_lines(info)]


def _token_lines(info: RunInfo) -> list[Line]:
    lines = []
    kinds = dict.fromkeys((gate.variant, gate.against) for gate in info.gates)
    for kind in kinds:
        passed = [gate for gate in info.gates if (gate.variant, gate.against) == kind and gate.passed]
        if passed:
            lines.append((_same_tokens(passed, info), Verdict.supported.value, _gate_figures(passed)))
    failed = [gate for gate in info.gates if not gate.passed]
    return [*lines, *((_gate_claim(gate, info), Verdict.refuted.value, _gate_figure(gate)) for gate in failed)]


def _error_lines(info: RunInfo) -> list[Line]:
    lines = []
    for variant, label in info.variants.items():
        own = [gate for gate in info.error_gates if gate.variant == variant]
        passed = [gate for gate in own if gate.passed]
        if passed:
            worst = max(passed, key=lambda gate: gate.error)
            lines.append((_error_claim(label, passed, info), Verdict.supported.value, _error_figure(worst)))
        for gate in own:
            if not gate.passed:
                lines.append((_error_claim(label, [gate], info), Verdict.refuted.value, _error_figure(gate)))
    return lines


def _same_tokens(gates: Sequence[Gate], info: RunInfo) -> str:
    if len(gates) == 1:
        return _gate_claim(gates[0], info)
    return f"{_gate_claim(gates[0], info).removesuffix(f' at {gates[0].point}')}, {_at_all(len(gates), info)}"


def _at_all(count: int, info: RunInfo) -> str:
    return f"at all {count} points" if count == len(info.points) else f"at {count} points"


def _gate_figures(gates: Sequence[Gate]) -> str:
    if len(gates) == 1:
        return _gate_figure(gates[0])
    equal, total = sum(g.equal_tokens for g in gates), sum(g.total_tokens for g in gates)
    return f"{equal:,} of {total:,} tokens"


def _gate_claim(gate: Gate, info: RunInfo) -> str:
    at = f" at {gate.point}" if gate.point else ""
    label, other = info.variants[gate.variant], info.variants[str(info.baseline)]
    if gate.against:
        return f"{label} answers each request as {gate.against}{at}"
    return f"{label} generates the same greedy tokens as {other}{at}"


def _gate_figure(gate: Gate) -> str:
    figure = f"{gate.equal_tokens:,} of {gate.total_tokens:,} tokens"
    if gate.first_difference is not None:
        where = gate.first_difference
        figure += (
            f" (first difference: request {where.request}, token {where.position}: {where.expected} became {where.got})"
        )
    return figure


def _error_claim(label: str, gates: Sequence[ErrorGate], info: RunInfo) -> str:
    first = gates[0]
    claim = f"{label}: relative error at most {wording.number(first.allowed)} against {first.against}"
    if len(gates) > 1:
        return f"{claim}, {_at_all(len(gates), info)}"
    return f"{claim} at {first.point}" if first.point else claim


def _error_figure(gate: ErrorGate) -> str:
    agreed = f"; {gate.equal_rows:,} of {gate.rows:,} greedy tokens agree" if gate.rows else ""
    return f"{wording.number(gate.error)}{agreed}"
