"""How much of a GPU's memory the KV cache may take: what is left when the weights are loaded and the largest steps have
been tried."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mini_infer.cache.kv_store import Allocate, KVStore
from mini_infer.core.config import CacheConfig, EngineConfig
from mini_infer.core.errors import ConfigError
from mini_infer.core.plan import Admission, StepPlan
from mini_infer.core.request import SamplingParams
from mini_infer.modeling.model import Model

CPU_KV_GIB = 0.5
FEW_ROWS = 16  # up to which kernels are compiled for a number of rows
_SMALL_TENSOR, _SMALL_MEMORY = 2**19, 32 * 2**20  # torch's allocator keeps tensors up to 1 MiB apart
_GRAPHS_RESERVE = 512 * 2**20  # captured decode steps: the driver's share and their tensors
_CONTEXT = 768 * 2**20  # what a process has on a GPU beside its tensors: the driver's context, libraries, kernels


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
    """Bytes that KV may take beside what is on the device already (of this process, where it shares the GPU) and the
    `step_bytes` that a step takes, with the graphs of its pieces."""
    if cache.memory_gib is not None or device.type != "cuda":
        return int((cache.memory_gib or CPU_KV_GIB) * 2**30)
    free, total = torch.cuda.mem_get_info(device)
    # What others hold at this moment says nothing: they may be about to start.
    used = torch.cuda.memory_reserved(device) + _CONTEXT if cache.gpu_shared else total - free
    return max(0, min(int(total * cache.gpu_memory_utilization) - used, free) - step_bytes - _GRAPHS_RESERVE)


def allocate_kv(model: Model, num_blocks: int, block_size: int, allocate: Allocate | None = None) -> KVStore:
    """The model's KV store of `num_blocks` blocks and a spare one. Raises ConfigError where they do not fit."""
    layout = model.kv_layout
    try:
        return KVStore(
            layout,
            num_blocks=num_blocks + 1,
            block_size=block_size,
            device=model.device,
            scales=model.kv_scales,
            allocate=allocate,
        )
    except (torch.OutOfMemoryError, MemoryError, OSError) as error:
        needed = layout.bytes_per_block(block_size) * (num_blocks + 1)
        raise ConfigError(
            f"a KV cache of {num_blocks} blocks takes {gib(needed)}, which the GPU has not free: lower "
            "cache.num_blocks, cache.memory_gib or cache.gpu_memory_utilization"
        ) from error


def largest_steps(config: EngineConfig, max_model_len: int, block: int, expands: bool = False) -> list[StepPlan]:
    """Plans that take as much memory as any: all tokens of the budget, in as many prompts as there can be, so that all
    of them sample; the same requests with drafts, where more tokens are sampled than in any other step; and, of a model
    that `expands` what its cache holds, the end of the longest prompt. All tokens share one block: nobody reads the
    results."""
    tokens, most_drafts = config.scheduler.max_num_batched_tokens, config.speculation.most
    rows = max(1, min(config.scheduler.max_num_seqs, tokens))
    share = min(-(-tokens // rows), max_model_len - 1)
    table = [block] * -(-max_model_len // config.cache.block_size)
    admissions = [Admission(row, "warm-up", [0] * share, share, table, SamplingParams(), row) for row in range(rows)]
    steps = [StepPlan.alike(rows, 0, share, decode=False, admissions=admissions)]
    if most_drafts:
        drafts = min(most_drafts, max(1, (tokens - rows) // 2 // rows))
        steps.append(_with_drafts(rows, 0, drafts))
    if expands:
        longest = max_model_len - 1
        new = min(tokens, longest)
        whole = Admission(0, "warm-up", [0] * longest, longest, table, SamplingParams(), 0)
        steps.append(StepPlan.alike(1, longest - new, new, decode=False, admissions=[whole]))
    return steps


def steps_of_each_size(largest: StepPlan, rows: Iterable[int], max_model_len: int, drafts: int = 0) -> list[StepPlan]:
    """Steps of so many decode rows, and of few, and of prompts that are twice as long each time. Together they call all
    variants of the kernels that are chosen by the number of tokens. With `drafts`, the most that a row has, there are
    also such rows with drafts, for which a draft model catches up with the prompts. `largest` has admitted their
    requests."""
    decode = [size for size in sorted({*rows, *range(1, FEW_ROWS + 1)}) if size <= largest.num_rows]
    plans = [StepPlan.alike(size, 1, 1, decode=True) for size in decode]
    if drafts:
        # Two, as a draft model computes two tokens of a row in its first round and one in each further round.
        plans += [_with_drafts(size, 1, min(2, drafts)) for size in decode]
        for size in {1, 2, FEW_ROWS}.intersection(decode):  # compilers tell apart 1, multiples of 16, and others
            plans.append(StepPlan.alike(size, 1, 1, decode=True, following=range(size)))
            plans += [_with_drafts(size, 1, count) for count in range(1, 1 + drafts) if count != min(2, drafts)]
    tokens = FEW_ROWS
    while (tokens := 2 * tokens) < largest.num_tokens:
        prompts = -(-tokens // (max_model_len - 1))
        if prompts <= largest.num_rows:
            plans.append(StepPlan.alike(prompts, 0, tokens // prompts, decode=False))
            plans += [_with_drafts(prompts, tokens // prompts, 1)] if drafts else []
    return plans


def _with_drafts(rows: int, start: int, count: int) -> StepPlan:
    """So many drafts each."""
    return StepPlan.alike(rows, start, 1 + count, decode=True, drafts=dict.fromkeys(range(rows), [0] * count))


def hold_small_memory(device: torch.device) -> None:
    """Gives torch's allocator room for small tensors, which come and go by the hundred and never in equal numbers."""
    held = [torch.empty(_SMALL_TENSOR, dtype=torch.uint8, device=device) for _ in range(_SMALL_MEMORY // _SMALL_TENSOR)]
    held.clear()


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
