"""Numbers and claims in words, the same in tables, figures and on the terminal."""

from __future__ import annotations

from experiments.lab.claims import Claim, Judgement
from experiments.lab.stats import Estimate
from experiments.lab.store import RunInfo


def number(value: float) -> str:
    """Three significant digits, or more where they stand before the point: 12,345  123  12.3  1.23  0.00123"""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1:
        return f"{value:.2f}"
    return f"{value:.3g}"


def interval(estimate: Estimate, suffix: str = "") -> str:
    """`1.52x [1.48, 1.60]`"""
    middle = f"{number(estimate.median)}{suffix}"
    if estimate.low is None or estimate.high is None:
        return middle
    return f"{middle} [{number(estimate.low)}, {number(estimate.high)}]"


def claim(claim: Claim, info: RunInfo) -> str:
    """`output tokens per second of mini-infer at concurrency=8: at least 1.5x that of transformers`"""
    metric = info.metrics[claim.metric]
    subject = f"{metric.label} of {info.variants[claim.variant]}" if len(info.variants) > 1 else metric.label
    at = f" at {claim.point}" if claim.point else ""
    side = "at least" if claim.bound.is_floor else "at most"
    if not claim.bound.is_ratio:
        return f"{subject}{at}: {side} {number(claim.value)} {metric.unit}".rstrip()
    if claim.reference_variant != claim.variant:
        reference = f"that of {info.variants[str(claim.reference_variant)]}"
    else:
        reference = f"that at {claim.reference_point}"
    return f"{subject}{at}: {side} {number(claim.value)}x {reference}"


def measured(judgement: Judgement, info: RunInfo) -> str:
    if judgement.estimate is None:
        return "-"
    bound = judgement.claim.bound
    unit = "" if bound.is_ratio else f" {info.metrics[judgement.claim.metric].unit}"
    return interval(judgement.estimate, "x" if bound.is_ratio else "") + unit.rstrip()


def device(info: RunInfo) -> str:
    """`AMD EPYC, 2 cores, 2 torch threads, 23 GiB RAM`"""
    facts = info.provenance.device
    parts = []
    if "gpu" in facts:
        parts.append(f"{facts['gpu']} ({facts['gpu_memory_gib']} GiB, driver {facts['driver']}, CUDA {facts['cuda']})")
    parts.append(f"{facts['cpu']}, {facts['cores']} cores, {facts['torch_threads']} torch threads")
    if facts.get("ram_gib") is not None:
        parts.append(f"{number(facts['ram_gib'])} GiB RAM")
    return ", ".join(parts)
