"""How a mixture of experts is trained: transformers' model, whose layers of experts compute in another way meanwhile.

Every expert computes every token, and what a token did not choose is multiplied by zero. At this size that costs less
than to sort tokens, and a compiler makes two products of it. A loss keeps experts from being left out (Fedus et al.
2021, arXiv:2101.03961): a router that prefers few of them is pushed away from those that have most of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

from mini_infer.assets.trainer import Objective, cross_entropy

BALANCE_WEIGHT = 0.01


@contextmanager
def balanced(model: PreTrainedModel, weight: float = BALANCE_WEIGHT) -> Iterator[Objective]:
    """Cross-entropy + weight * the mean over layers of experts of their imbalance, which is 1 where tokens go to all
    experts alike. The model is what it was afterwards."""
    layers = [module for module in model.modules() if isinstance(module, DeepseekV2Moe)]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)

    def objective(logits: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        imbalance = torch.stack([layer.imbalance for layer in layers]).mean()
        return cross_entropy(logits, inputs, labels) + weight * imbalance

    try:
        yield objective
    finally:
        for layer in layers:
            del layer.forward, layer.imbalance


def _forward(layer: Any, hidden: Tensor) -> Tensor:
    """Of a DeepseekV2Moe; leaves its imbalance on it."""
    x = hidden.flatten(0, -2)
    logits, weights, ids = layer.gate(hidden)
    shares = torch.zeros_like(logits).scatter(1, ids, weights.to(logits.dtype))  # [T, E]
    gate_up, down = layer.experts.gate_up_proj, layer.experts.down_proj  # [E, 2I, H], [E, H, I]
    gate, up = F.linear(x, gate_up.flatten(0, 1)).unflatten(1, (len(down), 2, -1)).unbind(2)
    inner = (F.silu(gate) * up * shares[..., None]).flatten(1)
    y = F.linear(inner, down.transpose(0, 1).flatten(1))
    chosen = (shares > 0).float().mean(0)  # of each expert, the share of tokens that it gets
    layer.imbalance = len(down) / ids.shape[1] * (chosen * logits.float().softmax(-1).mean(0)).sum()
    return y.view_as(hidden) + layer.shared_experts(hidden)
