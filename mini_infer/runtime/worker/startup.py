"""What an engine turned out to be: its choices, what it fell back from and why, and what starting cost."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CaptureReport:
    """What capturing CUDA graphs cost."""

    batch_sizes: tuple[int, ...] = ()  # rows of decode steps, tokens of steps with prompts
    seconds: float = 0.0
    memory_bytes: int = 0
    limits: tuple[str, ...] = ()  # why there are none, or none for some sizes
    in_pieces: bool = False  # attention is called between them: its kernels cannot be captured

    @classmethod
    def of_all(cls, reports: Sequence[CaptureReport]) -> CaptureReport:
        """Of the same sizes, captured in several ways."""
        seconds, taken = sum(one.seconds for one in reports), sum(one.memory_bytes for one in reports)
        limits = dict.fromkeys(limit for one in reports for limit in one.limits)
        return cls(reports[0].batch_sizes, seconds, taken, tuple(limits), reports[0].in_pieces)


@dataclass(frozen=True)
class StartupReport:
    """For the record of a run: nothing that the engine does in another way than it was asked to stays silent."""

    device: str
    dtype: str
    sampler: str
    overlap: bool
    max_model_len: int
    num_kv_blocks: int
    seconds: float
    graphs: CaptureReport
    prefill_graphs: CaptureReport
    draft_graphs: CaptureReport = field(default_factory=CaptureReport)  # of steps that verify drafts
    implementation: str = "ours"  # or transformers or dry
    attention_prefill: str = "none"
    attention_decode: str = "none"
    numerics: str = "none"
    kernels: str = "none"
    tensor_parallel: int = 1  # ranks of a stage that share layers; bytes are this one's
    expert_parallel: int = 1  # ... that share experts
    dispatch: str = "none"  # how tokens get to those of other ranks
    pipeline_parallel: int = 1  # stages; bytes are those of the last one
    all_reduce: str = "none"  # how the sums of `tensor_parallel` ranks are made
    quantization: str = "none"  # of the target's weights
    draft_quantization: str = "none"
    kv_dtype: str = "none"
    speculation: str = "none"
    threads: str = "none"  # that torch computes a step with on the CPU
    phases: dict[str, float] = field(default_factory=dict)  # seconds of `seconds`, by what was done
    kv_bytes: int = 0
    kv_token_bytes: int = 0  # that the target keeps of a token
    kv_token_bytes_of_heads: int = 0  # ... and would keep of keys and values of every KV head, in its dtype
    weight_bytes: int = 0
    adapter_bytes: int = 0  # of all slots on the device
    draft_weight_bytes: int = 0
    draft_kv_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Phases:
    """`finish` waits for what a device was given, so that a phase has all of its own work and none of another's."""

    def __init__(
        self, finish: Callable[[], None] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds: dict[str, float] = {}  # in the order in which phases were first entered
        self._finish, self._clock, self._started = finish, clock, clock()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """What runs inside belongs to the phase, which may be entered again, but not inside another."""
        started = self._clock()
        yield
        if self._finish is not None:
            self._finish()
        self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - started

    @property
    def total(self) -> float:
        """Seconds until now, whatever was done in them."""
        return self._clock() - self._started
