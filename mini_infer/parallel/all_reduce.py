"""What ranks say to each other in a step: by our own kernel where that is the faster, else by NCCL between GPUs and
gloo between CPUs.

Process groups are made here as objects, not as torch.distributed's global one: two engines may live in a process.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from mini_infer.kernels.interface import Kernels, Norm, Stream
from mini_infer.parallel.context import tree_sum
from mini_infer.parallel.copied_sums import RANKS, CopiedSums
from mini_infer.parallel.mailboxes import Mailboxes
from mini_infer.parallel.peer_memory import NoPeerAccess

COPIED_ON = ("cuda",)  # devices with an engine for copies
LOOK_S = 0.02  # between two looks at the store
LONGEST = timedelta(days=24)  # in milliseconds of 32 bits; the executor watches starts and steps


class Collectives:
    """
    Args:
        store: through which the ranks find each other.
        device: this rank's.

    Attributes:
        about: how sums are made, for a run's record.
        over_nccl: the groups that a GPU may wait in.
        stops: of other kernels that wait for ranks: int32 [1] each, above 0 once nobody is to be waited for.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        self._rank, self._size, self._where = rank, size, device
        self._host = host_group(store, rank, size)
        self._device: Any = self._host
        self._mailboxes: Mailboxes | None = None
        self._copied: CopiedSums | None = None
        self.stops: list[Tensor] = []
        self.about, self.over_nccl = "gloo", []
        if device.type == "cuda":
            self._device = nccl_group("device", store, rank, size)
            self.about, self.over_nccl = "NCCL", [self._device]

    def open(
        self, kernels: Kernels, width: int, dtypes: list[torch.dtype], most_rows: int | None = None, tokens: int = 0
    ) -> None:
        """Finds out which sums of rows of so many numbers our own kernel makes, or has it make those of `most_rows`. Of
        `dtypes` the last is the model's. The largest step has `tokens`; with some, halves of prompts are summed up by
        copies where they can be. Every rank calls it at once, before the first sum."""
        if kernels.all_reduce is None:
            return
        try:
            boxes = Mailboxes(
                kernels.all_reduce, self._rank, self._size, self._where, self.exchange, width, dtypes, most_rows
            )
        except NoPeerAccess as why:
            self.about = f"{self.about} ({why})"
            return

        def library(x: Tensor, residual: Tensor, weight: Tensor) -> None:
            kernels.add_rms_norm(Stream(self.all_reduce(x), residual, Norm(weight, 1e-6)))

        self._mailboxes = boxes  # from here on, `stop_kernels` ends what waits in them
        self.about = boxes.settle(library) if self._where.type == "cuda" else f"{boxes.about}, {self.about} above"
        boxes.most_rows = most_rows or boxes.most_rows
        if tokens and self._size == RANKS and self._where.type in COPIED_ON:
            half = -(-tokens // 2)
            try:
                copied = CopiedSums(kernels.all_reduce, self._rank, self._where, self.exchange, half, width, dtypes[-1])
            except NoPeerAccess:  # there is too little memory
                return
            if copied.work(self.exchange, self._rank):
                self._copied = copied
                self.about += "; halves of prompts by copies"

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum, in x's place or elsewhere."""
        x = x.contiguous()
        if (own := self._own_sum(len(x), x)) is not None:
            kernel, mailbox = own
            summed: Tensor = kernel.all_reduce(mailbox, x)
            return summed
        options = dist.AllreduceOptions()
        options.asyncOp = False  # on this stream
        _wait(self._device.allreduce([x], options))
        return x

    def begin_all_reduce(self, x: Tensor) -> Callable[[], object]:
        """As Ranks (kernels/interface.py): beside what this stream, or this thread, does meanwhile."""
        if self._copied is not None and self._copied.fits(x):
            return self._copied.begin(x)
        wait: Callable[[], object] = self._device.allreduce([x], dist.AllreduceOptions()).wait
        return wait

    def tree_sum(self, x: Tensor) -> Tensor:
        """The sum as a balanced tree over the ranks in their order. Their number is a power of two."""
        if self._own_sum(len(x), x) is not None:
            return self.all_reduce(x)
        return tree_sum(self.all_gather(x))

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor] | None:
        """As Ranks."""
        if (own := self._own_sum(len(x), x)) is None:
            return None
        kernel, mailbox = own
        found: tuple[Tensor, Tensor] = kernel.all_reduce_add_norm(mailbox, x, residual, *norm)
        return found

    def look_up(self, token_ids: Tensor, table: Tensor, first: int, known: int) -> Tensor | None:
        """As ParallelContext.look_up."""
        if (own := self._own_sum(len(token_ids), table)) is None:
            return None
        kernel, mailbox = own
        found: Tensor = kernel.look_up(mailbox, token_ids, table, first, known)
        return found

    def gather_columns(self, x: Tensor, out: Tensor) -> Tensor:
        """As ParallelContext.gather_columns."""
        if self._mailboxes is not None and (mailbox := self._mailboxes.for_columns(x)) is not None:
            gathered: Tensor = self._mailboxes.kernel.gather_columns(mailbox, x, out)
            return gathered
        parts, columns = self.all_gather(x), x.shape[1]
        real = [part[:, : max(0, out.shape[1] - rank * columns)] for rank, part in enumerate(parts)]
        return torch.cat(real, dim=1, out=out)

    def _own_sum(self, rows: int, like: Tensor) -> tuple[ModuleType, Any] | None:
        """What makes a sum of so many rows, where our own kernel is to make it."""
        mailbox = None if self._mailboxes is None else self._mailboxes.for_sum(rows, like)
        return None if self._mailboxes is None or mailbox is None else (self._mailboxes.kernel, mailbox)

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x, [size, *x.shape]."""
        return gather(self._device, x.contiguous(), self._size)

    def all_to_all(self, x: Tensor, sent: Sequence[int], arrives: Sequence[int]) -> Tensor:
        """As ParallelContext."""
        y = x.new_empty((sum(arrives), *x.shape[1:]))
        self._device.alltoall_base(y, x.contiguous(), list(arrives), list(sent), dist.AllToAllOptions()).wait()
        return y

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """As ParallelContext, of the ranks of this stage."""
        return exchange(self._host, values, self._size)

    def stop_kernels(self) -> None:
        """Ends the waiting of our own kernels. May be called in any thread."""
        for own in (self._mailboxes, self._copied):
            if own is not None:
                own.stop()
        for stop in self.stops:
            stop.fill_(1)


def host_group(store: dist.Store, rank: int, size: int) -> Any:
    """Of `size` ranks over gloo, through a store of their own."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = LONGEST
    return gloo(dist.PrefixStore("host", store), rank, size, options)


def nccl_group(name: str, store: dist.Store, rank: int, size: int, timeout: timedelta | None = None) -> Any:
    """Of `size` ranks over NCCL, with a stream of its own."""
    options = dist.ProcessGroupNCCL.Options()
    if timeout is not None:
        options._timeout = timeout
    return dist.ProcessGroupNCCL(dist.PrefixStore(name, store), rank, size, options)


def abort_group(group: Any) -> threading.Thread:
    """Ends what a GPU waits for in a group over NCCL, of which nothing can be used afterwards.

    The thread goes on until NCCL has let go of it: it waits for all that the GPU does, in other groups too, and until
    there is no CUDA graph any more that has captured it.
    """
    thread = threading.Thread(target=group.abort, daemon=True)
    with contextlib.suppress(RuntimeError):  # the interpreter ends, and the group with it
        thread.start()
    return thread


def gather(group: Any, x: Tensor, size: int) -> Tensor:
    """Every rank's x, [size, *x.shape]."""
    gathered = x.new_empty((size, *x.shape))
    options = AllgatherOptions()
    options.asyncOp = False
    _wait(group._allgather_base(gathered.view(-1), x.view(-1), options))
    return gathered


def exchange(group: Any, values: Sequence[int], size: int) -> list[list[int]]:
    """The values of every rank of a group of hosts, in their order."""
    # None at all are no message, which nobody would wait for.
    return gather(group, torch.tensor([0, *values], dtype=torch.int64), size)[:, 1:].tolist()


def _wait(work: Any) -> None:
    if work is not None:  # NCCL's, on the stream that waits already
        work.wait()


def listen() -> socket.socket:
    """At a free port of this machine, which nobody else's machine reaches."""
    return socket.create_server(("127.0.0.1", 0))


def open_store(listener: socket.socket) -> dist.TCPStore:
    """A store, which others join by the port of its listener; they may wait there for it, and are started before. Its
    thread looks up who comes: what a test forks meanwhile would wait for ever for the C library's lock."""
    port = listener.getsockname()[1]
    descriptor = listener.detach()
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def wait_for(store: dist.Store, key: str, still: Callable[[], None]) -> None:
    """Returns when somebody has set the key. `still` is called now and then, and raises where nobody will."""
    while not store.check([key]):
        still()
        time.sleep(LOOK_S)


def join_store(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
