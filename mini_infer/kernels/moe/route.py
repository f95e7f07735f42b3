"""Where tokens go: from a router's logits to experts and weights. The definition is in reference.py, and what the
fields of RouterSpec do in interface.py.

    logits --> experts, weights                                                 route
    x --> norm --> gate --> logits --> experts, weights, and the norm of x      norm_and_route, for few tokens

In both a program of one warp takes all logits of a token, and the highest one after the other: of a few hundred experts
no more than ten are wanted, and to compare each with each takes longer (64 us instead of 7 for 4,096 tokens and 128
experts). They are compared as integers of the same order, for which a warp has an instruction. In the second it is the
last to finish of the token's programs, which have some experts' logits each, and the norm for themselves: x is soon
read, and a kernel of its own is not soon started.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.core.model_config import Routing
from mini_infer.kernels.flash_decode import tickets_of
from mini_infer.kernels.interface import RouterSpec, Routes, Scores, Stream, TokenPlaces
from mini_infer.kernels.moe.reference import GOLDEN, TINY
from mini_infer.kernels.pdl import launch_options, let_next_start, take_turn, wait_for_previous

_GOLDEN, _TINY = tl.constexpr(GOLDEN), tl.constexpr(TINY)
_LOWEST = tl.constexpr(-1.0e30)
_TAKEN = tl.constexpr(-(2**31))  # below the order of any number
_ROUTINGS = {Routing.learned: 0, Routing.uniform: 1, Routing.zipf: 2}


class Picks(NamedTuple):
    """What a choice is made of beside the logits, and where it goes: as RouterSpec, TokenPlaces and Routes say."""

    bias: Tensor | None
    token_ids: Tensor
    positions: Tensor
    ids: Tensor
    weights: Tensor


@dataclass(frozen=True)
class RouteShape:
    """A RouterSpec as kernels are compiled for it, which call it S."""

    experts: int
    block: int  # experts and top_k, or the next powers of two
    top_k: int
    top_k_block: int
    sigmoid: bool
    normalize: bool
    scale: float
    groups: int
    top_groups: int
    group_top: int
    routing: int  # of _ROUTINGS


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _drawn(token_id, position, seed, expert, ZIPF: tl.constexpr):
    token = _mixed(token_id.to(tl.uint32) + (seed.to(tl.uint32) + 1) * _GOLDEN)
    lot = _mixed(token + position.to(tl.uint32))
    bits = _mixed(lot + expert.to(tl.uint32) * _GOLDEN)
    uniform = ((bits >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08  # 2**-24
    return tl.log(uniform) * (expert + 1).to(tl.float32) if ZIPF else uniform


@triton.jit
def _in_order(values):
    """float32 as int32 of the same order, and back. Of two zeros the negative one is the smaller."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _highest(order, index, BLOCK: tl.constexpr):
    """(the highest of `order`, the first index that has it)."""
    highest = tl.max(order, axis=0)
    return highest, tl.min(tl.where(order == highest, index, BLOCK), axis=0)


@triton.jit
def _choose(
    logits,  # [BLOCK] float32, of which the first EXPERTS are there
    token,
    picks,
    seed,
    S: tl.constexpr,
):
    BLOCK: tl.constexpr = S.block
    TOP_K_BLOCK: tl.constexpr = S.top_k_block
    expert = tl.arange(0, BLOCK)
    free = expert < S.experts
    logits = tl.where(free, logits, -float("inf"))
    if S.sigmoid:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(logits))
        scores /= tl.sum(scores)
    choice = scores
    if S.routing > 0:
        token_id, position = tl.load(picks.token_ids + token), tl.load(picks.positions + token)
        choice = _drawn(token_id, position, seed, expert, S.routing == 2)
    elif picks.bias is not None:
        choice += tl.load(picks.bias + expert, mask=free, other=0.0)
    # What is no number must lead to an expert too, and what is not free must stay below all others.
    order = tl.where(free, _in_order(tl.where(choice > _LOWEST, choice, _LOWEST)), _TAKEN)
    if S.groups > 1:
        group = expert // (S.experts // S.groups)
        best = tl.full([BLOCK], _TAKEN, tl.int32)  # of each expert's group
        for g in range(S.groups):
            own = tl.where(group == g, order, _TAKEN)
            total = 0.0
            for _ in range(S.group_top):
                highest, at = _highest(own, expert, BLOCK)
                own = tl.where(expert == at, _TAKEN, own)
                total += _in_order(highest).to(tl.float32, bitcast=True)
            best = tl.where(group == g, _in_order(total), best)
        kept = expert < 0
        for _ in range(S.top_groups):
            _score, at = _highest(tl.where(free & ~kept, best, _TAKEN), expert, BLOCK)
            kept = kept | (group == at // (S.experts // S.groups))
        order = tl.where(kept | ~free, order, _TAKEN + 1)
    place = tl.arange(0, TOP_K_BLOCK)
    ids, weights = tl.zeros([TOP_K_BLOCK], tl.int32), tl.zeros([TOP_K_BLOCK], tl.float32)
    for j in range(S.top_k):
        _score, at = _highest(order, expert, BLOCK)
        order = tl.where(expert == at, _TAKEN, order)
        score = tl.max(tl.where(expert == at, scores.to(tl.int32, bitcast=True), _TAKEN), axis=0)
        ids = tl.where(place == j, at, ids)
        weights = tl.where(place == j, score.to(tl.float32, bitcast=True), weights)
    if S.normalize:
        weights /= tl.sum(weights) + _TINY
    some = place < S.top_k
    tl.store(picks.ids + token * S.top_k + place, ids, mask=some)
    tl.store(picks.weights + token * S.top_k + place, weights * S.scale, mask=some)


@triton.jit(do_not_specialize=["seed"])
def _route_kernel(logits_ptr, picks, seed, S: tl.constexpr, PDL: tl.constexpr):
    take_turn(PDL)
    token, expert = tl.program_id(0).to(tl.int64), tl.arange(0, S.block)
    logits = tl.load(logits_ptr + token * S.experts + expert, mask=expert < S.experts, other=0.0).to(tl.float32)
    _choose(logits, token, picks, seed, S)


@triton.jit(do_not_specialize=["seed"])
def _norm_and_route_kernel(
    x_ptr,
    residual_ptr,  # None, or what x is to be added to first
    norm_ptr,
    gate_ptr,
    sum_ptr,
    normed_ptr,
    logits_ptr,
    tickets_ptr,  # [T] int32, zeros before and after: how many of a token's programs are finished
    picks,
    seed,
    eps,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    S: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    part, token, columns = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK_SIZE)
    own, inside = part * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS), columns < SIZE
    real = own < S.experts
    g = tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate_ptr + own[:, None] * SIZE + columns, mask=real[:, None] & inside, other=0.0)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + token * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + token * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        if part == 0:
            tl.store(sum_ptr + token * SIZE + columns, rounded, mask=inside)
        x = rounded.to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x) / SIZE + eps) * g).to(normed_ptr.dtype.element_ty)
    if part == 0:
        tl.store(normed_ptr + token * SIZE + columns, normed, mask=inside)
    logits = tl.sum(gates.to(tl.float32) * normed.to(tl.float32)[None, :], axis=1)
    tl.store(logits_ptr + token * S.experts + own, logits.to(logits_ptr.dtype.element_ty), mask=real)
    tl.debug_barrier()  # the ticket speaks for all threads
    if tl.atomic_add(tickets_ptr + token, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(tickets_ptr + token, 0)  # for the next launch
        expert = tl.arange(0, S.block)
        every = tl.load(logits_ptr + token * S.experts + expert, mask=expert < S.experts, other=0.0).to(tl.float32)
        _choose(every, token, picks, seed, S)


def route(logits: Tensor, bias: Tensor | None, router: RouterSpec, tokens: TokenPlaces) -> Routes:
    """Arguments, contiguous, as of Kernels.route."""
    routes = _empty(len(logits), router, logits.device)
    if len(logits):
        _route_kernel[(len(logits),)](
            logits, Picks(bias, *tokens[:2], *routes), router.seed, _shape(router), num_warps=1,
            **launch_options(logits.device),
        )  # fmt: skip
    return routes


def norm_and_route(
    stream: Stream, gate: Tensor, bias: Tensor | None, router: RouterSpec, tokens: TokenPlaces
) -> tuple[Tensor, Tensor, Routes]:
    """(the stream's norm, its value, `route` of the norm's product with gate), the norm rounded to the stream's dtype
    and the product to gate's.

    The first call on a device must not be under capture (RuntimeError), and calls must not overlap: the tickets are
    flash_decode's.

    Args:
        stream: [T, H], contiguous.
        gate: [E, H]; not still being written on the GPU (rule 3 of kernels/pdl.py), as little as the norm's weight.
        bias, router, tokens: as of Kernels.norm_and_route.
    """
    x, residual, norm = stream
    assert isinstance(x, Tensor), "parts of ranks are added up first"
    (count, size), routes = x.shape, _empty(len(x), router, x.device)
    total = x if residual is None else torch.empty_like(x)
    normed, logits = torch.empty_like(x), gate.new_empty((count, len(gate)))
    if count:
        block_size = triton.next_power_of_2(size)
        block_experts = max(1, 8192 // (block_size * gate.element_size()))
        _norm_and_route_kernel[(triton.cdiv(len(gate), block_experts), count)](
            x, residual, norm.weight, gate.contiguous(), total, normed, logits, tickets_of(x.device),
            Picks(bias, *tokens[:2], *routes), router.seed, norm.eps, S=_shape(router), SIZE=size,
            BLOCK_SIZE=block_size, BLOCK_EXPERTS=block_experts, num_warps=max(1, block_size // 2048),
            **launch_options(x.device),
        )  # fmt: skip
    return normed, total, routes


def worth_it(tokens: int, gate: torch.dtype) -> bool:
    """Whether `norm_and_route` is faster than its parts. Each token's programs read the gate anew; but a product in
    float32 takes a library long, and the norm's conversion to it another kernel."""
    return tokens <= (64 if gate is torch.float32 else 16)


def _empty(count: int, router: RouterSpec, device: torch.device) -> Routes:
    ids = torch.empty((count, router.top_k), dtype=torch.int32, device=device)
    return Routes(ids, torch.empty(ids.shape, dtype=torch.float32, device=device))


def _shape(router: RouterSpec) -> RouteShape:
    return RouteShape(
        experts=router.num_experts,
        block=triton.next_power_of_2(router.num_experts),
        top_k=router.top_k,
        top_k_block=triton.next_power_of_2(router.top_k),
        sigmoid=router.scores is Scores.sigmoid,
        normalize=router.normalize,
        scale=float(router.scale),
        groups=router.num_groups,
        top_groups=router.top_groups,
        group_top=router.group_top,
        routing=_ROUTINGS[router.routing],
    )
