"""What an experiment found, in a sentence of plain words that the rows bear out, and what must be known before it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from experiments.lab.config import points
from experiments.lab.judge import knees, marks, pairs
from experiments.lab.judge.knees import FOUND, KEPT
from experiments.lab.judge.metrics import Better
from experiments.lab.judge.stats import Estimate
from experiments.lab.show import effects, grids, wording
from experiments.lab.store.result import COMPLETE, Result, RunInfo

PARTS, MOST = 2, 3  # of a sentence: two that matter; with what was lost, missed or guarded,
LONG = 200  # while it has no more letters than these
OFF = ("without", "off", "none of them", "eager", "kernel by kernel")  # labels of a baseline without the mechanism
ON = ("with", "on")
SLO_WORDS = {  # of a promise's bounds
    "ttft_ms": "first token in {} ms",
    "tpot_ms": "then one every {} ms on average",
    "itl_ms": "no gap above {} ms",
    "e2e_ms": "whole answer in {} ms",
}
LARGE = 0.1  # a loss that cannot be excluded, and is worth naming


def sentence(result: Result) -> str:
    """`90 % shared: 7.56x requests/s (10.4 -> 78.8); 0 % shared: no loss above 1.1 % in requests/s.`"""
    info = result.info
    if result.runs:
        return _of_sweep(result)
    if told := info.answer or pairs.sentence(result):
        return told
    if most := at_most(result):
        return f"The best at the largest sizes: {', '.join(most)}."
    if told := grids.misses_in_words(result):
        return told
    claimed = effects.of_claims(result)
    if text := _one_by_one(claimed, info):
        return text
    if not claimed:
        return _without_claims(result)
    # The first and where its variant loses; what else was missed or is worse; the next of another metric; what guards
    # against a loss; and while there is room whatever comes next.
    first, rest = claimed[0], claimed[1:]
    worst = effects.worst_elsewhere(result, first)
    lost = [effect for effect in rest if effect.missed or effect.told < 0][:1]
    others = [effect for effect in rest if effect.metric != first.metric][:1]
    guards = [effect for effect in reversed(rest) if effect.guards][:1]
    key = lambda effect: (effect.metric, effect.cell, effect.reference)  # noqa: E731
    chosen = {key(effect): effect for effect in [first, *worst, *lost, *others, *guards]}
    count = max(PARTS, min(MOST, len(chosen)))
    found = [*chosen.values(), *(effect for effect in rest if key(effect) not in chosen)][:count]
    if all(effect.own is None for effect in found):
        return f"There is no answer: {first.reason or 'no valid measurement'}."
    parts, knee = told_once(found, info), list[str]()
    if FOUND in info.metrics and not any(effect.metric == FOUND for effect in claimed):
        knee = _knees(result, [first.cell[0], *effects.peers(info)])
    if len("; ".join(parts + knee)) > LONG:  # what was lost or missed matters most beside the first, or the knee
        parts = told_once([first, *(lost or ([] if knee else worst or found[1:]))][:PARTS], info)
    return _capital("; ".join(parts + knee) + ".")


def _knees(result: Result, variants: Sequence[str]) -> list[str]:
    """`requests/s within the SLO 89.1 [89.1, 100], vLLM over HTTP 63`: of the first one, beside it of others."""
    info, (own, *others) = result.info, variants
    for at in info.points:
        if knee := result.estimate(own, at, FOUND):
            beside = ((info.variants[v], result.estimate(v, at, FOUND)) for v in others)
            told = [(name, wording.interval(each), " (one search)" * (each.n == 1)) for name, each in beside if each]
            theirs = [f"{name} {ends}{once}" for name, ends, once in told]
            return [", ".join([f"{wording.short(FOUND, info)} {wording.interval(knee)}", *theirs])]
    return []


def at_most(result: Result) -> list[str]:
    """Of variants that are compared with themselves alone: the best repeat of each metric, at the last point that has
    it."""
    info, claimed, told = result.info, effects.of_claims(result), {}
    if not claimed or info.baseline is not None or not all(effect.at_another_point for effect in claimed):
        return []
    for point, name in product(info.points, filter(wording.known, info.metrics)):  # a later point's stands for all
        best = max if info.metrics[name].better is Better.higher else min
        if found := [value for v in info.variants for value in result.values(v, point, name).values()]:
            told[name] = f"{wording.short(name, info)} {wording.value(best(found), name, info)}"
    return [told[name] for name in info.metrics if name in told]


def in_words(effect: effects.Effect, info: RunInfo) -> str:
    """`1.62x tokens/s (440 -> 708)`, without who and where."""
    short, ratio, told = wording.short(effect.metric, info), effect.ratio, figures(effect, info)
    share = wording.is_share(effect.metric, info)
    if effect.own is None:
        return f"no figure of {short} that counts ({effect.reason or 'no valid measurement'})"
    alone = ratio or effect.own
    why = "" if alone.low is not None else "one valid repeat" if alone.n == 1 else "one process, all repeats alike"
    asked = f"{effect.open}: not shown" if effect.open else f"{effect.missed}: missed" if effect.missed else ""
    asked = asked if _own_target(effect) is None else asked.rpartition(": ")[2]
    bounded = effect.open and effect.is_absolute
    by_one = bool(bounded) and effect.own.processes == 1 < info.processes_due
    asked += " by one process" if by_one and not why else ""
    # The interval that a bound was held against, of the value itself or of the ratio.
    own = wording.ends(effect.own) if asked and not by_one and (ratio is None or bounded) else ""
    doubts = [*filter(None, (own, why, asked))]
    unsure = ratio is not None and (bool(effect.open and not bounded) or ratio.spans(wording.WIDE))
    times = (wording.interval(ratio, "x") if unsure else f"{wording.number(ratio.median)}x") if ratio else ""
    if effect.at_another_point and effect.reference is not None:
        times = f"{times} that at {wording.point(effect.reference[1])}".lstrip()
        return f"{short} {times} ({'; '.join([told, *doubts])})"
    if ratio is None or ratio.low is None:
        about = "; ".join([times, *doubts] if ratio and ratio.median != 1 else doubts)
        return f"{short} {told}" + (f" ({about})" if about else "")
    if effect.told == 0:
        gain = effect.gain
        loss = 1 - gain.judged[0] if gain is not None and gain.judged is not None else 1.0
        if effect.guards and loss <= LARGE:
            return f"no loss{f' above {100 * loss:.2g} %' if loss else ''} in {short}"
        about = "; ".join([wording.interval(ratio, "x"), *doubts])
        return f"no difference shown{wording.by_few(ratio)} in {short} ({about})"
    if effect.better is Better.higher and not share:
        short, told, doubts = f"{times} {short}", f"({'; '.join([told, *doubts])})", []
    elif unsure:
        doubts = [times, *doubts]
    doubt = f" ({'; '.join(doubts)})" if doubts else ""
    if effect.told > 0:
        return f"{short} {told}{doubt}"
    by = "" if share or not 0.5 < ratio.median < 2 else f"{_two_digits(100 * abs(ratio.median - 1))} % "
    return f"{short} {told}: {by}worse{doubt}"


def figures(effect: effects.Effect, info: RunInfo) -> str:
    """`88.9 -> 13.4 ms` of a mechanism switched on, `13.4 ms against 88.9`; beside nothing `13.4 ms, target 15`."""
    if effect.own is None:
        return wording.NOTHING
    own = wording.middle(effect.own, effect.metric, info)
    if effect.base is None:
        if (target := _own_target(effect)) is None:
            return own
        return f"{own}, target {wording.value(target, effect.metric, info, unit=False)}"
    base = wording.middle(effect.base, effect.metric, info, unit=False)
    return f"{base} -> {own}" if effect.beside in OFF else f"{own} against {base}"


def _own_target(effect: effects.Effect) -> float | None:
    """Of a value that stands beside nothing: that of a ratio is none."""
    return effect.target if effect.base is None and effect.reference is None else None


def flags(result: Result) -> list[str]:
    """What a reader must know before any number."""
    info = result.info
    why = info.status.removeprefix("incomplete: ")
    # Every timed pass is there where only a profile was cut off, of the last process.
    all_began = len(info.processes) == info.config.get("measure", {}).get("processes", 1)
    passes = re.search(r"in profile \d", why) and all_began and not re.search("in repeat|nothing of it", why)
    lacks = "a profile is missing" if passes else "INCOMPLETE"
    told = [] if info.status == COMPLETE else [f"{lacks} ({why})"]
    told += [] if all(gate.passed for gate in info.gates) else ["tokens differ from the baseline's"]
    told += [] if all(gate.passed for gate in info.error_gates) else ["numbers are too far from the reference's"]
    return [*told, *marks.of(result)]


def badges(result: Result) -> list[str]:
    return [f"**{flag.partition(' (')[0]}**" for flag in flags(result)]


def told_once(found: list[effects.Effect], info: RunInfo) -> list[str]:
    """Each in words, one subject after the other; who it is, against whom and where are said where they change."""
    subjects = list(dict.fromkeys(_who(effect, info) for effect in found))
    parts, before = [], ("", "", "")
    for effect in sorted(found, key=lambda each: subjects.index(_who(each, info))):
        # A baseline that is the same engine without the mechanism need not be named.
        other = "" if effect.at_another_point or effect.beside in OFF or effect.base is None else effect.beside
        who, _, at = here = (_who(effect, info), other, wording.point(effect.cell[1]))
        head = f"{who} against {other}" if other not in ("", before[1]) else who if here[:2] != before[:2] else ""
        parts.append(": ".join(part for part in (head, at if here != before else "", in_words(effect, info)) if part))
        before = here
    return parts


def called(variant: str, info: RunInfo) -> str:
    """Its label; where that is no more than `with`, what the experiment is of."""
    label = info.variants[variant]
    return info.experiment.replace("_", " ") if label in ON else label


def _who(effect: effects.Effect, info: RunInfo) -> str:
    own = info.variants[effect.cell[0]]
    return "" if len(info.variants) == 1 or (effect.beside in OFF and own in ON) else own


def _ranked(found: Mapping[str, Estimate], metric: str, info: RunInfo) -> list[str]:
    return sorted(found, key=lambda v: found[v].median, reverse=info.metrics[metric].better is Better.higher)


def _one_by_one(claimed: list[effects.Effect], info: RunInfo) -> str:
    """Where claims name several variants at a point, all of them told apart from the baseline, or none beside anything:
    what each has of the first one's metric, the best first, and then of another metric.
    `Tokens equal to fp32's: w8a16 99.3 %; fp8 96.3 %.`"""
    told: list[str] = []
    for metric in dict.fromkeys(effect.metric for effect in claimed):
        at = next(effect.cell[1] for effect in claimed if effect.metric == metric)
        own = [e for e in claimed if (e.metric, e.cell[1]) == (metric, at) and e.own is not None and not e.guards]
        beside = {effect.reference for effect in own}
        alike = all(effect.told for effect in own) if beside == {(info.baseline, at)} else beside == {None}
        if len(own) > 1 and alike and metric not in wording.RATIOS:  # of which 1 is the best
            found = {effect.cell[0]: effect.own for effect in own if effect.own}
            found |= {effect.reference[0]: effect.base for effect in own if effect.reference and effect.base}
            ranked = _ranked(found, metric, info)
            missed = {effect.cell[0]: f" ({effect.missed}: missed)" for effect in own if effect.missed}
            values = {v: wording.middle(found[v], metric, info) for v in ranked}
            each = "; ".join(f"{info.variants[v]} {value}{missed.get(v, '')}" for v, value in values.items())
            told.append(_capital(f"{wording.titled(wording.short(metric, info), at)}: {each}."))
        elif not told:
            break
    return " ".join(told[:2])


def _without_claims(result: Result) -> str:
    """Of the first metric at the last point that has it: which variant is best. Where the rates that keep the SLO do
    not tell, the next metric is asked, too, at the last point at which the SLO is kept."""
    info = result.info
    for name, at in product(info.metrics, reversed(info.points)):
        if not (found := _estimates(result, name, at)) or effects.is_scheduled(name, at, info):
            continue
        what = wording.titled(wording.short(name, info), at)
        if name != FOUND:
            return _best(result, name, at, found, what)[0]
        text, told = _best(result, name, at, found, f"{wording.short(name, info)}{_promise(info)}")
        return text if told else " ".join([text, *_where_kept(result)])
    return "There is no answer: no valid measurement."


def _estimates(result: Result, name: str, at: str) -> dict[str, Estimate]:
    """By variant, of all whose tokens are right."""
    info = result.info
    every = {v: result.estimate(v, at, name) for v in info.variants if v != info.aa and not info.fails(v, at)}
    return {variant: own for variant, own in every.items() if own}


def _promise(info: RunInfo) -> str:
    """` (90 % of the requests: first token in 500 ms, then one every 50 ms on average)`"""
    slo = info.config.get("experiment", {}).get("slo") or {}
    told = [words.format(wording.number(slo[name])) for name, words in SLO_WORDS.items() if slo.get(name)]
    return f" ({wording.share(knees.share(info.config))} of the requests: {', '.join(told)})" if told else ""


def _where_kept(result: Result) -> list[str]:
    """What settings come to at the last point of the closed loop at which the baseline keeps the SLO, and which ones
    keep it where that one does not."""
    info, least, alone = result.info, knees.share(result.info.config), list[str]()
    name = next(name for name in info.metrics if name != FOUND)  # a search has KEPT, too
    for at in reversed(info.points):
        in_time = _estimates(result, KEPT, at)
        kept = [variant for variant, own in in_time.items() if own.median >= least]
        found = {v: own for v, own in _estimates(result, name, at).items() if v in kept}
        if not found or effects.is_scheduled(name, at, info):
            continue
        if info.baseline not in found:
            names = ", ".join(info.variants[variant] for variant in found)
            alone.append(f"The SLO is kept{wording.at(at)} by {names}, and not by {info.variants[str(info.baseline)]}.")
        elif len(found) > 1:
            what = f"{wording.titled(wording.short(name, info), at)}, where the SLO is kept"
            return [*alone[:1], _best(result, name, at, found, what)[0]]
    return alone[:1]


def _best(result: Result, name: str, at: str, found: Mapping[str, Estimate], what: str) -> tuple[str, bool]:
    """Which variant is better than the baseline, and by how much; or that none is shown to be; and whether one is best.
    A knee outside of the searched range has no ratio, and is told by its interval."""
    info, ranked = result.info, _ranked(found, name, result.info)
    own = {v: f"{info.variants[v]} {wording.interval(found[v])}" for v in found}
    if len(found) == 1:
        return f"{_capital(what)}: {own[ranked[0]]}.", True
    base = str(info.baseline) if info.baseline in found else ranked[1]

    def better(one: str, other: str) -> bool:
        ratio = result.ratio((one, at), (other, at), name)
        higher = info.metrics[name].better is Better.higher
        if ratio:
            return ratio.told == (1 if higher else -1)
        return name == FOUND and ranked.index(one) < ranked.index(other) and found[one].apart_from(found[other])

    def times(one: str, other: str) -> str:
        ratio = result.ratio((one, at), (other, at), name)
        return f", {wording.interval(ratio, 'x')} of {info.variants[other]}" if ratio else ""

    worse = [variant for variant in ranked if better(base, variant)]
    best = next((v for v in ranked if better(v, base)), base if len(worse) == len(found) - 1 else None)
    if best is not None:
        others = [variant for variant in ranked if variant != best]
        behind = [base] if best != base else []  # it is told by how much, and of the next one
        behind += [variant for variant in others if better(best, variant) and variant != base][:1]
        both = "; ".join(own[v] for v in found if v in (best, *behind))
        alike = [info.variants[v] for v in others if not better(best, v)]
        more = f" Not told apart from it: {', '.join(alike)}." if alike else ""
        return f"Best in {what}: {info.variants[best]}{''.join(times(best, v) for v in behind)} ({both}).{more}", True
    rest = [variant for variant in ranked if variant not in (base, *worse)]
    once = "can be shown by one repeat" if None in (found[base].low, found[rest[0]].low) else "is shown"
    other = f"any of {len(rest)} other settings" if len(rest) > 1 else info.variants[rest[0]]
    between = f" between {info.variants[base]} and {other}" if len(found) > 2 else ""
    each = [
        *(own[v] for v in found if v in (base, rest[0])),
        *(f"worse: {info.variants[v]}{times(v, base)}" for v in worse),
    ]
    return f"No difference {once}{between} in {what}: {'; '.join(each)}.", False


def _of_sweep(result: Result) -> str:
    """Of the first metric at the last point of each run that has it: from its least to its most over the swept key, of
    the variant with the best of all, and as a ratio to the baseline where there is another variant."""
    info, panels = result.info, result.info.plots[0].panels
    if not panels:
        return "There is no answer: the runs have no metric in common."
    key, others = str(panels[0].x), [v for v in info.variants if v not in (info.baseline, info.aa)]
    base = info.variants[str(info.baseline)] if info.baseline and others else ""
    for name, metric in info.metrics.items():
        sign = 1 if metric.better is Better.higher else -1
        found: dict[str, dict[Any, tuple[str, Estimate]]] = {}  # of each variant by the key's value
        for variant, at in product(others or info.variants, info.points):
            own = result.estimate(variant, at, name)
            if base:
                own = result.ratio((variant, at), (str(info.baseline), at), name)
            if own and not effects.is_scheduled(name, at, info):
                found.setdefault(variant, {})[info.points[at][key]] = at, own
        if not found:
            continue
        variant, values = max(found.items(), key=lambda one: max(sign * own.median for _, own in one[1].values()))
        ends = [pick(values, key=lambda value: values[value][1].median) for pick in (min, max)]
        least, most = (f"{wording.interval(values[end][1], 'x' * bool(base))} at {end}" for end in ends)
        swept, at = list(values), wording.others(info.points[values[ends[0]][0]], key)
        over = " to ".join(map(str, swept[:: len(swept) - 1 or 1])) if all(map(wording.is_number, swept)) else ""
        told = wording.titled(wording.short(name, info), at)
        what = f"{told} over {wording.setting(key)} {over or points.shown(swept)}"
        if base and not any(own.told for _, own in values.values()):
            what = f"No difference is shown in {what}"
        each = f"{least} to {most}" if least != most else least
        return f"{_capital(what)}: {info.variants[variant]} {each}{f', of {base}' if base else ''}."
    return "There is no answer: no valid measurement."


def _two_digits(value: float) -> str:
    """Without an exponent, which `.2g` alone would have from 99.5 on."""
    return f"{float(f'{value:.2g}'):g}"


def _capital(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"
