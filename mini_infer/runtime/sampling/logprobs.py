"""Log-probabilities that are reported: of sampled tokens, and of a prompt's own from the hidden states of a step that
computes some of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mini_infer.core.plan import StepPlan
from mini_infer.core.request import TokenLogprob
from mini_infer.runtime.sampling.adjust import padded

LOGITS_AT_A_TIME = 2**23  # whose float32 copies take 100 MB at most, however long the prompt is


@dataclass(frozen=True, eq=False)
class Wanted:
    """L rows whose log-probabilities are asked for."""

    rows: Tensor | None  # [L] int64 on the device; None: all rows
    row_numbers: list[int]
    num_top: list[int]  # alternatives that each of them wants


@dataclass(frozen=True, eq=False)
class Logprobs:
    """Log-probabilities on their way to the host."""

    wanted: Wanted
    numbers: Tensor  # [L, 2 + K] int64: the token, its rank, the likeliest tokens
    values: Tensor  # [L, 1 + K] float32: the token's log-probability, the likeliest tokens'

    def finish(self) -> dict[int, TokenLogprob]:
        """Row -> the entry of its token. On a GPU: after an event that was recorded behind the sampling."""
        result = {}
        rows = zip(
            self.wanted.row_numbers, self.wanted.num_top, self.numbers.tolist(), self.values.tolist(), strict=True
        )
        for row, n, (token, rank, *ids), (own, *top) in rows:
            result[row] = TokenLogprob(token, own, rank, tuple(zip(ids[:n], top[:n], strict=True)))
        return result


def report(logits: Tensor, token_ids: Tensor, wanted: Wanted) -> Logprobs:
    """Log-probabilities (natural) under the model's own distribution, of the tokens and of the likeliest ones, of which
    the first where they are equally likely. A row's do not depend on the other rows."""
    rows = slice(None) if wanted.rows is None else wanted.rows
    vocab_size = logits.shape[1]
    # Where a row of memory begins decides in which order torch adds it up, so all are padded to begin alike.
    scores = logits.new_full((len(wanted.row_numbers), padded(vocab_size)), -math.inf, dtype=torch.float32)
    scores[:, :vocab_size] = logits[rows]
    logprobs, tokens = scores.log_softmax(dim=1)[:, :vocab_size], token_ids[rows, None]
    own = logprobs.gather(1, tokens)
    ranks = (logprobs > own).sum(dim=1, keepdim=True) + 1
    # Of numbers below 0 the bits grow as they sink.
    order = (0.0 - logprobs).view(torch.int32).long().bitwise_left_shift_(32)
    order |= torch.arange(vocab_size, device=logits.device)
    ids = order.topk(max(wanted.num_top), dim=1, largest=False).values & (2**32 - 1)
    values = logprobs.gather(1, ids)
    numbers, values = torch.cat([tokens, ranks, ids], dim=1), torch.cat([own, values], dim=1)
    # From a GPU, into page-locked memory, which needs no waiting.
    return Logprobs(wanted, numbers.to("cpu", non_blocking=True), values.to("cpu", non_blocking=True))


def prompt_logprobs(
    plan: StepPlan, hidden: Tensor, history: Tensor, vocab_size: int, compute_logits: Callable[[Tensor], Tensor]
) -> dict[int, list[Logprobs]]:
    """What rows of the plan ask for, in slices, from the hidden states [T, ...] of all its tokens. `history` [requests,
    longest] int32 holds each request's tokens; compute_logits takes hidden states [N, ...] to [N, vocab_size]."""
    firsts = list(accumulate(plan.counts, initial=0))
    at_a_time = max(1, LOGITS_AT_A_TIME // vocab_size)
    by_row = {}
    for row, count, num_top in plan.prompt_logprobs:
        next_tokens = history[plan.req_indices[row], plan.starts[row] + 1 :]
        slices = []
        for start in range(0, count, at_a_time):
            end = min(start + at_a_time, count)
            logits = compute_logits(hidden[firsts[row] + start : firsts[row] + end])
            numbers = list(range(end - start))
            wanted = Wanted(None, numbers, [min(num_top, vocab_size)] * len(numbers))
            slices.append(report(logits, next_tokens[start:end].long(), wanted))
        by_row[row] = slices
    return by_row
