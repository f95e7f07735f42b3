"""What the sampling kernels share: a row's logits, its parameters, and tokens in the order of their scores.

Tokens are ordered by their gap to the highest, (highest - logit) / temperature, a float32 of at least 0, whose bits as
an int32 grow with it: the key. A key tells the token's weight, its probability in fixed point.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns of a row of parameters, as draw.py encodes them; floats and the uint64 as their bits. Kernels call it
# own_params: with an argument named params Triton's launcher does not work.
NUM_PARAMS = 7
TEMPERATURE, TAIL, TOP_K, MIN_P, SEED_LOW, SEED_HIGH, SEEDED = (tl.constexpr(column) for column in range(NUM_PARAMS))

GROUP = tl.constexpr(64)  # tokens that share a maximum
TILE = tl.constexpr(4096)  # tokens that a program reads at a time
COUNTER = tl.constexpr(32)  # int32s from one row's counter to the next's: one L2 line each, or atomics wait in line
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
INFINITE = tl.constexpr(0x7F800000)  # the key of an infinite gap


class Rows(NamedTuple):
    """S rows of logits and of parameters, as kernels take them."""

    logits: Tensor
    stride: int
    own_params: Tensor
    own_stride: int
    maxima: Tensor  # [S, groups] float32


@triton.jit
def locate(rows, VOCAB: tl.constexpr):
    """The program's row of `Rows`, and where its logits, parameters and groups' maxima lie."""
    row = tl.program_id(0).to(tl.int64)
    groups: tl.constexpr = triton.cdiv(VOCAB, TILE) * TILE // GROUP
    logits = rows.logits + row * rows.stride
    return row, logits, rows.own_params + row * rows.own_stride, rows.maxima + row * groups


@triton.jit
def read(own_params):
    """temperature, tail, top_k and min_p of a row."""
    temperature = tl.load(own_params + TEMPERATURE).to(tl.float32, bitcast=True)
    tail = tl.load(own_params + TAIL).to(tl.float32, bitcast=True)
    return temperature, tail, tl.load(own_params + TOP_K), tl.load(own_params + MIN_P).to(tl.float32, bitcast=True)


@triton.jit
def load_logits(logits, index, VOCAB: tl.constexpr):
    """Logits of a row as float32, minus infinity behind its end."""
    return tl.load(logits + index, mask=index < VOCAB, other=-float("inf")).to(tl.float32)


@triton.jit
def in_order(x):
    """Logits that can be compared: NaN as infinity, infinity as the largest number."""
    return tl.where(x == x, tl.minimum(x, LARGEST), float("inf"))


@triton.jit
def load_maxima(maxima, VOCAB: tl.constexpr):
    """Numbers and maxima of a row's groups, filled up with minus infinity."""
    group = tl.arange(0, triton.next_power_of_2(triton.cdiv(VOCAB, GROUP)))
    return group, tl.load(maxima + group, mask=group < triton.cdiv(VOCAB, GROUP), other=-float("inf"))


@triton.jit
def load_highest(maxima, VOCAB: tl.constexpr):
    """A row's highest logit."""
    return tl.max(load_maxima(maxima, VOCAB)[1])


@triton.jit
def token_keys(x, top, temperature):
    """Keys of logits x, top being the row's highest; 0 for NaN and infinity, and in a row of minus infinities."""
    gaps = (tl.minimum(top, LARGEST) - x) * (1.0 / temperature)
    return tl.where(gaps > 0, gaps, 0.0).to(tl.int32, bitcast=True)


@triton.jit
def shares(keys):
    """Probabilities divided by the row's highest, float32."""
    return tl.exp(-keys.to(tl.float32, bitcast=True))


@triton.jit
def weights(keys, scale):
    """Probabilities in fixed point: int64, the highest being `scale`."""
    return (tl.exp(-keys.to(tl.float32, bitcast=True)) * scale).to(tl.int64)


@triton.jit
def kept_weights(logits, index, top, rule, cuts, scale, VOCAB: tl.constexpr):
    """Weights of a row's tokens, 0 where top-k, top-p or min-p cut them, or behind the row's end.

    Args:
        top: the row's highest logit.
        rule: from `read`.
        cuts: where the row's cut lies, if it has top-k or top-p.
    """
    temperature, tail, top_k, min_p = rule
    key = token_keys(load_logits(logits, index, VOCAB), top, temperature)
    share = shares(key)
    share = tl.where((index < VOCAB) & (share >= min_p), share, 0.0)
    if (top_k < VOCAB) | (tail > 0):
        cut, first_tie = tl.load(cuts), tl.load(cuts + 1)
        share = tl.where((key < cut) | ((key == cut) & (index >= first_tie)), share, 0.0)
    return (share * scale).to(tl.int64)


@triton.jit
def uniform(own_params, position):
    """core.uniforms.uniforms: SplitMix64 at (key, position), as a float64 in [0, 1)."""
    low = tl.load(own_params + SEED_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(own_params + SEED_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
    x = (low | (high << 32)) + position.to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return (x >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2**-53
