"""PlanRing: one writer, several readers, every record once and in order."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from mini_infer.core.plan import Admission, Growth, StepPlan
from mini_infer.core.request import SamplingParams
from mini_infer.runtime.executor.plan_ring import DATA_BYTES, KEPT, PlanRing, RingFiles, _decode, _encode

SIZE = 3


@pytest.fixture
def files() -> Iterator[RingFiles]:
    made = RingFiles.create(SIZE)
    yield made
    made.close()


def read_in_threads(files: RingFiles, count: int, nap_s: float = 0.0, awake_s: float = 0.0) -> list[queue.Queue]:
    """What rank 1 and rank 2 receive, as they do."""
    received: list[queue.Queue] = [queue.Queue(), queue.Queue()]

    def read(rank: int) -> None:
        ring = PlanRing(files, rank, SIZE, awake_s)
        for _ in range(count):
            received[rank - 1].put(ring.receive())
            time.sleep(nap_s)

    for rank in (1, 2):
        threading.Thread(target=read, args=(rank,), daemon=True).start()
    return received


def take(received: queue.Queue, count: int) -> list:
    return [received.get(timeout=20) for _ in range(count)]


def test_plans_arrive_as_they_were_sent(files: RingFiles) -> None:
    received = read_in_threads(files, 4, awake_s=0.001)
    ring = PlanRing(files, 0, SIZE)
    admission = Admission(3, "r", [1, 2], 2, [7], SamplingParams(temperature=0.5, stop=["x"]), 9, frozenset({4}))
    plan = StepPlan(5, [3], [0], [2], [True], admissions=[admission], masks={0: b"\x01\x02"})
    rows = StepPlan(6, [3, 4], [7, 2**40], [1, 1], [True, False], 2, growths=[Growth(3, 1, [9])], drafts={1: (5, 6)})
    odd = rows._replace(drafts={1: (Fraction(5), 6)})  # which only pickle takes
    assert ring.send((plan, 0)) == 0
    time.sleep(0.01)  # readers are asleep
    assert [ring.send(record) for record in ("the next one", (rows, 3), (odd, 4))] == [1, 2, 3]
    for queue_ in received:
        assert take(queue_, 4) == [(0, (plan, 0)), (1, "the next one"), (2, (rows, 3)), (3, (odd, 4))]


@pytest.mark.parametrize(
    "odd",
    [
        {"req_indices": [np.int64(3), 4]},
        {"starts": [7, np.int32(40)]},
        {"samples": [np.True_, False]},
        {"growths": [Growth(3, 1, [np.int64(9)])]},
        {"drafts": {1: (5, np.int64(6))}},
        {"drafts": {np.int64(1): (5, 6)}},
    ],
)
def test_numbers_of_numpy_arrive_as_numbers(odd: dict[str, Any]) -> None:
    """marshal would take them for bytes."""
    plan = StepPlan(6, [3, 4], [7, 40], [1, 1], [True, False], 2, drafts={1: (5, 6)})._replace(**odd)
    assert _decode(_encode((plan, 1))) == (plan, 1)


@pytest.mark.parametrize("nap_s", [0.0, 0.001])
def test_records_of_any_length_pass_through_a_ring_that_is_smaller(files: RingFiles, nap_s: float) -> None:
    """Of up to a megabyte, which is a quarter of the ring; one is longer than the ring. Slow readers make the writer
    wait."""
    numbers = random.Random(0)
    sent = [bytes([i]) * numbers.randrange(2 ** numbers.randrange(21)) for i in range(2 * KEPT)]
    sent[KEPT] = b"x" * (DATA_BYTES + 5)
    received = read_in_threads(files, len(sent), nap_s)
    ring = PlanRing(files, 0, SIZE)
    for record in sent:
        ring.send(record)
    for queue_ in received:
        assert [record for _, record in take(queue_, len(sent))] == sent


def test_reports_are_kept_for_a_while(files: RingFiles) -> None:
    writer, first, second = (PlanRing(files, rank, SIZE) for rank in range(SIZE))
    assert writer.reported(1, 0) is None
    first.report(0, -5)
    second.report(0, 2**62)
    assert (writer.reported(1, 0), writer.reported(2, 0)) == (-5, 2**62)
    first.report(KEPT, 1)
    assert writer.reported(1, 0) is None
    assert writer.reported(1, KEPT) == 1
