"""Kernels compiled in parallel: what is launched inside, what is compiled, and what torch's new tensors hold."""

import pytest
import torch
from uninterpreted import output_of

from mini_infer.kernels.compile_ahead import compiled_in_parallel

COMPILES_FOR_A_GPU_THAT_IS_NOT_THERE = """
import os, threading, torch
from h200 import H200
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

driver.set_active(H200())
from mini_infer.kernels import silu_mul
from mini_infer.kernels.compile_ahead import compiled_in_parallel

def listen(**of):
    main = threading.current_thread() is threading.main_thread()
    os.write(1, f"{of['src'].name} {of['cache_hit']} {main}\\n".encode())  # at once: two threads do it

knobs.compilation.listener = listen
launch = JITFunction.run
for dtype in (torch.float32, torch.bfloat16), (torch.float32,):
    silu_mul._silu_mul_kernel.device_caches.clear()
    with compiled_in_parallel(2):
        for one in dtype:
            for _ in range(2):
                silu_mul.silu_mul(torch.zeros(1, 32, dtype=one))
assert JITFunction.run is launch
"""


def test_each_variant_is_compiled_once_and_beside_the_caller(tmp_path) -> None:
    """For Hopper, on any machine: a launch would fail where there is no GPU."""
    pytest.importorskip("triton")
    told = output_of(COMPILES_FOR_A_GPU_THAT_IS_NOT_THERE, TRITON_CACHE_DIR=str(tmp_path))
    compiled = ["_silu_mul_kernel False False"] * 2
    assert told.splitlines() == [*compiled, "_silu_mul_kernel True False"]


def test_new_tensors_are_zeros_inside() -> None:
    with compiled_in_parallel(1):
        made = [torch.empty(1000), torch.ones(1000).new_empty(1000), torch.empty_like(torch.ones(1000))]
        assert torch.ones(3).sum() == 3
    assert all(not tensor.any() for tensor in made)


def test_an_error_inside_leaves_nothing_behind() -> None:
    with pytest.raises(ZeroDivisionError), compiled_in_parallel(1):
        raise ZeroDivisionError
    with compiled_in_parallel(1):  # which refuses where another is still open
        pass
