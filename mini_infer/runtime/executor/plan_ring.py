"""PlanRing: what rank 0 tells the other ranks, through memory that they share: one writer, n readers.

    read       | by rank 1 | by rank 2 | ...                             records so far, a cache line each
    places     | of record 0 | of record 1 | ... 64 of them, in turn     where in `data`, and of how many bytes
    reports    | of rank 1's last 64 steps: (number, value) | ...        for rank 0
    data       | record | record | ...                                   from the start again where nobody has any left

A reader waits at an event file of its own, which the writer counts up: a system call each, which also keeps the order
of what both see. Waking a sleeper takes longer than all the rest, so a reader looks for a while before it sleeps. The
memory has no name, so that nothing is left of it when the last process that has it is gone.
"""

from __future__ import annotations

import contextlib
import marshal
import mmap
import os
import pickle
import select
import time
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from mini_infer.core.plan import Growth, StepPlan

KEPT = 64  # records that wait for the slowest reader, and reports of a rank
DATA_BYTES = 2**22
_PIECE = DATA_BYTES // 4  # a longer record is sent in several
_LINE = 8  # int64 in a cache line
_NAP_S = 50e-6  # of a writer who waits for room


class RingFiles(NamedTuple):
    """Descriptors, of which every rank's process has its own."""

    memory: int
    events: Sequence[int]  # rank 1's first

    @classmethod
    def create(cls, size: int) -> RingFiles:
        memory = os.memfd_create("mini-infer-plans")
        os.ftruncate(memory, _header(size) * 8 + DATA_BYTES)
        return cls(memory, [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(1, size)])

    def close(self) -> None:
        for descriptor in (self.memory, *self.events):
            os.close(descriptor)


def _header(size: int) -> int:
    return _LINE * size + 3 * KEPT + 2 * KEPT * size


_PLAIN, _PICKLED = 0, 1
_ROWS, _COUNTS, _SAMPLES, _GROWTHS = map(StepPlan._fields.index, ("req_indices", "counts", "samples", "growths"))


def _encode(record: Any) -> bytes:
    """A kind, and the record. Rows alone, which is what most plans are, take marshal half of pickle's time. Where each
    has one token and samples, that goes without saying."""
    plan = record[0] if isinstance(record, tuple) else None
    one_a_row = isinstance(plan, StepPlan) and _one_a_row(plan)
    if isinstance(plan, StepPlan) and _is_plain(plan, one_a_row):
        fields: list[Any] = list(plan)
        if one_a_row:
            fields[_COUNTS] = fields[_SAMPLES] = None
        fields[_GROWTHS] = [tuple(growth) for growth in plan.growths]
        with contextlib.suppress(ValueError):  # something else is in it that is not of Python's own
            return bytes([_PLAIN]) + marshal.dumps((fields, *record[1:]), 2)
    return bytes([_PICKLED]) + pickle.dumps(record, protocol=5)


def _is_plain(plan: StepPlan, one_a_row: bool) -> bool:
    """Made of Python's own: marshal would write a number of NumPy's as bytes. A sum that has one in it is one."""
    if plan.admissions or plan.transfers or plan.pushes or plan.prompt_logprobs:
        return False
    columns = [plan.req_indices, plan.starts, plan.following]
    if not one_a_row:
        columns += [plan.counts, plan.samples]
    sums = [sum(column) for column in columns]
    sums += [sum(plan.drafts), *map(sum, plan.drafts.values())]
    sums += [req_index + first + sum(blocks) for req_index, first, blocks in plan.growths]
    return set(map(type, sums)) == {int}


def _one_a_row(plan: StepPlan) -> bool:
    return 0 < len(plan.req_indices) == plan.counts.count(1) == plan.samples.count(True)


def _decode(data: bytes) -> Any:
    body = memoryview(data)[1:]
    if data[0] == _PICKLED:
        return pickle.loads(body)
    fields, *others = marshal.loads(body)
    if fields[_COUNTS] is None:
        rows = len(fields[_ROWS])
        fields[_COUNTS], fields[_SAMPLES] = [1] * rows, [True] * rows
    fields[_GROWTHS] = [Growth(*growth) for growth in fields[_GROWTHS]]
    return StepPlan(*fields), *others


class Call(NamedTuple):
    """Something else than a step, that every rank does."""

    method: str
    arguments: tuple[Any, ...]

    def of(self, runner: Any) -> int:
        """What it gives; 0 for None."""
        return attrgetter(self.method)(runner)(*self.arguments) or 0


class PlanRing:
    """
    Args:
        files: stay open.
        rank: this process's; 0 writes, the others read.
        awake_s: that a reader looks for the next record before it sleeps. It takes a core meanwhile.
    """

    def __init__(self, files: RingFiles, rank: int, size: int, awake_s: float = 0.0) -> None:
        self._files, self._rank, self._readers, self._awake_s = files, rank, range(1, size), awake_s
        self._memory = mmap.mmap(files.memory, _header(size) * 8 + DATA_BYTES)
        # Numbers of a memoryview are read and written faster than those of an array.
        numbers = memoryview(self._memory)[: _header(size) * 8].cast("q")
        self._read = numbers[: _LINE * size]
        self._places = numbers[_LINE * size :][: 3 * KEPT]
        self._reports = numbers[_LINE * size + 3 * KEPT :]
        self._data = memoryview(self._memory)[_header(size) * 8 :]
        self._number = 0  # of records that were sent, or read
        self._unread: deque[tuple[int, int, int]] = deque()  # (number, begin, end) in `data`
        self._woken = 0  # records that a reader knows of and has not read

    def send(self, record: Any) -> int:
        """Of rank 0. Returns the record's number, from 0 on; waits where a reader is far behind."""
        data = _encode(record)
        for begin in range(0, len(data), _PIECE):
            self._put(data[begin : begin + _PIECE], more=begin + _PIECE < len(data))
        return self._number - 1

    def _put(self, piece: bytes, more: bool) -> None:
        begin = self._room(len(piece))
        end, at = begin + len(piece), self._number % KEPT * 3
        self._data[begin:end] = piece
        self._places[at], self._places[at + 1], self._places[at + 2] = begin, end, more
        self._unread.append((self._number, begin, end))
        self._number += 1
        for event in self._files.events:
            os.eventfd_write(event, 1)

    def _room(self, size: int) -> int:
        """Where `size` bytes may be written."""
        while True:
            read = min(self._read[rank * _LINE] for rank in self._readers)
            while self._unread and self._unread[0][0] < read:
                self._unread.popleft()
            if not self._unread:
                return 0
            begin = self._unread[-1][2]
            if begin + size > DATA_BYTES:
                begin = 0
            free = all(end <= begin or begin + size <= first for _, first, end in self._unread)
            if free and len(self._unread) < KEPT:
                return begin
            time.sleep(_NAP_S)

    def receive(self) -> tuple[int, Any]:
        """Of another rank. Waits for the next record: (its number, it)."""
        data, more = b"", True
        while more:
            if not self._woken:
                self._woken = self._wait(self._files.events[self._rank - 1])
            self._woken -= 1
            at = self._number % KEPT * 3
            begin, end, more = self._places[at], self._places[at + 1], bool(self._places[at + 2])
            data += bytes(self._data[begin:end])
            self._number += 1
            self._read[self._rank * _LINE] = self._number
        return self._number - 1, _decode(data)

    def _wait(self, event: int) -> int:
        """The number of records that have come, at least 1."""
        until = time.perf_counter() + self._awake_s
        while True:
            try:
                return os.eventfd_read(event)
            except BlockingIOError:
                if time.perf_counter() >= until:
                    select.select([event], [], [])

    def report(self, number: int, value: int) -> None:
        """Of another rank, about the record of this number. `value` has 64 bits, signed."""
        at = 2 * (self._rank * KEPT + number % KEPT)
        self._reports[at + 1], self._reports[at] = value, number + 1

    def reported(self, rank: int, number: int) -> int | None:
        """What the rank reported about it; None where it has not, or longer ago than it has kept."""
        at = 2 * (rank * KEPT + number % KEPT)
        return self._reports[at + 1] if self._reports[at] == number + 1 else None
