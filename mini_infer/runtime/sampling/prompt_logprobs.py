"""Log-probabilities of a prompt's own tokens, from the hidden states of a step that computes some of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from mini_infer.core.plan import StepPlan
from mini_infer.core.request import TokenLogprob
from mini_infer.runtime.sampling.sampler import Logprobs, Wanted, report

LOGITS_AT_A_TIME = 2**23  # whose float32 copies take 100 MB at most, however long the prompt is


class RowLogprobs(NamedTuple):
    """What a row of the plan asks for, on its way to the host."""

    row: int
    slices: list[Logprobs]

    def finish(self) -> list[TokenLogprob]:
        return [entry for part in self.slices for entry in part.finish().values()]


def prompt_logprobs(
    plan: StepPlan, hidden: Tensor, history: Tensor, vocab_size: int, compute_logits: Callable[[Tensor], Tensor]
) -> list[RowLogprobs]:
    """
    Args:
        hidden: [T, ...] of all the plan's tokens.
        history: [slots, longest] int32: each slot's tokens, which hold those that are asked about.
        compute_logits: hidden states [N, ...] -> [N, vocab_size].
    """
    firsts = list(accumulate(plan.counts, initial=0))
    at_a_time = max(1, LOGITS_AT_A_TIME // vocab_size)
    rows = []
    for row, count, num_top in plan.prompt_logprobs:
        next_tokens = history[plan.req_indices[row], plan.starts[row] + 1 :]
        slices = []
        for start in range(0, count, at_a_time):
            end = min(start + at_a_time, count)
            logits = compute_logits(hidden[firsts[row] + start : firsts[row] + end])
            numbers = list(range(end - start))
            wanted = Wanted(None, numbers, [min(num_top, vocab_size)] * len(numbers))
            slices.append(report(logits, next_tokens[start:end].long(), wanted))
        rows.append(RowLogprobs(row, slices))
    return rows
