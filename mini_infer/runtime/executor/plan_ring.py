"""PlanRing: what rank 0 tells the other ranks, through memory that they share: one writer, n readers.

    counters   | sent | read by rank 1 | read by rank 2 | ... |       numbers of records, a cache line each
    reports    | (number, value) of rank 1's last 64 records | ... |
    data       | size, record | size, record | ...              |      from the start again at the end

Every reader has an event file of its own: a writer who finds nobody asleep pays a system call, a reader who finds
nothing sleeps. The memory has no name, so nothing is left of it when the last process that has it is gone.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

DATA_BYTES = 2**22
REPORTS = 64  # of each rank, which is never that many records behind
_LINE = 8  # numbers of a cache line
_SIZE = struct.Struct("<Q")
_MORE = 2**63  # in a size: the record goes on in the next one
_PIECE = DATA_BYTES // 4
_NAP_S = 50e-6  # of a writer who waits for room


class RingFiles(NamedTuple):
    """Descriptors, which a child process is given."""

    memory: int
    events: Sequence[int]  # rank 1's first

    @classmethod
    def create(cls, size: int) -> RingFiles:
        memory = os.memfd_create("mini-infer-plans", os.MFD_CLOEXEC)
        os.ftruncate(memory, _header_bytes(size) + DATA_BYTES)
        return cls(memory, [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(1, size)])

    def close(self) -> None:
        for descriptor in (self.memory, *self.events):
            os.close(descriptor)


def _header_bytes(size: int) -> int:
    return 8 * (_LINE * size + 2 * REPORTS * size)


class PlanRing:
    """
    Args:
        rank: this process's; 0 writes, the others read.
        size: the number of ranks.
    """

    def __init__(self, files: RingFiles, rank: int, size: int) -> None:
        self._files, self._rank, self._size = files, rank, size
        header = _header_bytes(size)
        self._memory = mmap.mmap(files.memory, header + DATA_BYTES)
        numbers = np.frombuffer(self._memory, np.int64, header // 8)
        # Memory views of single numbers are read and written faster than arrays.
        self._counters = memoryview(self._memory)[: 8 * _LINE * size].cast("q")
        self._reports = numbers[_LINE * size :].reshape(size, REPORTS, 2)
        self._data = memoryview(self._memory)[header:]
        self._place = 0  # in `data`, of the next record
        self._number = 0  # of records that were sent, or read

    # --- rank 0 ---------------------------------------------------------------------------------------------------

    def send(self, record: Any) -> int:
        """Returns the record's number, from 1 on. Waits where a reader is far behind."""
        data = pickle.dumps(record, protocol=5)
        while len(data) > _PIECE:
            self._send(data[:_PIECE], _MORE)
            data = data[_PIECE:]
        self._send(data, 0)
        return self._number

    def _send(self, data: bytes, more: int) -> None:
        ...

    # --- the others -----------------------------------------------------------------------------------------------
