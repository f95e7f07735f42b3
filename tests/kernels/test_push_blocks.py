from __future__ import annotations

import pytest
import torch
from uninterpreted import output_of

pytest.importorskip("triton")

from mini_infer.kernels.push_blocks import PlaneCopies
from mini_infer.transfer.memory import CopiesOnCpu


def planes(count: int, blocks: int, rows: int, words: int, like: torch.Tensor) -> list[torch.Tensor]:
    """Parts of what lies there, as heads of a token are: [blocks, rows, words] of tensors that lie apart."""
    return [like.new_zeros(blocks, rows, 3 * words)[..., words : 2 * words] for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize(
    ("rows", "words", "count"), [(1, 1, 1), (1, 40, 9), (1, 2304, 3), (1, 9000, 2), (1, 16, 0), (3, 50, 4), (16, 8, 9)]
)
def test_equals_the_reference(rows: int, words: int, count: int, dtype: torch.dtype, device: torch.device) -> None:
    """Groups of planes, the last one smaller, in parts of blocks on both sides of what a program takes at once."""
    torch.manual_seed(count)
    like = torch.zeros((), dtype=dtype, device=device)
    source, got, expected = (planes(7, blocks, rows, words, like) for blocks in (12, 9, 9))
    for plane in source:
        plane.copy_(torch.randint(0, 127, plane.shape))
    copies = PlaneCopies(list(zip(source, got, strict=True)))
    reference = CopiesOnCpu(list(zip(source, expected, strict=True)))
    here, there = torch.randperm(12, device=device)[:count], torch.randperm(9, device=device)[:count]
    assert not any(plane.any() for plane in got), "what compiles it copies nothing"
    for first, end in ((0, 3), (3, 6), (6, 7)):
        for each in (copies, reference):
            each.push(first, end, here, there)
        assert all(map(torch.equal, got, expected))
    assert all(torch.equal(plane[there], own[here]) for plane, own in zip(got, source, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("peer", [0, 1])
def test_blocks_of_layers_reach_another_gpu(peer: int) -> None:
    if peer >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    source = torch.randint(0, 2**40, (10, 400, 1, 2048), device="cuda:0")
    target = torch.empty(10, 500, 1, 2048, dtype=torch.int64, device=f"cuda:{peer}")
    target[:, :400].copy_(source)  # from now on kernels here may write there
    target.zero_()
    torch.cuda.synchronize(peer)
    here, there = torch.randperm(400)[:300], torch.randperm(500)[:300]
    copies = PlaneCopies(list(zip(source, target, strict=True)))
    for first, end in ((0, 8), (8, 10)):
        copies.push(first, end, here.cuda(0), there.cuda(0))
    torch.cuda.synchronize(0)
    expected = torch.zeros_like(target, device="cpu")
    expected[:, there] = source.cpu()[:, here]
    assert torch.equal(target.cpu(), expected)


VARIANTS = """
import torch
import variants_met as variants
from mini_infer.kernels.push_blocks import PlaneCopies

met = variants.Met()
variants.driver.set_active(variants.H200())
variants.JITFunction.run = lambda kernel, *args, **kwargs: met.run(kernel, *args, **kwargs)
source, target = torch.zeros(6, 12, 1, 64, dtype=torch.int64), torch.zeros(6, 37, 1, 64, dtype=torch.int64)
copies = PlaneCopies(list(zip(source, target)))
met.started = True
for count in (1, 2, 7, 16, 17):
    for first, end in ((0, 1), (1, 6), (4, 6)):
        here, there = torch.zeros(2, count, dtype=torch.int64)
        copies.push(first, end, here, there)
print(len(met.variants), met.new)
"""


def test_no_number_of_blocks_is_compiled_for_itself() -> None:
    """A start compiles one variant, and another one would stop the engine in the middle of a load."""
    assert output_of(VARIANTS) == "1 []\n"
