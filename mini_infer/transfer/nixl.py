"""A connector: NIXL writes blocks into the other engine's memory, on this machine or another one, by whatever the two
have in common (RDMA, or else TCP). Nothing is staged, and the decoding engine does nothing.

NIXL's writes are ordered by no stream. So a thread waits for each layer, has it written, and waits for that: what is
sent again of a block arrives behind what was sent before. https://github.com/ai-dynamo/nixl
"""

from __future__ import annotations

import base64
import contextlib
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mini_infer.cache.kv_store import KVStore
from mini_infer.core.config import NO_NIXL
from mini_infer.core.errors import ConfigError
from mini_infer.transfer.blocks import Pairs, Target, tensor_at
from mini_infer.transfer.shares import Holding, Share

logger = logging.getLogger(__name__)
_LOOK_S = 20e-6  # between two looks at a write
_WRITE_S = 10.0  # in which what a step computes is there, or else the link is lost
# After which nothing more comes by a link that has ended: at its other end, 15 s later at most (address.py), somebody
# sees that between two steps, and what the last one of them computes takes _WRITE_S.
LATE_S = 30.0


class Reachable(NamedTuple):
    """Memory of a rank, for agents of other processes.

    share: of the KV, that is in it.
    num_blocks: of its KV store.
    addresses: of the store's tensors.
    gpu: that they are on, as its process counts them; 0 on a CPU.
    agent: how its agent is reached, in base 64.
    """

    share: Share
    num_blocks: int
    addresses: list[int]
    gpu: int
    agent: str

    @classmethod
    def of(cls, share: Sequence[int], *others: Any) -> Reachable:
        """Of plain lists."""
        return cls(Share(*share), *others)


class Agent:
    """NIXL's end in this process, which knows the memory of its KV store. Raises ConfigError without the library."""

    def __init__(self, store: KVStore) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise ConfigError(NO_NIXL) from error
        self._agent = nixl_agent(uuid.uuid4().hex, nixl_agent_config(backends=["UCX"]))
        self._agent.register_memory(store.tensors)
        self._addresses = [tensor.data_ptr() for tensor in store.tensors]
        self._num_blocks, on_gpu = store.num_blocks, store.device.type == "cuda"
        self._kind = "VRAM" if on_gpu else "DRAM"
        self.gpu = store.tensors[0].get_device() if on_gpu else 0
        self.thread = ThreadPoolExecutor(1, "nixl")
        self._met: Counter[Any] = Counter()  # names, by links that lead there: one may end behind its successor's start
        self._meeting = threading.Lock()

    def reachable(self, share: Share) -> Reachable:
        about = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return Reachable(share, self._num_blocks, self._addresses, self.gpu, about)

    def meet(self, other: Reachable) -> Any:
        """Its name. Raises OSError where it cannot be reached."""
        with self._meeting:
            try:
                name = self._agent.add_remote_agent(base64.b64decode(other.agent))
            except Exception as error:  # NIXL's errors have no base of their own
                raise OSError(f"NIXL: {error}") from error
            self._met[name] += 1
        return name

    def part(self, name: Any) -> None:
        """One that was met is needed by one link less. It is forgotten behind what is being written there."""
        self.thread.submit(self._part, name)

    def _part(self, name: Any) -> None:
        with self._meeting:
            self._met[name] -= 1
            if not self._met[name]:
                del self._met[name]
                with contextlib.suppress(Exception):  # it has gone by itself
                    self._agent.remove_remote_agent(name)

    def write(self, name: Any, here: np.ndarray, there: np.ndarray, until: float) -> None:
        """Memory `here` to `there`, (address, bytes, GPU) a row each. Returns when it is there; raises OSError where it
        is not at that time, or will not be. Then some of it may still come: NIXL may have handed it to a device."""
        agent = self._agent
        try:
            own, theirs = (agent.get_xfer_descs(rows, self._kind) for rows in (here, there))
            handle = agent.initialize_xfer("WRITE", own, theirs, name)
            state = agent.transfer(handle)
            while state == "PROC" and time.monotonic() < until:
                time.sleep(_LOOK_S)
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
        except Exception as error:
            raise OSError(f"NIXL: {error}") from error
        if state != "DONE":
            raise OSError(f"NIXL: a write ended as {state}")


class NixlLink:
    """The KV memory of another engine's ranks, as far as this rank has a part in filling it. Raises OSError where it
    cannot be reached."""

    def __init__(self, memories: Sequence[Sequence[Any]], holding: Holding) -> None:
        assert holding.agent is not None, "an engine with this connector has one"
        self.agent: Agent = holding.agent
        others = [Reachable.of(*memory) for memory in memories]
        self.lost: OSError | None = None
        self._gpus = [other.gpu for other in others]
        self._names: dict[int, Any] = {}

        def open_store(rank: int) -> KVStore:
            self._names[rank] = self.agent.meet(others[rank])
            return _placed(others[rank], holding)

        try:
            self._parts = holding.parts([other.share for other in others], open_store)
        except OSError:  # of the ranks that were reached
            self.close()
            raise

    def close(self) -> None:
        """Nothing will be written any more, but for the write that is being made."""
        self.lost = self.lost or OSError("the link has ended")
        for name in self._names.values():
            self.agent.part(name)

    def rows(self, layer: int, pairs: Sequence[tuple[int, int]]) -> list[tuple[Any, np.ndarray, np.ndarray]]:
        """What is to be written of blocks (here, there): an agent's name, and memory here and there."""
        here, there = np.array(pairs).T
        return [
            (self._names[rank], _rows(own, here, self.agent.gpu), _rows(theirs, there, self._gpus[rank]))
            for rank, own, theirs in self._parts.get(layer, ())
        ]


class NixlTarget(Target):
    """One transfer. Nothing is written behind a write of its link that has failed: the link ends, and some time later
    the other engine gives blocks away. And each would wait for somebody who is gone."""

    def __init__(self, link: NixlLink) -> None:
        self._link = link
        self._writes: list[Future[float]] = []

    def write_layer(self, layer: int, pairs: Pairs) -> int:
        parts = self._link.rows(layer, pairs.numbers)
        computed = None
        if pairs.here.is_cuda:
            computed = torch.cuda.Event()
            computed.record()
        until = time.monotonic() + _WRITE_S
        self._writes.append(self._link.agent.thread.submit(self._write, computed, parts, until))
        return sum(int(own[:, 1].sum()) for _, own, _ in parts)

    def _write(self, computed: Any, parts: Sequence[tuple[Any, np.ndarray, np.ndarray]], until: float) -> float:
        if computed is not None:
            computed.synchronize()
        started = time.perf_counter()
        try:
            for part in parts if self._link.lost is None else ():
                self._link.agent.write(*part, until)
        except OSError as error:
            self._link.lost = error
        return time.perf_counter() - started

    def settle(self) -> None:
        wait(self._writes)

    def end(self) -> float:
        seconds = sum(write.result() for write in self._writes)
        if self._link.lost is not None:
            raise self._link.lost
        return seconds


def _placed(other: Reachable, holding: Holding) -> KVStore:
    """Another rank's KV, as tensors that only say where it is: nobody here may read or write what is in them."""
    addresses = iter(other.addresses)

    def place(shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
        return tensor_at(next(addresses), shape, dtype, torch.device("cpu"))

    return holding.store_like(other.share, other.num_blocks, place)


def _rows(words: Tensor, blocks: np.ndarray, gpu: int) -> np.ndarray:
    """Where blocks [n] of a layer's words [planes, num_blocks, rows, words] are: uint64 [some, 3]."""
    planes, _, rows, size = words.shape
    strides = [stride * words.itemsize for stride in words.stride()]
    of_plane, of_row = np.arange(planes) * strides[0], np.arange(rows) * strides[2]
    offsets = of_plane[:, None, None] + (blocks * strides[1])[:, None] + of_row
    addresses = words.data_ptr() + offsets.astype(np.uint64).ravel()
    return np.stack([addresses, np.full_like(addresses, size * words.itemsize), np.full_like(addresses, gpu)], 1)
