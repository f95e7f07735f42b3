"""Copies of blocks on ranks other than 0, which end in an order of their own; and files of several ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from integrity import check_scheduler

from mini_infer import LLMEngine, SamplingParams
from mini_infer.cache.kv_manager import chained_sha256
from mini_infer.core.plan import StepPlan, StepResult
from mini_infer.runtime.executor.plan_ring import Call
from mini_infer.runtime.executor.rank_process import follow
from mini_infer.runtime.executor.ranks import RankedPusher
from mini_infer.transfer.pusher import LOST


class Rank:
    """A runner whose transfers end when they are asked about, or waited for, and a ring with what rank 0 says."""

    def __init__(self, records: list[Any], asked: dict[bool, list[int]], collected: list[int]) -> None:
        self._records: Iterator[Any] = iter(records)
        self._asked, self._collected = asked, collected
        self.said: list[Any] = []

    def receive(self) -> tuple[int, Any]:
        try:
            return len(self.said), next(self._records)
        except StopIteration:
            raise EOFError from None

    def report(self, number: int, value: int) -> None:
        pass

    def end_transfers(self, wait: bool) -> tuple[int, ...]:
        ended = self._asked[wait][: 1 if wait else None]
        del self._asked[wait][: len(ended)]
        self.said.append(("waits" if wait else "looks", *ended))
        return tuple(ended)

    def launch(self, plan: StepPlan) -> StepPlan:
        self.said.append(plan.step)
        return plan

    def collect(self, plan: StepPlan) -> StepResult:
        ended, self._collected = self._collected, []
        return StepResult([], transfers_done=tuple(ended))

    def abort(self) -> None:
        self.said.append("called")


def plan(number: int) -> StepPlan:
    return StepPlan(number)


def said(records: list[Any], asked: dict[bool, list[int]], collected: list[int] | None = None) -> list[Any]:
    rank = Rank(records, asked, collected or [])
    with pytest.raises(EOFError):
        follow(rank, rank, stages=1)  # type: ignore[arg-type]
    return rank.said


def test_a_plan_waits_for_the_transfers_that_have_ended_on_rank_0_and_for_no_others() -> None:
    asked = {False: [1], True: [3, 2]}  # rank 0 says that 2 has ended: here 1 is the first, and 3 the second
    assert said([(plan(0), ()), (plan(1), (2,)), (plan(2), (1,))], asked) == [
        0,
        ("looks", 1),
        ("waits", 3),
        ("waits", 2),
        1,
        2,  # 1 has ended long ago
    ]


def test_what_ended_with_a_step_is_not_waited_for_again() -> None:
    records = [(plan(0), ()), (plan(1), ()), Call("abort", ()), (plan(2), (7,)), (plan(3), (9,))]
    assert said(records, {False: [9], True: []}, [7, 8]) == [0, 1, "called", 2, ("looks", 9), 3]


def test_a_block_comes_from_files_where_all_ranks_have_their_part(
    make_engine: Callable[..., LLMEngine], tmp_path: Path
) -> None:
    cache = {"host_prefix_gib": 2**-6, "disk_prefix_path": str(tmp_path)}
    prompts = [[(7 * talk + 3 * i) % 1000 + 1 for i in range(200)] for talk in range(2)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def answers(engine: LLMEngine) -> list[list[int]]:
        engine.scheduler._loads.costs.loading_pays = lambda *known: True  # type: ignore[method-assign]
        return [output.outputs[0].token_ids for output in engine.generate(prompts, params)]

    first = make_engine(cache=cache)
    expected = answers(first)
    first.generate([[9] * 20], params)  # beside which the last blocks are written
    files = first.executor.files
    assert files is not None
    (other,) = map(Path, files.beside)
    own, theirs = (sorted(path.name for path in f.rglob("*") if path.is_file()) for f in (files.folder, other))
    first.close()
    first.close()  # a second time there is nobody to tell
    assert not any(thread.name.startswith(("kv writer", "kv reader")) for thread in threading.enumerate())
    assert own == theirs
    assert len(own) >= 24
    hashes = [chained_sha256("", prompt[:192], 16) for prompt in prompts]
    broken, gone = (other / h.hex()[:2] / h.hex() for h in (hashes[0][5], hashes[1][0]))
    data = bytearray(broken.read_bytes())
    data[len(data) // 2] ^= 1
    broken.write_bytes(data)
    gone.unlink()
    second = make_engine(cache=cache)
    assert answers(second) == expected
    assert sum(record.loaded_blocks for record in second.records) == 12, "of the second prompt nothing is looked for"
    assert sum(record.lost_blocks for record in second.records) == 12 - 5, "rank 0 has read all of them"
    check_scheduler(second.scheduler)


def test_copies_take_as_long_as_on_the_slowest_rank() -> None:
    """Their bytes are of all."""
    answers = {"pusher.close": [5, 7], "pusher.took_ns": [1_000_000, 3_000_000]}
    pusher = RankedPusher(lambda method, *_: answers[method])
    assert (pusher.close(1), pusher.seconds) == (12, 0.003)
    answers["pusher.close"] = [5, LOST]
    assert pusher.close(2) == LOST
