"""Fixtures of the runtime's tests."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What captures ask of torch.cuda, on a CPU: streams that do nothing, and memory of which nothing is taken.

    Attributes:
        free, reserved: bytes that are free, and that torch has taken, which a test may change.
        streams: how many have been made.
        emptied: called, without arguments, where the allocator's cache is emptied.
    """
    gpu = SimpleNamespace(free=1000, reserved=0, streams=0, emptied=lambda: None)

    def new_stream(device: Any) -> SimpleNamespace:
        gpu.streams += 1
        return SimpleNamespace(wait_stream=lambda other: None)

    for name, replacement in {
        "Stream": new_stream,
        "current_stream": lambda device: SimpleNamespace(wait_stream=lambda other: None),
        "stream": lambda stream: contextlib.nullcontext(),
        "graph_pool_handle": lambda: "pool",
        "synchronize": lambda device: None,
        "mem_get_info": lambda device: (gpu.free, 2000),
        "memory_reserved": lambda device: gpu.reserved,
        "empty_cache": lambda: gpu.emptied(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    return gpu
