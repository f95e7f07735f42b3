"""`transformers.generate`: static, left-padded batches.

A batch runs until its longest request is done, and the next one starts then. Tokens beyond a request's own length
are computed, because a static batch cannot avoid it, but not credited; a token counts from the step it appeared in.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from experiments.lab import hardware
from experiments.lab.metrics import RequestTrace, Served
from experiments.lab.workloads import Item
from mini_infer.assets import shipped_path
from mini_infer.core.config import DType, LoadFormat, ModelConfig
from mini_infer.core.errors import ConfigError

PAD = 0  # any id: padded positions are masked


class HFGenerate:
    """The model of `config` in transformers, with its SDPA attention, the engine's dtype and the same threads."""

    def __init__(self, config: ModelConfig) -> None:
        self._model = load_checkpoint(config, "hf", "sdpa")
        self._device = self._model.device

    def serve(self, items: Sequence[Item], concurrency: int) -> Served:
        start = time.perf_counter()
        traces: list[RequestTrace] = []
        for first in range(0, len(items), concurrency):
            traces += self._batch(items[first : first + concurrency])
        return Served(tuple(traces), start, time.perf_counter())

    def close(self) -> None:
        del self._model

    def _batch(self, items: Sequence[Item]) -> list[RequestTrace]:
        arrival = time.perf_counter()
        longest = max(len(item.prompt) for item in items)
        steps = max(item.output_tokens for item in items)
        rows = [[PAD] * (longest - len(item.prompt)) + list(item.prompt) for item in items]
        mask = [[0] * (longest - len(item.prompt)) + [1] * len(item.prompt) for item in items]
        clock = _Clock()
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor(rows, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
                generation_config=GenerationConfig(
                    do_sample=False, max_new_tokens=steps, pad_token_id=PAD, eos_token_id=None
                ),
                streamer=clock,
            )
        new_tokens = output[:, longest:].tolist()
        return [
            RequestTrace(
                prompt_tokens=len(item.prompt),
                asked_tokens=item.output_tokens,
                arrival=arrival,
                token_times=tuple(clock.times[: item.output_tokens]),
                token_ids=tuple(tokens[: item.output_tokens]),
            )
            for item, tokens in zip(items, new_tokens, strict=True)
        ]


def load_checkpoint(config: ModelConfig, kind: str, attention: str) -> Any:
    """The transformers model on the engine's device and in its dtype, with nothing of its own to bend generation.

    Raises ConfigError, in the name of the variant kind `kind`, where there is no checkpoint that both sides can load.
    """
    if config.load_format is not LoadFormat.auto:
        raise ConfigError(
            f"the variant kind `{kind}` needs a checkpoint that both sides can load, so model.load_format=auto; "
            f"got {config.load_format.value}. Choose model=tiny or a Hugging Face folder"
        )
    device = hardware.resolve(config.device)
    dtype: Any = config.dtype.value
    if config.dtype is DType.auto and device == "cpu":
        dtype = "float32"
    path = shipped_path(config.path) or config.path
    transformers_logging.disable_progress_bar()  # it would stand between our own lines
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention)
    model.to(device).eval()
    # `generate` fills what is left out from here: a checkpoint's end-of-sequence, its penalties, its temperature.
    model.generation_config = GenerationConfig()
    return model


class _Clock(BaseStreamer):
    """Notes when each step's tokens reach the host. `generate` puts the prompt first, which is no token."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            self.times.append(time.perf_counter())
        self._prompt_seen = True

    def end(self) -> None:
        pass
