"""LLM: the engine under the names that vLLM's and nano-vllm's users type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError
from mini_infer.core.request import RequestOutput
from mini_infer.runtime.llm_engine import LLMEngine, Params
from mini_infer.runtime.text.prompt import ChatMessage, Prompt

# Their name -> our setting. What _SECTIONS names (cache={...}) is taken as it is.
_OPTIONS = {
    "tokenizer": "model.tokenizer",
    "dtype": "model.dtype",
    "max_model_len": "model.max_model_len",
    "load_format": "model.load_format",
    "block_size": "cache.block_size",
    "kvcache_block_size": "cache.block_size",
    "num_gpu_blocks_override": "cache.num_blocks",
    "gpu_memory_utilization": "cache.gpu_memory_utilization",
    "enable_prefix_caching": "cache.prefix_caching",
    "swap_space": "cache.host_memory_gib",
    "max_num_seqs": "scheduler.max_num_seqs",
    "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
    "enable_chunked_prefill": "scheduler.chunked_prefill",
    "enforce_eager": "graphs.capture",
    "quantization": "model.quantization",
    "kv_cache_dtype": "cache.dtype",
    "tensor_parallel_size": "parallel.tensor",
    "pipeline_parallel_size": "parallel.pipeline",
    "max_loras": "lora.max_adapters",
    "max_lora_rank": "lora.max_rank",
    "seed": "seed",
}
_SECTIONS = ("cache", "scheduler", "attention", "graphs", "speculation", "parallel", "lora")


class LLM:
    """
        llm = LLM("Qwen/Qwen2.5-7B-Instruct", enforce_eager=True, max_model_len=4096)
        outputs = llm.generate(["Hello"], SamplingParams(temperature=0.6, max_tokens=64))
        print(outputs[0].outputs[0].text)

    Args:
        model: as in `ModelConfig.path`.
        options: vLLM's and nano-vllm's names for settings, or sections of EngineConfig (cache={...}).

    Raises:
        ConfigError: an option that is not known, or settings that cannot work.
        ModelError: a model that cannot be loaded.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.engine = LLMEngine(_config(model, options))

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params | Sequence[Params] | None = None
    ) -> list[RequestOutput]:
        """As `LLMEngine.generate`."""
        return self.engine.generate(prompts, sampling_params)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: Params | Sequence[Params] | None = None,
    ) -> list[RequestOutput]:
        """One conversation, or several."""
        return self.engine.generate(messages, sampling_params)


def _config(model: str, options: dict[str, Any]) -> EngineConfig:
    values: dict[str, Any] = {"model": {"path": model}}
    for name in [name for name in _SECTIONS if name in options]:
        values[name] = dict(options.pop(name))
    for name, value in options.items():
        if name not in _OPTIONS:
            known = ", ".join((*_OPTIONS, *_SECTIONS))
            raise ConfigError(f"LLM has no option {name!r}={value!r}. Known: {known}")
        if name == "enforce_eager":
            value = "never" if value else "auto"
        section, _, key = _OPTIONS[name].rpartition(".")
        (values.setdefault(section, {}) if section else values)[key] = value
    return EngineConfig.from_dict(values)
