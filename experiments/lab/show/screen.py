"""What stands on a report's first screen, for each result: the answer, whether to believe it, how much and how, and
what it is to be measured by."""

from __future__ import annotations

from collections.abc import Callable

from experiments.lab.judge import marks
from experiments.lab.judge.metrics import Better
from experiments.lab.judge.stats import Estimate
from experiments.lab.show import effects, wording
from experiments.lab.show.answer import figures, invalid, sentence, verdicts
from experiments.lab.show.effects import Effect
from experiments.lab.show.figures import gallery
from experiments.lab.show.figures.gallery import Picture
from experiments.lab.store.history import Since
from experiments.lab.store.result import Result, RunInfo

PEER_KINDS = ("vllm", "hf", "hf_continuous")  # of variants; of implementations of a kernel, what others wrote
PEER_KERNELS = ("fa4", "flash_attn", "sdpa", "torch", "compile")


def screen(result: Result, since: Since, picture: Callable[[Picture], str]) -> str:
    """As markdown; `picture` writes the line that shows one."""
    parts = [
        f"**{sentence(result)}**",
        _strip(result, since),
        *(picture(each) for each in gallery.of(result).first),
        "\n".join(f"- {line}" for line in (*_beside_peers(result), *_of_the_limit(result))),
    ]
    return "\n\n".join(part for part in parts if part)


def moved(info: RunInfo, since: Since) -> str:
    """How far the code has gone on; empty where it has not."""
    count = since(info)
    if count is None:
        return "not known"
    return f"{count} commit{'s' if count != 1 else ''} since" if count else ""


def peers(info: RunInfo) -> list[str]:
    """The variants that somebody else wrote."""
    kinds = variant_kinds(info)
    return [name for name in info.variants if kinds.get(name) in (*PEER_KINDS, *PEER_KERNELS)]


def variant_kinds(info: RunInfo) -> dict[str, str]:
    """What measures each variant; of an implementation of a kernel its name."""
    variants = info.config.get("experiment", {}).get("variants", {})
    return {name: v.get("kind", "") if isinstance(v, dict) else name for name, v in variants.items()}


def _strip(result: Result, since: Since) -> str:
    info = result.info
    repeats = max((row.repeat + 1 for row in result.rows), default=0)
    seeds = [p.seed for p in info.processes] or [info.config.get("measure", {}).get("seed", 0)]
    again = marks.again(result)
    failed = sum(not gate.passed for gate in info.every_gate)
    gates = f"{len(info.every_gate)} passed" if not failed else f"**{failed} of {len(info.every_gate)} FAILED**"
    facts = {
        "measured": f"{info.provenance.started[:10]}, {info.hardware}",
        "processes x repeats": f"{len(info.processes) or 1} x {repeats}",
        "seeds": ", ".join(map(str, seeds)),
        "A/A": wording.interval(again.ratio, "x") if again else "not measured",
        "INVALID": f"**{invalid(result):,} of {len(result.rows):,}**" if invalid(result) else "none",
        "claims": verdicts(result) or "none",
        "gates": gates if info.every_gate else "none",
        "code": {"": "as measured", "not known": "no git history here"}.get(moved(info, since), moved(info, since)),
    }
    return wording.table(tuple(facts), [tuple(facts.values())])


def _beside_peers(result: Result) -> list[str]:
    info, found = result.info, effects.of_claims(result)
    ours = [v for v in info.variants if v not in peers(info) and v != info.aa]
    told = []
    for effect in found[:1] if ours else ():
        point, metric = effect.cell[1], effect.metric
        own = effects.value(result, metric, (effect.cell[0], point))
        for peer in peers(info):
            theirs = effects.value(result, metric, (peer, point))
            if peer != effect.cell[0] and own and theirs and not info.fails(peer, point):
                told.append(f"{_named(info, peer)} {_value(theirs, metric, info)} ({_times(own, theirs, effect)})")
        if told:
            at = f" at {wording.point(point)}" if point else ""
            who = info.variants[effect.cell[0]]
            told = [
                f"**Peers**, {wording.short(metric, info)}{at}: {who} {_value(own, metric, info)}; {'; '.join(told)}."
            ]
    earlier = [f"the original project {info.original}"] if info.original else []
    if not told:
        told = [f"**Peers**: none ran beside it{'; ' if earlier else ''}{'; '.join(earlier)}."]
    return [*told, f"**To reach**: {info.target}."] if info.target else told


def _of_the_limit(result: Result) -> list[str]:
    """What the hardware allows, where the first claim's figure was measured."""
    info, found = result.info, effects.of_claims(result)
    cells = [effect.cell for effect in found] or [(v, p) for v in info.variants for p in info.points]
    for cell in cells:
        floor, step, used = (effects.value(result, name, cell) for name in ("floor_ms", "step_ms", "mbu"))
        at = f" ({', '.join(part for part in (info.variants[cell[0]], wording.point(cell[1])) if part)})"
        if floor and step and step.median > 0:
            share = wording.share(min(1.0, floor.median / step.median))
            took = f"a step took {wording.number(step.median)} ms"
            return [f"**Limit**: {took}, and the hardware allows {wording.number(floor.median)} ms: {share} of it{at}."]
        if used:
            return [f"**Limit**: {wording.share(min(1.0, used.median))} of the memory bandwidth{at}."]
    return []


def _named(info: RunInfo, variant: str) -> str:
    """With its version, where it says one."""
    facts = info.peers.get(variant, ({},))[-1]
    version = next((str(facts[key]) for key in ("vllm", "transformers") if key in facts), "")
    return f"{info.variants[variant]} {version}".strip()


def _value(found: Estimate | None, metric: str, info: RunInfo) -> str:
    assert found is not None
    return figures(Effect(metric, ("", ""), None, Better.higher, found, None, None), info)


def _times(own: Estimate, theirs: Estimate, effect: Effect) -> str:
    if not own.median or not theirs.median:
        return "no ratio"
    times = own.median / theirs.median if effect.better is Better.higher else theirs.median / own.median
    return f"ours is {wording.number(times)}x as good"
