"""What to know of a whole run: is it complete, does it tell the baseline from itself, do repeats of a variant agree?"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import product

from experiments.lab.config.axes import NO_SCALE
from experiments.lab.judge import stats
from experiments.lab.judge.knees import offered
from experiments.lab.measure.traces import STEADY
from experiments.lab.show import wording
from experiments.lab.store.result import OF_PROCESSES, Result, RunInfo
from experiments.lab.store.rows import Turn
from experiments.lab.workloads.base import ONE_BY_ONE

STEADY_S = 60  # in which an open loop's requests arrive on a GPU
DRAWN = 0.02  # of it: so much sooner the last of some thousand arrivals that are drawn may come
NEAR = 0.005  # 1, of a ratio that three digits round to it
SEVERALFOLD = 2.0  # between the smallest and the largest repeat of a process
OF_TIME = ("s", "ms", "us", "µs", "GB/s", "TFLOP/s", "tokens/s", "requests/s")  # units of what should repeat
TAILS = ("_p90_", "_p95_", "_p99_", "_max_")  # which a single pause sets


def again(result: Result) -> stats.Estimate | None:
    """The baseline's second arm over its first, by the metric of the run: in each repeat the geometric mean over all
    points. 5 % of sound runs tell it from 1. None where it was measured once, or the two share no valid repeat."""
    info = result.info
    timed = [name for name, metric in info.metrics.items() if metric.unit in OF_TIME]
    claimed = [claim.metric for claim in info.claims if claim.bound.is_ratio and claim.metric in timed]
    if info.aa is None:
        return None
    # Of the first claim of a ratio, else the first metric, that both have, of those that time goes into: counts are the
    # same whatever the machine does. No search is made a second time.
    logs = next((logs for metric in (*claimed, *timed) if (logs := log_ratios(result, info.aa, metric))), {})
    whole = max((len(own) for own in logs.values()), default=0)  # a turn that lacks a point is no equal of the others
    pairs = {turn: math.exp(sum(own) / whole) for turn, own in logs.items() if len(own) == whole}
    return stats.factors(pairs) if pairs else None


def log_ratios(result: Result, variant: str, metric: str) -> dict[Turn, list[float]]:
    """Of the variant to the baseline, turn by turn, over the points that both have in it."""
    table, logs = result.table, defaultdict(list)
    for point in result.info.points:
        base = table.values(str(result.info.baseline), point, metric)
        for turn, value in table.values(variant, point, metric).items():
            if value > 0 and base.get(turn, 0) > 0:
                logs[turn].append(math.log(value / base[turn]))
    return logs


def severalfold(result: Result) -> dict[str, str]:
    """By a variant's label the worst disagreement between repeats of one process, in words; the worst of all first."""
    info, table = result.info, result.table
    worst: dict[str, tuple[float, str]] = {}
    left_out = (*TAILS, "floor")  # which is computed from what a step had to do, and was not measured
    names = [n for n, m in info.metrics.items() if m.unit in OF_TIME and not any(part in n for part in left_out)]
    for (variant, label), point, name in product(info.variants.items(), info.points, names):
        for values in stats.by_process(table.values(variant, point, name)):
            low, high = min(values), max(values)
            if low > 0 and high / low > max(SEVERALFOLD, worst.get(variant, (0.0, ""))[0]):
                metric, where = info.metrics[name], f"{label}{wording.at(point)}"
                text = f"{where}: {metric.label} from {low:.4g} to {high:.4g} {metric.unit} in one process"
                worst[variant] = high / low, text
    return {info.variants[v]: worst[v][1] for v in sorted(worst, key=worst.__getitem__, reverse=True)}


def open_loops(info: RunInfo) -> set[str]:
    """The points at which requests arrive one by one at times of their own, so that a pass lasts as long as they do."""
    how = info.config.get("workload", {}).get("arrivals")
    return {p for p, at in info.points.items() if at.get("workload.arrivals", how) in ONE_BY_ONE or offered(at)}


def short_passes(result: Result) -> str:
    """Of passes on a GPU whose requests arrive one after another: over how little time they do."""
    info, loops = result.info, open_loops(result.info)
    passes = defaultdict[tuple[str, str, int, int], list[float]](list)
    if not info.on_gpu:
        return ""
    for r in result.requests:
        if r.point in loops and r.valid is not False:
            passes[r.variant, r.point, r.process, r.repeat].append(r.arrival_s)
    spans = [max(times) - min(times) for times in passes.values()]
    # Of results that are older than that table, and where arrivals are no setting, as those of prompts in `mixed`.
    if not passes and (loops or "arrivals" not in info.config.get("workload", {})):
        last = info.workload.get("last_arrival_s")
        spans = list(filter(None, last if isinstance(last, list) else [last]))
    short = sorted(span for span in spans if span < (1 - DRAWN) * STEADY_S)
    if not short:
        return ""
    few = any(len(times) < STEADY for times in passes.values())
    ramps = f"; of fewer than {STEADY} requests no ramps are left out" if few else ""
    ends = dict.fromkeys(map(wording.number, (short[0], short[-1])))
    return f"open-loop passes of {' to '.join(ends)} s ({STEADY_S} are asked for on a GPU{ramps})"


def of(result: Result) -> list[str]:
    """Everything that marks the run, in words; empty where nothing does. What stands in brackets can be left out."""
    info, found, told = result.info, again(result), []
    if found is not None and found.low is not None and found.high is not None and found.told:
        ratio = wording.interval(found)
        if min(abs(found.low - 1), abs(found.high - 1)) < NEAR:  # else an end that is not 1 would read 1.00
            ratio = f"{found.median:.4f} [{found.low:.4f}, {found.high:.4f}]"
        told.append(f"the baseline differs from itself: A/A ratio {ratio}")
    if apart := severalfold(result):
        (label, worst), *more = apart.items()
        whose = f"{len(apart)} variants" if more else label.partition(" (")[0]
        told.append(f"repeats of {whose} differ severalfold ({'the most: ' if more else ''}{worst})")
    if found is None and info.baseline is not None and info.on_gpu:
        told.append("no A/A arm (nothing says how far the baseline differs from itself)")
    compared = set(info.variants) - {info.aa, info.baseline}
    gates = info.every_gate if info.scale == NO_SCALE else info.gates  # without an engine there are no tokens
    if info.on_gpu and info.baseline is not None and compared and not gates:
        told.append("no gates (nothing says that variants compute the same)")
    if info.on_gpu and result.repeats == 1 and "measure.repeats" in info.changed:
        told.append("1 repeat (nothing says what varies within a process)")
    count = len(info.processes) or 1
    if count < info.processes_due and OF_PROCESSES not in info.status:  # which says how many
        told.append(f"{count} process{'es' if count > 1 else ''} (a result is made of {info.processes_due})")
    return [*told, *filter(None, [short_passes(result)])]
