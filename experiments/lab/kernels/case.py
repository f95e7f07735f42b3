"""What a kernel sweep needs to know of an operation, its inputs, its implementations, and the least it has to do; and
how it is timed: many calls in a row, each with inputs that no cache still holds.

On a GPU the calls are captured in a CUDA graph, so that no host is in the time, and the graph is replayed between two
events; what cannot be captured is called between them. On a CPU there is the clock alone.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from experiments.lab.measure.witness import Timed, witnessed
from mini_infer.core.errors import ConfigError, MiniInferError


class VariantAbsent(MiniInferError):
    """An implementation that cannot run here. The message says why: it stands in the report, and is no error."""


@dataclass(frozen=True)
class Work:
    """The least that one call moves through memory and computes."""

    bytes: int
    flops: float = 0.0
    ceiling: str = "copy_gb_s"  # of hardware.Ceilings: what its bytes are held against


@dataclass(frozen=True)
class Implementation:
    run: Callable[[int], Any]  # computes with the inputs of that number, and returns what it computed
    graph_safe: bool = True  # it can be captured in a CUDA graph


class Case(ABC):
    """One operation at one shape. `allocate` comes before all else that touches tensors.

    class Gemv(Case, rows=None, out=4096) has the settings `rows`, which must be given, and `out`.
    """

    name: ClassVar[str]
    settings: ClassVar[Mapping[str, Any]] = {}  # of a shape, with their defaults
    variants: ClassVar[tuple[str, ...]]
    needs_gpu: ClassVar[bool] = False  # no variant is torch's, which runs on a CPU
    apart: ClassVar[tuple[str, ...]] = ()  # of the variants, those that only the process of a peer can run
    sets: Sequence[tuple[Any, ...]]  # of inputs, by copy

    def __init_subclass__(cls, **settings: Any) -> None:
        cls.settings = {**cls.settings, **settings}

    def __init__(self, shape: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        """Raises ConfigError where the shape says too little, too much, or the impossible."""
        self.shape = {**self.settings, **shape}
        unknown = sorted(set(shape) - set(self.settings))
        missing = [name for name, value in self.shape.items() if value is None]
        if unknown or missing:
            problem = f"it has no {', '.join(unknown)}" if unknown else f"{', '.join(missing)} missing"
            raise ConfigError(f"the case {self.name}: {problem}. A shape has {', '.join(self.settings)}")
        for name, value in self.shape.items():
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ConfigError(f"the case {self.name}: {name} must be at least 1, got {value}")
        self.dtype = dtype
        self.device = device

    @abstractmethod
    def work(self, variant: str = "") -> Work:
        """Of an implementation, where one reads its inputs in another format."""

    @abstractmethod
    def allocate(self, copies: int) -> None:
        """Makes `sets`, so many, of random inputs, each somewhere else in memory."""

    @abstractmethod
    def implementation(self, variant: str) -> Implementation:
        """Raises VariantAbsent."""

    def on_sets(self, compute: Callable[..., Any], graph_safe: bool = True) -> Implementation:
        return Implementation(lambda copy: compute(*self.sets[copy]), graph_safe)

    @abstractmethod
    def checked(self, output: Any) -> Iterable[tuple[Tensor, Tensor]]:
        """Rows of what was computed from the first set of inputs, and what they should be."""

    def error(self, output: Any) -> float:
        return worst(row_error(found, expected) for found, expected in self.checked(output))

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype).mul_(scale)


def require_triton(device: torch.device) -> None:
    """Raises VariantAbsent where Triton kernels do not run. On a CPU they do in Triton's interpreter, for tests."""
    try:
        from triton import knobs
    except ImportError as error:
        raise VariantAbsent(f"Triton cannot be imported ({error})") from error
    if device.type != "cuda" and not knobs.runtime.interpret:
        raise VariantAbsent("Triton kernels run on a GPU")


def heads(text: Any, name: str) -> tuple[int, int]:
    """`28/4` -> 28 query heads over 4 KV heads."""
    parts = str(text).split("/")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts) or int(parts[0]) % int(parts[1]):
        raise ConfigError(f"the case {name}: heads must look like 28/4, query heads over KV heads; got {text!r}")
    return int(parts[0]), int(parts[1])


def some(count: int, most: int) -> list[int]:
    """Up to `most` of so many rows, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()


def row_error(found: Tensor, expected: Tensor) -> float:
    """The largest ||x - reference|| / ||reference|| of a row, which is the last dimension; NaN where there is one."""
    found, expected = found.float(), expected.float()
    errors = torch.linalg.vector_norm(found - expected, dim=-1) / torch.linalg.vector_norm(expected, dim=-1)
    return float(errors.max())


def worst(errors: Iterable[float]) -> float:
    """The largest; NaN where there is one, which `max` may pass over."""
    return max(errors, key=lambda error: (math.isnan(error), error))


PASS_US = 1_000.0  # at least so long are the calls between two events
SAMPLES = 15  # of which the median is one repeat
ROTATED = 2  # times the last cache is what all inputs together are larger than
CPU_CACHE = 64 * 2**20
MAX_COPIES = 512
MAX_CALLS = 2048  # of one graph


@dataclass(frozen=True)
class Timer:
    sample: Callable[[], Timed]
    captured: bool  # the calls are a CUDA graph
    implementation: Implementation | None = None  # a graph reads memory that it owns


def copies_needed(num_bytes: int, device: torch.device) -> int:
    """So many sets of inputs, of `num_bytes` each, that using them in turns finds none of them in the last cache."""
    cache = CPU_CACHE
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MAX_COPIES, 1 + ROTATED * cache // max(num_bytes, 1))


def prepare(implementation: Implementation, copies: int, device: torch.device) -> Timer:
    """Compiles, warms up and captures: nothing of it is left for the timed part."""
    run, on_gpu = implementation.run, device.type == "cuda"
    captured = on_gpu and implementation.graph_safe
    for copy in (0, copies - 1, 0):
        run(copy)
    once_us = 1e6 * seconds_of(lambda: run(0), 1, on_gpu)
    calls = min(MAX_CALLS, max(copies, round(PASS_US / max(once_us, 0.1))))
    calls = max(1, calls // copies) * copies  # each set as often as every other

    def burst() -> None:
        for index in range(calls):
            run(index % copies)

    again: Callable[[], None] = burst
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            burst()
        graph.replay()
        again = graph.replay

    timer = partial(seconds_of, again, 1, on_gpu)

    def sample() -> Timed:
        return Timed.of([witnessed(timer) for _ in range(SAMPLES)], calls, on_gpu=on_gpu)

    return Timer(sample, captured, implementation)


def seconds_of(work: Callable[[], object], calls: int, on_gpu: bool) -> float:
    if not on_gpu:
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3
