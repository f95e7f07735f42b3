"""The text that a model is calibrated on, as token ids of equal length."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mini_infer.assets.corpus import TrainingTexts, stdlib_dir
from mini_infer.assets.prompts import heldout_sources
from mini_infer.core.errors import ConfigError


def shipped_text() -> Sequence[str]:
    """What the shipped models were trained on: this Python's standard library without the held-out modules and what
    shares a passage with them."""
    return TrainingTexts(stdlib_dir(), heldout_sources())


def files_text(paths: Sequence[Path]) -> list[str]:
    """Raises ConfigError where one cannot be read as UTF-8 text."""
    texts = []
    for path in paths:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {path} cannot be read as UTF-8 text: {error}") from error
    return texts


def calibration_ids(texts: Sequence[str], tokenizer: Any, samples: int, length: int, seed: int) -> Tensor:
    """[samples, length] int64: texts in an order drawn by `seed`, one after the other, cut into pieces.

    Raises ConfigError where there is less text than that.
    """
    wanted = samples * length
    order = list(range(len(texts)))
    random.Random(seed).shuffle(order)
    ids: list[int] = []
    for index in order:
        if len(ids) >= wanted:
            break
        ids += tokenizer(texts[index], add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < wanted:
        raise ConfigError(
            f"the calibration text has {len(ids):,} tokens, and --samples {samples} --length {length} take {wanted:,}: "
            f"give more text, or --samples {len(ids) // length}"
            + ("" if len(ids) >= length else " of a shorter --length")
        )
    return torch.tensor(ids[:wanted]).view(samples, length)
