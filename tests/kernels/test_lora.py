"""Adapters' kernels against their definitions, and a token's numbers in any company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mini_infer.kernels import lora, lora_kernels
from mini_infer.kernels.lora import NO_ADAPTER, Groups, LoraWeights

SLOTS, RANK, IN, PARTS = 5, 16, 80, (48, 20, 130)


def new_groups(tokens: int, device: torch.device) -> Groups:
    groups = lora.new_groups(SLOTS, tokens, device)
    return Groups(groups.order.fill_(-7), groups.spans.fill_(7), SLOTS)


@pytest.fixture(scope="module")
def weights(device: torch.device) -> LoraWeights:
    torch.manual_seed(0)
    memory = torch.randn(SLOTS, RANK * (len(PARTS) * IN + sum(PARTS)) + 16, device=device)
    a, b, _ = memory.split([RANK * len(PARTS) * IN, RANK * sum(PARTS), 16], dim=1)
    return LoraWeights(a.unflatten(1, (len(PARTS), RANK, IN)), b.unflatten(1, (sum(PARTS), RANK)), PARTS)


def applied(module: object, x: Tensor, weights: LoraWeights, slots: list[int], chunk: int | None = None) -> Tensor:
    """What is added by tokens of these slots to what `shrink` has made 0."""
    groups = new_groups(len(slots), x.device)
    of_request = torch.tensor(slots, dtype=torch.int32, device=x.device)
    module.group(groups, of_request, torch.arange(len(slots), device=x.device), len(slots))  # type: ignore[attr-defined]
    y = x.new_full((len(x), sum(weights.parts)), torch.nan)
    module.expand(y, module.shrink(x, weights, groups, chunk, y), weights, groups)  # type: ignore[attr-defined]
    return y


@pytest.mark.parametrize("owners", [[0], [3, 1, 0, 2, 1], [2, 2, 2], list(range(6)) * 5, [0] * 150 + [3, 1] * 25])
@pytest.mark.parametrize("each", [1, 3])
def test_tokens_of_an_adapter_are_side_by_side_and_in_order(owners: list[int], each: int, device: torch.device) -> None:
    slots = torch.tensor([4, NO_ADAPTER, 0, 2, NO_ADAPTER, 4], dtype=torch.int32, device=device)
    tokens = len(owners) * each
    found, expected = new_groups(tokens, device), new_groups(tokens, device)
    for module, groups in ((lora_kernels, found), (lora, expected)):
        module.group(groups, slots, torch.tensor(owners, device=device), tokens)
    known = [row for row in expected.spans.tolist() if row[2]]
    assert [row for row in found.spans.tolist() if row[2]] == known
    assert len(known) <= lora.most_spans(found, tokens), "so many are read"
    assert max(end - begin for _, begin, end in known) <= lora.span(tokens)
    last = max(end for _, _, end in known)
    assert torch.equal(found.order[:last], expected.order[:last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [None, 20])
def test_what_is_added_is_the_definitions(
    chunk: int | None, dtype: torch.dtype, weights: LoraWeights, device: torch.device
) -> None:
    slots = [3, NO_ADAPTER, 0, 0, 2, NO_ADAPTER, *[1] * 19]
    x = torch.randn(len(slots), IN, dtype=dtype, device=device)
    own = LoraWeights(weights.a.to(dtype), weights.b.to(dtype), PARTS)
    y, expected = (applied(module, x, own, slots, chunk).double() for module in (lora_kernels, lora))
    by_hand = torch.zeros_like(expected)
    for token, slot in enumerate(slots):
        if slot != NO_ADAPTER:
            a, b = own.a[slot].double(), own.b[slot].double().split(PARTS)
            by_hand[token] = torch.cat([part @ (a[i] @ x[token].double()) for i, part in enumerate(b)])
    for other in (expected, by_hand):
        assert (y - other).norm() < (1e-2 if dtype is torch.bfloat16 else 1e-6) * other.norm()
    assert not y[[1, 5]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_rank(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(1, 1, 512, 600, device=device) / 25, torch.randn(1, 300, 512, device=device) / 25
    own = LoraWeights(a.to(dtype), b.to(dtype), (300,))
    x = torch.randn(18, 600, dtype=dtype, device=device)
    y, expected = (applied(module, x, own, [0] * 18).float() for module in (lora_kernels, lora))
    assert (y - expected).norm() < (1e-2 if dtype is torch.bfloat16 else 1e-6) * expected.norm()


def test_a_tokens_numbers_are_the_same_in_any_company(weights: LoraWeights, device: torch.device) -> None:
    x = torch.randn(40, IN, device=device)
    slots = [min(3, (7 * i) % 6) - 1 for i in range(40)]  # more than a tile of one
    together = applied(lora_kernels, x, weights, slots)
    for token in (0, 1, 2, 17, 39):
        assert torch.equal(
            applied(lora_kernels, x[token : token + 1], weights, slots[token : token + 1])[0], together[token]
        )
    backwards = applied(lora_kernels, x.flip(0), weights, slots[::-1])
    assert torch.equal(backwards.flip(0), together)


@pytest.mark.parametrize("tokens", [20, 500])
def test_a_graphs_padding_is_no_step_of_before(tokens: int, weights: LoraWeights, device: torch.device) -> None:
    """It is captured for more tokens than the step has, which may be more than such a long step has spans of."""
    padded, before = tokens + 44, 600
    groups, slots = new_groups(before, device), torch.arange(SLOTS, dtype=torch.int32, device=device)
    owners = torch.arange(before, device=device) * 7 % SLOTS
    lora_kernels.group(groups, slots, owners, before)
    lora_kernels.group(groups, slots, owners[:tokens], tokens)
    x = torch.randn(padded, IN, device=device)
    y = x.new_zeros(padded, sum(PARTS))
    lora_kernels.expand(y, lora_kernels.shrink(x, weights, groups), weights, groups)
    expected = applied(lora_kernels, x[:tokens], weights, slots[owners[:tokens]].tolist())
    assert torch.equal(y[:tokens], expected)
    assert not y[tokens:].any()
