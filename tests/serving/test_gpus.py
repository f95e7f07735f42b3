"""Which GPUs several models' engines see, and what they may take of one that they share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mini_infer.core.config import CacheConfig, EngineConfig
from mini_infer.core.errors import ConfigError
from mini_infer.runtime.worker import memory
from mini_infer.serving.processes.gpus import VISIBLE, placed
from mini_infer.serving.settings import ModelSettings

GIB = 2**30


def model(name: str, gpus: str | None = None, device: str = "auto", **sections: Any) -> ModelSettings:
    engine = EngineConfig.from_dict({"model": {"device": device}, **sections})
    return ModelSettings(served_model_name=name, gpus=gpus, engine=engine)


def seen(*models: ModelSettings, visible: int = 4, **environment: str) -> list[tuple[str | None, bool]]:
    found = placed(models, environment, lambda _: visible)
    return [(own.get(VISIBLE), engine.cache.gpu_shared) for engine, own in found]


def test_models_have_gpus_of_their_own() -> None:
    assert seen(model("a")) == [(None, False)], "one model sees all there are"
    assert seen(model("a", "2")) == [("2", False)]
    pair = {"parallel": {"tensor": 2}}
    assert seen(model("a", **pair), model("b"), model("c", device="cpu")) == [
        ("0,1", False),
        ("2", False),
        (None, False),
    ]
    assert seen(model("a"), model("b", "0"), **{VISIBLE: "GPU-7, GPU-9"}, visible=2) == [
        ("GPU-9", False),
        ("GPU-7", False),
    ]
    assert seen(model("a"), model("b"), visible=0) == [(None, False), (None, False)], "auto does without one"
    assert seen(model("a"), model("b"), visible=0, **{VISIBLE: "-1"}) == [("-1", False)] * 2, "as do those told to"


def test_models_share_the_gpus_that_they_name() -> None:
    half = {"cache": {"gpu_memory_utilization": 0.5}}
    said = {"cache": {"memory_gib": 4.0}}
    assert seen(model("a", "1", **half), model("b", "1", **half), model("c", "1,0", **said), model("d")) == [
        ("1", True),
        ("1", True),
        ("1,0", True),
        ("2", False),
    ]


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ConfigError, match=r"share GPU 0 want more than all of its memory \('a' 0.9, 'b' 0.9\)"):
        seen(model("a", "0"), model("b", "0"))
    with pytest.raises(ConfigError, match="model 'b' needs 1 GPUs of its own, and of the 1 that are visible here 0"):
        seen(model("a"), model("b"), visible=1)
    with pytest.raises(ConfigError, match="model 'a': gpus=3, and 2 GPUs are visible here"):
        seen(model("a", "3"), visible=2)
    with pytest.raises(ConfigError, match="model 'a': gpus=1,1 names a GPU twice"):
        seen(model("a", "1,1"))


def test_a_share_of_a_shared_gpu_is_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    free = 100 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 14 * GIB)
    overhead = memory._GRAPHS_RESERVE
    alone, shared = CacheConfig(gpu_memory_utilization=0.5), CacheConfig(gpu_memory_utilization=0.5, gpu_shared=True)
    assert memory.kv_memory(alone, device) == (70 - 40) * GIB - overhead, "others' 26 GiB count"
    assert memory.kv_memory(shared, device) == (70 - 14) * GIB - memory._CONTEXT - overhead, "and here they do not"
    free = 20 * GIB
    assert memory.kv_memory(shared, device, GIB) == (20 - 1) * GIB - overhead, "but there must be as much"
