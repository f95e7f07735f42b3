"""One token a row of logits, greedy or random, by parameters that lie on the device: safe to capture in a CUDA graph.

The rules, and the torch reference, are runtime/draw.py's: temperature -> top-k -> top-p -> min-p -> the inverse CDF at
a hashed uniform, over probabilities in fixed point, whose sums do not depend on their order. Nothing is sorted:

    _maxima     row x tiles   the highest logit of every group of 64 tokens
    guess       row           top-k, top-p: how likely the tokens are among which the cut lies   (sample_cut.py)
    gather      row x tiles   top-k, top-p: sets these tokens apart                              (sample_cut.py)
    find_cut    row           top-k, top-p: finds the last one that is kept                      (sample_cut.py)
    _weigh      row x tiles   sampled rows: the mass that is kept in every tile of 4096 tokens
    _pick       row           greedy rows: the first of the highest
                              sampled rows: the tile, and in it the token, where the CDF passes the uniform

A row leaves at once the kernels that it has no use for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.sample_cut import find_cut, gather, guess
from mini_infer.kernels.sample_shared import (
    COUNTER,
    GROUP,
    SEED_HIGH,
    SEED_LOW,
    TILE,
    in_order,
    load_highest,
    load_logits,
    load_maxima,
    locate,
    read,
    shares,
    token_keys,
)

_CAPACITY = 16384  # tokens of a row that `gather` sets apart at most
_PROGRAMS = 1536  # that the kernels over tiles aim at; on an H200, 512 are a sixth slower at 256 rows, more no faster


def sample_rows(logits: Tensor, param_rows: Tensor, positions: Tensor, *, capacity: int = _CAPACITY) -> Tensor:
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
    if not rows:
        return tokens

    def scratch(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((rows, columns), dtype=dtype, device=logits.device)

    tiles = triton.cdiv(vocab, TILE.value)
    capacity = min(capacity, vocab)
    maxima = scratch(tiles * TILE.value // GROUP.value, torch.float32)
    counts, sums = scratch(COUNTER.value, torch.int32), scratch(3, torch.int64)
    bounds, keys, ids = scratch(2, torch.int32), scratch(capacity, torch.int32), scratch(capacity, torch.int32)
    cuts, masses = scratch(2, torch.int32), scratch(tiles, torch.int64)
    row = (logits, logits.stride(0), param_rows, param_rows.stride(0), maxima)
    scale = 2.0 ** (62 - vocab.bit_length())  # the weight of a row's highest: all together stay below 2**62
    wide = (rows, min(tiles, triton.cdiv(_PROGRAMS, rows)))
    _maxima[wide](*row, counts, sums, vocab, num_warps=4)
    if capacity < vocab:  # else all tokens are set apart
        guess[(rows,)](*row, bounds, vocab, num_warps=8)
    gather[wide](*row, bounds, counts, sums, keys, ids, scale, vocab, capacity, num_warps=8)
    find_cut[(rows,)](*row, bounds, counts, sums, keys, ids, cuts, scale, vocab, capacity, num_warps=8)
    _weigh[wide](*row, cuts, masses, scale, vocab, num_warps=8)
    _pick[(rows,)](*row, cuts, masses, positions, tokens, scale, vocab, num_warps=8)
    return tokens


@triton.jit
def _maxima(logits, stride, own_params, own_stride, maxima, counts, sums, VOCAB: tl.constexpr):
    row, logits, own_params, maxima = locate(logits, stride, own_params, own_stride, maxima, VOCAB)
    if tl.program_id(1) == 0:
        tl.store(counts + row * COUNTER, 0)
        tl.store(sums + row * 3 + tl.arange(0, 4), tl.zeros((4,), tl.int64), mask=tl.arange(0, 4) < 3)
    for tile in range(tl.program_id(1), triton.cdiv(VOCAB, TILE), tl.num_programs(1)):
        group = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
        x = load_logits(logits, group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], VOCAB)
        tl.store(maxima + group, tl.max(in_order(x), axis=1))


@triton.jit
def _weigh(logits, stride, own_params, own_stride, maxima, cuts, masses, scale, VOCAB: tl.constexpr):
    """masses [S, tiles] int64, of sampled rows."""
    row, logits, own_params, maxima = locate(logits, stride, own_params, own_stride, maxima, VOCAB)
    rule = read(own_params)
    if rule[0] == 0:
        return
    top = load_highest(maxima, VOCAB)
    for tile in range(tl.program_id(1), triton.cdiv(VOCAB, TILE), tl.num_programs(1)):
        weight = _kept_weights(logits, tile, top, rule, cuts + row * 2, scale, VOCAB)
        tl.store(masses + row * triton.cdiv(VOCAB, TILE) + tile, tl.sum(weight))


@triton.jit
def _kept_weights(logits, tile, top, rule, cuts, scale, VOCAB: tl.constexpr):
    """Weights of a tile's tokens, 0 where top-k, top-p or min-p cut them."""
    temperature, tail, top_k, min_p = rule
    index = tile * TILE + tl.arange(0, TILE)
    key = token_keys(load_logits(logits, index, VOCAB), top, temperature)
    share = shares(key)
    share = tl.where((index < VOCAB) & (share >= min_p), share, 0.0)
    if (top_k < VOCAB) | (tail > 0):
        cut, first_tie = tl.load(cuts), tl.load(cuts + 1)
        share = tl.where((key < cut) | ((key == cut) & (index >= first_tie)), share, 0.0)
    return (share * scale).to(tl.int64)


@triton.jit
def _pick(logits, stride, own_params, own_stride, maxima, cuts, masses, positions, tokens, scale, VOCAB: tl.constexpr):
    row, logits, own_params, maxima = locate(logits, stride, own_params, own_stride, maxima, VOCAB)
    rule = read(own_params)
    group, highest = load_maxima(maxima, VOCAB)
    top = tl.max(highest)
    if rule[0] == 0:
        index = tl.min(tl.where(highest == top, group, VOCAB)) * GROUP + tl.arange(0, GROUP)
        token = tl.min(tl.where(in_order(load_logits(logits, index, VOCAB)) == top, index, VOCAB - 1))
    else:
        tiles: tl.constexpr = triton.cdiv(VOCAB, TILE)
        tile = tl.arange(0, triton.next_power_of_2(tiles))
        mass = tl.load(masses + row * tiles + tile, mask=tile < tiles, other=0)
        total = tl.sum(mass)
        target = (_uniform(own_params, tl.load(positions + row)) * total.to(tl.float64)).to(tl.int64)
        target = tl.minimum(target, total - 1)  # u * total may round up to total
        chosen = tl.sum((tl.cumsum(mass) <= target).to(tl.int32))
        target -= tl.sum(tl.where(tile < chosen, mass, 0))
        weight = _kept_weights(logits, chosen, top, rule, cuts + row * 2, scale, VOCAB)
        token = chosen * TILE + tl.sum((tl.cumsum(weight) <= target).to(tl.int32))
    tl.store(tokens + row, tl.minimum(token, VOCAB - 1).to(tl.int64))


@triton.jit
def _uniform(own_params, position):
    """draw.uniforms: SplitMix64 at (key, position), as a float64 in [0, 1)."""
    low = tl.load(own_params + SEED_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(own_params + SEED_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
    x = (low | (high << 32)) + position.to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return (x >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2**-53
