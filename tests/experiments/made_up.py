"""Results that nobody measured, for the tests of what is made from results."""

from __future__ import annotations

import random
from dataclasses import replace

from experiments.lab.config.spec import PanelKind, PanelSpec, PlotSpec
from experiments.lab.judge.claims import Bound, Claim
from experiments.lab.judge.gate import Gate, compare
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.measure.traces import RequestRow, StepRow
from experiments.lab.store.result import Provenance, Result, RunInfo
from experiments.lab.store.rows import Row

VARIANTS = {"base": "whole prompts", "new": "chunked prefill, 512 tokens a step"}
METRICS = {
    "output_tokens_per_s": Metric("output tokens per second", "tokens/s", Better.higher),
    "ttft_p50_ms": Metric("time to first token, median request", "ms", Better.lower),
    "itl_p99_ms": Metric("inter-token latency, P99", "ms", Better.lower),
}
BASE = {"output_tokens_per_s": 1234.5678, "ttft_p50_ms": 87.654321, "itl_p99_ms": 45.0}
FACTORS = {"output_tokens_per_s": 1.5, "ttft_p50_ms": 0.7, "itl_p99_ms": 1.0}  # of the second variant


def result(
    experiment="demo",
    hardware="cpu",
    run="default",
    *,
    repeats=5,
    sizes=(1, 8),
    variants=VARIANTS,
    baseline="base",
    metrics=METRICS,
    gates=None,
    rows=None,
    steps=(),
    requests=(),
    noise=0.01,
    factor=1.0,
    seed=0,
    **changes,
):
    """One variant after the other is `FACTORS` times the baseline, `factor` as fast over all, and noise."""
    rng = random.Random(seed)
    points = {f"concurrency={n}": {"workload.concurrency": n} for n in sizes}
    if rows is None:
        rows = [
            Row(variant, point, repeat, name, value(name, column, n, rng, noise) * factor, metric.unit)
            for n, point in zip(sizes, points, strict=True)
            for repeat in range(repeats)
            for column, variant in enumerate(variants)
            for name, metric in metrics.items()
        ]
    last = f"concurrency={sizes[-1]}"
    if gates is None:
        gates = [equal(variant, point) for point in points for variant in variants if variant != baseline]
    other = next(v for v in reversed(variants))
    claims = (
        Claim("output_tokens_per_s", other, last, Bound.ratio_at_least, 1.2, baseline, last, "original: 1.2x"),
        Claim("ttft_p50_ms", other, last, Bound.at_most, 900.0, source="needed"),
    )
    panels = (
        PanelSpec("output_tokens_per_s", x_label="requests in flight"),
        PanelSpec("ttft_p50_ms", PanelKind.lines, x="workload.concurrency", log_x=True, log_y=True),
    )
    info = RunInfo(
        experiment=experiment,
        hardware=hardware,
        run=run,
        title="A demo: chunks",
        question="Does `chunked` prefill help?",
        method="By hand.",
        baseline=baseline,
        variants=dict(variants),
        points=points,
        metrics=dict(metrics),
        claims=claims,
        gates=tuple(gates),
        samples=(),
        plots=(PlotSpec("speed", "Speed of a demo", panels),),
        code=("run.py",),
        limits=("It is made up.",),
        provenance=Provenance(
            f"python run.py experiment={experiment}",
            "2026-01-01T00:00:00+00:00",
            12.3,
            "0123456789abcdef",
            True,
            {"python": "3.11", "torch": "2.13"},
            {"cpu": "A CPU", "cores": 2, "torch_threads": 2, "ram_gib": 24.0},
        ),
        config={
            "engine": {"seed": 0, "cache": {"block_size": 16}},
            "paths": {"results": "results"},
            "measure": {"processes": 1},  # as the experiment asks
        },
        original="+20 %",
        target="1.2x",
    )
    return Result(replace(info, **changes), tuple(rows), tuple(steps), tuple(requests))


def value(name, column, size, rng, noise):
    return BASE[name] * FACTORS[name] ** column * size**0.6 * (1 + rng.gauss(0, noise))


def equal(variant, point) -> Gate:
    return compare(variant, point, [[1, 2, 3]] * 300, [[1, 2, 3]] * 300)


def different(variant, point) -> Gate:
    return compare(variant, point, [[1, 2, 3]], [[1, 5, 3]])


def engine_steps(variant="base", count=60, point="concurrency=8", chunk=512, seed=0) -> list[StepRow]:
    """Prompts that arrive among decodes until the KV blocks are nearly out, and a request loses its place."""
    rng = random.Random(seed)
    start, running, waiting, cached, found = 0.0, 0, 40, 0, []
    for step in range(count):
        prefill = 0
        if waiting and rng.random() < 0.2:
            prefill, waiting, running = min(chunk, rng.choice([300, 512, 2048])), waiting - 1, running + 1
        elif rng.random() < 0.05:
            waiting += rng.randint(1, 5)
        duration = 0.004 + running * 0.0001 + prefill * 0.00004
        preempted: tuple[str, ...] = ()
        finished: tuple[str, ...] = ()
        if running > 24:
            preempted, running, waiting = (f"{variant}-{rng.randint(0, 3)}",), running - 3, waiting + 3
        if running and rng.random() < 0.05:
            finished, running, cached = (f"{variant}-{step}",), running - 1, cached + 8
        used = min(500, running * 16 + step % 10)
        found.append(
            StepRow(
                variant=variant,
                point=point,
                step=step,
                start_s=start,
                duration_s=duration,
                prefill_tokens=prefill,
                decode_tokens=running,
                num_running=running,
                num_prefilling=1 if prefill else 0,
                num_waiting=waiting,
                num_swapped=0,
                kv_total_blocks=500,
                kv_used_blocks=used,
                kv_cached_blocks=min(cached, 500 - used),
                kv_used_slots=16 * used - 5,
                kv_reserved_slots=16 * used,
                prefix_hit_tokens=0,
                evictions=0,
                preempted=preempted,
                finished=finished,
            )
        )
        start += duration + (0.0002 if rng.random() > 0.01 else 0.05)
    return found


def requests(variant="base", count=20, point="concurrency=8", seed=0) -> list[RequestRow]:
    rng = random.Random(seed)
    found = []
    for index in range(count):
        arrival = 0.01 * index
        scheduled = arrival + rng.random() * 0.02
        first = scheduled + 0.02 + rng.expovariate(50)
        found.append(
            RequestRow(
                variant=variant,
                point=point,
                request=f"{variant}-{index}",
                name="stream" if index % 2 else "prompt",
                arrival_s=arrival,
                first_scheduled_s=scheduled,
                first_token_s=first,
                end_s=first + 0.3,
                prompt_tokens=100,
                output_tokens=32,
                cached_tokens=0,
                preemptions=index % 3,
            )
        )
    return found
