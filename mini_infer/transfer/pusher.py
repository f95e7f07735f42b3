"""What copies prompts' KV to other engines while steps compute it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from mini_infer.cache.transfer import AtOnce, SideStream
from mini_infer.core.plan import Push
from mini_infer.transfer.blocks import Pairs, Target
from mini_infer.transfer.memory import MemoryTarget, Shared
from mini_infer.transfer.nixl import NixlLink, NixlTarget
from mini_infer.transfer.shares import Holding
from mini_infer.transfer.stream import StreamTarget

if TYPE_CHECKING:  # see stream.py
    from mini_infer.transfer.link import Link

logger = logging.getLogger(__name__)
LOST = -1  # bytes, of a transfer that did not arrive


@dataclass
class _Open:
    target: Target
    num_bytes: int = 0
    last: Any = None  # an event behind its copies so far
    seconds: float = 0.0  # on a CPU
    laps: list[tuple[Any, Any]] = field(default_factory=list)  # on a GPU: events around copies


@dataclass
class _Pushed:
    """Blocks of the step that are copied."""

    transfer: _Open
    pairs: Pairs
    first: int = 0  # of the layers that are not on their way


class Pusher:
    """Copies what a step computes to other engines, beside the layers that follow: a layer as soon as it is there, or a
    group of them as soon as its last one is, where copies have a cost of their own (Target.group_bytes). Each rank has
    one.

        computed   0   1   2   3   4   5   6   7   8   9
        copied                     | 0 - 3 |       | 4 - 7 | 8 9 |

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
        self._stream = SideStream(self._device, urgent=True) if self._on_gpu else AtOnce()
        self._ends: dict[int, MemoryTarget | NixlLink | Link] = {}  # by the number of a link
        self._open: dict[int, _Open] = {}
        self._step: list[_Pushed] = []
        block_size, layers = holding.store.block_size, holding.store.layout.layers
        of_layers = (block_size * sum(plane.bytes_per_token for plane in planes) for planes in layers)
        self._bytes = [0, *accumulate(of_layers)]  # of a block, in the layers before each and in all of them
        self._last: Any = None  # an event
        self.seconds = 0.0

    def connect(self, link: int, memories: Sequence[Sequence[Any]]) -> bool:
        """What is opened for the link goes into memory of all ranks of an engine (Holding.memories). Whether it can be
        reached."""
        try:
            if self._holding.agent is not None:
                self._ends[link] = NixlLink(memories, self._holding)
            else:
                self._ends[link] = MemoryTarget([Shared.of(*memory) for memory in memories], self._holding)
        except OSError as error:
            logger.warning("KV memory of another engine cannot be reached: %s", error)
            return False
        return True

    def send_by(self, link: int, way: Link) -> None:
        """What is opened for the link is sent by it."""
        self._ends[link] = way

    def disconnect(self, link: int) -> None:
        end = self._ends.pop(link, None)
        if isinstance(end, NixlLink):
            end.close()

    def open(self, transfer_id: int, link: int, theirs: int) -> None:
        """The pushes of this transfer go there, where it is called `theirs`."""
        end = self._ends[link]
        target: Target
        if isinstance(end, NixlLink):
            target = NixlTarget(end)
        else:
            target = end if isinstance(end, MemoryTarget) else StreamTarget(end, theirs, self._holding.store)
        self._open[transfer_id] = _Open(target)

    def close(self, transfer_id: int) -> int:
        """Waits until nothing of it is being copied. The bytes of its copies, or LOST."""
        transfer = self._open.pop(transfer_id)
        if transfer.last is not None:
            transfer.last.synchronize()
        try:
            beside = transfer.target.end()
        except OSError as error:
            logger.warning("a prompt's KV did not reach the engine that asked for it: %s", error)
            return LOST
        self.seconds = beside + transfer.seconds + sum(a.elapsed_time(b) for a, b in transfer.laps) / 1e3
        return transfer.num_bytes

    def took_ns(self) -> int:
        """`seconds`, as a rank can report them."""
        return round(self.seconds * 1e9)

    def begin(self, pushes: Sequence[Push]) -> None:
        """Before anything of a step is launched: blocks that are still being copied may be written to by it."""
        for transfer in self._open.values():
            transfer.target.settle()
        if self._last is not None and self._on_gpu:
            torch.cuda.current_stream(self._device).wait_event(self._last)
        self._step = []
        for push in pushes:
            opened = self._open.get(push.transfer_id)
            if opened is not None and push.pairs:  # else it has ended meanwhile
                numbers = torch.tensor(tuple(zip(*push.pairs, strict=True)), pin_memory=self._on_gpu)
                here, there = numbers.to(self._device, non_blocking=True)
                self._step.append(_Pushed(opened, Pairs(push.pairs, here, there)))

    def layer(self, layer: int) -> None:
        due = [pushed for pushed in self._step if self._is_due(pushed, layer + 1)]
        if due:
            self._last = self._stream.run(lambda: self._push(due, layer + 1))
            for pushed in due:
                pushed.transfer.last, pushed.first = self._last, layer + 1

    def end(self) -> Any:
        """None where nothing was copied."""
        step, self._step = self._step, []
        for pushed in step:
            self._stream.uses(pushed.pairs.here)
            self._stream.uses(pushed.pairs.there)
        return self._last if step else None

    def _is_due(self, pushed: _Pushed, end: int) -> bool:
        """Whether the layers before `end` that are not on their way are a group."""
        waiting = len(pushed.pairs.numbers) * (self._bytes[end] - self._bytes[pushed.first])
        return waiting >= pushed.transfer.target.group_bytes or end == len(self._bytes) - 1

    def _push(self, due: Sequence[_Pushed], end: int) -> None:
        for pushed in due:
            lap = self._lap()
            pushed.transfer.num_bytes += pushed.transfer.target.write(range(pushed.first, end), pushed.pairs)
            lap(pushed.transfer)

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
