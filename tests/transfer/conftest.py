"""The library NIXL, or something in its place."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class StandIn:
    """Of NIXL's agent: it copies within the process, of a write when somebody looks whether it has been made."""

    def __init__(self, name: str, config: Any) -> None:
        self._name, self._known, self.peers = name, list[tuple[int, int]](), set[bytes]()

    def register_memory(self, tensors: list[torch.Tensor]) -> None:
        self._known += [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]

    def get_agent_metadata(self) -> bytes:
        return self._name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        if not metadata:
            raise RuntimeError("NIXL_ERR_INVALID_PARAM")
        self.peers.add(metadata)
        return metadata

    def remove_remote_agent(self, name: bytes) -> None:
        self.peers.remove(name)

    def get_xfer_descs(self, rows: Any, kind: str) -> list[list[int]]:
        assert kind == "DRAM"
        return rows.tolist()

    def initialize_xfer(self, verb: str, here: list[list[int]], there: list[list[int]], name: bytes) -> Any:
        if name not in self.peers:
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        assert verb == "WRITE"
        assert len(here) == len(there)
        assert all(any(a <= at and at + size <= b for a, b in self._known) for at, size, _ in here)
        return here, there

    def transfer(self, handle: Any) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        for (source, size, _), (target, same, gpu) in zip(*handle, strict=True):
            assert (size, gpu) == (same, 0)
            ctypes.memmove(target, source, size)
        return "DONE"

    def release_xfer_handle(self, handle: Any) -> None:
        pass


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library, or else something that has its calls."""
    if importlib.util.find_spec("nixl") is None:
        api = SimpleNamespace(nixl_agent=StandIn, nixl_agent_config=lambda backends: None)
        monkeypatch.setitem(sys.modules, "nixl", SimpleNamespace(_api=api))
        monkeypatch.setitem(sys.modules, "nixl._api", api)
