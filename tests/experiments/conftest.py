"""Composing configs as run.py does, and a small random checkpoint."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from experiments.lab import schema
from experiments.lab.measure import clocks, lending, subjects
from mini_infer import LLMEngine
from mini_infer.runtime.executor import dry

ROOT = Path(__file__).resolve().parents[2]
TEST_CONF = Path(__file__).resolve().parent / "conf"  # experiment=probe


@pytest.fixture(scope="session")
def compose_config() -> Callable[..., DictConfig]:
    schema.register(ROOT / "conf")
    OmegaConf.register_new_resolver("lab.help", lambda: "", replace=True)

    @cache
    def composed(*overrides: str) -> DictConfig:
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            here = [f"hydra.searchpath=[file://{TEST_CONF}]", "measure.processes=1"]  # tests plant faults in this one
            return compose("config", overrides=[*here, *overrides])

    return lambda *overrides: copy.deepcopy(composed(*overrides))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 of two layers. Its generation_config.json would bend any generation that heeds it."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=list(range(0, 128, 2)), do_sample=True, temperature=3.0, repetition_penalty=1.5
    )
    folder = tmp_path_factory.mktemp("models") / "random-qwen2"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def frozen_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was frozen after the collection of the tests stays so, and a measurement's own collections are short."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.fixture(autouse=True)
def steady_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that runs the tests is busy, and its clocks are nothing that they are about."""
    monkeypatch.setattr(clocks, "take", lambda device, wanted=None: clocks.Speed(1.0))


class VirtualTime:
    """A clock that moves as the dry model sleeps, with noise: a machine of its own, whatever else this one does."""

    def __init__(self, seed):
        self.now = 0.0
        self._rng = np.random.default_rng(seed)
        self.new_pass()

    def new_pass(self):
        """Each pass meets the machine in another mood."""
        self._mood = float(np.exp(self._rng.normal(0, 0.02)))

    def __call__(self):
        self.now += 1e-6
        return self.now

    def sleep(self, seconds):
        self.now += seconds * self._mood * float(np.exp(self._rng.normal(0, 0.05)))


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """What engines of the lab, and those who watch them, read instead of the machine's clock."""
    clock = VirtualTime(seed=0)

    def engine(config):
        clock.new_pass()
        return LLMEngine(config, clock=clock)

    monkeypatch.setattr(subjects, "LLMEngine", engine)
    monkeypatch.setattr(lending, "clock", clock)
    # The dry model's sleep alone: a thread that another test left behind must not move this clock.
    monkeypatch.setattr(dry, "time", SimpleNamespace(sleep=clock.sleep))
    return clock
