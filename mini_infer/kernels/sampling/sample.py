"""One token a row of logits, greedy or random, by parameters that lie on the device: safe to capture in a CUDA graph.

The rules, and the torch reference, are draw.py's: temperature -> top-k -> top-p -> min-p -> the inverse CDF at
a hashed uniform, over probabilities in fixed point, whose sums do not depend on their order. Nothing is sorted:

    _maxima     row x tiles   the highest logit of every group of 64 tokens
    guess       row           top-k, top-p: how likely the tokens are among which the cut lies   (cut.py)
    gather      row x tiles   top-k, top-p: sets these tokens apart                              (cut.py)
    find_cut    row           top-k, top-p: finds the last one that is kept                      (cut.py)
    _weigh      row x tiles   sampled rows: the mass that is kept in every tile of 4096 tokens
    _pick       row           greedy rows: the first of the highest
                              sampled rows: the tile, and in it the token, where the CDF passes the uniform

A row leaves at once the kernels that it has no use for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.sampling.cut import Apart, find_cut, gather, guess
from mini_infer.kernels.sampling.shared import (
    COUNTER,
    GROUP,
    TILE,
    Rows,
    in_order,
    kept_weights,
    load_highest,
    load_logits,
    load_maxima,
    locate,
    read,
    uniform,
)

CAPACITY = 16384  # tokens of a row that `gather` sets apart at most
_PROGRAMS = 1536  # that the kernels over tiles aim at; on an H200, 512 are a sixth slower at 256 rows, more no faster


def sample_rows(logits: Tensor, param_rows: Tensor, positions: Tensor, *, capacity: int = CAPACITY) -> Tensor:
    """Samples one token a row; a row's token depends on its logits, parameters and position alone.

    Args:
        logits: [S, V] float32, bfloat16 or float16. A NaN counts as the largest.
        param_rows: [S, NUM_PARAMS] int32, from draw.encode.
        positions: [S] int32 or int64, contiguous: tokens before the one that is sampled.
        capacity: smaller values serve tests.

    Each row of logits and parameters is contiguous; rows may lie apart.

    Returns:
        token ids [S] int64.
    """
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        weighed = weigh_rows(logits, param_rows, capacity)
        _pick[(rows,)](weighed, positions, tokens, weight_of_highest(vocab), vocab, num_warps=8)
    return tokens


class Weighed(NamedTuple):
    """Rows whose cuts and masses are known."""

    logits: Tensor
    stride: int
    own_params: Tensor
    own_stride: int
    maxima: Tensor
    cuts: Tensor  # [S, 2] int32, of rows with top-k or top-p
    masses: Tensor  # [S, tiles] int64, of sampled rows


def weight_of_highest(vocab: int) -> float:
    """All weights of a row stay below 2**62 together."""
    return 2.0 ** (62 - vocab.bit_length())


def weigh_rows(logits: Tensor, param_rows: Tensor, capacity: int = CAPACITY) -> Weighed:
    """All that comes before a token is picked. Arguments as those of `sample_rows`; at least one row."""
    rows, vocab = logits.shape

    def scratch(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((rows, columns), dtype=dtype, device=logits.device)

    tiles = triton.cdiv(vocab, TILE.value)
    capacity = min(capacity, vocab)
    maxima = scratch(tiles * TILE.value // GROUP.value, torch.float32)
    apart = Apart(
        bounds=scratch(2, torch.int32),
        counts=scratch(COUNTER.value, torch.int32),
        sums=scratch(3, torch.int64),
        keys=scratch(capacity, torch.int32),
        ids=scratch(capacity, torch.int32),
    )
    cuts, masses = scratch(2, torch.int32), scratch(tiles, torch.int64)
    row = Rows(logits, logits.stride(0), param_rows, param_rows.stride(0), maxima)
    scale, wide = weight_of_highest(vocab), over_tiles(rows, vocab)
    _maxima[wide](row, apart, vocab, num_warps=4)
    if capacity < vocab:  # else all tokens are set apart
        guess[(rows,)](row, apart.bounds, vocab, num_warps=8)
    gather[wide](row, apart, scale, vocab, capacity, num_warps=8)
    find_cut[(rows,)](row, apart, cuts, scale, vocab, capacity, num_warps=8)
    _weigh[wide](row, cuts, masses, scale, vocab, num_warps=8)
    return Weighed(*row, cuts, masses)


def over_tiles(rows: int, vocab: int) -> tuple[int, int]:
    """The grid of a kernel over tiles."""
    return rows, min(triton.cdiv(vocab, TILE.value), triton.cdiv(_PROGRAMS, rows))


@triton.jit
def _maxima(rows, apart, VOCAB: tl.constexpr):
    row, logits, _own_params, maxima = locate(rows, VOCAB)
    if tl.program_id(1) == 0:
        tl.store(apart.counts + row * COUNTER, 0)
        tl.store(apart.sums + row * 3 + tl.arange(0, 4), tl.zeros((4,), tl.int64), mask=tl.arange(0, 4) < 3)
    for tile in range(tl.program_id(1), triton.cdiv(VOCAB, TILE), tl.num_programs(1)):
        group = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
        x = load_logits(logits, group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], VOCAB)
        tl.store(maxima + group, tl.max(in_order(x), axis=1))


@triton.jit
def _weigh(rows, cuts, masses, scale, VOCAB: tl.constexpr):
    """masses [S, tiles] int64, of sampled rows."""
    row, logits, own_params, maxima = locate(rows, VOCAB)
    rule = read(own_params)
    if rule[0] == 0:
        return
    top = load_highest(maxima, VOCAB)
    for tile in range(tl.program_id(1), triton.cdiv(VOCAB, TILE), tl.num_programs(1)):
        index = tile * TILE + tl.arange(0, TILE)
        weight = kept_weights(logits, index, top, rule, cuts + row * 2, scale, VOCAB)
        tl.store(masses + row * triton.cdiv(VOCAB, TILE) + tile, tl.sum(weight))


@triton.jit
def _pick(rows, positions, tokens, scale, VOCAB: tl.constexpr):
    row, logits, own_params, maxima = locate(rows, VOCAB)
    masses = rows.masses + row * triton.cdiv(VOCAB, TILE)
    token = pick(logits, own_params, maxima, rows.cuts + row * 2, masses, tl.load(positions + row), scale, VOCAB)
    tl.store(tokens + row, token)


@triton.jit
def pick(logits, own_params, maxima, cuts, masses, position, scale, VOCAB: tl.constexpr):
    """A row's token, int64. All pointers are to the row's own."""
    rule = read(own_params)
    if rule[0] == 0:
        token = _first_highest(logits, maxima, VOCAB)
    else:
        chosen, target = find_tile(masses, uniform(own_params, position), VOCAB)
        index = chosen * TILE + tl.arange(0, TILE)
        weight = kept_weights(logits, index, load_highest(maxima, VOCAB), rule, cuts, scale, VOCAB)
        token = find_token(chosen, target, weight)
    return tl.minimum(token, VOCAB - 1).to(tl.int64)


@triton.jit
def _first_highest(logits, maxima, VOCAB: tl.constexpr):
    group, highest = load_maxima(maxima, VOCAB)
    top = tl.max(highest)
    index = tl.min(tl.where(highest == top, group, VOCAB)) * GROUP + tl.arange(0, GROUP)
    return tl.min(tl.where(in_order(load_logits(logits, index, VOCAB)) == top, index, VOCAB - 1))


@triton.jit
def find_tile(masses, u, VOCAB: tl.constexpr):
    """The tile in which the CDF passes u, and how much of the way to there lies within it."""
    tiles: tl.constexpr = triton.cdiv(VOCAB, TILE)
    tile = tl.arange(0, triton.next_power_of_2(tiles))
    mass = tl.load(masses + tile, mask=tile < tiles, other=0)
    total = tl.sum(mass)
    target = tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)  # u * total may round up to total
    chosen = tl.sum((tl.cumsum(mass) <= target).to(tl.int32))
    return chosen, target - tl.sum(tl.where(tile < chosen, mass, 0))


@triton.jit
def find_token(tile, target, weight):
    """The token, by the weights of its tile."""
    return tile * TILE + tl.sum((tl.cumsum(weight) <= target).to(tl.int32))
