from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from mini_infer.kernels.push_blocks import push_blocks


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize(("planes", "words", "count"), [(1, 1, 1), (2, 40, 3), (2, 2500, 7), (1, 16, 0)])
def test_equals_the_reference(planes: int, words: int, count: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(count)
    source = torch.randint(0, 127, (planes, 12, words), device=device).to(dtype)
    got, expected = (torch.zeros(planes, 9, words, dtype=dtype, device=device) for _ in range(2))
    here, there = torch.randperm(12, device=device)[:count], torch.randperm(9, device=device)[:count]
    push_blocks(source, got, here, there)
    expected.index_copy_(1, there, source.index_select(1, here))
    assert torch.equal(got, expected)
