"""What an experiment found, in a sentence of plain words that the rows bear out, and what must be known before it."""

from __future__ import annotations

from experiments.lab.judge import marks, pairs, stats
from experiments.lab.judge.metrics import Better
from experiments.lab.show import effects, verdicts, wording
from experiments.lab.show.effects import Effect
from experiments.lab.store.result import COMPLETE, Result, RunInfo

PARTS = 3  # of a sentence: two that matter, and what it costs
OFF = ("without", "off", "none of them", "eager", "kernel by kernel")  # labels of a baseline without the mechanism
ON = ("with", "on")
LARGE = 0.1  # a loss that cannot be excluded, and is worth naming


def answer(result: Result) -> str:
    """The sentence, the count of verdicts, and what counts against the numbers."""
    info = result.info
    parts = [sentence(result)]
    if info.claims:
        parts.append(f"Claims: {verdicts.counted(result)}.")
    failed = sum(1 for gate in info.every_gate if not gate.passed)
    if failed:
        parts.append(f"Gate: {failed} of {len(info.every_gate)} comparisons FAILED.")
    absent = dict.fromkeys(info.variants[row.variant] for row in result.rows if row.is_absent)
    if absent:
        parts.append(f"Absent: {', '.join(absent)}.")
    if invalid(result):
        parts.append(f"INVALID: {invalid(result):,} of {len(result.rows):,} values.")
    return " ".join(parts)


def sentence(result: Result) -> str:
    """`90 % shared: 7.56x requests/s (10.4 -> 78.8); 0 % shared: no loss above 1.1 % in requests/s.`"""
    info, of_pairs = result.info, pairs.sentence(result)
    if of_pairs:
        return of_pairs
    claimed = effects.of_claims(result)
    if claimed and info.baseline is None and all(effect.at_another_point for effect in claimed):
        return _at_most(result)
    if text := _one_by_one(claimed, info):
        return text
    found = _chosen(claimed)
    if not found:
        return _without_claims(result)
    if all(effect.own is None for effect in found):
        return f"There is no answer: {found[0].reason or 'no valid measurement'}."
    who = {_who(effect, info) for effect in found}
    shared = who.pop() if len(who) == 1 else ""
    parts, before = [], ("", "")
    for effect in found:
        here = ("" if shared else _who(effect, info), wording.point(effect.cell[1]))
        parts.append(": ".join(part for part in (*(here if here != before else ()), in_words(effect, info)) if part))
        before = here
    text = ": ".join(part for part in (shared, "; ".join(parts)) if part)
    return f"{text[0].upper()}{text[1:]}."


def in_words(effect: Effect, info: RunInfo) -> str:
    """`1.62x tokens/s (440 -> 708)`, without who and where."""
    short, ratio, told = wording.short(effect.metric, info), effect.ratio, figures(effect, info)
    if effect.own is None:
        return f"no figure of {short} that counts ({effect.reason or 'no valid measurement'})"
    if effect.at_another_point and effect.reference is not None:
        times = f"{wording.number(ratio.median)}x " if ratio else ""
        return f"{short} {times}that at {wording.point(effect.reference[1])} ({told})"
    if ratio is None or ratio.low is None:
        return f"{short} {told}" + (" (one valid repeat)" if effect.own.n == 1 else "")
    if effect.told == 0:
        gain = effect.gain
        loss = 1 - gain.low if gain is not None and gain.low is not None else 1.0
        if effect.guards and loss <= LARGE:
            return f"no loss above {100 * loss:.2g} % in {short}"
        return f"no difference shown in {short} ({wording.interval(ratio, 'x')})"
    if effect.better is Better.higher and not wording.is_share(effect.metric, info):
        short, told = f"{wording.number(ratio.median)}x {short}", f"({told})"
    return f"{short} {told}" + ("" if effect.told > 0 else ": worse")


def figures(effect: Effect, info: RunInfo) -> str:
    """`88.9 -> 13.4 ms` where a mechanism is switched on, else `13.4 ms against 88.9`."""
    if effect.own is None:
        return wording.NOTHING
    own = wording.value(effect.own.median, effect.metric, info)
    if effect.base is None:
        return own
    base = wording.value(effect.base.median, effect.metric, info, unit=False)
    return f"{base} -> {own}" if _is_off(effect, info) else f"{own} against {base}"


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


def _chosen(found: list[Effect]) -> list[Effect]:
    """The first, the next of another metric, and what guards against a loss; else whatever comes next."""
    if not found:
        return []
    first, rest = found[0], found[1:]
    other = next((effect for effect in rest if effect.metric != first.metric), None)
    guard = next((effect for effect in reversed(rest) if effect.guards and effect is not other), None)
    chosen = [effect for effect in (first, other, guard) if effect is not None]
    return [*chosen, *(effect for effect in rest if effect not in chosen)][:PARTS]


def _who(effect: Effect, info: RunInfo) -> str:
    own = info.variants[effect.cell[0]]
    if effect.reference is None or effect.at_another_point:
        return own if len(info.variants) > 1 else ""
    if _is_off(effect, info):
        return "" if own in ON else own
    return f"{own} against {info.variants[effect.reference[0]]}"


def _is_off(effect: Effect, info: RunInfo) -> bool:
    return effect.reference is not None and info.variants[effect.reference[0]] in OFF


def _at_most(result: Result) -> str:
    """Where nothing is compared: what the best variant has of each metric, at the last point that has it."""
    info, told = result.info, []
    for name in filter(wording.known, info.metrics):
        measured = ([result.estimate(v, at, name) for v in info.variants] for at in reversed(info.points))
        medians = next((found for each in measured if (found := [e.median for e in each if e])), [])
        if medians:
            best = (max if info.metrics[name].better is Better.higher else min)(medians)
            told.append(f"{wording.short(name, info)} {wording.value(best, name, info)}")
    return f"At most: {', '.join(told)}." if told else "There is no answer: no valid measurement."


def _one_by_one(claimed: list[Effect], info: RunInfo) -> str:
    """Where nothing is compared, and claims name several variants: the first one's metric of each of them, the best
    first. `Tokens equal to fp32's: w8a16 99.3 %; fp8 96.3 %.`"""
    if not claimed or any(effect.reference for effect in claimed):
        return ""
    metric, at = claimed[0].metric, claimed[0].cell[1]
    found = {e.cell[0]: e.own.median for e in claimed if (e.metric, e.cell[1]) == (metric, at) and e.own is not None}
    if len(found) < 2 or metric in wording.RATIOS:  # of which 1 is the best
        return ""
    higher = info.metrics[metric].better is Better.higher
    ranked = sorted(found, key=lambda variant: found[variant], reverse=higher)
    told = "; ".join(f"{info.variants[v]} {wording.value(found[v], metric, info)}" for v in ranked)
    text = wording.titled(wording.short(metric, info), at)
    return f"{text[0].upper()}{text[1:]}: {told}."


def _without_claims(result: Result) -> str:
    """The first metric at the last point that has it, and which variant is best there: where the paired ratio to the
    next one shows a difference."""
    info = result.info
    for name, at in ((name, at) for name in info.metrics for at in reversed(info.points)):
        found = {v: e for v in info.variants if v != info.aa and (e := result.estimate(v, at, name))}
        if not found:
            continue
        shown = ", ".join(f"{info.variants[v]} {wording.interval(each)}" for v, each in found.items())
        text = f"{f'{wording.point(at)}: ' if at else ''}{wording.short(name, info)} {shown}."
        higher = info.metrics[name].better is Better.higher
        first, second, *_ = [*sorted(found, key=lambda v: found[v].median, reverse=higher), "", ""]
        ratio = stats.ratio(*(result.table.values(v, at, name) for v in (first, second)))
        if ratio is None or ratio.low is None:
            return text
        if not ratio.told:
            return f"{text} {info.variants[first]} and {info.variants[second]} cannot be told apart."
        return f"{text} Best: {info.variants[first]}, {wording.interval(ratio, 'x')} of {info.variants[second]}."
    return "There is no answer: no valid measurement."
