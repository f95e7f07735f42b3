"""What a machine without moods would measure of an experiment's own requests: which of its figures have a sample."""

import random
from collections import defaultdict, deque
from functools import cache
from typing import NamedTuple

from experiments.lab.judge import formulas
from experiments.lab.judge.metrics import Missing
from experiments.lab.measure.traces import RequestTrace, Served
from experiments.lab.workloads.base import Vocabulary

STEP_S, PROMPT_TOKEN_S = 0.005, 2e-5  # of a decode step, and more for each prompt token in it
SPREAD = 0.01  # of a step's time: no two pauses are equal


class Request(NamedTuple):
    prompt: int
    output: int
    arrival_s: float | None
    name: str


def not_shown(experiment):
    """(metric, point, why) of what claims and figures of an ablation are about, and no pass of it would show."""
    found, vocabulary = set(), Vocabulary(next(iter(experiment._cells.values())).engine.model)
    inputs = {
        point.name: experiment._cell(experiment.baseline, point).workload.make(vocabulary, 0)
        for point in experiment._grid
    }
    for (variant, point), names in asked(experiment).items():
        cell = experiment._cells[variant, point]
        items = inputs[point].measured
        requests = tuple(Request(len(i.prompt), i.output_tokens, i.arrival_s, i.name) for i in items)
        scheduler = cell.engine.scheduler
        limits = scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.chunked_prefill
        served = serve(requests, cell.workload.in_flight, *limits)
        values = measured(served.without_ramps() if cell.workload.has_ramps else served, tuple(sorted(names)))
        found |= {(n, point, v.reason) for n, v in values.items() if isinstance(v, Missing) and v.applies}
    return sorted(found)


measured = cache(formulas.measure)


def asked(experiment):
    """(variant, point) -> metrics."""
    found = defaultdict(set)
    for claim in experiment.claims:
        found[claim.variant, claim.point].add(claim.metric)
        found[claim.reference_variant, claim.reference_point].add(claim.metric)
    for panel in (panel for plot in experiment.spec.plots for panel in plot.panels):
        for point in experiment._grid:
            shown = all(point.values.get(key) == value for key, value in panel.where.items())
            if shown and (panel.x in point.values or not (panel.x or "").startswith("workload.")):
                for variant in experiment.variants:
                    found[variant, point.name].add(panel.metric)
    points = {point.name for point in experiment._grid}  # of a search nobody knows which it will visit
    return {cell: names for cell, names in found.items() if cell in experiment._cells and cell[1] in points}


@cache
def serve(requests, places, rows, tokens, chunked):
    """Steps of at most so many rows and tokens: running requests first, then prompts in the order of their arrival, cut
    into chunks or not. Of the closed loop's requests so many are in flight as there are places."""
    rng, now = random.Random(0), 0.0
    due = deque(sorted(range(len(requests)), key=lambda index: requests[index].arrival_s or 0.0))
    left = {index: requests[index].prompt for index in due}  # prompt tokens that are not computed
    times = {index: [] for index in due}
    arrivals, prompts, running = {}, deque(), []
    while due or prompts or running:
        if not prompts and not running:
            now = max(now, requests[due[0]].arrival_s or 0.0)
        while due and (requests[due[0]].arrival_s or 0.0) <= now:
            closed = requests[due[0]].arrival_s is None
            if closed and len(prompts) + len(running) >= places:
                break
            arrivals[due[0]] = now if closed else requests[due[0]].arrival_s
            prompts.append(due.popleft())
        room, begun = tokens - len(running), len(running)
        while prompts and len(running) < rows and (left[prompts[0]] <= room or chunked) and room > 0:
            computed = min(left[prompts[0]], room)
            left[prompts[0]] -= computed
            room -= computed
            if not left[prompts[0]]:
                running.append(prompts.popleft())
        now += (STEP_S + PROMPT_TOKEN_S * (tokens - begun - room)) * (1 + SPREAD * rng.random())
        for index in running:
            times[index].append(now)
        running = [index for index in running if len(times[index]) < requests[index].output]
    traces = tuple(
        RequestTrace(request.prompt, request.output, arrivals[index], tuple(times[index]), (), name=request.name)
        for index, request in enumerate(requests)
    )
    return Served(traces, min(arrivals.values()), now)
