"""Programmatic dependent launch (PDL, Hopper and later): a kernel starts while the one before it still runs.

A decode step is a chain of kernels of a few microseconds, of which launch and first load are a large part. A kernel
launched so has its programs in place early: they may load what no kernel writes (weights), and only then wait:

    let_next_start(PDL)
    ...  # loads of weights
    wait_for_previous(PDL)

Three rules make that safe:
  1. Every program executes `wait_for_previous` before it reads or writes anything that an earlier kernel may touch.
     That includes the output: it may lie in memory that an earlier kernel still reads. It returns when the whole kernel
     before has ended; as that one waited too, everything before it has ended.
  2. `let_next_start` only lets the next kernel start. It says nothing about results and may come first.
  3. What is read before the wait must not be written by any kernel that may still run: here that is the weights
     alone, which are in place long before the first step.

A program that streams weights through shared memory does not load before it waits; it has the first of them brought to
L2 (`bring_to_l2`), which rule 3 allows.

A kernel that is launched in the ordinary way starts when all before it has ended, and so is a barrier between those
that are not.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


def launch_options(device: torch.device, *, ordinary: bool = False) -> dict[str, Any]:
    """Keyword arguments for the launch of a kernel that has a constexpr PDL. `ordinary`: it starts when all before it
    has ended, as behind kernels of two streams, and lets the next start early."""
    # Triton's interpreter does not know launch_pdl.
    if not _has_pdl(device):
        return {"PDL": False}
    return {"PDL": True} if ordinary else {"PDL": True, "launch_pdl": True}


@cache
def _has_pdl(device: torch.device) -> bool:
    return (
        device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)
    )


@triton.jit
def let_next_start(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def take_turn(PDL: tl.constexpr):
    """Both, of a kernel that loads nothing early."""
    let_next_start(PDL)
    wait_for_previous(PDL)


@triton.jit
def bring_to_l2(ptr, rows, ROW_BYTES: tl.constexpr, BYTES: tl.constexpr):
    """Asks for the first BYTES of rows that are ROW_BYTES apart, all multiples of 16, as ptr is. Hopper and later."""
    at = ptr.to(tl.int64) + rows.to(tl.int64) * ROW_BYTES
    tl.inline_asm_elementwise(
        f"cp.async.bulk.prefetch.L2.global [$1], {BYTES}; mov.b32 $0, 0;", "=r,l", [at], tl.int32, False, 1
    )
