"""Mixture of experts, as torch operations: the definition of `Kernels.route` and `Kernels.experts`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_infer.core.model_config import Routing
from mini_infer.kernels.interface import ExpertWeights, RouterSpec, Routes, Scores, TokenPlaces
from mini_infer.quantization.formats import ActivationFormat, quantize_tokens
from mini_infer.quantization.weight import QuantizedTokens, QuantizedWeight, quantized_linear_reference

_UINT32 = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
TINY = 1e-20  # added to a sum of scores, lest it be zero


def route_reference(logits: Tensor, bias: Tensor | None, router: RouterSpec, tokens: TokenPlaces) -> Routes:
    """The definition. Arguments as of Kernels.route."""
    logits = logits.float()
    scores = logits.softmax(-1) if router.scores is Scores.softmax else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if router.routing is not Routing.learned:
        choice = _drawn(router, tokens)
    if router.num_groups > 1:
        groups = choice.unflatten(1, (router.num_groups, -1))
        best = groups.topk(router.group_top).values.sum(-1)
        left_out = best.argsort(descending=True, stable=True)[:, router.top_groups :]
        choice = groups.scatter(1, left_out[..., None].expand(-1, -1, groups.shape[2]), -torch.inf).flatten(1)
    ids = choice.argsort(descending=True, stable=True)[:, : router.top_k]
    weights = scores.gather(1, ids)
    if router.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return Routes(ids.int(), weights * router.scale)


def _drawn(router: RouterSpec, tokens: TokenPlaces) -> Tensor:
    """Choices [T, E]. The highest is each expert's with the same probability, or, in zipf, with one that falls as 1,
    1/2, 1/3, ... (an exponential race); so is the second among those left, and so on."""
    token = _mixed(tokens.token_ids + ((router.seed + 1) * GOLDEN & _UINT32))
    lot = _mixed(token + tokens.positions)
    expert = torch.arange(router.num_experts, device=lot.device)
    bits = _mixed(lot[:, None] + expert * GOLDEN)
    uniform = ((bits >> 8).float() + 0.5) * 2.0**-24
    return uniform if router.routing is Routing.uniform else uniform.log() * (expert + 1)


def _mixed(x: Tensor) -> Tensor:
    """A hash of the lower 32 bits of x int64, as int64 from 0 (Wellons 2018, "Prospecting for Hash Functions",
    lowbias32)."""
    x = x & _UINT32
    x = (x ^ (x >> 16)) * 0x7FEB352D & _UINT32
    x = (x ^ (x >> 15)) * 0x846CA68B & _UINT32
    return x ^ (x >> 16)


def experts_reference(x: Tensor, routes: Routes, weights: ExpertWeights, residual: Tensor | None = None) -> Tensor:
    """The definition. Arguments and result as of Kernels.experts."""
    total = add_experts_reference(expert_results_reference(x, routes, weights), routes.weights)
    return total if residual is None else residual + total


def expert_results_reference(x: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
    """As Kernels.expert_results, rounded to x's dtype.

    On a GPU nothing may wait for the counts of tokens, so that every expert computes every token there.
    """
    tokens, chosen = routes.ids.shape
    results = x.new_zeros((tokens, chosen, x.shape[1]))
    down = weights.down
    for expert in range(len(down if isinstance(down, Tensor) else down.codes)):
        own = routes.ids == expert
        if x.is_cuda:
            results = torch.where(own[..., None], _expert(x, expert, weights)[:, None], results)
        elif len(pairs := own.flatten().nonzero()[:, 0]):
            results.view(tokens * chosen, -1)[pairs] = _expert(x[pairs // chosen], expert, weights)
    return results


def add_experts_reference(results: Tensor, shares: Tensor) -> Tensor:
    """The definition. Arguments and result as of Kernels.add_experts."""
    return (results * shares[..., None]).sum(1).to(results.dtype)


def _expert(x: Tensor, expert: int, weights: ExpertWeights) -> Tensor:
    gate_up, down, activations, _ = weights
    gate, up = _product(x, expert, gate_up, activations).chunk(2, dim=-1)
    return _product(F.silu(gate) * up, expert, down, activations)


def _product(x: Tensor, expert: int, weight: Tensor | QuantizedWeight, activations: ActivationFormat | None) -> Tensor:
    if isinstance(weight, Tensor):
        return F.linear(x, weight[expert])
    zeros = None if weight.zeros is None else weight.zeros[expert]
    own = QuantizedWeight(weight.codes[expert], weight.scales[expert], zeros, weight.form)
    wide = x if activations is None else QuantizedTokens(*quantize_tokens(x, activations), torch.float64)
    return quantized_linear_reference(wide, own, None, activations).to(x.dtype)  # as TorchKernels.quantized_linear
