"""From an EngineConfig to the parts of an engine: what the model allows, how much KV memory there is, who does what."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mini_infer.cache.kv_manager import KVManager
from mini_infer.cache.kv_store import KVStore
from mini_infer.cache.swap import HostStore
from mini_infer.core.config import CacheConfig, EngineConfig, LoadFormat, Preemption
from mini_infer.core.errors import ConfigError
from mini_infer.modeling.checkpoint import resolve_folder
from mini_infer.modeling.loader import load_model, load_spec, resolve_device, resolve_dtype
from mini_infer.runtime.dry import DryModel
from mini_infer.runtime.runner import Runner, StepModel
from mini_infer.runtime.sampler import SamplingState
from mini_infer.runtime.scheduler import Scheduler
from mini_infer.runtime.slots import SlotState
from mini_infer.runtime.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from mini_infer.runtime.torch_model import AttentionBackends, TorchModel

CPU_KV_GIB = 0.5


@dataclass(frozen=True)
class EngineParts:
    tokenizer: Tokenizer
    runner: Runner
    make_scheduler: Callable[[], Scheduler]
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int  # tokens of prompt and output
    limit_reason: str  # what sets max_model_len, for the message to who exceeds it


@dataclass(frozen=True)
class Limits:
    """The longest request and the size of the pool, settled."""

    max_model_len: int
    reason: str
    num_blocks: int
    num_host_blocks: int


def build_parts(config: EngineConfig) -> EngineParts:
    """Raises ConfigError or ModelError where the settings cannot work; what needs no weights is found out first."""
    if config.model.load_format is LoadFormat.dry:
        return _build_dry(config)
    model_config = config.model
    if model_config.hf_config is None:  # a hub name is looked up once; from here on it is a folder
        folder = resolve_folder(model_config.path, weights=model_config.load_format is LoadFormat.auto)
        model_config = dataclasses.replace(model_config, path=str(folder))
    spec = load_spec(model_config)
    device = resolve_device(model_config)
    dtype = resolve_dtype(model_config, spec, device)
    shape = {"num_layers": spec.num_layers, "num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
    block_size = config.cache.block_size
    block_bytes = KVStore.bytes_per_block(**shape, block_size=block_size, dtype=dtype)
    limits = settle_limits(config, spec.max_model_len, _kv_memory(config.cache, device) // block_bytes)
    backends = AttentionBackends.select(config.attention, spec, block_size, dtype, device)
    tokenizer = load_tokenizer(model_config)
    model = load_model(model_config, spec, dtype, device, limits.max_model_len)
    if device.type == "cuda":  # the weights have taken their share
        limits = settle_limits(config, spec.max_model_len, _kv_memory(config.cache, device) // block_bytes)
    store = KVStore(**shape, num_blocks=limits.num_blocks, block_size=block_size, dtype=dtype, device=device)
    host = HostStore(store, limits.num_host_blocks) if limits.num_host_blocks else None
    eos = spec.eos_token_ids or tokenizer.eos_token_ids
    return _assemble(config, limits, TorchModel(model, store, host, backends), tokenizer, spec.vocab_size, eos, device)


def _build_dry(config: EngineConfig) -> EngineParts:
    dry = config.model.dry
    tokenizer = ByteTokenizer(dry.vocab_size)
    plenty = config.scheduler.max_num_seqs * -(-dry.max_model_len // config.cache.block_size)
    limits = settle_limits(config, dry.max_model_len, affordable_blocks=plenty)
    model = DryModel(dry, limits.num_blocks, config.cache.block_size, limits.num_host_blocks)
    return _assemble(config, limits, model, tokenizer, dry.vocab_size, tokenizer.eos_token_ids, torch.device("cpu"))


def _assemble(
    config: EngineConfig,
    limits: Limits,
    model: StepModel,
    tokenizer: Tokenizer,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    device: torch.device,
) -> EngineParts:
    def make_scheduler() -> Scheduler:
        kv = KVManager(
            limits.num_blocks,
            config.cache.block_size,
            limits.max_model_len,
            layout=config.cache.layout,
            prefix_caching=config.cache.prefix_caching,
            num_host_blocks=limits.num_host_blocks,
        )
        return Scheduler(config.scheduler, kv, config.cache.watermark)

    max_num_seqs = config.scheduler.max_num_seqs
    slots = SlotState(max_num_seqs, limits.max_model_len, config.cache.block_size)
    return EngineParts(
        tokenizer=tokenizer,
        runner=Runner(model, slots, SamplingState(max_num_seqs, vocab_size, device)),
        make_scheduler=make_scheduler,
        vocab_size=vocab_size,
        eos_token_ids=tuple(eos_token_ids),
        max_model_len=limits.max_model_len,
        limit_reason=limits.reason,
    )


def settle_limits(config: EngineConfig, model_limit: int, affordable_blocks: int) -> Limits:
    """Brings the model's length, the wishes of the config and the memory at hand together.

    Args:
        model_limit: tokens that the model's positions reach.
        affordable_blocks: KV blocks that fit in memory; used where cache.num_blocks is not given.

    Raises:
        ConfigError: the wishes contradict each other.
    """
    cache, scheduler, asked = config.cache, config.scheduler, config.model.max_model_len
    if asked is not None and asked > model_limit:
        raise ConfigError(
            f"model.max_model_len={asked} is beyond the model's own limit of {model_limit} tokens. Lower it, or "
            "stretch the model with rope scaling (linear or yarn) in its config.json"
        )
    length = asked or model_limit
    reason = f"model.max_model_len={asked}" if asked else f"the model's limit is {model_limit} tokens"
    longest = -(-length // cache.block_size)
    num_blocks = cache.num_blocks or min(affordable_blocks, scheduler.max_num_seqs * longest)
    if num_blocks < longest:
        capacity = num_blocks * cache.block_size
        pool = f"the KV pool holds {capacity} tokens ({num_blocks} blocks of {cache.block_size})"
        way_out = "raise cache.num_blocks" if cache.num_blocks else "give the cache more memory (cache.memory_gib)"
        if asked is not None or capacity < 2:
            raise ConfigError(
                f"{pool}, too few for one request of {length} tokens: {way_out}, or lower model.max_model_len"
            )
        length, reason = capacity, f"{pool}: {way_out}"
    if not scheduler.chunked_prefill and scheduler.max_num_batched_tokens < length:
        raise ConfigError(
            f"scheduler.chunked_prefill=false computes a prompt in one step, but "
            f"scheduler.max_num_batched_tokens={scheduler.max_num_batched_tokens} is less than the longest prompt "
            f"({length} tokens, {reason}): raise it to {length}, or lower model.max_model_len"
        )
    swaps = scheduler.preemption is Preemption.swap
    num_host_blocks = (cache.num_host_blocks or num_blocks) if swaps else 0
    return Limits(length, reason, num_blocks, num_host_blocks)


def _kv_memory(cache: CacheConfig, device: torch.device) -> int:
    """Bytes that KV may take, beside what is on the device already."""
    if cache.memory_gib is not None or device.type != "cuda":
        return int((cache.memory_gib or CPU_KV_GIB) * 2**30)
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * cache.gpu_memory_utilization) - (total - free))
