"""One random token a row: temperature, top-k, top-p, min-p, then the inverse CDF at a uniform number.

The rules are defined here, in torch operations; sample.py follows them on a GPU. Two things make a row's token
a function of (logits, parameters, seed, position) alone, whatever the batch around it, its slot, or a preemption in
between. The uniform is a hash of (seed, position): there is no generator state to advance. And the distribution is
summed in integers: float sums depend on their order, which a GPU scan chooses by the shape of the batch; integer sums
do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mini_infer.core.request import SamplingParams
from mini_infer.core.uniforms import Array, hash_seeds, uniforms

MIN_TEMPERATURE = 1e-5  # logits divided by less may overflow float32; by this, they are an argmax already

# A request's parameters as a record, and the same bits as NUM_PARAMS int32 columns for the device.
PARAM_COLUMNS = np.dtype(
    [
        ("temperature", np.float32),  # 0 is greedy
        ("tail", np.float32),  # 1 - top_p
        ("top_k", np.int32),  # vocab_size where it cuts nothing
        ("min_p", np.float32),
        ("key", np.uint64),  # hashed seed
        ("seeded", np.int32),  # the request brought it, and asks for the same tokens in any company
    ]
)
NUM_PARAMS = PARAM_COLUMNS.itemsize // 4
TEMPERATURE, SEEDED = 0, NUM_PARAMS - 1  # of those columns


def encode(params: SamplingParams, seed: int, vocab_size: int) -> Array:
    """The parameters of a draw as int32 [NUM_PARAMS]."""
    row = np.zeros(1, PARAM_COLUMNS)
    row["temperature"] = 0 if params.greedy else max(params.temperature, MIN_TEMPERATURE)
    row["tail"] = 1 - params.top_p
    row["top_k"] = min(params.top_k, vocab_size) or vocab_size
    row["min_p"] = params.min_p
    row["key"] = hash_seeds(np.array([seed], np.uint64))
    row["seeded"] = params.seed is not None
    return row.view(np.int32)


# ---------------------------------------------------------------------------------------------- what a batch draws


@dataclass(frozen=True, eq=False)
class Column:
    """A parameter of the rows that use it."""

    rows: Tensor | None  # [n] int64; None: all rows, which saves a copy of their logits
    values: Tensor  # [n, 1]

    def take(self, matrix: Tensor) -> Tensor:
        return matrix if self.rows is None else matrix[self.rows]

    def put(self, matrix: Tensor, part: Tensor) -> Tensor:
        return part if self.rows is None else matrix.index_copy(0, self.rows, part)


@dataclass(frozen=True, eq=False)
class Draw:
    """R rows that are sampled. Rows of `top_k` and `top_p` count within these R. What none uses is None."""

    rows: Tensor | None  # [R] int64; None: all rows of the batch
    uniforms: Tensor  # [R, 1] float64 in [0, 1)
    temperature: Tensor  # [R, 1] float32
    top_k: Column | None  # int64
    max_top_k: int
    top_p: Column | None  # float64: 1 - top_p, the mass that may go
    min_p: Tensor | None  # [R, 1] float32

    @classmethod
    def of(cls, params: Array, positions: Array, vocab_size: int, send: Callable[[Array], Tensor]) -> Draw | None:
        """The draw of S rows; None where all are greedy.

        Args:
            params: [S] of PARAM_COLUMNS.
            positions: [S] int: tokens before the one that is drawn.
            send: makes a tensor on the logits' device.
        """
        chosen = np.flatnonzero(params["temperature"])
        if not chosen.size:
            return None
        sampled = params.take(chosen)

        def column(values: Array, uses: Array) -> Column | None:
            users = np.flatnonzero(uses)
            if not users.size:
                return None
            return Column(None if len(users) == len(values) else send(users), send(values[users, None]))

        top_k = sampled["top_k"].astype(np.int64)
        return cls(
            rows=None if len(chosen) == len(params) else send(chosen),
            uniforms=send(uniforms(sampled["key"], positions[chosen])[:, None]),
            temperature=send(sampled["temperature"][:, None]),
            top_k=column(top_k, top_k < vocab_size),
            max_top_k=int(top_k.max(initial=0, where=top_k < vocab_size)),
            top_p=column(sampled["tail"].astype(np.float64), sampled["tail"] > 0),
            min_p=send(sampled["min_p"][:, None]) if sampled["min_p"].any() else None,
        )


def pick_tokens(scores: Tensor, draw: Draw | None) -> Tensor:
    """Token ids [S] int64 of scores [S, V]: drawn in the rows of `draw`, the first highest in the others. A NaN counts
    as the largest."""
    if draw is None:
        return scores.argmax(dim=1)
    if draw.rows is None:
        return draw_tokens(scores, draw)
    return scores.argmax(dim=1).index_copy_(0, draw.rows, draw_tokens(scores[draw.rows], draw))


def pick_rows(logits: Tensor, param_rows: Tensor, positions: Tensor) -> Tensor:
    """The reference of kernels.sampling.sample.sample_rows, with its arguments, on any device."""
    params = param_rows.cpu().contiguous().numpy().view(PARAM_COLUMNS)[:, 0]
    draw = Draw.of(params, positions.cpu().numpy(), logits.shape[1], lambda a: torch.tensor(a, device=logits.device))
    return pick_tokens(logits.float(), draw)


# ---------------------------------------------------------------------------------------------- the rules


def draw_tokens(scores: Tensor, draw: Draw) -> Tensor:
    """Samples every row of scores [R, V] float32 by its inverse CDF."""
    return invert(kept_weights(scores, draw), draw.uniforms)


def kept_weights(scores: Tensor, draw: Draw) -> Tensor:
    """Probabilities in fixed point, [R, V] int64, whose sum differs from row to row; 0 where a token is cut."""
    return _weights(truncate(scores, draw))


def invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The inverse CDF of weights [R, V] int64 at uniforms [R, 1]: token ids [R]. One of weight 0 has no width in it."""
    cdf = weights.cumsum(dim=1)
    total = cdf[:, -1:]
    target = (uniforms * total).long().clamp(max=total - 1)  # u * total may round up to total
    return torch.searchsorted(cdf, target, right=True).squeeze(1)  # the first token with cdf > target


def truncate(scores: Tensor, draw: Draw) -> Tensor:
    """Scales [R, V] by temperature and sets what top-k, top-p and min-p cut to -inf, in the order and with the
    rules of transformers' logits warpers. The most likely token always stays."""
    limits = torch.finfo(scores.dtype)
    scores = (scores / draw.temperature).nan_to_num_(nan=limits.max, posinf=limits.max, neginf=limits.min)
    if draw.top_k is not None:
        scores = draw.top_k.put(scores, _top_k(draw.top_k.take(scores), draw.top_k.values, draw.max_top_k))
    if draw.top_p is not None:
        scores = draw.top_p.put(scores, _top_p(draw.top_p.take(scores), draw.top_p.values))
    if draw.min_p is not None:
        scores = scores.masked_fill(_relative(scores) < draw.min_p, -torch.inf)
    return scores


def _top_k(scores: Tensor, k: Tensor, max_k: int) -> Tensor:
    """Keeps the k highest, and all that tie with the k-th. Fan et al. 2018 (arXiv:1805.04833)."""
    kth = scores.topk(max_k, dim=1).values.gather(1, k - 1)
    return scores.masked_fill(scores < kth, -torch.inf)


def _top_p(scores: Tensor, tail: Tensor) -> Tensor:
    """Cuts the least likely tokens whose mass together is at most tail [R, 1] = 1 - top_p. Holtzman et al. 2019
    (arXiv:1904.09751). Of equal tokens, those with the lower ids go first."""
    ordered, token_ids = scores.sort(dim=1, stable=True)
    mass = _weights(ordered).cumsum(dim=1)
    cut = mass <= (tail * mass[:, -1:]).long()
    cut[:, -1] = False
    return scores.masked_fill(torch.empty_like(cut).scatter_(1, token_ids, cut), -torch.inf)


def _relative(scores: Tensor) -> Tensor:
    """Probabilities divided by the row's highest."""
    return (scores - scores.amax(dim=1, keepdim=True)).exp_()


def _weights(scores: Tensor) -> Tensor:
    """Probabilities in fixed point: int64, the row's highest being 2**bits, and the row's sum below 2**62."""
    bits = 62 - scores.shape[1].bit_length()
    return _relative(scores).mul_(2.0**bits).long()
