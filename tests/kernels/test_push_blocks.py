from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


VARIANTS = """
import torch
import variants_met as variants
from mini_infer.kernels.push_blocks import push_blocks

met = variants.Met()
variants.driver.set_active(variants.H200())
variants.JITFunction.run = lambda kernel, *args, **kwargs: met.run(kernel, *args, **kwargs)
source, target = torch.zeros(2, 12, 1, 64, dtype=torch.int64), torch.zeros(2, 37, 1, 64, dtype=torch.int64)
for count in (1, 2, 7, 16, 17):
    here, there = torch.zeros(2, count, dtype=torch.int64)
    push_blocks(source, target, here, there)
print(len(met.variants))
"""


def test_no_number_of_blocks_is_compiled_for_itself() -> None:
    """A start compiles one variant, and another one would stop the engine in the middle of a load."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1] / "runtime")
    done = subprocess.run([sys.executable, "-c", VARIANTS], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
