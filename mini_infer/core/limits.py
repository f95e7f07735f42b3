"""The longest request and the sizes of the KV pool and of its part in host memory, settled from what is asked for and
what there is. Without torch: the simulator and the planner ask it too."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from mini_infer.core.config import EngineConfig, Preemption
from mini_infer.core.errors import ConfigError

HOST_GIB = 4.0  # of swap space, where nothing else is said


@dataclass(frozen=True)
class Limits:
    max_model_len: int  # tokens of prompt and output
    reason: str  # what sets max_model_len, for the message to who exceeds it
    num_blocks: int
    num_host_blocks: int  # for swapped requests, and for prefixes


def require_length(asked: int, model_limit: int) -> None:
    """Raises ConfigError where so many tokens are beyond what the model's positions reach."""
    if asked > model_limit:
        raise ConfigError(
            f"model.max_model_len={asked} is beyond the model's own limit of {model_limit} tokens. Lower it, or "
            "stretch the model with rope scaling (linear or yarn) in its config.json"
        )


def require_whole_prompts(config: EngineConfig, model_limit: int, pool_tokens: int) -> None:
    """Before anything is loaded. Raises ConfigError where steps are too small for whole prompts.

    Args:
        model_limit: tokens that the model's positions reach.
        pool_tokens: so many the KV pool holds at least, where cache.num_blocks is not given.
    """
    cache, (length, reason) = config.cache, _asked(config, model_limit)
    if config.model.max_model_len is None:
        if cache.num_blocks and cache.num_blocks * cache.block_size < length:
            length, reason = cache.num_blocks * cache.block_size, "the KV pool holds no more"
        elif not cache.num_blocks and pool_tokens <= config.scheduler.max_num_batched_tokens:
            return  # the longest request may be what the pool holds, and that as little
    _require_step_for(config, length, reason)


def _asked(config: EngineConfig, model_limit: int) -> tuple[int, str]:
    """Tokens of the longest request, were there memory enough, and what sets them."""
    if (asked := config.model.max_model_len) is not None:
        return asked, f"model.max_model_len={asked}"
    return model_limit, f"the model's limit is {model_limit} tokens"


def _require_step_for(config: EngineConfig, length: int, reason: str) -> None:
    scheduler = config.scheduler
    if not scheduler.chunked_prefill and scheduler.max_num_batched_tokens < length:
        raise ConfigError(
            f"scheduler.chunked_prefill=false computes a prompt in one step, but "
            f"scheduler.max_num_batched_tokens={scheduler.max_num_batched_tokens} is less than the longest prompt "
            f"({length} tokens, {reason}): raise it to {length}, or lower model.max_model_len"
        )


def settle_limits(
    config: EngineConfig, model_limit: int, affordable_blocks: int, block_bytes: int, host_gib: float | None = None
) -> Limits:
    """
    Args:
        model_limit: tokens that the model's positions reach.
        affordable_blocks: KV blocks that fit in memory; used where cache.num_blocks is not given.
        block_bytes: of a block in host memory.
        host_gib: what is free of it; default: of this machine's, now.

    Raises:
        ConfigError: what is asked for contradicts itself, or the machine.
    """
    cache, scheduler, asked = config.cache, config.scheduler, config.model.max_model_len
    if asked is not None:
        require_length(asked, model_limit)
    length, reason = _asked(config, model_limit)
    longest = -(-length // cache.block_size)
    num_blocks = cache.num_blocks or min(affordable_blocks, scheduler.max_num_seqs * longest)
    if num_blocks < longest:
        capacity = num_blocks * cache.block_size
        pool = f"the KV pool holds {capacity} tokens ({num_blocks} blocks of {cache.block_size})"
        way_out = "raise cache.num_blocks" if cache.num_blocks else "give the cache more memory (cache.memory_gib)"
        if asked is not None or capacity < 2:
            raise ConfigError(
                f"{pool}, too few for one request of {length} tokens: {way_out}, or lower model.max_model_len"
            )
        length, reason = capacity, f"{pool}: {way_out}"
    _require_step_for(config, length, reason)
    drafts = config.speculation.most
    if drafts > length - 2:  # a prompt of one token, and the one behind the draft
        raise ConfigError(
            f"speculation.num_tokens={drafts} drafts do not fit in a request of {length} tokens "
            f"(model.max_model_len): lower the first to {max(1, length - 2)} or less, or raise the second"
        )
    return Limits(length, reason, num_blocks, _host_blocks(config, num_blocks, block_bytes, host_gib))


def _host_blocks(config: EngineConfig, num_blocks: int, block_bytes: int, host_gib: float | None) -> int:
    """Page-locked memory is taken from everybody else on the machine: unasked no more than HOST_GIB, and never more
    than half of what is free."""
    cache, free = config.cache, psutil.virtual_memory().available if host_gib is None else int(host_gib * 2**30)
    room = free // 2
    swaps = config.scheduler.preemption is Preemption.swap
    asked = {"host_prefix_gib": cache.host_prefix_gib}
    if swaps:
        asked |= {"host_memory_gib": cache.host_memory_gib, "num_host_blocks": cache.num_host_blocks}
    counts = {
        f"cache.{name}={value}": value if name == "num_host_blocks" else _blocks(value, block_bytes)
        for name, value in asked.items()
        if value is not None
    }
    for key, count in counts.items():
        if count < 1:
            raise ConfigError(f"{key} is less than one KV block of {block_bytes} bytes: raise it")
    total = int(sum(counts.values()))
    if total * block_bytes > room:
        raise ConfigError(
            f"{' and '.join(counts)} takes {total * block_bytes / 2**30:.1f} GiB of page-locked host memory, and no "
            f"more than {room / 2**30:.1f} GiB, half of what is free, may be taken: lower it, or do without "
            "(scheduler.preemption=recompute, cache.host_prefix_gib unset)"
        )
    if swaps and cache.num_host_blocks is None and cache.host_memory_gib is None:
        total += max(1, min(num_blocks, room // block_bytes - total, _blocks(HOST_GIB, block_bytes)))
    return total


def _blocks(gib: float, block_bytes: int) -> int:
    return int(gib * 2**30) // block_bytes
