"""The products of a mixture of experts, in Triton. What they compute is defined in moe.py.

A pair is a token and one of its k experts: pair p is token p // k. Few tokens and many go different ways:

    few     pairs --> gate, up, SiLU-mul: h [T k, I] --> down, times weights, summed over a token's pairs --> [T, H]

            A program owns some outputs of one pair, then of one token, and reads just the experts that were chosen.

    many    ids --> place: pairs in the order of their experts, and tiles of them
            --> gate, up, SiLU-mul: h [T k, I] in that order --> down: y [T k, H] by pairs --> combine --> [T, H]

            A program owns a tile: some outputs of some pairs of one expert. So an expert's weights are read once for
            a tile of tokens, and the tensor cores take them.

In both the host knows the number of pairs and nothing of where they go: a CUDA graph has them all. Nothing is added up
by atomics, and a token's pairs are added in their order, so that equal inputs give equal bits. In the second way a sum
over K is taken from first to last as in invariant_linear.py, so that it is also the same in any company.

Quantized weights are made floating as they are loaded. Activations that have a format are rounded to it first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from mini_infer.kernels.interface import ExpertWeights, Routes
from mini_infer.kernels.moe.experts_kernels import (
    combine_kernel,
    few_down_kernel,
    few_gate_up_kernel,
    grouped_kernel,
    place_kernel,
)
from mini_infer.kernels.paged_prefill import DOT_DTYPES, shared_memory
from mini_infer.kernels.pdl import launch_options
from mini_infer.kernels.quantized.tokens import quantize_tokens
from mini_infer.quantization.formats import ActivationFormat, Number, Quantized, WeightFormat, dequantize
from mini_infer.quantization.weight import QuantizedWeight

FEW_TOKENS = 4  # above, some experts would be read twice: of 128 with 8 a token, 8 tokens choose 64 times some 52


class Tile(NamedTuple):
    rows: int  # pairs of one expert
    outs: int  # at least 64, as in invariant_linear.py
    k: int
    num_warps: int
    num_stages: int


def tile_for(pairs: int, experts: int, itemsize: int) -> Tile:
    """By the pairs that an expert has on average."""
    average = pairs / experts
    if itemsize == 4:
        return Tile(32, 64, 32, 4, 2)
    if average <= 16:
        return Tile(16, 64, 128, 4, 4)
    if average <= 64:
        return Tile(64, 64, 64, 4, 4)
    return Tile(128, 128, 64, 8, 3)


def experts(
    x: Tensor, routes: Routes, weights: ExpertWeights, *, few_tokens: int = FEW_TOKENS, tile: Tile | None = None
) -> Tensor:
    """Arguments and result as of Kernels.experts, summed in float32.

    Args:
        few_tokens: up to so many go the way of few; 0: none, for sums in one order.
        tile: instead of the one for this number of pairs, for tests and measurements.
    """
    out = torch.empty_like(x)
    if len(x) > few_tokens:
        _many(x, routes, weights, out, tile)
    elif len(x):
        _few(x, routes, weights, out)
    return out


def _few(x: Tensor, routes: Routes, weights: ExpertWeights, out: Tensor) -> None:
    gate_up, down, activations = _Weight.of(weights.gate_up), _Weight.of(weights.down), weights.activations
    (tokens, chosen), size, inner = routes.ids.shape, x.shape[1], gate_up.codes.shape[1] // 2
    x, h = _as_quantized(x, activations), x.new_empty((tokens * chosen, inner))
    block_k = min(triton.next_power_of_2(size), 512)
    options = {"CHOSEN": chosen, "SIZE": size, "INNER": inner, "BLOCK_OUT": 8, "num_warps": 4}
    options |= launch_options(x.device)
    few_gate_up_kernel[(triton.cdiv(inner, 8), tokens * chosen)](
        x, routes.ids, gate_up[:3], h, FORM=gate_up.form, BLOCK_K=gate_up.block_k(block_k), **options
    )
    h = _as_quantized(h, activations)
    few_down_kernel[(triton.cdiv(size, 8), tokens)](
        h, *routes, down[:3], out, FORM=down.form, BLOCK_K=down.block_k(block_k), **options
    )


def _many(x: Tensor, routes: Routes, weights: ExpertWeights, out: Tensor, tile: Tile | None) -> None:
    gate_up, down, activations = _Weight.of(weights.gate_up), _Weight.of(weights.down), weights.activations
    ids = routes.ids
    (tokens, chosen), size = ids.shape, x.shape[1]
    pairs, count, options = tokens * chosen, len(down.codes), launch_options(x.device)
    tile = tile or tile_for(pairs, count, x.element_size())
    if (shared := shared_memory(x.device)) is not None:
        stage = (tile.rows + 2 * tile.outs) * tile.k * x.element_size()
        tile = tile._replace(num_stages=max(1, min(tile.num_stages, shared // stage)))
    num_tiles = pairs // tile.rows + count  # at most: each expert may leave one that is not full
    order, tiles = ids.new_empty(pairs), ids.new_empty((3, num_tiles))
    block = min(max(triton.next_power_of_2(pairs), 128), 4096)
    place_kernel[(count,)](
        ids, order, tiles, pairs, num_tiles, BLOCK_ROWS=tile.rows, BLOCK=block, num_warps=4, **options
    )

    def product(source: Tensor, weight: _Weight, target: Tensor, gated: bool) -> None:
        source, outs = _as_quantized(source, activations), target.shape[1]
        grouped_kernel[(num_tiles, triton.cdiv(outs, tile.outs))](
            source, weight[:3], order, tiles, target, num_tiles, GATED=gated, CHOSEN=chosen, OUT=outs,
            IN=source.shape[1], FORM=weight.form, BLOCK_ROWS=tile.rows, BLOCK_OUT=tile.outs,
            BLOCK_K=weight.block_k(tile.k), DOT=DOT_DTYPES[x.dtype], num_warps=tile.num_warps,
            num_stages=tile.num_stages, **options,
        )  # fmt: skip

    h, y = x.new_empty((pairs, gate_up.codes.shape[1] // 2)), x.new_empty((pairs, size))
    product(x, gate_up, h, gated=True)
    product(h, down, y, gated=False)
    add_experts(y.view(tokens, chosen, size), routes.weights, out)


def add_experts(results: Tensor, shares: Tensor, out: Tensor | None = None) -> Tensor:
    """Arguments, contiguous, and result as of Kernels.add_experts; in `out` where it is given."""
    tokens, chosen, size = results.shape
    out = results.new_empty(tokens, size) if out is None else out
    if tokens:
        block = min(triton.next_power_of_2(size), 1024)
        combine_kernel[(tokens, triton.cdiv(size, block))](
            results, shares, out, CHOSEN=chosen, SIZE=size, BLOCK=block, num_warps=4, **launch_options(out.device)
        )
    return out


class _Weight(NamedTuple):
    """What kernels are handed of experts' weights [E, N, K].

    Attributes:
        form: (int4 and packed, columns of a scale or None for all, rows of a scale); None where they are not quantized.
    """

    codes: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    form: tuple[bool, int | None, int] | None

    @classmethod
    def of(cls, weight: Tensor | QuantizedWeight) -> _Weight:
        if isinstance(weight, Tensor):
            return cls(weight.contiguous(), None, None, None)  # a copy on a CPU alone, for tests
        codes, scales, zeros, form = weight
        return cls(codes, scales, zeros, (form.number is Number.int4, form.columns, form.rows))

    def block_k(self, most: int) -> int:
        """Columns that a program takes at a time: of one scale."""
        return most if self.form is None or self.form[1] is None else math.gcd(most, self.form[1])


def _as_quantized(x: Tensor, form: ActivationFormat | None) -> Tensor:
    """The values of x [T, K] that its codes stand for, of its dtype."""
    if form is None:
        return x
    codes, scales, dtype = quantize_tokens(x, form)
    return dequantize(Quantized(codes, scales), WeightFormat(form.number, form.columns)).to(dtype)
