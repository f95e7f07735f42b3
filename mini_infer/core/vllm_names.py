"""vLLM's and nano-vllm's names of settings, as flags have them (`max-model-len`) and Python has (`max_model_len`)."""

from __future__ import annotations

from typing import Any, NamedTuple


class Ours(NamedTuple):
    """
    Attributes:
        name: section.setting of an EngineConfig, or a flag of the server's.
        values: ours for theirs, "" for a flag without a value; any other value is taken as it is.
    """

    name: str
    values: dict[str, Any] = {}  # noqa: RUF012

    def value(self, theirs: Any) -> Any:
        if "false" in self.values:  # a switch, of whatever Python takes for true or false
            theirs = (theirs if isinstance(theirs, str) else str(bool(theirs))).lower()
        return self.values.get(theirs, theirs) if isinstance(theirs, str) else theirs


ON, OFF = {"": True, "true": True, "false": False}, {"": False, "true": False, "false": True}
HALF = {"half": "float16", "float": "float32"}
SETTINGS = {
    "max-model-len": Ours("model.max_model_len"),
    "dtype": Ours("model.dtype", HALF),
    "tokenizer": Ours("model.tokenizer"),
    "load-format": Ours("model.load_format", {"safetensors": "auto"}),
    "quantization": Ours("model.quantization", {"compressed-tensors": "none", "awq": "none", "gptq": "none"}),
    "device": Ours("model.device"),
    "seed": Ours("seed"),
    "tensor-parallel-size": Ours("parallel.tensor"),
    "pipeline-parallel-size": Ours("parallel.pipeline"),
    "gpu-memory-utilization": Ours("cache.gpu_memory_utilization"),
    "kv-cache-dtype": Ours("cache.dtype", {"fp8_e4m3": "fp8"}),
    "block-size": Ours("cache.block_size"),
    "kvcache-block-size": Ours("cache.block_size"),
    "num-gpu-blocks-override": Ours("cache.num_blocks"),
    "swap-space": Ours("cache.host_memory_gib"),
    "kv-offloading-size": Ours("cache.host_prefix_gib"),
    "enable-prefix-caching": Ours("cache.prefix_caching", ON),
    "no-enable-prefix-caching": Ours("cache.prefix_caching", OFF),
    "max-num-seqs": Ours("scheduler.max_num_seqs"),
    "max-num-batched-tokens": Ours("scheduler.max_num_batched_tokens"),
    "enable-chunked-prefill": Ours("scheduler.chunked_prefill", ON),
    "no-enable-chunked-prefill": Ours("scheduler.chunked_prefill", OFF),
    "scheduling-policy": Ours("scheduler.policy"),
    "async-scheduling": Ours("scheduler.overlap", {"": "always", "true": "always", "false": "never"}),
    "no-async-scheduling": Ours("scheduler.overlap", {"": "never", "true": "never", "false": "always"}),
    "enforce-eager": Ours("graphs.capture", {"": "never", "true": "never", "false": "auto"}),
    "max-loras": Ours("lora.max_adapters"),
    "max-lora-rank": Ours("lora.max_rank"),
}
