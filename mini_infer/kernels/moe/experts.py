"""The products of a mixture of experts, in Triton. What they compute is defined in moe.py.

A pair is a token and one of its k experts: pair p is token p // k. Few tokens and many go different ways:

    few     pairs --> gate, up, SiLU-mul: h [T k, I] --> down, times weights, summed over a token's pairs --> [T, H]

            A program owns some outputs of one pair, then of one token, and reads just the experts that were chosen.
            Shared experts of a single token are more of its pairs, instead of two kernels of their own.

    many    ids --> place: pairs in the order of their experts, and tiles of them
            --> gate, up, SiLU-mul: h [T k, I] in that order --> down: y [T k, H] by pairs --> combine --> [T, H]

            A program owns a tile: some outputs of some pairs of one expert. So an expert's weights are read once for
            a tile of tokens, and the tensor cores take them. Where tiles are tall, descriptors (TMA) bring weights that
            are not quantized.

In both the host knows the number of pairs and nothing of where they go: a CUDA graph has them all. Nothing is added up
by atomics, and a token's pairs are added in their order, so that equal inputs give equal bits. In the second way a sum
over K is taken from first to last as in invariant_linear.py, so that it is also the same in any company; down's inputs,
which ranks may share, in chunks where the weights say so.

Quantized weights are made floating as they are loaded. Activations that have a format are rounded to it first.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mini_infer.kernels.interface import ExpertWeights, Routes
from mini_infer.kernels.moe.experts_kernels import (
    FewShape,
    GroupedShape,
    combine_kernel,
    few_down_kernel,
    few_gate_up_kernel,
    grouped_kernel,
    place_kernel,
    tall_kernel,
)
from mini_infer.kernels.paged_prefill import DOT_DTYPES, shared_memory
from mini_infer.kernels.pdl import launch_options
from mini_infer.kernels.quantized.tokens import quantize_tokens
from mini_infer.quantization.formats import ActivationFormat, Number, Quantized, WeightFormat, dequantize
from mini_infer.quantization.weight import QuantizedWeight

# Above, some experts would be read twice: of 128 with 8 a token, 8 tokens choose 64 times some 52. There, on an H200,
# they take 132 us this way and 119 the other; 4 tokens take 69 and 74 (reports/moe_layer.md).
FEW_TOKENS = 4


class Tile(NamedTuple):
    rows: int  # pairs of one expert
    outs: int  # rows of the weight, gate's and up's; at least 64, as in invariant_linear.py
    k: int
    num_warps: int
    num_stages: int


TALL = 128  # rows of a tile, from which on weights that are not quantized are brought by descriptors
TALL_DOWN = Tile(TALL, 128, 64, 4, 3)  # two programs an SM: one stores while the other multiplies


class FewTile(NamedTuple):
    outs: int  # rows of the weight, of each of a token's experts for down
    k: int
    num_warps: int
    unroll: int  # loads that do not wait for each other


def tiles_for(pairs: int, experts: int, itemsize: int) -> tuple[Tile, Tile]:
    """Of gate and up, and of down, which have the same rows: by the pairs that an expert has on average."""
    average = pairs / experts
    if itemsize == 4:
        return Tile(32, 64, 32, 4, 2), Tile(32, 64, 32, 4, 2)
    if average <= 8:
        return Tile(16, 128, 128, 4, 3), Tile(16, 64, 128, 4, 4)
    if average <= 96:
        tile = Tile(32 if average <= 32 else 64, 128, 64, 4, 3)
        return tile, tile
    return Tile(TALL, 256, 64, 8, 4), Tile(TALL, 256, 64, 8, 4)


# As measured with Qwen3-30B-A3B's experts, like the tiles above.
FEW_GATE_UP, FEW_DOWN = FewTile(4, 256, 1, 8), FewTile(2, 512, 2, 4)


def experts(
    x: Tensor,
    routes: Routes,
    weights: ExpertWeights,
    residual: Tensor | None = None,
    *,
    elsewhere: bool = False,
    few_tokens: int = FEW_TOKENS,
    shared: tuple[Tensor, Tensor] | None = None,
    tiles: tuple[Tile, Tile] | None = None,
) -> Tensor:
    """Arguments and result as of Kernels.experts, summed in float32.

    Args:
        few_tokens: up to so many go the way of few; 0: none, for sums in one order.
        shared: as in Kernels.experts_and_shared; of few tokens, and where `can_share` says so.
        tiles: instead of those for this number of pairs, for tests and measurements.
    """
    out = torch.empty_like(x)
    if len(x) > few_tokens:
        assert shared is None, "they are of few tokens"
        results = expert_results(x, routes, weights, x.dtype, tiles=tiles)
        add_experts(results, routes.weights, residual, out, routes.ids if elsewhere else None)
    elif len(x):
        _few(x, routes, weights, residual, out, elsewhere, shared)
    return out


def can_share(weights: ExpertWeights, shared: tuple[Tensor, Tensor]) -> bool:
    """Whether shared experts, gate_up [2S, H] and down [H, S], can be computed as if they were some of the others."""
    return isinstance(weights.down, Tensor) and shared[1].shape[1] % weights.down.shape[2] == 0


def _few(
    x: Tensor,
    routes: Routes,
    weights: ExpertWeights,
    residual: Tensor | None,
    out: Tensor,
    elsewhere: bool,
    shared: tuple[Tensor, Tensor] | None,
) -> None:
    gate_up, down, activations = _Weight.of(weights.gate_up), _Weight.of(weights.down), weights.activations
    (tokens, chosen), size, inner = routes.ids.shape, x.shape[1], gate_up.codes.shape[1] // 2
    shared_gate_up, shared_down = (None, None) if shared is None else (weight.contiguous() for weight in shared)
    more = 0 if shared_down is None else shared_down.shape[1] // inner
    x, h = _as_quantized(x, activations), x.new_empty((tokens * (chosen + more), inner))

    def options(tile: FewTile, weight: _Weight, in_size: int) -> dict[str, Any]:
        block_k = weight.block_k(min(triton.next_power_of_2(in_size), tile.k))
        unroll = min(tile.unroll, triton.cdiv(in_size, block_k))
        shape = FewShape(chosen, more, size, inner, weight.form, elsewhere, tile.outs, block_k, unroll)
        return {"S": shape, "num_warps": tile.num_warps, **launch_options(x.device)}

    few_gate_up_kernel[(triton.cdiv(2 * inner, FEW_GATE_UP.outs), len(h))](
        x, routes.ids, gate_up[:3], shared_gate_up, h, **options(FEW_GATE_UP, gate_up, size)
    )
    h = _as_quantized(h, activations)
    few_down_kernel[(triton.cdiv(size, FEW_DOWN.outs), tokens)](
        h, *routes, down[:3], shared_down, residual, out, **options(FEW_DOWN, down, inner)
    )


def expert_results(
    x: Tensor, routes: Routes, weights: ExpertWeights, dtype: torch.dtype, *, tiles: tuple[Tile, Tile] | None = None
) -> Tensor:
    """The way of many, but for its last part: as Kernels.expert_results, of `dtype`."""
    gate_up, down, activations = _Weight.of(weights.gate_up), _Weight.of(weights.down), weights.activations
    ids = routes.ids
    (tokens, chosen), size = ids.shape, x.shape[1]
    pairs, count, options = tokens * chosen, len(down.codes), launch_options(x.device)
    plain = gate_up.form is down.form is None and weights.chunks == 1 and size % 8 == down.codes.shape[2] % 8 == 0
    usual = tiles_for(pairs, count, x.element_size())
    tall = plain and (tiles or usual)[0].rows >= TALL
    tiles = tiles or (usual[0], TALL_DOWN if tall else usual[1])
    if weights.chunks > 1:  # room in registers for the sums of branches that wait: four accumulators at most
        tiles = tiles[0], tiles[1]._replace(outs=64)
    rows = tiles[0].rows
    num_tiles = pairs // rows + count  # at most: each expert may leave one that is not full
    order, places = ids.new_empty(pairs), ids.new_empty((3, num_tiles))
    block = min(max(triton.next_power_of_2(pairs), 128), 8192)
    warps = 1 if block == 128 else max(4, block // 512)  # one waits for no other
    place_kernel[(count,)](
        ids, order, places, pairs, num_tiles, BLOCK_ROWS=rows, BLOCK=block, num_warps=warps, **options
    )

    def product(source: Tensor, weight: _Weight, target: Tensor, tile: Tile, gated: bool, chunks: int = 1) -> None:
        source = _as_quantized(source, activations)
        if (shared := shared_memory(x.device)) is not None:
            stage = (rows + tile.outs) * tile.k * x.element_size()
            tile = tile._replace(num_stages=max(1, min(tile.num_stages, shared // stage)))
        out_size, in_size = target.shape[1], source.shape[1]
        block_k = weight.block_k(tile.k if chunks == 1 else _within(in_size // chunks, tile.k))
        sizes = gated, chosen, out_size, in_size, chunks, weight.form, rows, tile.outs, block_k
        kernel, inputs = grouped_kernel, (source, weight[:3])
        if tall:
            some = [source if gated else TensorDescriptor.from_tensor(source, [r, block_k]) for r in (rows, rows // 2)]
            outs = tile.outs // 2 if gated else tile.outs
            kernel = tall_kernel
            inputs = *some, TensorDescriptor.from_tensor(weight.codes.view(-1, in_size), [outs, block_k])
        kernel[(triton.cdiv(weight.codes.shape[1], tile.outs), num_tiles)](
            *inputs, order, places, target, num_tiles, GroupedShape(*sizes, DOT_DTYPES[x.dtype]),
            num_warps=tile.num_warps, num_stages=tile.num_stages, **options,
        )  # fmt: skip

    h, y = x.new_empty((pairs, gate_up.codes.shape[1] // 2)), x.new_empty((tokens, chosen, size), dtype=dtype)
    product(x, gate_up, h, tiles[0], gated=True)
    product(h, down, y.view(pairs, size), tiles[1], gated=False, chunks=weights.chunks)
    return y


def add_experts(
    results: Tensor,
    shares: Tensor,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    ids: Tensor | None = None,
) -> Tensor:
    """Arguments, contiguous, and result as of Kernels.add_experts, plus residual [T, H]; in `out` where it is given.
    Of `ids` -1 there is no result, whatever stands in its place."""
    tokens, chosen, size = results.shape
    out = results.new_empty(tokens, size) if out is None else out
    if tokens:
        block = min(triton.next_power_of_2(size), 1024)
        combine_kernel[(tokens, triton.cdiv(size, block))](
            results, ids, shares, residual, out, CHOSEN=chosen, SIZE=size, BLOCK=block, num_warps=4,
            **launch_options(out.device),
        )  # fmt: skip
    return out


def _within(chunk: int, columns: int) -> int:
    """As many columns at a time that chunks have no rest, or all of them: masks would cost more than shorter steps."""
    power = chunk & -chunk
    return power if 16 <= power < columns else columns


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
