"""`transformers.generate`: static, left-padded batches.

A batch runs until its longest request is done, and the next one starts then. Tokens beyond a request's own length
are computed, because a static batch cannot avoid it, but not credited; a token counts from the step it appeared in.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from experiments.lab.measure.kinds import Subject
from experiments.lab.measure.traces import RequestTrace, Served
from experiments.lab.workloads import Item
from mini_infer.assets import shipped_path
from mini_infer.core.config import DType, EngineConfig, LoadFormat, ModelConfig
from mini_infer.core.errors import ConfigError
from mini_infer.modeling.loader import load_model, load_spec, resolve_device, resolve_dtype

PAD = 0  # any id: padded positions are masked


class HFGenerate(Subject):
    """The model of `config` in transformers, with its SDPA attention, the engine's dtype and the same threads. Each
    batch has a cache of its own."""

    def __init__(self, config: ModelConfig) -> None:
        self._model = load_checkpoint(config, "hf", "sdpa")
        self._device = self._model.device
        self.about = describe(self._model)

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
        times: list[float] = []  # when the prompt, which `generate` puts first, and each step's tokens reach the host
        clock = SimpleNamespace(put=lambda tokens: times.append(time.perf_counter()), end=lambda: None)
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
                token_times=tuple(times[1 : 1 + item.output_tokens]),
                token_ids=tuple(tokens[: item.output_tokens]),
                name=item.name,
            )
            for item, tokens in zip(items, new_tokens, strict=True)
        ]


def open_peer(config: EngineConfig, settings: Mapping[str, Any]) -> HFGenerate:
    """For a process of its own, which takes no more of the GPU's memory than the engine would."""
    set_threads(config, settings)
    if resolve_device(config.model).type == "cuda" and config.cache.memory_gib is None:
        torch.cuda.set_per_process_memory_fraction(config.cache.gpu_memory_utilization)
    return HFGenerate(config.model)


def set_threads(config: EngineConfig, settings: Mapping[str, Any]) -> None:
    """On a CPU those of the process that measures. On a GPU one: what is left for the CPU is small, and threads that
    wait for each other only delay it (on an H200's 16 cores a step of `generate` took 51 ms with 16, and 20 with 1)."""
    on_gpu = resolve_device(config.model).type == "cuda"
    torch.set_num_threads(1 if on_gpu else settings["threads"])


def load_checkpoint(config: ModelConfig, kind: str, attention: str) -> Any:
    """The transformers model on the engine's device and in its dtype, with nothing of its own to bend generation; with
    load_format=dummy of the engine's random weights, so that even then their tokens can be compared. Raises
    ConfigError, in the name of the variant kind `kind`, where the model has no weights."""
    if config.load_format is LoadFormat.dry:
        raise ConfigError(
            f"the variant kind `{kind}` needs weights: model.load_format=dummy or model.load_format=auto; got dry. "
            "Choose model=tiny, a Hugging Face folder, or a shape such as model=qwen3_0_6b"
        )
    transformers_logging.disable_progress_bar()  # it would stand between our own lines
    device = resolve_device(config)
    if config.load_format is LoadFormat.dummy:
        model = _with_dummy_weights(config, attention)
    else:
        dtype = "float32" if config.dtype is DType.auto and device.type == "cpu" else config.dtype.value
        path = shipped_path(config.path) or config.path
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention)
    model.to(device).eval()
    # `generate` fills what is left out from here: a checkpoint's end-of-sequence, its penalties, its temperature.
    model.generation_config = GenerationConfig()
    return model


def _with_dummy_weights(config: ModelConfig, attention: str) -> Any:
    """Its parameters are parts of the engine's merged ones: 7B take as long as filling them on the device."""
    spec, device = load_spec(config), resolve_device(config)
    dtype = resolve_dtype(config, spec, device)
    ours = load_model(config, spec, dtype, device, max_len=1)
    if config.hf_config is None:
        settings = AutoConfig.from_pretrained(config.path)
    else:
        values = {key: value for key, value in config.hf_config.items() if key != "model_type"}
        settings = AutoConfig.for_model(config.hf_config["model_type"], **values)
    architecture = getattr(transformers, spec.architecture)
    with no_init_weights():  # parameters that nobody touches take no time and no memory
        model = architecture._from_config(settings, dtype=dtype, attn_implementation=attention)
    weights = {name: tensor.memory for name, tensor in ours.checkpoint_tensors().items()}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    return model


def describe(model: Any) -> dict[str, Any]:
    return {
        "transformers": transformers.__version__,
        "torch": str(torch.__version__),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
        "cpu_threads": torch.get_num_threads(),
    }
