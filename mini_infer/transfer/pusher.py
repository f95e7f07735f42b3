"""What copies prompts' KV to other engines while steps compute it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from mini_infer.cache.transfer import AtOnce, SideStream
from mini_infer.core.plan import Push
from mini_infer.transfer.link import Link
from mini_infer.transfer.memory import MemoryTarget, Shared
from mini_infer.transfer.shares import Holding
from mini_infer.transfer.stream import StreamTarget

logger = logging.getLogger(__name__)


class Target(Protocol):
    """Where a prompt's blocks go: a connector's end."""

    def write(self, layer: int, here: Tensor, there: Tensor, there_listed: list[int]) -> int:
        """Copies blocks `here` [n] of a layer to blocks `there` [n], on the current stream. Their bytes."""


@dataclass
class _Open:
    target: Target
    num_bytes: int = 0
    last: Any = None  # an event behind its copies so far
    seconds: float = 0.0  # on a CPU
    laps: list[tuple[Any, Any]] = field(default_factory=list)  # on a GPU: events around copies


class Pusher:
    """Copies what a step computes to other engines, each layer as soon as it is there, beside the layers that follow.
    Each rank has one.

    connect(link, ...)  to an engine that asks
    open(id, link, ...) a transfer to it
    begin(pushes)       of the step
    layer(i)            as often as there are layers: layer i of the step's tokens is in the cache
    end()               an event behind all copies
    close(id)           the transfer's end

    Attributes:
        seconds: that the copies of the transfer closed last took on this rank.
    """

    def __init__(self, holding: Holding) -> None:
        self._holding, self._device = holding, holding.store.device
        self._on_gpu = self._device.type == "cuda"
        self._stream = SideStream(self._device) if self._on_gpu else AtOnce()
        self._ends: dict[int, MemoryTarget | Link] = {}  # by the number of a link
        self._open: dict[int, _Open] = {}
        self._step: list[tuple[_Open, Tensor, Tensor, list[int]]] = []
        self._last: Any = None  # an event
        self.seconds = 0.0

    def connect(self, link: int, memories: Sequence[Sequence[Any]]) -> bool:
        """What is opened for the link goes into memory of all ranks of an engine, a Shared each. Whether it can be
        reached."""
        try:
            self._ends[link] = MemoryTarget([Shared.of(*memory) for memory in memories], self._holding)
        except OSError as error:
            logger.warning("KV memory of another engine cannot be reached: %s", error)
            return False
        return True

    def send_by(self, link: int, way: Link) -> None:
        """What is opened for the link is sent by it."""
        self._ends[link] = way

    def disconnect(self, link: int) -> None:
        self._ends.pop(link, None)

    def open(self, transfer_id: int, link: int, theirs: int) -> None:
        """The pushes of this transfer go there, where it is called `theirs`."""
        end = self._ends[link]
        target = end if isinstance(end, MemoryTarget) else StreamTarget(end, theirs, self._holding.store)
        self._open[transfer_id] = _Open(target)

    def close(self, transfer_id: int) -> int:
        """Waits until nothing of it is being copied. The bytes of its copies."""
        transfer = self._open.pop(transfer_id)
        if transfer.last is not None:
            transfer.last.synchronize()
        self.seconds = transfer.seconds + sum(a.elapsed_time(b) for a, b in transfer.laps) / 1e3
        return transfer.num_bytes

    def begin(self, pushes: Sequence[Push]) -> None:
        """Before anything of a step is launched: blocks that are still being copied may be written to by it."""
        if self._last is not None and self._on_gpu:
            torch.cuda.current_stream(self._device).wait_event(self._last)
        self._step = []
        for push in pushes:
            transfer = self._open.get(push.transfer_id)
            if transfer is not None and push.pairs:  # else it has ended meanwhile
                pairs = torch.tensor(push.pairs, pin_memory=self._on_gpu)
                here, there = pairs.to(self._device, non_blocking=True).T.contiguous()
                self._step.append((transfer, here, there, [block for _, block in push.pairs]))

    def layer(self, layer: int) -> None:
        if self._step:
            self._last = self._stream.run(lambda: self._push(layer))
            for transfer, *_ in self._step:
                transfer.last = self._last

    def end(self) -> Any:
        """None where nothing was copied."""
        pushed, self._step = self._step, []
        for _, here, there, _ in pushed:
            self._stream.uses(here)
            self._stream.uses(there)
        return self._last if pushed else None

    def _push(self, layer: int) -> None:
        for transfer, here, there, listed in self._step:
            lap = self._lap()
            transfer.num_bytes += transfer.target.write(layer, here, there, listed)
            lap(transfer)

    def _lap(self) -> Callable[[_Open], None]:
        if not self._on_gpu:
            started = time.perf_counter()

            def stop(transfer: _Open) -> None:
                transfer.seconds += time.perf_counter() - started

            return stop
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()

        def stop_on_gpu(transfer: _Open) -> None:
            end.record()
            transfer.laps.append((begin, end))

        return stop_on_gpu
