"""The longest request and the sizes of the pools, settled from what is asked for and what the machine has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mini_infer import ConfigError, EngineConfig
from mini_infer.core import limits
from mini_infer.core.limits import settle_limits

GIB = 2**30
BLOCK = 2**20  # bytes


def host_blocks(monkeypatch: pytest.MonkeyPatch, free_gib: float, preemption: str = "swap", **cache: object) -> int:
    free = SimpleNamespace(available=int(free_gib * GIB))
    monkeypatch.setattr(limits.psutil, "virtual_memory", lambda: free)
    config = EngineConfig.from_dict({"scheduler": {"preemption": preemption}, "cache": cache})
    return settle_limits(config, 4096, affordable_blocks=10**6, block_bytes=BLOCK).num_host_blocks


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
