"""Numbers, and what gates and claims found, in words: the same in tables, figures and on the terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from experiments.lab.config import points
from experiments.lab.judge.claims import Claim, Judgement, Verdict
from experiments.lab.judge.gate import ALONE, ErrorGate
from experiments.lab.judge.stats import Estimate
from experiments.lab.store.result import Provenance, Result, RunInfo

NOTHING = "-"
CPU = "cpu"  # the hardware key
_SHORT = {  # what a metric is called where a line has no room
    "ttft": "first token",
    "itl_p50": "median ITL",
    "itl_p99": "P99 ITL",
    "itl_max": "longest ITL",
    "tpot": "time per token",
    "e2e": "whole answer",
    "step": "step",
    "total": "total time",
    "time": "time",
    "output_tokens_per": "tokens/s",
    "decode_tokens_per": "decode tokens/s",
    "requests_per": "requests/s",
    "kv_utilization": "KV slots in use",
    "batch_size": "requests at once",
    "gpu_idle_share": "GPU idle under the profiler",
    "acceptance": "tried drafts accepted",
    "accepted_of_drafted": "drafts accepted",
    "exchange_mb": "bytes sent to experts",
    "exchange_excess": "bytes sent for each that is needed",
    "rank_imbalance": "busiest rank's tokens / the average",
    "expert_imbalance": "busiest expert's tokens / the average",
    "slo_share": "requests in time",
    "slo_rate_per": "requests/s within the SLO",
    "goodput": "requests/s in time",
    "prefix_hit_rate": "prompt tokens found in the cache",
    "route": "CPU time of a router",
    "formula_share": "measured / theory",
    "client_busy": "load of the client",
    "slo_rate": "requests/s within the SLO",
    "mbu": "useful bandwidth",
    "mfu": "compute used",
    "agreement": "next tokens equal, teacher-forced",
    "perplexity_increase_pct": "rise of perplexity",
    "share_of_rtn": "KL as a share of RTN's",
    "read_gb": "reading",
    "copy_gb": "copying",
    "from_host_gb": "from the host (PCIe)",
    "to_host_gb": "to the host",
    "to_peer_gb": "to another GPU",
    "matmul_float32_tflop": "fp32 products",
    "matmul_bfloat16_tflop": "bf16 products",
    "matmul_float8_e4m3_tflop": "fp8 products",
    "matmul_int8_tflop": "int8 products",
}
_UNITS = ("_ms", "_s", "_us", "_rps")
_COUNTED = {  # settings: one, many
    "count": ("request", "requests"),
    "rows": ("row", "rows"),
    "mib": ("MiB", "MiB"),
    "tokens": ("token", "tokens"),
    **{f"{of}_tokens": (f"{of} token", f"{of} tokens") for of in ("prompt", "prefix", "suffix")},
}
WIDE = 2.0  # times its lower end an interval reaches: then the median alone would say more than is known
RANKED = ", best first: "  # begins what a process ranks in a note
RATIOS = ("formula_share", "formula_speedup", "draft_cost", "verify_cost", "r_squared")  # without a unit, and no shares


def short(name: str, info: RunInfo) -> str:
    """`ttft_ms` as `first token`; `itl_p99_ms@stream` as `P99 ITL of stream`."""
    group = name.partition("@")[2]
    text = known(name) or info.metrics[name].label.partition(",")[0]
    group = re.sub(r"([a-z])(\d)", r"\1 \2", group)  # `turn2`
    return f"{text} of {group}" if group and group not in text else text


def known(name: str) -> str | None:
    """What `short` calls a metric, whatever its label."""
    base = name.partition("@")[0]
    return _SHORT.get(next((base.removesuffix(unit) for unit in _UNITS if base.endswith(unit)), base))


def value(amount: float, name: str, info: RunInfo, unit: bool = True) -> str:
    """`13.4 ms`; of a share `78.5 %`; and no unit that the metric's short name has already."""
    if is_share(name, info) and abs(amount) <= 1:
        return share(amount)
    own = info.metrics[name].unit
    return f"{number(amount)} {own}" if unit and own and own not in short(name, info).split() else number(amount)


def middle(found: Estimate, name: str, info: RunInfo, unit: bool = True) -> str:
    return found.beyond + value(found.median, name, info, unit)


def is_share(name: str, info: RunInfo) -> bool:
    return info.metrics[name].unit == "" and name not in RATIOS


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def setting(key: str) -> str:
    """`workload.output_spread` as `output spread`, where an experiment has no words of its own for it."""
    name = key.rpartition(".")[2]
    return "requests" if name == "count" else name.replace("_", " ")


def others(settings: Mapping[str, Any], left_out: str) -> str:
    """As a point's name has them: `batch=8 mode=x`."""
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items() if key != left_out)


def titled(text: str, name: str) -> str:
    """`text`, and at which point: nothing more where there is one alone."""
    return f"{text}, {point(name)}" if name else text


def point(name: str) -> str:
    """`hit_rate=0.5` as `hit rate 0.5`, `count=64` as `64 requests`, `layers=all` as `all layers`, `mix=long prompts
    rate_per_s=6.0` as `long prompts, 6 requests/s`."""
    name = re.sub(r"(?<=[^,\s]) (?=\w+=|\d+ x \d)", ", ", name)
    name = re.sub(r"\b(?:mix|load|case)=", "", name)
    name = re.sub(r"\brate_per_s=([\d.]+?)(?:\.0)?(?![\d.])", r"\1 requests/s", name)
    name = re.sub(r"\brouting=(\w+)", r"\1 routing", name)
    name = re.sub(r"\b(\d+) x (\d+)\b", r"\1 x \2 tokens", name)  # sequences, and how long each is
    name = re.sub(r"\b(\w+)=all\b", r"all \1", name)
    for key, (one, many) in _COUNTED.items():
        name = re.sub(rf"\b{key}=1\b(?!,\d)", f"1 {one}", name)
        name = re.sub(rf"\b{key}=(\d+(?:,\d{{3}})*)", rf"\1 {many}", name)
    return name.replace("=", " ").replace("_", " ")


def at(name: str) -> str:
    """` at 64 requests`; nothing where there is one point alone."""
    return f" at {point(name)}" if name else ""


def number(value: float) -> str:
    """Three significant digits, or all before the point: 12,345  123  12.3  1.23  0.00123; whole numbers whole."""
    size = abs(value)
    if math.isinf(value):
        return "∞"
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.{1 if size >= 10 else 2}f}" if size >= 1 else f"{value:#.3g}"


def interval(estimate: Estimate, suffix: str = "") -> str:
    """`1.52x [1.48, 1.60]`; `> 40 [40, ∞]` of a knee above the rates that were searched. Repeats of one process that
    are all the same, as a simulator's are, have no interval; two or three values whose interval is wide stand for
    themselves."""
    middle = "" if by_few(estimate) else f"{estimate.beyond}{number(estimate.median)}{suffix} "
    return f"{middle}{ends(estimate, suffix)}".rstrip()


def ends(estimate: Estimate, suffix: str = "") -> str:
    """`[1.48, 1.60]`; `46.8 and 372` of two values, or three, whose interval is wide by chance; else nothing."""
    if by_few(estimate):
        *others, last = (f"{number(value)}{suffix}" for value in estimate.few)
        return f"{', '.join(others)} and {last}"
    alike = estimate.processes == 1 and estimate.low == estimate.high
    if estimate.low is None or estimate.high is None or alike:
        return ""
    return f"[{number(estimate.low)}, {number(estimate.high)}]"


def by_few(estimate: Estimate) -> str:
    """What a verdict says of its ground, where two or three values stand for their interval."""
    return f" by {'two' if len(estimate.few) == 2 else 'three'} values" if estimate.few and estimate.spans(WIDE) else ""


def share(value: float) -> str:
    """`97.3 %`, and `100 %` only where nothing is missing"""
    return "100 %" if value == 1 else f"{min(100 * value, 99.9):.3g} %"


def cell(text: str) -> str:
    """`text` inside a markdown table."""
    return " ".join(text.replace("|", "\\|").split())


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    every = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(cell(text) for text in line)} |" for line in every)


def settings(values: Mapping[str, Any]) -> str:
    """`kind trace, rate_per_s 4, cut.requests 100`: what is not set is left out."""
    parts = []
    for key, value in points.flat(values).items():
        if value not in (None, "", [], (), {}):
            shown = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
            parts.append(f"{key} {number(shown) if isinstance(shown, float) else shown}")
    return ", ".join(parts)


def commit(origin: Provenance) -> str:
    if origin.commit is None:
        return "no commit"
    tree = {True: "clean tree", False: "with uncommitted changes", None: "not known whether the tree was clean"}
    return f"commit {origin.commit[:12]}, {tree[origin.clean]}"


class Line(NamedTuple):
    claim: str
    verdict: str
    measured: str
    source: str
    why: str = ""  # there is no other verdict


def verdicts(result: Result) -> list[Line]:
    """One for all gates that passed and ask the same, for each other gate, and for each claim."""
    info, of_variant, alike = result.info, dict[tuple[str, ...], list[Any]](), dict[tuple[str, ...], list[Any]]()
    for gate in sorted(info.every_gate, key=lambda gate: (isinstance(gate, ErrorGate), not gate.passed)):
        kind = (gate.variant, type(gate).__name__, "" if isinstance(gate, ErrorGate) else gate.against)
        of_variant.setdefault(kind if gate.passed else (*kind, str(gate.point)), []).append(gate)
    for gates in of_variant.values():
        alike.setdefault((_asked(gates, info), "" if gates[0].passed else gates[0].variant), []).extend(gates)
    return [*(_of_gates(asked, gates, info) for (asked, _), gates in alike.items()),
            *(of_claim(judged, info) for judged in result.judgements)]  # fmt: skip


def _asked(gates: Sequence[Any], info: RunInfo) -> str:
    """By the gates of one variant and kind, and where."""
    first, count = gates[0], len(gates)
    every = "all " if count == len(info.points) else ""
    where = f", at {every}{count} points" if count > 1 else f" at {first.point}" if first.point else ""
    if isinstance(first, ErrorGate):
        return f"relative error at most {number(first.allowed)} against {first.against}{where}"
    if not first.against:
        return f"the same greedy tokens as {info.variants.get(str(info.baseline), '')}{where}"
    against = first.against.replace(ALONE, "the tokens that it gets alone")
    return f"every request gets {against if against != first.against else f'{against} tokens'}{where}"


def _of_gates(asked: str, gates: Sequence[Any], info: RunInfo) -> Line:
    """They are several where all have passed."""
    first, variants = gates[0], {gate.variant: info.variants[gate.variant] for gate in gates}
    if isinstance(first, ErrorGate):
        worst = max(gates, key=lambda gate: gate.error)
        agreed = f"; {worst.equal_rows:,} of {worst.rows:,} greedy tokens agree" if worst.rows else ""
        measured = f"{number(worst.error)}{agreed}"
    else:
        measured = f"{sum(g.equal_tokens for g in gates):,} of {sum(g.total_tokens for g in gates):,} tokens"
        if (at := first.first_difference) is not None:
            where = f"request {at.request}, token {at.position}"
            measured += f" (first difference: {where}: {at.expected} became {at.got})"
    who = " and ".join(variants.values()) if len(variants) < 3 else f"{len(variants)} variants, all passed"
    return Line(f"{who}: {asked}", (Verdict.supported if first.passed else Verdict.refuted).value, measured, "the gate")


def of_claim(judged: Judgement, info: RunInfo) -> Line:
    """`output tokens per second of mini-infer at concurrency=8: at least 1.5x that of transformers (aim 2x)`"""
    claim, found = judged.claim, judged.estimate
    metric, times = info.metrics[claim.metric], "x" if claim.bound.is_ratio else ""
    unit = times or f" {metric.unit}".rstrip()
    text = f"{metric.label} of {info.variants[claim.variant]}" if len(info.variants) > 1 else metric.label
    text += f" at {claim.point}: {bound(claim, info)}" if claim.point else f": {bound(claim, info)}"
    if claim.bound.is_ratio and claim.reference_variant != claim.variant:
        text += f" that of {info.variants[str(claim.reference_variant)]}"
    elif claim.bound.is_ratio:
        text += f" that at {claim.reference_point}"
    text += "" if claim.aim is None else f" (aim {number(claim.aim)}{times})"
    judged_by = found and replace(found, few=())  # the interval, however wide
    measured = interval(judged_by, times) + ("" if times else unit) if judged_by else NOTHING
    return Line(text, judged.verdict.value, measured, claim.source, judged.reason)


def bound(claim: Claim, info: RunInfo) -> str:
    """`at least 1.5x`, `from 2 to 3 ms`"""
    unit = "x" if claim.bound.is_ratio else f" {info.metrics[claim.metric].unit}".rstrip()
    least = "from" if claim.upper is not None else "at least" if claim.bound.is_floor else "at most"
    return f"{least} {number(claim.value)}{'' if claim.upper is None else f' to {number(claim.upper)}'}{unit}"


def machine(info: RunInfo) -> str:
    """`h200`; `cpu: AMD EPYC 9654`, since all CPUs have one key."""
    return f"{CPU}: {info.machine}" if info.hardware == CPU else info.hardware


def device(info: RunInfo) -> str:
    """`AMD EPYC, 2 cores, 2 torch threads, 23 GiB RAM`"""
    facts = info.provenance.device
    parts = []
    if "gpu" in facts:
        parts.append(f"{facts['gpu']} ({facts['gpu_memory_gib']} GiB, driver {facts['driver']}, CUDA {facts['cuda']})")
    threads = facts["torch_threads"]
    parts.append(f"{facts['cpu']}, {facts['cores']} cores, {threads} torch thread{'s' if threads != 1 else ''}")
    if facts.get("ram_gib") is not None:
        parts.append(f"{number(facts['ram_gib'])} GiB RAM")
    return ", ".join(parts)
