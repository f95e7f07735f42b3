"""Sums over two ranks of a prompt's rows, while the next product is computed: by the GPUs' copy engines.

    product of one half | product of the other | sum | norm and next product of one half | sum | ...
                        '------ copies --------^     '---------- copies ---------------- ^

NCCL's kernels take multiprocessors, which a product holds until it ends: they run before it or behind it. A copy takes
none. Each rank's part goes into an inbox of the other one, a number behind it, and who needs the sum waits for that
number and adds up what is there. For two ranks that moves no more bytes than NCCL does.

An inbox has two slots for each of the two halves that are under way. A slot is written again two sums later: by then
this rank has had the other one's part of the sum in between, which it sent when it was done with the slot.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from mini_infer.parallel.peer_memory import Exchange, PeerMemory, copy_to, wait_for_device

RANKS = 2
SLOTS = 4
ANSWER_S = 20.0  # in which the first sums must be there
_LINE = 16  # bytes of a slot's number
_NUMBERS = 2**31  # that sums have, which then begin again: a multiple of SLOTS, and more than that


class CopiedSums:
    """Both ranks make them at once.

    Args:
        kernel: kernels/all_reduce.py.
        most_rows: of a half.
        width, dtype: of its rows.

    Raises:
        NoPeerAccess
    """

    def __init__(
        self,
        kernel: ModuleType,
        rank: int,
        device: torch.device,
        exchange: Exchange,
        most_rows: int,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        self._kernel, self._device, self._dtype = kernel, device, dtype
        self._slot_bytes = -(-most_rows * width * dtype.itemsize // _LINE) * _LINE
        self._memory = PeerMemory(SLOTS * (_LINE + self._slot_bytes), rank, device, exchange)
        self._own, self._other = self._memory.addresses[rank], self._memory.addresses[1 - rank]
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._number = 0  # of sums so far

    def fits(self, x: Tensor) -> bool:
        """Whether x can be summed up here. A CUDA graph would repeat its number."""
        captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
        return x.dtype is self._dtype and x.nbytes <= self._slot_bytes and not captured

    def begin(self, x: Tensor) -> Callable[[], object]:
        """As Ranks.begin_all_reduce (kernels/interface.py). What is begun is waited for in the same order, and no more
        than two before they are."""
        slot, self._number = self._number % SLOTS, (self._number + 1) % _NUMBERS
        number, line, place = self._number, slot * _LINE, SLOTS * _LINE + slot * self._slot_bytes
        sent = copy_to(self._other + place, x, self._other + line, number, self._stream)

        def wait() -> None:
            sent()  # before x is written to
            self._kernel.add_copied(x, self._own + place, self._own + line, number, self._stop)

        return wait

    def stop(self) -> None:
        """As Mailboxes.stop."""
        self._stop.fill_(1)

    def work(self, exchange: Exchange, rank: int) -> bool:
        """Whether both ranks get what they should, as often as there are slots and once more."""
        size, found = self._slot_bytes // self._dtype.itemsize, []
        for _ in range(SLOTS + 1):
            x = torch.full((size,), rank + 1, dtype=self._dtype, device=self._device)
            try:
                self.begin(x)()
            except OSError:  # the driver writes no numbers there
                return self._agreed(exchange, False)
            found.append((x == 3).all())
        wait_for_device(self._device, ANSWER_S, self.stop)
        return self._agreed(exchange, all(map(bool, found)))

    def _agreed(self, exchange: Exchange, right: bool) -> bool:
        return all(row[0] for row in exchange([right]))
