"""The longest request and the sizes of the pools, settled from what is asked for and what the machine has."""

from __future__ import annotations

import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from mini_infer import ConfigError, EngineConfig
from mini_infer.core import limits
from mini_infer.core.limits import require_whole_prompts, settle_limits

GIB = 2**30
BLOCK = 2**20  # bytes


def host_blocks(monkeypatch: pytest.MonkeyPatch, free_gib: float, preemption: str = "swap", **cache: object) -> int:
    free = SimpleNamespace(available=int(free_gib * GIB))
    monkeypatch.setattr(limits.psutil, "virtual_memory", lambda: free)
    config = EngineConfig.from_dict({"scheduler": {"preemption": preemption}, "cache": cache})
    return settle_limits(config, 4096, affordable_blocks=10**6, block_bytes=BLOCK).num_host_blocks


@pytest.mark.parametrize(
    ("settings", "pool_tokens", "why"),
    [
        ({}, 10**6, "4096 tokens, the model's limit is 4096 tokens): raise it to 4096"),
        ({"model": {"max_model_len": 600}}, 0, "600 tokens, model.max_model_len=600): raise it to 600"),
        ({"cache": {"num_blocks": 40}}, 0, "640 tokens, the KV pool holds no more): raise it to 640"),
        ({"cache": {"num_blocks": 4000}}, 0, "4096 tokens, the model's limit"),
        ({"cache": {"num_blocks": 32}}, 0, ""),
        ({"model": {"max_model_len": 512}}, 10**6, ""),
        ({}, 512, ""),
        ({}, 0, ""),
    ],
)
def test_whole_prompts_that_no_step_takes_are_refused_before_memory_is_known(
    settings: dict[str, dict[str, int]], pool_tokens: int, why: str
) -> None:
    """Where the pool's size decides, only what it holds at least is known, and less is asked of nobody."""
    scheduler = {"chunked_prefill": False, "max_num_batched_tokens": 512}
    config = EngineConfig.from_dict({**settings, "scheduler": scheduler})
    with pytest.raises(ConfigError, match=re.escape(why)) if why else nullcontext():
        require_whole_prompts(config, 4096, pool_tokens)


def test_swap_space_is_bounded_where_nobody_asked_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_blocks(monkeypatch, 100) == 4 * 1024, "4 GiB of a pool of 64"
    assert host_blocks(monkeypatch, 2) == 1024, "half of what is free"
    assert host_blocks(monkeypatch, 100, num_blocks=300) == 300, "the whole pool, where it is small"
    assert host_blocks(monkeypatch, 100, preemption="recompute") == 0


def test_swap_space_that_was_asked_for_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_blocks(monkeypatch, 100, num_host_blocks=20 * 1024) == 20 * 1024
    assert host_blocks(monkeypatch, 100, host_memory_gib=0.5) == 512
    with pytest.raises(ConfigError, match=r"num_host_blocks=20480 takes 20.0 GiB .* no more than 10.0 GiB.*lower it"):
        host_blocks(monkeypatch, 20, num_host_blocks=20 * 1024)
    with pytest.raises(ConfigError, match=r"host_memory_gib=12.0 takes 12.0 GiB"):
        host_blocks(monkeypatch, 20, host_memory_gib=12)
    with pytest.raises(ConfigError, match=r"less than one KV block of 1048576 bytes"):
        host_blocks(monkeypatch, 20, host_memory_gib=1e-6)
    with pytest.raises(ConfigError, match="say the same"):
        host_blocks(monkeypatch, 20, host_memory_gib=1, num_host_blocks=3)
    with pytest.raises(ConfigError, match=r"host_memory_gib=1.0 needs scheduler.preemption=swap"):
        host_blocks(monkeypatch, 20, preemption="recompute", host_memory_gib=1)
