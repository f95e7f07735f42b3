"""How predictions did: their errors load by load, and the gains that they promised beside those that were measured."""

from __future__ import annotations

from experiments.lab.judge import prediction, stats
from experiments.lab.judge.prediction import Miss
from experiments.lab.show import effects, wording
from experiments.lab.show.grids import Grid, predictions_of
from experiments.lab.spec import PREDICTED
from experiments.lab.store.result import Result

REPORTED = {  # of the error table
    "output_tokens_per_s": "tokens/s",
    "ttft_p50_ms": "median TTFT",
    "itl_p99_ms": "P99 ITL",
    "goodput_rps": "goodput",
}


def errors(result: Result) -> list[Grid]:
    """A row a load: of each metric the errors of all variants' predictions, in the variants' order, and the worst."""
    info, predictions = result.info, predictions_of(result.info)
    found = {(m.point, m.metric, m.variant): m for m in prediction.misses(result.rows, predictions)}
    metrics = [name for name in REPORTED if any(name == metric for _, metric, _ in found)]
    if not metrics or not _is_about(result):
        return []
    rows, many = [], len(predictions) > 1
    for point in info.points:
        every = [[found.get((point, name, variant)) for variant in predictions] for name in metrics]
        told = [" / ".join(miss.by if miss else wording.NOTHING for miss in of_metric) for of_metric in every]
        worst = max((miss for of_metric in every for miss in of_metric if miss), key=_size, default=None)
        whose = f", {info.variants[predictions[worst.variant]]}" if worst and many else ""
        rows.append((point, *told, f"{REPORTED[worst.metric]}{whose}: {worst.by}" if worst else wording.NOTHING))
    order = f": {' / '.join(info.variants[name] for name in predictions.values())}" if many else ""
    header = ("load", *(REPORTED[name] for name in metrics), "worst")
    return [Grid(f"Errors of the predictions{order}", header, tuple(rows))]


def gains(result: Result) -> list[Grid]:
    """Over the baseline, and of predictions over the baseline's: of the metrics of the claims, or of all."""
    info, measured = result.info, predictions_of(result.info).values()
    baseline, rows = str(info.baseline), []
    for metric in dict.fromkeys(claim.metric for claim in info.claims) or info.metrics:
        for point, variant in ((point, name) for point in info.points for name in measured if name != baseline):
            cells = (((variant + mark, point), (baseline + mark, point)) for mark in ("", PREDICTED))
            both = [effects.between(result, metric, *pair).gain for pair in cells] if baseline in measured else []
            if any(both):
                told = (wording.interval(gain, "x") if gain else wording.NOTHING for gain in both)
                rows.append((REPORTED.get(metric) or wording.short(metric, info), point, info.variants[variant], *told))
    title = f"Gains over {info.variants.get(baseline)}, above 1 where it is better"
    header = ("metric", "point", "variant", "gain measured", "gain predicted")
    return [Grid(title, header, tuple(rows))] if rows else []


def sentence(result: Result) -> str:
    """Of a run that asks how good predictions are: their errors, metric by metric. Empty of any other."""
    told, predictions = [], predictions_of(result.info)
    found = list(prediction.misses(result.rows, predictions)) if _is_about(result) else []
    for name, short in REPORTED.items():
        own = [miss for miss in found if miss.metric == name]
        if own:
            worst, median = max(own, key=_size), stats.median([_size(miss) for miss in own])
            at = ", ".join(filter(None, (result.info.variants[predictions[worst.variant]], worst.point)))
            told.append(f"{short} {median:.1%} (worst {worst.by}: {at})")
    return f"Predictions are off by, in the median: {'; '.join(told)}." if told else ""


def _is_about(result: Result) -> bool:
    """Whether claims are on the predictions themselves."""
    return any(claim.variant in predictions_of(result.info) for claim in result.info.claims)


def _size(miss: Miss) -> float:
    return abs(miss.share)
