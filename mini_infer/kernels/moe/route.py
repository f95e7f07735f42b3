"""Where tokens go, in one kernel: from a router's logits to experts and weights. The definition is in moe.py, and what
the fields of RouterSpec do in interface.py.

A program is a token, and has a number of each expert in one warp. The highest are taken one after the other: of a few
hundred experts no more than ten are wanted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.core.model_config import Routing
from mini_infer.kernels.interface import RouterSpec, Routes, Scores, TokenPlaces
from mini_infer.kernels.moe.reference import GOLDEN, TINY
from mini_infer.kernels.pdl import launch_options

_GOLDEN, _TINY = tl.constexpr(GOLDEN), tl.constexpr(TINY)
_ROUTINGS = {Routing.learned: 0, Routing.uniform: 1, Routing.zipf: 2}


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
def _first(values, free, index, NONE: tl.constexpr):
    """(the highest of those that are free, the first index that has it)."""
    highest = tl.max(tl.where(free, values, -float("inf")))
    return highest, tl.min(tl.where(free & (values == highest), index, NONE))


@triton.jit(do_not_specialize=["seed"])
def _route_kernel(
    logits_ptr,
    bias_ptr,
    token_ids_ptr,
    positions_ptr,
    ids_ptr,
    weights_ptr,
    seed,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_TOP: tl.constexpr,
    ROUTING: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    free = expert < EXPERTS
    logits = tl.load(logits_ptr + token * EXPERTS + expert, mask=free, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(logits))
        scores /= tl.sum(scores)
    choice = scores
    if ROUTING > 0:
        token_id, position = tl.load(token_ids_ptr + token), tl.load(positions_ptr + token)
        choice = _drawn(token_id, position, seed, expert, ROUTING == 2)
    elif bias_ptr is not None:
        choice += tl.load(bias_ptr + expert, mask=free, other=0.0)
    choice = tl.where(free & (choice == choice), choice, -float("inf"))  # what is no number must lead to an expert too
    if GROUPS > 1:
        group = expert // (EXPERTS // GROUPS)
        best = tl.zeros([BLOCK], tl.float32)  # of each expert's group
        for g in range(GROUPS):
            own = free & (group == g)
            total = 0.0
            for _ in range(GROUP_TOP):
                highest, at = _first(choice, own, expert, BLOCK)
                own = own & (expert != at)
                total += highest
            best = tl.where(group == g, total, best)
        kept = expert < 0
        for _ in range(TOP_GROUPS):
            _highest, at = _first(best, free & ~kept, group, GROUPS)
            kept = kept | (group == at)
        choice = tl.where(kept, choice, -float("inf"))
    place = tl.arange(0, TOP_K_BLOCK)
    ids, weights = tl.zeros([TOP_K_BLOCK], tl.int32), tl.zeros([TOP_K_BLOCK], tl.float32)
    for j in range(TOP_K):
        _highest, at = _first(choice, free, expert, EXPERTS - 1)
        ids = tl.where(place == j, at, ids)
        weights = tl.where(place == j, tl.sum(tl.where(expert == at, scores, 0.0)), weights)
        free = free & (expert != at)
    if NORMALIZE:
        weights /= tl.sum(weights) + _TINY
    some = place < TOP_K
    tl.store(ids_ptr + token * TOP_K + place, ids, mask=some)
    tl.store(weights_ptr + token * TOP_K + place, weights * SCALE, mask=some)


def route(logits: Tensor, bias: Tensor | None, router: RouterSpec, tokens: TokenPlaces) -> Routes:
    """Arguments, contiguous, as of Kernels.route."""
    count, experts = logits.shape
    ids = torch.empty((count, router.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
    if count:
        _route_kernel[(count,)](
            logits, bias, tokens.token_ids, tokens.positions, ids, weights, router.seed, EXPERTS=experts,
            BLOCK=triton.next_power_of_2(experts),
            TOP_K=router.top_k, TOP_K_BLOCK=triton.next_power_of_2(router.top_k),
            SIGMOID=router.scores is Scores.sigmoid, NORMALIZE=router.normalize, SCALE=float(router.scale),
            GROUPS=router.num_groups, TOP_GROUPS=router.top_groups, GROUP_TOP=router.group_top,
            ROUTING=_ROUTINGS[router.routing], num_warps=1, **launch_options(logits.device),
        )  # fmt: skip
    return Routes(ids, weights)
