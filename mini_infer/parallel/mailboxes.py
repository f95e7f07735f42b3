"""Sums over ranks by our own kernel (kernels/all_reduce.py): its memory, and up to which size it is the faster."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mini_infer.parallel.peer_memory import Exchange, NoPeerAccess, PeerMemory, wait_for_device

SIZES = {"cuda": (8, 16, 32, 64, 128, 256, 512, 1024), "cpu": (8,)}  # rows that are tried, the last as many as can be
GATHERED_BYTES = {"cuda": 64 * 2**20, "cpu": 2**20}  # of the inboxes for what is gathered
ONCE = {"cuda": SIZES["cuda"][-1], "cpu": 4}  # rows up to which a sum takes one shot, where nothing has been measured
CALLS, REPLAYS = {"cuda": 100, "cpu": 2}, {"cuda": 5, "cpu": 1}  # that are timed
FEW_CALLS = 4  # where the host has a part in each
ANSWER_S = 60.0  # in which peers must have compiled and launched their first call


class Mailboxes:
    """Every rank makes them at once.

    Args:
        kernel: kernels/all_reduce.py.
        width: numbers of a row that is summed.
        dtypes: of rows that are summed; the last one's are gathered, too.
        most_rows: that there is memory for; default: as many as are tried.

    Attributes:
        most_rows: that are summed by the kernel.
        most_once: that are summed in one shot: more take two, where there are more than two ranks. Two ranks send as
            much either way.

    Raises:
        NoPeerAccess
    """

    def __init__(
        self,
        kernel: ModuleType,
        rank: int,
        size: int,
        device: torch.device,
        exchange: Exchange,
        width: int,
        dtypes: list[torch.dtype],
        most_rows: int | None = None,
    ) -> None:
        self.kernel, self._device, self._rank, self._size, self._exchange = kernel, device, rank, size, exchange
        self._width, self.most_rows, self._gathered = width, most_rows or SIZES[device.type][-1], dtypes[-1]
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._memory: list[PeerMemory] = []
        self._for_sums = {dtype: self._open(self.most_rows, width, dtype) for dtype in dict.fromkeys(dtypes)}
        self._twice = {dtype: self._open_twice(dtype) for dtype in self._for_sums if size > 2}
        self.most_once = ONCE[device.type] if self._twice else self.most_rows
        _, columns = kernel.gather_places(1, 1)
        one = kernel.Mailbox.num_bytes(1, size, columns, self._gathered.itemsize)
        self._for_columns = self._open(GATHERED_BYTES[device.type] // one, columns, self._gathered)
        if device.type == "cuda" and not self._work():
            raise NoPeerAccess(f"a sum over ranks was wrong, or not there after {ANSWER_S:g} s")

    def _open_twice(self, dtype: torch.dtype) -> Any:
        places, size = self.kernel.two_shot_places(self.most_rows, self._width, self._size, dtype.itemsize)
        return self._open(places, size, dtype)._replace(shots=2)

    def _open(self, places: int, size: int, dtype: torch.dtype) -> Any:
        num_bytes = self.kernel.Mailbox.num_bytes(places, self._size, size, dtype.itemsize)
        memory = PeerMemory(num_bytes, self._rank, self._device, self._exchange)
        self._memory.append(memory)
        inboxes = torch.tensor(memory.addresses, dtype=torch.int64, device=self._device)
        turns = torch.zeros(places, dtype=torch.int32, device=self._device)
        return self.kernel.Mailbox(self._rank, size, inboxes, turns, self._stop)

    def for_sum(self, rows: int, like: Tensor) -> Any:
        """The mailbox for a sum of so many rows like those of a tensor [..., width]; None: it is not ours to make."""
        if like.shape[-1] != self._width or rows > self.most_rows:
            return None
        return (self._twice if self._twice and rows > self.most_once else self._for_sums).get(like.dtype)

    @property
    def about(self) -> str:
        twice = f", in two shots above {self.most_once}" if self.most_once < self.most_rows else ""
        return f"our kernel up to {self.most_rows} rows of {self._width}{twice}"

    def for_columns(self, x: Tensor) -> Any:
        """Likewise for `gather_columns` of x [T, columns]."""
        places, _ = self.kernel.gather_places(*x.shape)
        return self._for_columns if places <= len(self._for_columns.turns) and x.dtype is self._gathered else None

    def stop(self) -> None:
        """Ends the waiting of kernels that run, whose results are then wrong. May be called in any thread."""
        self._stop.fill_(1)

    def _work(self) -> bool:
        """On a GPU: whether every rank gets what it should, at all."""
        right = True
        for dtype, mailbox in (*self._for_sums.items(), *self._twice.items()):
            found = self.kernel.all_reduce(mailbox, self._rows(8, dtype).fill_(self._rank + 1))
            wait_for_device(self._device, ANSWER_S, self.stop)
            right = right and bool((found == self._size * (self._size + 1) // 2).all())
        return all(row[0] for row in self._exchange([right]))

    def _rows(self, rows: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(rows, self._width, dtype=dtype, device=self._device)

    def settle(self, library: Callable[[Tensor, Tensor, Tensor], object]) -> str:
        """On a GPU: measures up to how many rows our kernel beats `library`, which takes x, residual and the weight of
        a norm, and says so."""
        weight = self._rows(1, self._gathered)[0]
        self.most_rows = 0  # meanwhile, sums are the library's
        most, once, about = 0, 0, []
        ways = [boxes[self._gathered] for boxes in (self._for_sums, self._twice) if boxes]
        calls: list[Callable[..., object]] = [library]
        calls += [partial(self.kernel.all_reduce_add_norm, mailbox, eps=1e-6) for mailbox in ways]
        for rows in (size for size in SIZES["cuda"] if size <= len(ways[0].turns)):
            x, residual = self._rows(rows, self._gathered), self._rows(rows, self._gathered)
            theirs, *ours = (
                time_us(partial(call, x, residual, weight), self._device, self._exchange) for call in calls
            )
            about.append(f"{rows}: {' / '.join(f'{us:.1f}' for us in (*ours, theirs))}")
            if min(ours) > theirs:
                break
            most = rows
            once = rows if ours[0] == min(ours) else once
        self.most_rows, self.most_once = most, once
        names = "ours" if len(ways) == 1 else "ours in one shot / in two"
        return f"{self.about}, NCCL above (us by rows, {names} / NCCL: {', '.join(about)})"


def time_us(call: Callable[[], object], device: torch.device, exchange: Exchange, in_graph: bool = True) -> float:
    """Of one of many calls, which all ranks make, on the slowest: in a CUDA graph on a GPU, but for calls in which the
    host has a part."""
    call()  # which compiles
    on_gpu, number = device.type == "cuda", CALLS[device.type] if in_graph else min(CALLS[device.type], FEW_CALLS)

    def calls() -> None:
        for _ in range(number):
            call()

    run = calls
    if on_gpu and in_graph:
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            calls()
        run = graph.replay
    own = min(_once_us(call, run, on_gpu, exchange) for _ in range(REPLAYS[device.type])) / number
    return max(ns for (ns,) in exchange([round(own * 1e3)])) / 1e3


def _once_us(call: Callable[[], object], run: Callable[[], object], on_gpu: bool, exchange: Exchange) -> float:
    """Of a run, which begins when a call has ended: on all ranks together."""
    exchange([])
    if not on_gpu:
        started = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - started)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return 1e3 * float(begin.elapsed_time(end))
