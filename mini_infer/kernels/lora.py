"""Low-rank adapters (LoRA, arXiv:2106.09685) of many requests in one step: y += B A x, each token with its own A and B.

    group    tokens of one adapter become neighbours, once a step:   order  [ 4 0 7 | 2 5 | 1 ]
                                                                     spans    slot 3  slot 0  slot 6
    shrink   x [T, K] --> A of the token's slot --> [T, parts, R], R numbers for each part of a merged product
    expand   that --> B of the token's slot --> added to y [T, N]

These are the definitions, in torch, and wait for the device; lora_kernels.py does each in one launch, from which
nothing waits, so that CUDA graphs have them. Tokens without an adapter are in no span: nothing reads or writes them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mini_infer.core.request import NO_ADAPTER

_SPAN, _LONG_SPAN = 16, 64  # tokens
FEW_TOKENS = 512  # of a step, up to which spans are short


class LoraWeights(NamedTuple):
    """Of one product, of all slots, which lie any distance apart."""

    a: Tensor  # [slots, parts, R, K]
    b: Tensor  # [slots, N, R], the parts' outputs one after the other
    parts: tuple[int, ...]  # outputs of each; their sum is N


class Groups(NamedTuple):
    """Tokens of a step by adapter. The memory is the same in every step."""

    order: Tensor  # [most tokens] int32: indices of the tokens that have an adapter, those of one side by side
    spans: Tensor  # [most spans, 3] int32: slot, begin and end in `order`; an end of 0: there are no more
    num_slots: int


def new_groups(num_slots: int, most_tokens: int, device: torch.device) -> Groups:
    """Room for steps of up to so many tokens."""
    order = torch.zeros(most_tokens, dtype=torch.int32, device=device)
    spans = torch.zeros(num_slots + most_tokens // _SPAN, 3, dtype=torch.int32, device=device)
    return Groups(order, spans, num_slots)


def span(num_tokens: int) -> int:
    """Tokens of one adapter that a program takes at most: few where a step has few, so that programs work side by side,
    and else more, so that its weights are not read again for each few of them."""
    return _SPAN if num_tokens <= FEW_TOKENS else _LONG_SPAN


def most_spans(groups: Groups, num_tokens: int) -> int:
    """Of a step of up to so many tokens, however they are spread over adapters: what a graph computes is that of a
    shorter step and padding."""
    full = max(min(num_tokens, FEW_TOKENS) // _SPAN, num_tokens // _LONG_SPAN)
    return min(num_tokens, groups.num_slots + full, len(groups.spans))


def group(groups: Groups, slots: Tensor, owners: Tensor, num_tokens: int) -> None:
    """Fills `groups` for a step.

    Args:
        slots: [requests] int32, NO_ADAPTER where there is none.
        owners: [R] of any integer type: the requests whose tokens these are, num_tokens / R neighbours each.
    """
    of_token = slots[owners.long()].repeat_interleave(num_tokens // max(1, len(owners)))
    order = torch.argsort(of_token, stable=True)[int((of_token == NO_ADAPTER).sum()) :]
    found, counts = of_token[order].unique_consecutive(return_counts=True)
    ends = counts.cumsum(0)
    groups.order[: len(order)] = order.int()
    each = span(num_tokens)
    spans = [
        (slot, first, min(first + each, end))
        for slot, begin, end in torch.stack((found, ends - counts, ends), dim=1).tolist()
        for first in range(begin, end, each)
    ]
    groups.spans.zero_()
    groups.spans[: len(spans)] = torch.tensor(spans, dtype=torch.int32).view(-1, 3)


def shrink(
    x: Tensor, weights: LoraWeights, groups: Groups, chunk: int | None = None, clear: Tensor | None = None
) -> Tensor:
    """x [T, K] -> [T, splits, parts, R] float32, whose sum over splits is A x.

    Args:
        chunk: inputs of a split, a divisor of K; by default as the kernel likes them.
        clear: contiguous, of fewer than 2^31 numbers: is made 0.
    """
    if clear is not None:
        clear.zero_()
    split = x.shape[1] if chunk is None else chunk
    _, parts, rank, _ = weights.a.shape
    out = x.new_zeros(len(x), x.shape[1] // split, parts, rank, dtype=torch.float32)
    for slot, tokens in _each(groups):
        a = weights.a[slot].unflatten(2, (-1, split)).float()
        out[tokens] = torch.einsum("tsk,prsk->tspr", x[tokens].unflatten(1, (-1, split)).float(), a)
    return out


def expand(y: Tensor, shrunk: Tensor, weights: LoraWeights, groups: Groups, *, joins: bool = False) -> None:
    """Adds to y [T, N], contiguous, what becomes of `shrunk`, which is summed over splits and rounded to y's dtype.
    `joins`: the two come from two streams."""
    for slot, tokens in _each(groups):
        s = shrunk[tokens].sum(1).to(y.dtype).float()
        b = weights.b[slot].float().split(weights.parts)
        y[tokens] = (y[tokens] + torch.cat([s[:, i] @ part.t() for i, part in enumerate(b)], dim=1)).to(y.dtype)


def _each(groups: Groups) -> list[tuple[int, Tensor]]:
    """(slot, its tokens [n])"""
    return [(slot, groups.order[begin:end].long()) for slot, begin, end in groups.spans.tolist() if end]
