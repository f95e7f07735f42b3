"""How an engine bears load: throughput against latency, and what of an offered rate comes out in time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from experiments.lab.show import wording
from experiments.lab.show.figures import frame, lines
from experiments.lab.show.figures.frame import INK
from experiments.lab.spec import PanelKind, PanelSpec
from experiments.lab.store.result import Result

IN_FLIGHT = ("workload.concurrency", "workload.count")
RATE = "workload.rate_per_s"
SPEED, GOODPUT = "output_tokens_per_s", "goodput_rps"
LATENCIES = ("itl_p50_ms", "tpot_ms", "ttft_ms")
IN_TIME = 0.95  # of the requests that were offered
ENOUGH = 3  # points of a curve
WIDTH, HEIGHT = 0.8 * frame.WIDTH, 4.2


def pareto_of(result: Result) -> tuple[Result, str] | None:
    """The points that differ in how many requests are in flight, and the metric of latency; None where there are too
    few of them."""
    for key in IN_FLIGHT:
        for latency in LATENCIES:
            if {latency, SPEED} <= set(result.info.metrics):
                kept = _measured(result, key, latency, SPEED)
                if len(kept) >= ENOUGH:
                    return replace(result, info=replace(result.info, points=kept)), latency
    return None


def pareto(result: Result, latency: str) -> Figure:
    """Throughput over latency, a curve a variant; what is above and to the left of another is better."""
    figure, ax = frame.one(HEIGHT, WIDTH)
    ax.set_title("up and left is better", fontsize=8, color=INK)
    lines.curve(ax, PanelSpec(SPEED, PanelKind.curve, x=latency, log_x=True, log_y=True), result)
    frame.log(ax.yaxis, ax, False)
    ax.set_ylabel(frame.axis_label(result.info.metrics[SPEED], 36), fontsize=9)
    frame.legend(figure, [ax])
    return figure


def goodput_of(result: Result) -> Result | None:
    """The points that differ in the rate at which requests arrive."""
    kept = _measured(result, RATE, GOODPUT) if GOODPUT in result.info.metrics else {}
    kept = dict(sorted(kept.items(), key=lambda item: item[1][RATE]))
    return replace(result, info=replace(result.info, points=kept)) if len(kept) >= ENOUGH else None


def goodput(result: Result) -> Figure:
    """Requests a second that met every objective, over those that were offered: up to the knee both are the same."""
    figure, ax = frame.one(HEIGHT, WIDTH)
    most = max(settings[RATE] for settings in result.info.points.values())
    ax.plot([0, most], [0, most], color=INK, linewidth=1, linestyle=":", label="all that is offered")
    lines.draw(ax, PanelSpec(GOODPUT, PanelKind.lines, x=RATE, x_label="requests a second offered"), result)
    ax.set_title(_knee(result), fontsize=8, color=INK)
    ax.set_xlim(left=0)
    frame.from_zero(ax.yaxis, ax, False, 8)
    ax.set_ylabel(frame.axis_label(result.info.metrics[GOODPUT], 40), fontsize=9)
    frame.legend(figure, [ax])
    return figure


def _knee(result: Result) -> str:
    """The last rate up to which nearly all came in time, variant by variant."""
    found = []
    for variant, label in result.info.variants.items():
        last = None
        for point, settings in result.info.points.items():
            reached = result.estimate(variant, point, GOODPUT)
            if reached is None or reached.median < IN_TIME * settings[RATE]:
                break
            last = settings[RATE]
        where = "no rate that was tried" if last is None else f"{wording.number(last)} requests/s"
        found.append(f"{label}: {where}")
    return f"{IN_TIME:.0%} in time up to: {'; '.join(found)}"


def _measured(result: Result, key: str, *metrics: str) -> dict[str, dict[str, Any]]:
    """The points that set `key` to a number, and where some variant has valid values of all metrics. Those that differ
    in anything else would be no curve."""
    info, found = result.info, {}
    for name, settings in info.points.items():
        values = ([result.table.values(v, name, metric) for metric in metrics] for v in info.variants)
        if lines.is_number(settings.get(key)) and any(map(all, values)):
            found[name] = {k: v for k, v in settings.items() if k != key}
    alike = [name for name, others in found.items() if others == next(iter(found.values()))]
    return {name: {key: info.points[name][key]} for name in alike}
