"""What all captures of CUDA graphs have in common: memory, stream, order, and what happens where memory is short."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from mini_infer.core.errors import ConfigError
from mini_infer.parallel.context import ONE_RANK, ParallelContext
from mini_infer.runtime.worker.startup import CaptureReport


class Graph(Protocol):
    """What is used of a torch.cuda.CUDAGraph."""

    def capture_begin(self, pool: Any = None) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


_MOST_OF_DRIVER = 64 * 2**20  # for the graphs of one size it takes 2 to 20 MiB, and more than this nobody but others

Size = TypeVar("Size")
Captured = TypeVar("Captured")


class GraphMemory:
    """What an engine's graphs share, since only one of them runs at a time: a pool of memory and the stream that they
    are captured on. A second stream would need memory and cuBLAS's workspace (32 MiB on Hopper) of its own."""

    def __init__(self, device: torch.device, parallel: ParallelContext = ONE_RANK) -> None:
        self.device = device
        self.parallel = parallel
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], object]) -> None:
        """Runs what is captured next, which compiles kernels and makes library handles: capture forbids both."""
        self.run(run)
        torch.cuda.empty_cache()  # what it took is not the pool's

    def run(self, work: Callable[[], object]) -> None:
        """Runs what the ranks of a stage run together, to its end. Raises ConfigError where this one finds no memory
        for it: it is no use to leave it out, when the others wait for its part."""
        try:
            work()
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            if self.parallel.size == 1 or not _is_short(error):
                raise
            raise ConfigError(
                f"rank {self.parallel.number} has no GPU memory left for the first run of a CUDA graph: lower "
                "cache.gpu_memory_utilization, graphs.max_batch or graphs.max_prefill_tokens"
            ) from error


class ThreadsGraph(torch.cuda.CUDAGraph):
    """Captured whatever other threads do meanwhile: NCCL has one that asks how far the device is."""

    def capture_begin(self, pool: Any = None) -> None:  # type: ignore[override]
        super().capture_begin(pool, capture_error_mode="thread_local")


class Cutter:
    """Captures what runs while it is open, on the current stream: as one graph for each stretch between two cuts, and
    as one graph where there are none. Whatever happens, no capture is left open."""

    def __init__(self, new_graph: Callable[[], Graph], pool: Any) -> None:
        self._new_graph = new_graph
        self._pool = pool
        self._open: Graph | None = None
        self.graphs: list[Graph] = []

    def __enter__(self) -> Cutter:
        self._begin()
        return self

    def cut(self) -> None:
        self._end()
        self._begin()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self._end()
            return
        with contextlib.suppress(RuntimeError):  # a capture that was broken says so, and `error` is the reason
            self._end()

    def _begin(self) -> None:
        graph = self._new_graph()
        graph.capture_begin(pool=self._pool)
        self._open = graph

    def _end(self) -> None:
        graph, self._open = self._open, None
        if graph is not None:
            graph.capture_end()
            self.graphs.append(graph)


def capture_sizes(
    sizes: Sequence[Size],
    capture: Callable[[Size], Captured],
    unit: str,
    memory: GraphMemory,
    static_bytes: int,
    units: Callable[[Any], int] = int,
) -> tuple[dict[Size, Captured], CaptureReport]:
    """Captures the sizes while nothing else runs on the GPU, the largest first: the others fit into its memory. One
    that finds no memory is left out, and the report says so. What other processes take meanwhile is not the graphs'.

    Args:
        capture: captures one size, on the current stream: something that can `replay`.
        unit: of a size, for the report.
        static_bytes: of tensors that the graphs read and write, for the report: they have been taken already.
        units: how many of them a size is.
    """
    device, start = memory.device, time.perf_counter()
    gc.collect()  # not during a capture: what it frees might be a graph
    torch.cuda.empty_cache()  # what others have left is not counted as saved
    reserved = torch.cuda.memory_reserved(device)
    captured: dict[Size, Captured] = {}
    left_out: list[int] = []
    of_driver: list[int] = []  # bytes of each size, where they are known
    current = torch.cuda.current_stream(device)
    memory.stream.wait_stream(current)
    with torch.cuda.stream(memory.stream):
        for size in _progress_bar(sorted(sizes, key=units, reverse=True), f"capturing CUDA graphs ({unit})"):
            beside = _beside_torch(device)
            graphs = _try(capture, size, memory)
            if graphs is not None:
                captured[size] = graphs
                if abs(taken := _beside_torch(device) - beside) <= _MOST_OF_DRIVER:
                    of_driver.append(taken)
                continue
            # Not in _try: as long as the error is handled, its traceback holds what the size has taken. And a pool that
            # has no graphs left must be empty before the next one is captured into it.
            torch.cuda.empty_cache()
            left_out.append(units(size))
    current.wait_stream(memory.stream)
    limits = [f"no graph for {number} {unit}: out of GPU memory during capture" for number in dict.fromkeys(left_out)]
    if unknown := len(captured) - len(of_driver):
        others = f"what the driver took for {unknown} of {len(captured)} sizes is not known"
        limits.append(f"{others}: other processes took or gave back GPU memory meanwhile")
    return captured, CaptureReport(
        batch_sizes=tuple(sorted({units(size) for size in captured})),
        seconds=time.perf_counter() - start,
        memory_bytes=torch.cuda.memory_reserved(device) - reserved + sum(of_driver) + static_bytes,
        limits=tuple(limits),
    )


def _beside_torch(device: torch.device) -> int:
    """Bytes of the GPU that are taken, and not by torch in this process: by its driver or by other processes, which
    nobody tells apart."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _progress_bar(items: Sequence[Size], title: str) -> Iterable[Size]:
    """On a terminal; silence elsewhere."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(items, title, console=console, transient=True, disable=not console.is_terminal)


def _try(capture: Callable[[Size], Captured], size: Size, memory: GraphMemory) -> Captured | None:
    """None where capturing it finds no memory, on any rank: they replay alike."""
    captured = _unless_short(lambda: capture(size))
    if not memory.parallel.on_all_ranks(captured is not None):
        return None

    def replay(graphs: Any) -> Captured:
        memory.run(graphs.replay)  # of padding: the first launch of a graph takes memory
        return graphs

    return _unless_short(lambda: replay(captured))


def _unless_short(work: Callable[[], Captured]) -> Captured | None:
    """None where it finds no memory."""
    try:
        return work()
    except RuntimeError as error:
        if _is_short(error):
            return None
        raise


def _is_short(error: RuntimeError) -> bool:
    """The driver takes memory for a graph by itself, and has no error of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
