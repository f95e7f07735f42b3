"""Prefixes that the pool gives up and that come back from host memory and from files: tokens are those that a request
gets alone, whatever else goes on."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integrity import check_scheduler

from mini_infer import ConfigError, EngineConfig, LLMEngine, SamplingParams
from mini_infer.assets import shipped_path
from mini_infer.cache.block_files import BlockFiles
from mini_infer.cache.transfer import _WRITERS
from mini_infer.core.model_config import DRY_TOKEN_BYTES
from mini_infer.core.plan import StepRecord

MODEL = {"path": "tiny-draft", "dtype": "float32", "device": "cpu", "max_model_len": 160}
TIGHT = {"block_size": 8, "num_blocks": 20, "watermark": 0.0}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TALKS = [[(7 * talk + 3 * i) % 1000 + 1 for i in range(72 + 8 * talk)] for talk in range(4)]

MECHANISMS: dict[str, dict[str, Any]] = {
    "one at a time": {"scheduler": {"max_num_seqs": 1}},
    "chunks": {"scheduler": {"max_num_batched_tokens": 24, "max_num_seqs": 2}},
    "overlap": {"scheduler": {"overlap": "always"}},
    "whole prompts": {"scheduler": {"chunked_prefill": False, "max_num_batched_tokens": 160}},
    "swap": {"scheduler": {"preemption": "swap"}, "cache": {"num_host_blocks": 4}},
    "suffix drafts": {"speculation": {"method": "suffix", "num_tokens": 3, "adaptive": False}},
    "a draft model": {
        "speculation": {"method": "draft", "num_tokens": 2, "adaptive": False, "draft": {"path": "tiny-draft"}},
    },
}


def make(**changes: Any) -> LLMEngine:
    cache = {**TIGHT, **changes.pop("cache", {})}
    engine = LLMEngine(EngineConfig.from_dict({"model": MODEL, "cache": cache, "seed": 0, **changes}))
    engine.scheduler._loads.costs.loading_pays = lambda *known: True  # type: ignore[method-assign]
    return engine


def talk(engine: LLMEngine, turns: int = 3) -> list[list[int]]:
    """Conversations take turns, so that each finds its blocks evicted when it goes on."""
    said = [prompt.copy() for prompt in TALKS]
    for turn in range(turns):
        for prompt, output in zip(said, engine.generate(said, PARAMS), strict=True):
            prompt += [*output.outputs[0].token_ids, 5 + turn]
        check_scheduler(engine.scheduler)
    return said


def total(engine: LLMEngine, name: str) -> int:
    return sum(getattr(record, name) for record in engine.records)


@pytest.fixture(scope="module")
def alone() -> Iterator[list[list[int]]]:
    engine = make(cache={"num_blocks": 200, "prefix_caching": False}, scheduler={"max_num_seqs": 1})
    yield talk(engine)
    engine.close()


@pytest.mark.parametrize(
    ("mechanism", "files"),
    [*((name, True) for name in MECHANISMS), ("overlap", False), ("swap", False), ("a draft model", False)],
)
def test_conversations_come_back(alone: list[list[int]], mechanism: str, files: bool, tmp_path: Path) -> None:
    changes = MECHANISMS[mechanism]
    tier: dict[str, Any] = {"host_prefix_gib": 2**-4}
    if files:  # host memory holds few of them
        tier = {"host_prefix_gib": 2**-11, "disk_prefix_path": str(tmp_path)}
    engine = make(**{**changes, "cache": {**changes.get("cache", {}), **tier}})
    assert talk(engine) == alone
    assert total(engine, "evictions") > 0
    assert (total(engine, "disk_hit_tokens") > 0) == files
    assert total(engine, "lost_blocks") == 0
    hits = sum(total(engine, f"{tier}_hit_tokens") for tier in ("host", "disk"))
    assert 0 < hits <= total(engine, "prefix_hit_tokens")
    engine.close()


def test_files_outlive_the_engine_and_are_shared_by_those_beside_it(alone: list[list[int]], tmp_path: Path) -> None:
    tier = {"cache": {"host_prefix_gib": 2**-4, "disk_prefix_path": str(tmp_path / "files")}}
    shipped = shipped_path("tiny-draft")
    assert shipped is not None
    elsewhere = shutil.copytree(shipped, tmp_path / "elsewhere")
    os.utime(elsewhere / "model.safetensors", (1, 1))  # it came at another time, too
    first, second = make(**tier), make(**tier, model={**MODEL, "path": str(elsewhere)})
    prompts = TALKS[:2]
    expected = [output.outputs[0].token_ids for output in first.generate(prompts, PARAMS)]
    first.generate(TALKS[2:], PARAMS)  # what is not written when the last step ends is written beside the next ones
    assert any(thread.name.startswith("kv writer") for thread in threading.enumerate())
    first.close()
    assert not any(thread.name.startswith(("kv writer", "kv reader")) for thread in threading.enumerate())
    assert [output.outputs[0].token_ids for output in second.generate(prompts, PARAMS)] == expected
    assert total(second, "disk_hit_tokens") > 0.5 * sum(map(len, prompts))
    second.close()
    other = make(**tier, attention={"decode": "sdpa"})  # which may round in another way
    assert [output.outputs[0].token_ids for output in other.generate(prompts, PARAMS)] == expected
    assert total(other, "disk_hit_tokens") == 0
    other.close()


def test_broken_files_are_computed_again(alone: list[list[int]], tmp_path: Path) -> None:
    tier = {"cache": {"host_prefix_gib": 2**-4, "disk_prefix_path": str(tmp_path)}}
    first = make(**tier)
    talk(first, turns=1)
    first.generate([[9] * 20], PARAMS)
    first.close()
    for number, path in enumerate(sorted(path for path in tmp_path.rglob("*") if path.is_file())):
        if number % 3 == 0:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    second = make(**tier)
    assert talk(second) == alone
    assert total(second, "lost_blocks") > 0
    second.close()


def test_a_full_disk_costs_no_answer(
    alone: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*paths: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    engine = make(cache={"host_prefix_gib": 2**-11, "disk_prefix_path": str(tmp_path)})
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", full)
        assert talk(engine) == alone
    assert total(engine, "lost_blocks") > 0
    assert total(engine, "disk_hit_tokens") == 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    said = [record for record in caplog.records if "No space left on device" in record.getMessage()]
    assert 0 < len(said) <= _WRITERS, "nothing more is tried for a while"
    files = engine.executor.files
    assert files is not None
    files._full_until = 0.0  # a while has passed
    assert talk(engine) == alone
    assert total(engine, "disk_hit_tokens") > 0
    engine.close()


@pytest.mark.parametrize(("block_s", "loads"), [(0.0, True), (0.1, False)], ids=["fast files", "slow files"])
def test_files_are_read_where_that_takes_less_than_computing(
    block_s: float, loads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 8 tokens of a block are computed in 24 ms. Host memory has room for one prompt."""
    dry = {"load_format": "dry", "dry": {"prefill_token_us": 3000, "max_model_len": 160}}

    def start(host_blocks: int) -> LLMEngine:
        host = {"host_prefix_gib": host_blocks * 8 * DRY_TOKEN_BYTES / 2**30, "disk_prefix_path": str(tmp_path)}
        settings = {"model": dry, "cache": {**TIGHT, **host}, "scheduler": {"max_num_seqs": 1}}
        return LLMEngine(EngineConfig.from_dict(settings))

    first = start(host_blocks=80)
    answers = [output.outputs[0].token_ids for output in first.generate(TALKS[:3], PARAMS)]
    first.generate([[9] * 20], PARAMS)  # beside which the last blocks are written
    first.close()
    read = BlockFiles.read

    def timed(files: BlockFiles, *what: Any) -> bool:
        time.sleep(block_s)
        return read(files, *what)

    monkeypatch.setattr(BlockFiles, "read", timed)
    second, hits = start(host_blocks=12), list[int]()
    for _ in range(2):
        before = total(second, "disk_hit_tokens")
        assert [output.outputs[0].token_ids for output in second.generate(TALKS[:3], PARAMS)] == answers
        hits.append(total(second, "disk_hit_tokens") - before)
    assert hits[0] > 0, "nobody knows yet what a file takes"
    assert (hits[1] > 50) == loads
    assert loads or hits[1] == 0
    second.close()


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    for cache, why in (
        ({"host_prefix_gib": 10**6}, r"host_prefix_gib=1000000.* takes .* GiB of page-locked .* lower it"),
        ({"host_prefix_gib": 1e-9}, "less than one KV block"),
        ({"host_prefix_gib": 1, "prefix_caching": False}, "Set it to true"),
        ({"host_prefix_gib": 1, "disk_prefix_path": ""}, "name a folder, or leave it unset"),
        ({"disk_prefix_path": str(tmp_path)}, r"Set cache\.host_prefix_gib, too"),
        ({"host_prefix_gib": 1, "disk_prefix_gib": 1}, r"set cache\.disk_prefix_path"),
    ):
        with pytest.raises(ConfigError, match=why):
            make(cache=cache)


def test_records_add_up() -> None:
    engine = make(cache={"host_prefix_gib": 2**-4})
    seen: list[StepRecord] = []
    engine.observers.append(seen.append)
    talk(engine)
    assert sum(record.saved_blocks for record in seen) >= sum(record.kv.host_cached_blocks for record in seen[-1:]) > 0
    assert total(engine, "loaded_blocks") * 8 >= total(engine, "host_hit_tokens") > 0
    engine.core.reset()
    assert engine.scheduler.usage().host_cached_blocks == 0
    engine.close()
