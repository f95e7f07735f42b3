"""A decoder with random weights, small enough to be quantized in a second."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest


def save_random(folder: Path, **changes: Any) -> Path:
    """bfloat16, two layers, as many KV heads as heads, a bias before attention, the shipped tokenizer."""
    import torch  # here, since pytest reads this file before tests/conftest.py prepares for Triton
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from mini_infer.assets.prompts import ASSETS

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2, "initializer_range": 0.04} | changes
    config = Qwen2Config(
        **shape,
        vocab_size=2048,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )
    model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # no two channels alike, some of them large
            parameter.data = torch.rand_like(parameter) + 0.5
            parameter.data[::16] *= 8
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(ASSETS / "tiny-target" / file, folder / file)
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("calibration") / "model")


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For blocks of 128 x 128, of which keys and values fill half of one."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 1, "initializer_range": 0.02}
    return save_random(tmp_path_factory.mktemp("calibration") / "wide", **shape)
