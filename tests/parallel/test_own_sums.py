"""Engines whose ranks add up by our own kernel, over memory that their processes share; and when they do not."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_exactness import SHAPE

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("ranks of a CPU, in Triton's interpreter", allow_module_level=True)

from mini_infer import LLMEngine, SamplingParams
from mini_infer.core.errors import RankError
from mini_infer.kernels import all_reduce as all_reduce_kernel
from mini_infer.parallel import all_reduce, context, copied_sums, mailboxes, peer_memory
from mini_infer.parallel.all_reduce import Collectives, listen, open_store
from mini_infer.parallel.context import ParallelContext
from mini_infer.parallel.mailboxes import Mailboxes
from mini_infer.parallel.peer_memory import NoPeerAccess, PeerMemory

MakeEngine = Callable[..., LLMEngine]

MODEL = {"path": "made up", "load_format": "dummy", "hf_config": SHAPE, "kernels": "triton"}
SMALL = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
PROMPTS = [[5, 9, 2, 77, 31], [8] * 12]  # together more rows than the kernel takes
PARAMS = [
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, max_tokens=3, ignore_eos=True),
]


def tokens(engine: LLMEngine) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, PARAMS)]


def test_sums_of_few_rows_are_our_own(make_engine: MakeEngine) -> None:
    expected = tokens(make_engine(1, model=MODEL, scheduler=SMALL))
    own = make_engine(model=MODEL, scheduler=SMALL)
    assert own.startup.all_reduce == "our kernel up to 8 rows of 32, gloo above"
    assert tokens(own) == expected
    library = make_engine(model=MODEL, scheduler=SMALL, parallel={"all_reduce": "library"})
    assert library.startup.all_reduce == "gloo"
    assert tokens(library) == expected


def test_a_killed_rank_is_not_waited_for(make_engine: MakeEngine) -> None:
    engine = make_engine(model=MODEL, scheduler=SMALL)
    (process,) = engine.executor._ranks.processes
    threading.Timer(0.2, os.kill, (process.pid, signal.SIGKILL)).start()
    with pytest.raises(RankError, match=r"^rank 1 .* was killed by SIGKILL"):
        engine.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))


def test_kernels_are_stopped_and_no_group_that_ends_waits_for_another() -> None:
    """As NCCL's do, each of which waits for all that the GPU has to do."""
    stopped, all_are_ended = threading.Event(), threading.Barrier(3, timeout=20)
    group = SimpleNamespace(abort=all_are_ended.wait)
    own: Any = SimpleNamespace(stop_kernels=stopped.set, over_nccl=[group])
    pipe: Any = SimpleNamespace(over_nccl=[group, group])
    for thread in ParallelContext(0, 2, own, 0, 2, pipe).abort():
        thread.join()
    assert stopped.is_set()
    assert not all_are_ended.broken


def test_halves_of_prompts_are_summed_up_by_copies(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "COPIED_ON", ("cpu",))
    monkeypatch.setattr(context, "IN_HALVES", 9)
    expected = tokens(make_engine(1, model=MODEL, scheduler=SMALL))
    own = make_engine(model=MODEL, scheduler=SMALL)
    assert own.startup.all_reduce.endswith("; halves of prompts by copies")
    collectives: Any = own.executor._worker.target.parallel.collectives
    before = collectives._copied._number
    assert tokens(own) == expected
    assert collectives._copied._number >= before + 2 * 2, "of two products a layer two halves each"


def test_numbers_of_copied_sums_begin_again(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "COPIED_ON", ("cpu",))
    monkeypatch.setattr(context, "IN_HALVES", 9)
    monkeypatch.setattr(copied_sums, "_NUMBERS", 2 * copied_sums.SLOTS)
    expected = tokens(make_engine(1, model=MODEL, scheduler=SMALL))
    own = make_engine(model=MODEL, scheduler=SMALL)
    assert own.startup.all_reduce.endswith("; halves of prompts by copies")
    assert tokens(own) == expected


def test_what_is_measured_decides_who_sums_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks, of which this process is all: up to so many rows one shot is the fastest, then two, then NCCL."""
    cpu, width = torch.device("cpu"), 32
    boxes = Mailboxes(all_reduce_kernel, 0, 3, cpu, lambda values: [list(values)] * 3, width, [torch.float32], 64)
    times = iter([9, 1, 2, 9, 2, 1, 9, 4, 3, 9, 10, 11])  # NCCL, one shot, two: of 8, 16, 32 and 64 rows
    monkeypatch.setattr(mailboxes, "time_us", lambda *given: next(times))
    said = boxes.settle(lambda *given: None)
    assert said.startswith("our kernel up to 32 rows of 32, in two shots above 8, NCCL above (us by rows, ours in one")
    assert [boxes.for_sum(rows, torch.empty(1, width)).shots for rows in (1, 8, 9, 32)] == [1, 1, 2, 2]
    assert boxes.for_sum(33, torch.empty(1, width)) is None


def test_kernels_that_are_measured_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = []

    class Measured:
        most_rows = 0

        def __init__(self, *given: Any) -> None: ...

        def settle(self, library: Any) -> str:
            collectives.stop_kernels()  # another thread does, where a rank has ended meanwhile
            return "measured"

        def stop(self) -> None:
            stopped.append(self)

    monkeypatch.setattr(all_reduce, "Mailboxes", Measured)
    collectives = Collectives(open_store(listen()), 0, 1, torch.device("cpu"))
    collectives._where = torch.device("cuda")
    kernels: Any = SimpleNamespace(all_reduce=object())
    collectives.open(kernels, 32, [torch.float32])
    assert len(stopped) == 1


def test_without_peer_access_it_is_the_library(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(own: Any, handle: list[int]) -> int:
        raise OSError("there is no way from here to there")

    monkeypatch.setattr(peer_memory._OnCpu, "open", refuse)
    engine = make_engine(model=MODEL, scheduler=SMALL)
    assert engine.startup.all_reduce == "gloo (there is no way from here to there)"
    assert len(tokens(engine)) == 2


def test_a_rank_that_has_access_is_told_that_another_has_none() -> None:
    def others_fail(values: list[int]) -> list[list[int]]:
        return [list(values), [0] * len(values)]

    with pytest.raises(NoPeerAccess, match="another rank cannot"):
        PeerMemory(64, 0, torch.device("cpu"), others_fail)
