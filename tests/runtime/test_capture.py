"""Captures on a CPU, with graphs that write down what is done to them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from fake_graphs import LoggingGraph, numbered

from mini_infer.core.errors import ConfigError
from mini_infer.kernels.sampling.draw import NUM_PARAMS
from mini_infer.parallel.context import ParallelContext
from mini_infer.runtime.graphs.capture import Cutter, GraphMemory, capture_sizes
from mini_infer.runtime.graphs.step_graphs import BatchDescriptor, StepGraphs, batch_ladder
from mini_infer.runtime.worker.request_states import RequestStates
from mini_infer.runtime.worker.row_step import DoneRows
from mini_infer.speculative.draft_model import Drafter

CPU = torch.device("cpu")


def test_captures_follow_each_other_and_each_is_ended() -> None:
    log: list[str] = []
    with Cutter(numbered(log), "pool") as cutter:
        log.append("work")
        cutter.cut()
        log.append("more work")
    assert log == ["begin 0", "work", "end 0", "begin 1", "more work", "end 1"]
    assert len(cutter.graphs) == 2


def _cut_and_fail(cutter: Cutter, error: Exception) -> None:
    with cutter:
        cutter.cut()
        raise error


@pytest.mark.parametrize(
    ("fails", "error", "log"),
    [
        ("", "out of ideas", ["begin 0", "end 0", "begin 1", "end 1"]),
        ("end", "cannot end", ["begin 0", "end 0"]),  # the cut raises, and no graph is ended twice
        ("begin", "cannot begin", ["begin 0"]),
    ],
)
def test_no_capture_is_left_open_by_an_error(fails: str, error: str, log: list[str]) -> None:
    seen: list[str] = []
    with pytest.raises(RuntimeError, match=error):
        _cut_and_fail(Cutter(numbered(seen, lambda _: fails), "pool"), RuntimeError("out of ideas"))
    assert seen == log


def test_the_first_error_is_the_one_that_is_told() -> None:
    """A capture that an operation has broken cannot be ended without a second error."""
    seen: list[str] = []
    cutter = Cutter(numbered(seen, lambda number: "end" if number == 1 else ""), "pool")
    with pytest.raises(torch.OutOfMemoryError, match="first"):
        _cut_and_fail(cutter, torch.OutOfMemoryError("first"))
    assert seen[-1] == "end 1"


@pytest.mark.parametrize("fails", ["end", "replay"], ids=["instantiation", "first launch"])
@pytest.mark.parametrize(
    "error",
    [
        lambda _: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB"),
        lambda _: RuntimeError("CUDA error: out of memory"),
        lambda _: torch.AcceleratorError("CUDA error: out of memory"),
    ],
    ids=["allocator", "driver", "driver, as torch tells it"],
)
def test_a_size_that_finds_no_memory_is_left_out(
    pretended_gpu: SimpleNamespace, error: Callable[[str], RuntimeError], fails: str
) -> None:
    log: list[str] = []
    alive_when_emptied = []
    graphs: list[weakref.ref[LoggingGraph]] = []
    new_graph = numbered(log, lambda number: fails if number < 2 else "", error)
    pretended_gpu.emptied = lambda: alive_when_emptied.append(sum(ref() is not None for ref in graphs))

    def made() -> LoggingGraph:
        graph = new_graph()
        graphs.append(weakref.ref(graph))
        return graph

    def capture(size: int) -> LoggingGraph:
        with Cutter(made, "pool") as cutter:
            pretended_gpu.free -= 100
        graph = cutter.graphs[0]
        assert isinstance(graph, LoggingGraph)
        return graph

    captured, report = capture_sizes([64, 128, 192, 256], capture, "tokens", GraphMemory(CPU), 7)
    assert (list(captured), report.batch_sizes, report.memory_bytes) == ([128, 64], (64, 128), 207)
    assert report.limits == (
        "no graph for 256 tokens: out of GPU memory during capture",
        "no graph for 192 tokens: out of GPU memory during capture",
    )
    assert log[-6:] == ["begin 2", "end 2", "replay 2", "begin 3", "end 3", "replay 3"]
    assert alive_when_emptied == [0, 0, 0], "at the start, and where what a size has taken is given back"


@pytest.mark.parametrize(
    ("by_others", "known"), [([0, 0, 0], 3), ([0, 57 * 2**30, 0], 2), ([0, 0, -(2**30)], 2), ([2**30] * 3, 0)]
)
def test_what_other_processes_take_meanwhile_is_not_of_the_graphs(
    pretended_gpu: SimpleNamespace, by_others: list[int], known: int
) -> None:
    """A peer that loads beside an engine as it captures: with its weights, 20 graphs had taken 58 GiB."""
    others = iter(by_others)

    def capture(size: int) -> SimpleNamespace:
        of_torch, of_driver = (500, 4) if size == 3 else (0, 2)  # the others fit into the largest's
        pretended_gpu.reserved += of_torch
        pretended_gpu.free -= of_torch + of_driver + next(others)
        return SimpleNamespace(replay=lambda: None)

    report = capture_sizes([1, 2, 3], capture, "rows", GraphMemory(CPU), 10)[1]
    told = [taken for taken, by in zip([4, 2, 2], by_others, strict=True) if not by]
    assert report.memory_bytes == 500 + 10 + sum(told)
    note = f"what the driver took for {3 - known} of 3 sizes is not known: other processes took or gave back GPU memory"
    assert report.limits == ((f"{note} meanwhile",) if known < 3 else ())


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize("where", ["warm-up", "capture", "first launch"])
def test_a_rank_that_others_wait_for_ends_where_it_finds_no_memory(where: str) -> None:
    """While it captures nobody waits, and the size is left out on all of them."""
    asked: list[bool] = []

    def on_all_ranks(here: bool) -> bool:
        asked.append(here)
        return here

    memory = GraphMemory(CPU, cast("ParallelContext", SimpleNamespace(size=2, number=1, on_all_ranks=on_all_ranks)))

    def short(_: object = None) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")

    def capture(size: int) -> SimpleNamespace:
        memory.warm_up(short if where == "warm-up" else lambda: None)
        if where == "capture":
            short()
        return SimpleNamespace(replay=short)

    if where == "capture":
        assert capture_sizes([64], capture, "tokens", memory, 0)[0] == {}
        assert asked == [False]
        return
    with pytest.raises(ConfigError, match=r"^rank 1 has no GPU memory left .*: lower cache\.gpu_memory_utilization"):
        capture_sizes([64], capture, "tokens", memory, 0)
    assert asked == ([] if where == "warm-up" else [True])


@pytest.mark.usefixtures("pretended_gpu")
def test_another_error_ends_the_capture() -> None:
    def capture(size: int) -> LoggingGraph:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        capture_sizes([64], capture, "tokens", GraphMemory(CPU), 0)


def test_decode_steps_of_all_sizes_share_a_stream_and_their_logits(pretended_gpu: SimpleNamespace) -> None:
    """At a vocabulary of 152,000, logits of its own for each size up to 256 would take 640 MB."""
    states = RequestStates(4, 32, 16, num_params=NUM_PARAMS, device=CPU)
    logits = torch.zeros(4, 11)
    places: dict[int, int] = {}

    def run(
        num_rows: int, query_len: int, draft_logits: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> DoneRows:
        assert out is not None
        places[len(out)] = out.data_ptr()
        return DoneRows(states.build_rows(num_rows, query_len), out.fill_(num_rows), torch.full((num_rows,), 5), None)

    graphs = StepGraphs(states, Drafter().chain, run, numbered([]))
    report = graphs.capture([BatchDescriptor(rows) for rows in batch_ladder(4)], logits, None, GraphMemory(CPU), "rows")
    assert report.batch_sizes == (1, 2, 4)
    assert report.memory_bytes == logits.nbytes
    assert places == dict.fromkeys((1, 2, 4), logits.data_ptr())
    assert pretended_gpu.streams == 1
    assert graphs.run(BatchDescriptor(4)).logits.shape == (4, 11)
