"""The line on a page's first screen that says what the hardware allows, where the page's first claim was measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from statistics import median
from typing import Any

from omegaconf import OmegaConf

from experiments.lab.config import ablation_spec, axes, schema
from experiments.lab.judge import marks, pass_floor
from experiments.lab.judge.roofline import StepCosts
from experiments.lab.measure import ceilings, hardware
from experiments.lab.measure.hardware import Ceilings
from experiments.lab.show import answer, effects, wording
from experiments.lab.store.result import Result, RunInfo
from experiments.lab.store.rows import from_plain
from mini_infer.core.config import EngineConfig, LoadFormat
from mini_infer.core.errors import MiniInferError
from mini_infer.core.speculation_config import SpeculationMethod

TO_PEER = "to_peer"  # of Ceilings.link_gb_s
OF_CEILINGS = ("floor_ms", "mbu", "mfu")  # metrics that are not measured without


def lines(result: Result) -> list[str]:
    """One, or none where neither rows nor the experiment's file tell of a limit."""
    found = _of_steps(result) or _of_requests(result) or _stated(result.info)
    return [f"**Limit**: {found}."] if found else []


def _cells(result: Result) -> list[effects.Cell]:
    """Those of the claims; without any all, from the last point on, which has most in flight."""
    claimed, info = [effect.cell for effect in effects.of_claims(result)], result.info
    scheduled = marks.open_loops(info)
    asked = [point for point in reversed(info.points) if point not in scheduled]
    return claimed or [cell for point in asked for cell in info.cells if cell[1] == point]


def _of_steps(result: Result) -> str:
    """By metrics of the engine's steps, or of a kernel's calls. Calls on two GPUs whose bytes no
    memory is held against send them over the link."""
    info = result.info
    for cell in _cells(result):
        found = [result.estimate(*cell, name) for name in ("floor_ms", "step_ms", "mbu", "mfu")]
        floor, step, *used = (each.median if each else 0.0 for each in found)
        where = _where(cell, info)
        if floor and step:
            needs = f"the hardware needs at least {wording.number(floor)} of the {wording.number(step)} ms of a step"
            return f"{needs}, prompts included ({wording.share(min(1.0, floor / step))}; {where})"
        if any(used):
            most, what = max(zip(used, ("memory bandwidth", "computing power"), strict=True), key=itemgetter(0))
            return f"{wording.share(min(1.0, most))} of the {what} is used ({where})"
        link = (info.ceilings or {}).get("link_gb_s", {}).get(TO_PEER)
        if link and info.provenance.device.get("gpus", 1) > 1 and (own := result.estimate(*cell, "gb_s")):
            return f"{wording.number(own.median)} of the {wording.number(link)} GB/s of a copy to another GPU ({where})"
    return ""


def _of_requests(result: Result) -> str:
    """By what the requests of a pass were, where nobody has looked at steps; or why that is not known."""
    known, why = _ceilings(result.info)
    unknown = f"not known: {why}" if why else ""
    since = "" if result.info.ceilings else ", by ceilings that were measured since"
    if known is None and set(OF_CEILINGS) & set(result.info.metrics):
        return unknown
    peers = effects.peers(result.info)
    scheduled = marks.open_loops(result.info)  # where a pass lasts as long as requests arrive, whatever the hardware
    for cell in (cell for cell in _cells(result) if cell[0] not in peers and cell[1] not in scheduled):
        passes = list(_passes(result, *cell))
        engine = _engine(result.info, *cell) if passes else None
        if engine is None:
            continue
        if known is None:
            return unknown
        costs, devices = engine
        floors = [(pass_floor.least(requests, costs, known.of(devices)), took) for requests, took in passes]
        shortest, took = (median(each) for each in zip(*((least.seconds, s) for least, s in floors), strict=True))
        if shortest > took:
            impossible = f"a pass took {wording.number(took)} s, and the hardware needs {wording.number(shortest)}"
            return f"{impossible}: times or ceilings are wrong ({_where(cell, result.info)})"
        memory = sum(least.memory_s for least, _ in floors) > sum(least.compute_s for least, _ in floors)
        what = "to read weights and KV" if memory else "for the matrix products"
        needs = f"the hardware needs at least {wording.number(shortest)} of the {wording.number(took)} s of a pass"
        return f"{needs}, {what} ({wording.share(shortest / took)}; {_where(cell, result.info)}{since})"
    return ""


def _ceilings(info: RunInfo) -> tuple[Ceilings | None, str]:
    """Those that the run had; else those that are known of its machine by now, or why there are none."""
    if info.ceilings is not None or info.is_simulated:
        with suppress(ValueError):  # of a day when they had other rates
            return from_plain(Ceilings, info.ceilings), ""
        return None, ""
    key = hardware.short_gpu_name(info.machine) if info.on_gpu else wording.CPU
    return ceilings.of_machine(ceilings.FOLDER, key, info.machine, info.provenance.device["torch_threads"])


def _passes(result: Result, variant: str, point: str) -> Iterator[tuple[list[Any], float]]:
    """The requests of each pass that counts, where all have their tokens, and the seconds that it took."""
    own = [row for row in result.requests if (row.variant, row.point) == (variant, point)]
    for _, group in groupby(own, key=lambda row: (row.process, row.repeat, row.attempt)):
        rows = list(group)
        if all(row.valid is not False and row.end_s is not None and row.output_tokens for row in rows):
            yield rows, max(row.end_s for row in rows if row.end_s) - min(row.arrival_s for row in rows)


def _engine(info: RunInfo, variant: str, point: str) -> tuple[StepCosts, int] | None:
    """What a variant's steps cost at least, and on how many devices, by the settings that the run has kept; None where
    they say too little, or drafts make several tokens of a step."""
    variants = info.config.get("experiment", {}).get("variants")
    if info.via == axes.URL or (variants is not None and variant not in variants):
        return None
    try:
        asked = OmegaConf.create({"engine": info.config["engine"]})
        values = {key: value for key, value in info.points[point].items() if key.startswith("engine.")}
        asked = schema.with_values(asked, values).engine
        changes = ablation_spec.settings_of((variants or {}).get(variant) or {})
        engine = EngineConfig.from_dict(schema.plain(schema.merged(asked, changes, variant)))
        if engine.model.load_format is LoadFormat.dry or engine.speculation.method is not SpeculationMethod.none:
            return None
        from experiments.lab.measure.costs import served  # needs torch, which takes a second to import

        costs = StepCosts(*served(engine, "cuda" if info.on_gpu or info.is_simulated else "cpu"))
    except (MiniInferError, OSError, KeyError):  # settings or files of another day
        return None
    if variants is not None:
        return costs, engine.parallel.ranks * engine.parallel.engines
    return (costs, info.provenance.device["gpus"]) if info.on_gpu else None  # the experiment lays out its own engines


def _stated(info: RunInfo) -> str:
    """By the run, or what its experiment says today: no number depends on it."""
    said = axes.said(info.experiment, info.scale, info.via) or {}
    return (info.bounded_by or str(said.get("experiment", {}).get("bounded_by", ""))).rstrip(".")


def _where(cell: effects.Cell, info: RunInfo) -> str:
    return wording.titled(answer.called(cell[0], info), cell[1])
