"""How much of a GPU's memory the KV cache may take: what is left when the weights are loaded and the largest steps have
been tried."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mini_infer.cache.kv_store import KVStore
from mini_infer.cache.layout import KVLayout
from mini_infer.core.config import CacheConfig
from mini_infer.core.errors import ConfigError
from mini_infer.core.plan import Admission, StepPlan
from mini_infer.core.request import SamplingParams

CPU_KV_GIB = 0.5
_SMALL_TENSOR, _SMALL_MEMORY = 2**19, 32 * 2**20  # torch's allocator keeps tensors up to 1 MiB apart
_GRAPHS_RESERVE = 512 * 2**20  # captured decode steps: the driver's share and their tensors


def require_room_for_weights(needed: int, name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ConfigError where `needed` bytes of weights will not fit."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if needed > free:
        raise ConfigError(
            f"the weights of {name} take {gib(needed)} in {str(dtype).removeprefix('torch.')}, and {gib(free)} of the "
            f"GPU's {gib(total)} are free: choose a smaller model, a smaller model.dtype, or end what else runs there"
        )


def kv_memory(cache: CacheConfig, device: torch.device, step_bytes: int = 0) -> int:
    """Bytes that KV may take beside what is on the device already and the `step_bytes` that a step takes, with the
    graphs of its pieces."""
    if cache.memory_gib is not None or device.type != "cuda":
        return int((cache.memory_gib or CPU_KV_GIB) * 2**30)
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * cache.gpu_memory_utilization) - (total - free) - step_bytes - _GRAPHS_RESERVE)


def allocate_kv(layout: KVLayout, num_blocks: int, block_size: int, device: torch.device) -> KVStore:
    """A KV store of `num_blocks` blocks and a spare one. Raises ConfigError where they do not fit."""
    try:
        return KVStore(layout, num_blocks=num_blocks + 1, block_size=block_size, device=device)
    except torch.OutOfMemoryError as error:
        needed = layout.bytes_per_block(block_size) * (num_blocks + 1)
        raise ConfigError(
            f"a KV cache of {num_blocks} blocks takes {gib(needed)}, which the GPU has not free: lower "
            "cache.num_blocks, cache.memory_gib or cache.gpu_memory_utilization"
        ) from error


def largest_step(max_num_seqs: int, max_num_tokens: int, max_model_len: int, block_size: int, block: int) -> StepPlan:
    """A plan that takes as much memory as any: all tokens of the budget, in as many prompts as there can be, so that
    all of them sample. They share one block for all their tokens: nobody reads the results."""
    rows = max(1, min(max_num_seqs, max_num_tokens))
    share = min(-(-max_num_tokens // rows), max_model_len - 1)
    table = [block] * -(-max_model_len // block_size)
    return StepPlan(
        step=0,
        req_indices=list(range(rows)),
        starts=[0] * rows,
        counts=[share] * rows,
        samples=[True] * rows,
        num_decode_rows=0,
        admissions=[
            Admission(
                req_index, f"warm-up {req_index}", [0] * share, share, table, SamplingParams(), req_index, frozenset()
            )
            for req_index in range(rows)
        ],
    )


def largest_verification(max_num_seqs: int, max_num_tokens: int, num_drafts: int, step: StepPlan) -> StepPlan:
    """Likewise of a step with drafts: more tokens are sampled there than in any other.

    Args:
        num_drafts: of a request, at most.
        step: the plan of `largest_step`, whose admissions it has.
    """
    rows = min(max_num_seqs, len(step.req_indices))
    drafts = min(num_drafts, max(1, (max_num_tokens - rows) // 2 // rows))
    return StepPlan(
        step=0,
        req_indices=step.req_indices[:rows],
        starts=[0] * rows,
        counts=[1 + drafts] * rows,
        samples=[True] * rows,
        num_decode_rows=rows,
        drafts={row: [0] * drafts for row in range(rows)},
        num_drafts=rows * drafts,
    )


def decode_steps(step: StepPlan, sizes: Iterable[int]) -> list[StepPlan]:
    """Steps of so many decode rows, for the sake of the kernels that are chosen by the number of rows.

    Args:
        step: the plan of `largest_step`, whose admissions they have.
    """
    rows = len(step.req_indices)
    return [
        StepPlan(
            step=0,
            req_indices=step.req_indices[:size],
            starts=[1] * size,
            counts=[1] * size,
            samples=[True] * size,
            num_decode_rows=size,
        )
        for size in sizes
        if size <= rows
    ]


def hold_small_memory(device: torch.device) -> None:
    """Gives torch's allocator room for small tensors, which come and go by the hundred and never in equal numbers."""
    held = [torch.empty(_SMALL_TENSOR, dtype=torch.uint8, device=device) for _ in range(_SMALL_MEMORY // _SMALL_TENSOR)]
    held.clear()


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
