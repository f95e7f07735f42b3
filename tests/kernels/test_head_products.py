"""head_products against its definition, in any strides, and a token's numbers in any company."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from mini_infer.kernels.head_products import head_products, head_products_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "size", "outs", "more"), [(1, 16, 40, 8), (3, 24, 20, 0), (35, 40, 70, 6)])
def test_products_are_those_of_the_definition(
    tokens: int, size: int, outs: int, more: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    q = torch.randn(tokens, 3, size + more, dtype=dtype, device=device)
    x, rest = q[..., :size], q[..., size:] if more else None
    out = torch.empty(tokens, 3, outs + more + 1, dtype=dtype, device=device)[..., : outs + more]
    weights = torch.randn(3, size, outs, dtype=dtype, device=device).transpose(1, 2) / size**0.5
    for own in (weights, weights.contiguous()):
        head_products(x, own, out, rest)
        expected = torch.empty_like(out)
        head_products_reference(x, own, expected, rest)
        torch.testing.assert_close(out, expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)
        alone = torch.empty_like(out[-1:])
        head_products(x[-1:], own, alone, None if rest is None else rest[-1:])
        assert torch.equal(alone, out[-1:])
