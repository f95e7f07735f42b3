"""The least time in which the hardware could have served the requests of a pass whose steps nobody has looked at, as
over HTTP: each prompt token that was not cached and each token that was fed back is computed once, each token that was
fed back reads its own request's KV, and each decode step reads the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from experiments.lab.judge.roofline import Floor, StepCosts, StepWork, bandwidth, floor
from experiments.lab.measure.hardware import Ceilings
from experiments.lab.measure.traces import RequestRow


def least(requests: Sequence[RequestRow], costs: StepCosts, ceilings: Ceilings) -> Floor:
    """Of whatever engine, without drafts. It is no more than the least time of the steps that there were: prompts count
    no bytes, cached tokens none either, since requests can share them, and products of attention nothing."""
    fed_back = [request.output_tokens - 1 for request in requests]  # the first token comes with the prompt's end
    prompts = sum(max(request.prompt_tokens - request.cached_tokens, 1) for request in requests)
    steps = max(1, *fed_back, math.ceil(sum(fed_back) / most_at_once(requests)))
    done = StepWork(prompts + sum(fed_back), sum(request.output_tokens for request in requests), 1, 1, 0)
    of_step = _bytes_of_step(costs, 0)
    moved = steps * of_step
    for request, count in zip(requests, fed_back, strict=True):
        # A sliding window makes the bytes of a token concave in its place: between the first and the last, or above.
        first = request.prompt_tokens - request.cached_tokens
        ends = (_bytes_of_step(costs, context) for context in (first, first + max(count - 1, 0)))
        moved += count * (sum(ends) / 2 - of_step)
    # A step reads no less than the weights alone, so that none has a cache's rate for less than these.
    return Floor(moved / bandwidth(ceilings, of_step), floor(costs.of(done), ceilings).compute_s)


def _bytes_of_step(costs: StepCosts, context: int) -> float:
    """Of one that computes a token behind so many."""
    return costs.of(StepWork(tokens=1, sampled=1, rows=1, context=context + 1, pairs=0)).bytes


def most_at_once(requests: Sequence[RequestRow]) -> int:
    """How many had come and not ended at a time, at the most; requests have an end."""
    events = [(request.arrival_s, 1) for request in requests] + [(request.end_s or 0.0, -1) for request in requests]
    return max(accumulate(change for _, change in sorted(events, key=lambda event: (event[0], -event[1]))))
