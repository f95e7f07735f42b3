from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from mini_infer.kernels.push_blocks import push_blocks


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize(
    ("planes", "rows", "words", "count"), [(1, 1, 1, 1), (2, 1, 40, 3), (2, 1, 2500, 7), (1, 1, 16, 0), (2, 3, 50, 4)]
)
def test_equals_the_reference(
    planes: int, rows: int, words: int, count: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Several rows are a part of what lies there: heads of a token."""
    torch.manual_seed(count)
    source = torch.randint(0, 127, (planes, 12, rows, 2 * words), device=device).to(dtype)[..., words:]
    whole = torch.zeros(2, planes, 9, rows, 3 * words, dtype=dtype, device=device)
    got, expected = whole[..., words : 2 * words]
    here, there = torch.randperm(12, device=device)[:count], torch.randperm(9, device=device)[:count]
    push_blocks(source, got, here, there)
    expected.index_copy_(1, there, source.index_select(1, here))
    assert torch.equal(whole[0], whole[1])
