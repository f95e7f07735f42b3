"""Copies of blocks between the device and the host, and between the host and files, beside the steps."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mini_infer.cache.block_files import BlockFiles
from mini_infer.cache.kv_store import KVStore
from mini_infer.core.cores import usable_cores
from mini_infer.core.errors import ConfigError
from mini_infer.core.plan import Transfer

_STAGED_BYTES = 32 * 2**20  # of device memory, or one block
_CHUNK_BYTES = 256 * 2**20  # of host memory
_CLOSE_S = 2.0  # that a close waits for files which are being written
_KEPT = 64  # transfers of which it is known what files failed to give, or take
# Threads. They copy to and from the operating system's memory, which takes a core for each, and some wait for a disk;
# the step loop needs cores, too.
_READERS, _WRITERS = max(4, min(16, usable_cores() // 2)), max(2, min(8, usable_cores() // 2))
_PIECE = 8  # blocks at least that are read before they go on to the device; of many, half a reader's share


class AtOnce:
    """On a CPU a copy has ended when its call returns. So this is its own event, too."""

    def uses(self, tensor: Tensor) -> None:
        """The tensor's memory must not be given away before the stream is done with it."""

    def run(self, work: Callable[[], None]) -> Any:
        """Does the work behind all that the caller's stream was given so far, and after earlier work. Returns an event
        behind it."""
        work()
        return self

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class SideStream(AtOnce):
    """A CUDA stream; nobody waits for it. The caller's stream may go on at once. An urgent one's kernels get the next
    free multiprocessors, before what the caller's has launched."""

    def __init__(self, device: torch.device, urgent: bool = False) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1 if urgent else 0)

    def uses(self, tensor: Tensor) -> None:
        tensor.record_stream(self._stream)

    def run(self, work: Callable[[], None]) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()
        return self._stream.record_event()


class KVTransfer:
    """Between KV stores, which give a block the same number, and `num_host_blocks` blocks of host memory.

        device   [layers, planes, num_blocks, ...] --gather--> staged [n, layers, planes, ...]
                                                                  |  one copy for neighbouring host blocks
        host                                     [num_host_blocks, layers, planes, ...], page-locked on a GPU
                                                                  |  threads, which wait for the disk
        files                                                     one a block

    A block's layers lie apart on the device: gathered there, a block is one copy over PCIe instead of one a layer.

    Transfers end in the order in which they were started, but for those with files. A block must not be written to
    (source), nor read or written to (destination), before `poll` has named its transfer. Raises ConfigError where the
    host has too little memory.
    """

    def __init__(
        self,
        stores: Sequence[KVStore],
        num_host_blocks: int,
        stream: AtOnce | None = None,
        files: BlockFiles | None = None,
    ) -> None:
        self._device = stores[0].device
        on_gpu = self._device.type == "cuda"
        self._stream = stream or (SideStream(self._device) if on_gpu else AtOnce())
        self._under_way: deque[tuple[int | None, Any]] = deque()  # each with its event; None: a part, others follow
        all_blocks = [_words(tensor) for store in stores for tensor in store.tensors]
        block_bytes = sum(store.layout.bytes_per_block(store.block_size) for store in stores)
        try:
            host = [_host_memory(blocks, num_host_blocks) for blocks in all_blocks]
        except RuntimeError as error:
            raise ConfigError(
                f"{num_host_blocks} KV blocks in host memory take {num_host_blocks * block_bytes / 2**30:.1f} GiB"
                f"{', page-locked,' if on_gpu else ''} which this machine does not give ({error}): lower "
                "cache.host_prefix_gib, cache.num_host_blocks or cache.host_memory_gib, or set "
                "scheduler.preemption=recompute"
            ) from error
        self._num_staged = min(max(1, _STAGED_BYTES // block_bytes), num_host_blocks)
        self._parts = [
            _Part(
                blocks,
                blocks.new_empty((self._num_staged, *blocks.shape[1:])),
                chunks,
                [chunk.numpy().data.cast("B") for chunk in chunks],
            )
            for blocks, chunks in zip(all_blocks, host, strict=True)
        ]
        # Of a transfer's blocks on the device: its targets are distinct. They have memory of their own, because what is
        # taken on another stream than the model's, the allocator asks the driver for, in the middle of a step.
        most = max(num_host_blocks, len(all_blocks[0]))
        self._indices = torch.empty(most, dtype=torch.int64, device=self._device)
        self._stream.uses(self._indices)
        for part in self._parts:
            self._stream.uses(part.blocks)
            self._stream.uses(part.staged)
        self._files = files
        self._readers, self._writers = (
            ThreadPoolExecutor(_READERS, "kv reader"),
            ThreadPoolExecutor(_WRITERS, "kv writer"),
        )
        self._closing = threading.Event()
        self._at_files: list[tuple[Transfer, deque[_Piece]]] = []
        self._failed: dict[int, list[int]] = {}  # of the latest transfers that had any

    def start(self, transfer: Transfer) -> None:
        """Queues the copies behind what the current stream was given so far, whose writes they see; of what files are
        to give, piece by piece when it has been read."""
        self._failed.pop(transfer.transfer_id, None)  # another one's: a new scheduler counts from the start
        if not transfer.files:
            self._queue(transfer)
            return
        files = transfer.files[::-1]  # what a chain begins with is used last: without it the others are found by nobody
        if transfer.to_host:
            threads, shares = self._writers, [files[first::_WRITERS] for first in range(min(_WRITERS, len(files)))]
        else:
            size = max(_PIECE, len(files) // (2 * _READERS))
            threads, shares = self._readers, [files[first : first + size] for first in range(0, len(files), size)]
        targets = dict(transfer.pairs)
        pairs = [[(block, targets.pop(block)) for block, _ in share if block in targets] for share in shares]
        if targets:  # these are in host memory
            self._queue(transfer._replace(pairs=list(targets.items())), last=False)
        jobs = [threads.submit(self._through_files, share, transfer.to_host) for share in shares]
        self._at_files.append((transfer, deque(map(_Piece, jobs, pairs))))

    def _through_files(self, files: Sequence[tuple[int, bytes]], to_host: bool) -> list[int]:
        """Writes host blocks, or reads them. Those with which it did not work. On a thread, which mostly waits."""
        assert self._files is not None, "they are in no plan without"
        verb = self._files.write if to_host else self._files.read
        closing = self._closing.is_set
        return [block for block, block_hash in files if closing() or not verb(block_hash, self._host_bytes(block))]

    def _queue(self, transfer: Transfer, last: bool = True) -> None:
        event = self._stream.run(lambda: self._copy(transfer))
        self._under_way.append((transfer.transfer_id if last else None, event))

    def poll(self, wait: bool = False) -> tuple[int, ...]:
        """Ids of transfers that have ended since the last call; where it is to wait, of all that were started. For
        files that are being written it waits only where nothing else is under way: few want the blocks that they hold.

        Steps that are launched after this see what the copies wrote: whatever is queued after an event was seen to have
        passed runs after it, on any stream.
        """
        ended = []
        writes_alone = not self._under_way and all(transfer.to_host for transfer, _ in self._at_files)
        for transfer, pieces in self._at_files.copy():
            waits = wait and (writes_alone or not transfer.to_host)
            while pieces and (waits or pieces[0].job.done()):
                self._take(transfer, pieces)
            if not pieces:
                self._at_files.remove((transfer, pieces))
                ended += [transfer.transfer_id] if transfer.to_host else []
        while self._under_way and (wait or self._under_way[0][1].query()):
            transfer_id, event = self._under_way.popleft()
            event.synchronize()
            ended += [] if transfer_id is None else [transfer_id]
        return tuple(ended)

    def _take(self, transfer: Transfer, pieces: deque[_Piece]) -> None:
        """Waits for the next piece, and has it and those that are there behind it copied to the device together."""
        pieces[0].job.result()
        done = []
        while pieces and pieces[0].job.done():
            done.append(pieces.popleft())
        failed = [block for piece in done for block in piece.job.result()]
        if failed:
            self._failed.setdefault(transfer.transfer_id, []).extend(failed)
            while len(self._failed) > _KEPT:
                del self._failed[next(iter(self._failed))]
        if not transfer.to_host:
            self._queue(transfer._replace(pairs=[pair for piece in done for pair in piece.pairs]), last=not pieces)

    def failed(self, ended: Sequence[int]) -> dict[int, list[int]]:
        """Of transfers that have ended lately: id -> host blocks that files did not give, or take."""
        return {transfer_id: self._failed[transfer_id] for transfer_id in ended if transfer_id in self._failed}

    def num_read(self, transfer_id: int, blocks: Sequence[int]) -> int:
        """How many of these host blocks, from the first on, files have given in a transfer that is under way or has
        ended lately. Waits for the files."""
        failed = set(self._failed.get(transfer_id, ()))
        for transfer, pieces in self._at_files:
            if transfer.transfer_id == transfer_id:
                failed.update(block for piece in pieces for block in piece.job.result())
        return next((place for place, block in enumerate(blocks) if block in failed), len(blocks))

    def close(self) -> None:
        """Ends the threads, of which each still finishes its block: then nobody uses host memory or files any more.
        What is being written has a moment to be done; of up to half of host memory the rest is given up."""
        wait([piece.job for transfer, pieces in self._at_files if transfer.to_host for piece in pieces], _CLOSE_S)
        self._closing.set()
        for threads in (self._writers, self._readers):
            threads.shutdown(wait=True, cancel_futures=True)

    def _host_bytes(self, block: int) -> list[memoryview]:
        """A block in host memory."""
        return [part.bytes_on_host(block) for part in self._parts]

    def _copy(self, transfer: Transfer) -> None:
        # (host block, device block), so ordered that copies are few: what order they come in makes no difference.
        pairs = sorted((pair[::-1] if transfer.to_host else pair) for pair in transfer.pairs)
        if not pairs:
            return
        hosts, devices = zip(*pairs, strict=True)
        # In one piece: each piece of page-locked memory that torch has to ask the driver for makes the caller wait.
        pinned = torch.tensor(devices, pin_memory=self._device.type == "cuda")
        indices = self._indices[: len(devices)].copy_(pinned, non_blocking=True)
        for number, index in enumerate(indices.split(self._num_staged)):
            host = hosts[number * self._num_staged :][: len(index)]
            for part in self._parts:
                (part.to_host if transfer.to_host else part.to_device)(host, index)


class _Piece(NamedTuple):
    """A thread's part of a transfer with files."""

    job: Future[list[int]]  # gives the blocks with which it did not work
    pairs: list[tuple[int, int]]  # to copy when it is done


class _Part(NamedTuple):
    """One tensor of a store, its staging memory and its host memory. N is its layers times planes, W the words of a
    block of each."""

    blocks: Tensor  # [num_blocks, N, W], not contiguous
    staged: Tensor  # [n, N, W] on the device
    chunks: list[Tensor]  # host memory in pieces of equal length, but for the last: [m, N, W] each
    views: list[memoryview]  # their bytes

    def bytes_on_host(self, block: int) -> memoryview:
        size = len(self.chunks[0])
        width = len(self.views[0]) // size
        return self.views[block // size][block % size * width :][:width]

    def to_host(self, host: Sequence[int], index: Tensor) -> None:
        """Block index[i] of the device to host[i]; host is ascending."""
        torch.index_select(self.blocks, 0, index, out=self.staged[: len(host)])
        for on_host, staged in self._runs(host):
            on_host.copy_(staged, non_blocking=True)

    def to_device(self, host: Sequence[int], index: Tensor) -> None:
        """Block host[i] to index[i] of the device; host is ascending."""
        for on_host, staged in self._runs(host):
            staged.copy_(on_host, non_blocking=True)
        self.blocks.index_copy_(0, index, self.staged[: len(host)])

    def _runs(self, host: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Neighbouring host blocks, each run with its place in `staged`."""
        size = len(self.chunks[0])
        begin = 0
        for end in range(1, len(host) + 1):
            if end == len(host) or host[end] != host[end - 1] + 1 or host[end] % size == 0:
                chunk, first = divmod(host[begin], size)
                yield self.chunks[chunk][first : first + end - begin], self.staged[begin:end]
                begin = end


def _words(tensor: Tensor) -> Tensor:
    """A store's tensor as [num_blocks, N, W]. Of 8 bytes where they fit: what they stand for is nothing to a copy, and
    not every dtype can be gathered."""
    flat = tensor.flatten(0, 1).flatten(2)  # [N, num_blocks, numbers of a block]
    return flat.view(torch.int64 if flat.shape[2] * flat.itemsize % 8 == 0 else torch.uint8).transpose(0, 1)


def _host_memory(blocks: Tensor, num_host_blocks: int) -> list[Tensor]:
    """Raises RuntimeError where there is too little. In chunks, because torch rounds page-locked memory up to a power
    of two: 33 GiB in one piece would take 64."""
    shape = blocks.shape[1:]
    size = max(1, _CHUNK_BYTES // (math.prod(shape) * blocks.itemsize))
    counts = [min(size, num_host_blocks - first) for first in range(0, num_host_blocks, size)]
    return [torch.empty((n, *shape), dtype=blocks.dtype, pin_memory=blocks.is_cuda) for n in counts]
