"""Which drafts stand, and the token after them: safe to capture in a CUDA graph, nothing is sorted.

The rules, and the torch reference, are speculative/verify.py's. Positions without a draft distribution are sampled as
ever (sample.py). For those with one, target and draft logits are both weighed as for sampling, by the same parameters,
and then:

    _judge      position x tiles   accepts the draft, or sums up what p has more of than q in every tile of 4096 tokens
    _pick       position           the draft, or the tile and in it the token where the CDF passes the uniform
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.core.uniforms import ACCEPT
from mini_infer.kernels.sampling.sample import (
    CAPACITY,
    find_tile,
    find_token,
    over_tiles,
    pick,
    sample_rows,
    weigh_rows,
    weight_of_highest,
)
from mini_infer.kernels.sampling.shared import GROUP, TILE, kept_weights, load_highest, locate, read, uniform

_ACCEPT = tl.constexpr(ACCEPT)
_UNIT = tl.constexpr(2.0**61)  # a probability of 1 in fixed point


def verify_rows(
    logits: Tensor,
    param_rows: Tensor,
    positions: Tensor,
    drafts: Tensor,
    draft_logits: Tensor | None = None,
    sources: Tensor | None = None,
    *,
    capacity: int = CAPACITY,
) -> Tensor:
    """The token at each of N positions, given that the drafts before it in its row stand.

    Args:
        logits: [N, V] float32, bfloat16 or float16.
        param_rows: [N, NUM_PARAMS] int32, from draw.encode.
        positions: [N] int32 or int64, contiguous: tokens before the one that is judged.
        drafts: [N] int64, -1 where there is none.
        draft_logits: [D, V'], what drafts were drawn from; None where nothing random proposed them.
        sources: [N] int64: the row of `draft_logits` for each position's draft, -1 for none. No row twice.
        capacity: smaller values serve tests.

    Each row of logits and parameters is contiguous; rows may lie apart.

    Returns:
        token ids [N] int64.
    """
    if draft_logits is None or sources is None or not len(logits) or not len(draft_logits):
        return sample_rows(logits, param_rows, positions, capacity=capacity)
    vocab, (num_drafts, draft_vocab) = logits.shape[1], draft_logits.shape
    # Parameters of zeros are greedy, and cost next to nothing: those of rows without a draft.
    draft_params = param_rows.new_zeros((num_drafts + 1, param_rows.shape[1]))
    draft_params.index_copy_(0, sources.where(sources >= 0, num_drafts), param_rows)
    p = weigh_rows(logits, param_rows, capacity)
    q = weigh_rows(draft_logits, draft_params[:num_drafts], min(capacity, draft_vocab))
    accepted = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    both = p, q, Judged(drafts, sources, positions, torch.empty_like(p.masses), accepted)
    sizes = (weight_of_highest(vocab), weight_of_highest(draft_vocab), vocab, draft_vocab)
    _judge[over_tiles(len(logits), vocab)](*both, *sizes, num_warps=8)
    _pick[(len(logits),)](*both, tokens, *sizes, num_warps=8)
    return tokens


class Judged(NamedTuple):
    """What is known of N positions, and what `_judge` finds of those that are sampled and have a draft distribution."""

    drafts: Tensor  # [N] int64
    sources: Tensor  # [N] int64
    positions: Tensor  # [N]
    residuals: Tensor  # [N, tiles] int64, only where the draft is rejected
    accepted: Tensor  # [N] int32


@triton.jit
def _judge(p, q, judged, scale, draft_scale, VOCAB: tl.constexpr, DRAFT_VOCAB: tl.constexpr):
    row, _logits, own_params, _maxima = locate(p, VOCAB)
    source = tl.load(judged.sources + row)
    rule = read(own_params)
    if (source < 0) | (rule[0] == 0):
        return
    tiles: tl.constexpr = triton.cdiv(VOCAB, TILE)
    target, proposal = _open(p, row, scale, VOCAB), _open(q, source, draft_scale, DRAFT_VOCAB)
    draft = tl.load(judged.drafts + row)
    accepting = uniform(own_params, tl.load(judged.positions + row).to(tl.int64) + _ACCEPT)
    proposed = _probabilities(proposal, draft, rule, DRAFT_VOCAB)
    is_accepted = accepting * proposed < _probabilities(target, draft, rule, VOCAB)
    if tl.program_id(1) == 0:
        tl.store(judged.accepted + row, is_accepted.to(tl.int32))
    if is_accepted:
        return
    for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
        residual = _residual(target, proposal, tile, rule, VOCAB, DRAFT_VOCAB)
        tl.store(judged.residuals + row * tiles + tile, tl.sum(residual))


@triton.jit
def _pick(p, q, judged, tokens, scale, draft_scale, VOCAB: tl.constexpr, DRAFT_VOCAB: tl.constexpr):
    row, logits, own_params, maxima = locate(p, VOCAB)
    source, position = tl.load(judged.sources + row), tl.load(judged.positions + row)
    tiles: tl.constexpr = triton.cdiv(VOCAB, TILE)
    rule = read(own_params)
    if (source < 0) | (rule[0] == 0):
        token = pick(logits, own_params, maxima, p.cuts + row * 2, p.masses + row * tiles, position, scale, VOCAB)
    else:
        token = tl.load(judged.drafts + row)
        if tl.load(judged.accepted + row) == 0:
            residuals = judged.residuals + row * tiles
            if _total(residuals, VOCAB) > 0:  # else p equals q, but for rounding
                target, proposal = _open(p, row, scale, VOCAB), _open(q, source, draft_scale, DRAFT_VOCAB)
                chosen, left = find_tile(residuals, uniform(own_params, position), VOCAB)
                weight = _residual(target, proposal, chosen, rule, VOCAB, DRAFT_VOCAB)
                token = tl.minimum(find_token(chosen, left, weight), VOCAB - 1).to(tl.int64)
    tl.store(tokens + row, token)


@triton.jit
def _open(rows, row, scale, VOCAB: tl.constexpr):
    """A row's distribution, as `_probabilities` takes it."""
    tiles: tl.constexpr = triton.cdiv(VOCAB, TILE)
    unit = _UNIT / _total(rows.masses + row * tiles, VOCAB).to(tl.float64)
    highest = load_highest(rows.maxima + row * (tiles * TILE // GROUP), VOCAB)
    return rows.logits + row * rows.stride, highest, rows.cuts + row * 2, scale, unit


@triton.jit
def _total(masses, VOCAB: tl.constexpr):
    tiles: tl.constexpr = triton.cdiv(VOCAB, TILE)
    tile = tl.arange(0, triton.next_power_of_2(tiles))
    return tl.sum(tl.load(masses + tile, mask=tile < tiles, other=0))


@triton.jit
def _probabilities(distribution, index, rule, VOCAB: tl.constexpr):
    """Of tokens, float64, in units of 1 / _UNIT; 0 behind the row's end."""
    logits, top, cuts, scale, unit = distribution
    return kept_weights(logits, index, top, rule, cuts, scale, VOCAB).to(tl.float64) * unit


@triton.jit
def _residual(p, q, tile, rule, VOCAB: tl.constexpr, DRAFT_VOCAB: tl.constexpr):
    """What a tile's tokens are likelier by in p than in q: weights, int64."""
    index = tile * TILE + tl.arange(0, TILE)
    more = _probabilities(p, index, rule, VOCAB) - _probabilities(q, index, rule, DRAFT_VOCAB)
    return tl.maximum(more, 0.0).to(tl.int64)
