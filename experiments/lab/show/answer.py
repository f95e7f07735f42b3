"""What an experiment found, in a sentence of plain words that the rows bear out, and what must be known before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from experiments.lab.judge import marks, pairs, stats
from experiments.lab.judge.claims import Verdict
from experiments.lab.judge.metrics import Better
from experiments.lab.show import effects, wording
from experiments.lab.show.effects import Effect, judgements
from experiments.lab.store.result import COMPLETE, Result, RunInfo
from experiments.lab.store.rows import Table

PARTS = 3  # of a sentence: two that matter, and what it costs
OFF = ("without", "off", "none of them", "eager", "kernel by kernel")  # labels of a baseline without the mechanism
ON = ("with", "on")
LARGE = 0.1  # a loss that cannot be excluded, and is worth naming


def answer(result: Result) -> str:
    """The sentence, and the count of verdicts."""
    return " ".join(part for part in (sentence(result), tally(result)) if part)


def sentence(result: Result) -> str:
    """`90 % shared: 7.56x requests/s (10.4 -> 78.8); 0 % shared: no loss above 1.1 % in requests/s.`"""
    of_pairs = pairs.sentence(result)
    if of_pairs:
        return of_pairs
    found = _chosen(effects.of_claims(result))
    if not found:
        return _without_claims(result)
    if all(effect.own is None for effect in found):
        return f"There is no answer: {found[0].reason or 'no valid measurement'}."
    who = {_who(effect, result.info) for effect in found}
    shared = who.pop() if len(who) == 1 else None
    parts, before = [], ("", "")
    for effect in found:
        here = ("" if shared is not None else _who(effect, result.info), wording.point(effect.cell[1]))
        parts.append(_part(effect, result.info, here if here != before else ()))
        before = here
    text = f"{shared}: {'; '.join(parts)}" if shared else "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def tally(result: Result) -> str:
    """`Claims: 2 supported, 1 refuted.`, and what counts against the numbers."""
    parts = [f"Claims: {verdicts(result)}."] if result.info.claims else []
    failed = sum(1 for gate in result.info.every_gate if not gate.passed)
    if failed:
        parts.append(f"Gate: {failed} of {len(result.info.every_gate)} comparisons FAILED.")
    absent = dict.fromkeys(result.info.variants[row.variant] for row in result.rows if row.is_absent)
    if absent:
        parts.append(f"Absent: {', '.join(absent)}.")
    if invalid(result):
        parts.append(f"INVALID: {invalid(result):,} of {len(result.rows):,} values.")
    return " ".join(parts)


def verdicts(result: Result) -> str:
    """`2 supported, 1 refuted`"""
    counts = Counter(j.verdict for j in judgements(result))
    return ", ".join(f"{counts[v]} {v.value}" for v in Verdict if counts[v])


def invalid(result: Result) -> int:
    return sum(1 for row in result.rows if row.is_fault)


def flags(result: Result) -> list[str]:
    """What a reader must know before any number."""
    found = []
    if result.info.status != COMPLETE:
        found.append(f"INCOMPLETE ({result.info.status.removeprefix('incomplete: ')})")
    if any(not gate.passed for gate in result.info.gates):
        found.append("tokens differ from the baseline's")
    if any(not gate.passed for gate in result.info.error_gates):
        found.append("numbers are too far from the reference's")
    return [*found, *marks.of(result)]


def figures(effect: Effect, info: RunInfo, against: bool = False) -> str:
    """`88.9 -> 13.4 ms`, or `13.4 ms against 88.9`; of a share in percent."""
    unit = info.metrics[effect.metric].unit
    own, base = (None if each is None else each.median for each in (effect.own, effect.base))
    if own is None:
        return wording.NOTHING
    as_share = unit == "" and 0 <= own <= 1 and 0 <= (base or 0) <= 1
    text = [wording.share(v) if as_share else wording.number(v) for v in (own, base) if v is not None]
    unit = f" {unit}" if unit and unit != wording.short(effect.metric, info) else ""
    if len(text) == 1:
        return f"{text[0]}{unit}"
    return f"{text[0]}{unit} against {text[1]}" if against else f"{text[1]} -> {text[0]}{unit}"


def _chosen(found: list[Effect]) -> list[Effect]:
    """The first, the next of another metric, and what guards against a loss; else whatever comes next."""
    if not found:
        return []
    first, rest = found[0], found[1:]
    other = next((effect for effect in rest if effect.metric != first.metric), None)
    guard = next((effect for effect in reversed(rest) if effect.guards and effect is not other), None)
    chosen = [first, *(effect for effect in (other, guard) if effect is not None)]
    return [*chosen, *(effect for effect in rest if effect not in chosen)][:PARTS]


def _who(effect: Effect, info: RunInfo) -> str:
    own = info.variants[effect.cell[0]]
    if effect.reference is None or effect.reference[0] == effect.cell[0]:
        return own if len(info.variants) > 1 else ""
    base = info.variants[effect.reference[0]]
    if base in OFF:
        return "" if own in ON else own
    return f"{own} against {base}"


def _part(effect: Effect, info: RunInfo, at: Sequence[str]) -> str:
    short, against = wording.short(effect.metric, info), bool(effect.reference) and not _is_off(effect, info)
    ratio = effect.ratio
    if effect.own is None:
        text = f"no figure of {short} that counts ({effect.reason or 'no valid measurement'})"
    elif effect.reference is not None and effect.reference[0] == effect.cell[0]:
        times = wording.number(ratio.median) if ratio else wording.NOTHING
        text = f"{times}x the {short} of {wording.point(effect.reference[1])}"
    elif ratio is None or ratio.low is None or ratio.high is None:
        alone = " (one valid repeat)" if effect.own is not None and effect.own.n == 1 else ""
        text = f"{short} {figures(effect, info, against)}{alone}"
    elif effect.told == 0:
        text = _nothing_shown(effect, short)
    elif effect.better is Better.higher and not wording.is_share(effect.metric, info):
        text = f"{wording.number(ratio.median)}x {short} ({figures(effect, info, against)})"
        text += "" if effect.told > 0 else ": worse"
    else:
        text = f"{short} {figures(effect, info, against)}" + ("" if effect.told > 0 else ": worse")
    return ": ".join(part for part in (*at, text) if part)


def _nothing_shown(effect: Effect, short: str) -> str:
    gain = effect.gain
    assert gain is not None
    assert gain.low is not None
    loss = 1 - gain.low
    if effect.guards and loss <= LARGE:
        return f"no loss above {100 * loss:.2g} % in {short}"
    assert effect.ratio is not None
    return f"no difference shown in {short} ({wording.interval(effect.ratio, 'x')})"


def _is_off(effect: Effect, info: RunInfo) -> bool:
    return effect.reference is not None and info.variants[effect.reference[0]] in OFF


def _without_claims(result: Result) -> str:
    """The first metric at the last point that has it, and which variant is best there."""
    info = result.info
    for name in info.metrics:
        for at in reversed(info.points):
            found = {v: effects.value(result, name, (v, at)) for v in info.variants if v != info.aa}
            shown = [f"{info.variants[v]} {wording.interval(e)}" for v, e in found.items() if e is not None]
            if shown:
                text = f"{wording.short(name, info)} {', '.join(shown)}.{_best(result, name, at)}"
                return ": ".join(part for part in (wording.point(at), text) if part)
    return "There is no answer: no valid measurement."


def _best(result: Result, metric: str, point: str) -> str:
    """The variant with the best median, where the paired ratio to the next one shows a difference."""
    info, table = result.info, Table(result.rows)
    values = {v: table.values(v, point, metric) for v in info.variants if v != info.aa}
    higher = info.metrics[metric].better is Better.higher
    ranked = sorted((v for v in values if values[v]), key=lambda v: stats.absolute(values[v]).median, reverse=higher)
    found = stats.ratio(values[ranked[0]], values[ranked[1]]) if len(ranked) > 1 else None
    if found is None or found.low is None or found.high is None:
        return ""
    if found.low <= 1 <= found.high:
        return f" {info.variants[ranked[0]]} and {info.variants[ranked[1]]} cannot be told apart."
    return f" Best: {info.variants[ranked[0]]}, {wording.interval(found, 'x')} of {info.variants[ranked[1]]}."
