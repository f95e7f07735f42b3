"""Speculation over models of one token's memory, tens of thousands of requests at once, to see what it draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mini_infer.core.request import SamplingParams
from mini_infer.core.uniforms import DRAFT, hash_seeds
from mini_infer.kernels.sampling.draw import NUM_PARAMS, PARAM_COLUMNS, Draw, encode, pick_rows, truncate
from mini_infer.runtime.worker.model_runner import keep_accepted
from mini_infer.speculative.verify import NO_DRAFT

Verify = Callable[..., Tensor]
FIRST_TOKEN, FIRST_POSITION = 0, 5


def table(vocab: int, seed: int, scale: float = 1.5) -> Tensor:
    """[V, V] logits: of the next token, by the last one."""
    return torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def parameters(params: SamplingParams, seeds: np.ndarray, vocab: int) -> Tensor:
    """[R, NUM_PARAMS]: one request a seed."""
    columns = np.repeat(encode(params, 0, vocab).view(PARAM_COLUMNS), len(seeds))
    columns["key"] = hash_seeds(seeds.astype(np.uint64))
    return torch.from_numpy(columns.view(np.int32).reshape(-1, NUM_PARAMS))


@dataclass
class Run:
    tokens: Tensor  # [R, L]
    drafted: int
    accepted: int
    first_accepted: float  # of the drafts at the first position


def speculate(
    target: Tensor,
    params: SamplingParams,
    verify: Verify,
    *,
    draft: Tensor | None = None,
    guess: Tensor | None = None,
    same_uniform: bool = False,
    k: int = 2,
    length: int = 2,
    seeds: np.ndarray | None = None,
) -> Run:
    """The first `length` tokens of many requests.

    Args:
        draft: [V, V'] logits that drafts are drawn from.
        guess: [V] what is proposed behind each token, without any randomness; instead of `draft`.
        same_uniform: drafts are drawn with the uniforms of the tokens themselves, and not judged by their distribution.
    """
    seeds = np.arange(20_000) if seeds is None else seeds
    rows, vocab = len(seeds), len(target)
    by_row = parameters(params, seeds, vocab)
    last = torch.full((rows,), FIRST_TOKEN)
    done = torch.zeros(rows, dtype=torch.int64)
    tokens = torch.full((rows, length + k + 1), NO_DRAFT)
    run = Run(tokens, 0, 0, 0.0)
    while len(going := (done < length).nonzero()[:, 0]):
        own, start = by_row[going], FIRST_POSITION + done[going]
        inputs, q = [last[going]], []
        for i in range(k):
            if draft is None:
                assert guess is not None
                inputs.append(guess[inputs[-1]])
                continue
            q.append(draft[inputs[-1].clamp(max=len(draft) - 1)])
            inputs.append(pick_rows(q[-1], own, start + i + (0 if same_uniform else DRAFT)))
        after, none = torch.stack(inputs, 1), torch.full((len(going), 1), NO_DRAFT)
        drafts = torch.cat([after[:, 1:], none], 1).flatten()
        place = (start[:, None] + torch.arange(k + 1)).flatten()
        flat = (target[after.flatten().clamp(max=vocab - 1)], own.repeat_interleave(k + 1, 0), place, drafts)
        if q and not same_uniform:
            sources = torch.arange(len(going) * k).view(-1, k)
            judged = verify(*flat, torch.stack(q, 1).flatten(0, 1), torch.cat([sources, none], 1).flatten())
        else:
            judged = verify(*flat)
        num_accepted, new = kept(judged, drafts, k + 1)
        if not run.drafted:
            run.first_accepted = float((num_accepted > 0).double().mean())
        run.drafted += k * len(going)
        run.accepted += int(num_accepted.sum())
        tokens[going[:, None], done[going, None] + torch.arange(k + 1)] = new
        last[going] = new.gather(1, num_accepted[:, None])[:, 0]
        done[going] += num_accepted + 1
    run.tokens = tokens[:, :length]
    return run


def kept(judged: Tensor, drafts: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """What R requests of `width` positions each go on with, by the runner's own rule: drafts accepted [R], and their
    tokens [R, width] with NO_DRAFT behind them."""
    rows: list[list[int]] = [[] for _ in range(len(judged) // width)]
    of_row = np.arange(len(judged)) // width
    keep_accepted(rows, of_row.tolist(), judged.tolist(), drafts.tolist())
    new = torch.tensor([row + [NO_DRAFT] * (width - len(row)) for row in rows])
    return (new != NO_DRAFT).sum(1) - 1, new


def probabilities(logits: Tensor, params: SamplingParams) -> np.ndarray:
    """Of the truncated distributions, [V, V]."""
    vocab = logits.shape[1]
    columns = parameters(params, np.zeros(len(logits)), vocab).numpy().view(PARAM_COLUMNS)[:, 0]
    draw = Draw.of(columns, np.zeros(len(logits), np.int64), vocab, torch.tensor)
    return truncate(logits, draw).double().softmax(1).numpy() if draw else np.eye(vocab)[logits.argmax(1)]


def z_of_next(tokens: Tensor, exact: np.ndarray) -> float:
    """Chi-square of the first token."""
    return chi_square_z(np.bincount(tokens[:, 0], minlength=len(exact)), exact[FIRST_TOKEN])


def z_of_pairs(tokens: Tensor, exact: np.ndarray) -> float:
    """Chi-square of the first two tokens together."""
    vocab = len(exact)
    pairs = np.bincount(tokens[:, 0] * vocab + tokens[:, 1], minlength=vocab * vocab)
    return chi_square_z(pairs, (exact[FIRST_TOKEN][:, None] * exact).flatten())


def chi_square_z(counts: np.ndarray, exact: np.ndarray) -> float:
    """The chi-square statistic as standard deviations of a normal distribution (Wilson and Hilferty 1931); infinite
    where there is something that cannot be."""
    if counts[exact == 0].any():
        return math.inf
    expected = exact * counts.sum()
    likely = expected > 5
    degrees = int(likely.sum()) - 1
    if degrees < 1:
        return 0.0
    statistic = float(((counts - expected)[likely] ** 2 / expected[likely]).sum())
    variance = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - variance)) / math.sqrt(variance)
