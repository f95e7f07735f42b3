"""How predictions did: their errors load by load, and the gains that they promised beside those that were measured."""

from __future__ import annotations

from collections.abc import Sequence

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

    def row(point: str) -> tuple[str, ...]:
        every = {name: [found.get((point, name, variant)) for variant in predictions] for name in metrics}
        known = [miss for of_metric in every.values() for miss in of_metric if miss]
        return (
            point,
            *(_errors(of_metric) for of_metric in every.values()),
            _worst(known, result) if known else wording.NOTHING,
        )

    if not metrics or not _is_about(result):
        return []
    order = " / ".join(info.variants[name] for name in predictions.values())
    title = f"Errors of the predictions{f': {order}' if len(predictions) > 1 else ''}"
    header = ("load", *(REPORTED[name] for name in metrics), "worst")
    return [Grid(title, header, tuple(row(point) for point in info.points))]


def gains(result: Result) -> list[Grid]:
    """Over the baseline, and of predictions over the baseline's: of the metrics of the claims, or of all."""
    info, measured = result.info, [*predictions_of(result.info).values()]
    baseline, rows = str(info.baseline), []
    if baseline not in measured:
        return []
    for metric in dict.fromkeys(claim.metric for claim in info.claims) or info.metrics:
        for point, variant in ((point, name) for point in info.points for name in measured if name != baseline):
            both = [
                effects.between(result, metric, (variant + mark, point), (baseline + mark, point)).gain
                for mark in ("", PREDICTED)
            ]
            if any(both):
                told = (wording.interval(gain, "x") if gain else wording.NOTHING for gain in both)
                rows.append((REPORTED.get(metric) or wording.short(metric, info), point, info.variants[variant], *told))
    title = f"Gains over {info.variants[baseline]}, above 1 where it is better"
    header = ("metric", "point", "variant", "gain measured", "gain predicted")
    return [Grid(title, header, tuple(rows))] if rows else []


def sentence(result: Result) -> str:
    """Of a run that asks how good predictions are: their errors, metric by metric. Empty of any other."""
    if not _is_about(result):
        return ""
    told, labels = [], result.info.variants
    found = list(prediction.misses(result.rows, predictions_of(result.info)))
    for name, short in REPORTED.items():
        own = [miss for miss in found if miss.metric == name]
        if own:
            worst, median = max(own, key=_size), stats.median([abs(miss.share) for miss in own])
            at = f"{labels[predictions_of(result.info)[worst.variant]]}{f', {worst.point}' if worst.point else ''}"
            told.append(f"{short} {median:.1%} (worst {worst.by}: {at})")
    return f"Predictions are off by, in the median: {'; '.join(told)}." if told else ""


def _is_about(result: Result) -> bool:
    """Whether claims are on the predictions themselves."""
    return any(claim.variant in predictions_of(result.info) for claim in result.info.claims)


def _errors(misses: Sequence[Miss | None]) -> str:
    return " / ".join(miss.by if miss else wording.NOTHING for miss in misses)


def _worst(misses: Sequence[Miss], result: Result) -> str:
    worst = max(misses, key=_size)
    variants = predictions_of(result.info)
    whose = f", {result.info.variants[variants[worst.variant]]}" if len(variants) > 1 else ""
    return f"{REPORTED[worst.metric]}{whose}: {worst.by}"


def _size(miss: Miss) -> float:
    return abs(miss.share)
