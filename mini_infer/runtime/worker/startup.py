"""What an engine turned out to be: its choices, what it fell back from and why, and what starting cost."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CaptureReport:
    """What capturing CUDA graphs cost."""

    batch_sizes: tuple[int, ...] = ()  # rows of whole decode steps, tokens of piecewise graphs
    seconds: float = 0.0
    memory_bytes: int = 0
    limits: tuple[str, ...] = ()  # why there are none, or none for some sizes


@dataclass(frozen=True)
class StartupReport:
    """For the record of a run: nothing that the engine does in another way than it was asked to stays silent."""

    device: str
    dtype: str
    implementation: str  # of the model: ours, transformers or dry
    attention_prefill: str
    attention_decode: str
    kernels: str
    sampler: str
    overlap: bool
    max_model_len: int
    num_kv_blocks: int
    kv_bytes: int
    weight_bytes: int
    seconds: float
    graphs: CaptureReport
    prefill_graphs: CaptureReport
    draft_graphs: CaptureReport = dataclasses.field(default_factory=CaptureReport)  # of steps that verify drafts
    speculation: str = "none"
    threads: str = "none"  # that torch computes a step with on the CPU
    phases: dict[str, float] = dataclasses.field(default_factory=dict)  # seconds of `seconds`, by what was done
    draft_weight_bytes: int = 0
    draft_kv_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
