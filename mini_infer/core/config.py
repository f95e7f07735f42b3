"""The EngineConfig tree: every setting of the engine, typed, validated and immutable.

Plain dataclasses, so that this module needs neither torch nor Hydra. Enum members carry the name that is
typed on a command line; a plain string of that name is accepted wherever an enum is expected.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from mini_infer.core.errors import ConfigError


class LoadFormat(str, Enum):
    auto = "auto"  # safetensors of a Hugging Face folder
    dummy = "dummy"  # random weights of the true shape, made on the device
    dry = "dry"  # no weights at all: a deterministic token function and a time model


class DType(str, Enum):
    auto = "auto"  # what the checkpoint says on a GPU, float32 on a CPU
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Device(str, Enum):
    auto = "auto"  # cuda where there is one
    cpu = "cpu"
    cuda = "cuda"


class KernelChoice(str, Enum):
    auto = "auto"  # triton on a GPU, torch on a CPU
    torch = "torch"  # plain torch operations: the reference
    triton = "triton"  # our own fused kernels


class When(str, Enum):
    auto = "auto"  # where it helps: on a GPU
    always = "always"
    never = "never"


class Layout(str, Enum):
    paged = "paged"  # blocks are taken as a request grows
    contiguous = "contiguous"  # baseline: one stretch of max_model_len slots for a request's whole life


class Batching(str, Enum):
    continuous = "continuous"  # requests join and leave between steps
    static = "static"  # baseline: a batch is admitted together, and the next one when all of it is done


class Policy(str, Enum):
    fcfs = "fcfs"  # in order of arrival
    priority = "priority"  # smaller number first, then arrival


class Preemption(str, Enum):
    recompute = "recompute"  # drop the KV and compute it again later
    swap = "swap"  # move the KV to host memory and back


class AttentionChoice(str, Enum):
    auto = "auto"  # the first of the others that can serve the model on this machine
    flash_attn = "flash_attn"  # FlashAttention-4: prefill on Hopper and Blackwell
    triton = "triton"  # our own kernels, Flash Decoding among them
    sdpa = "sdpa"  # torch.nn.functional.scaled_dot_product_attention over gathered blocks


@dataclass(frozen=True)
class DryConfig:
    """Shape and time model of the dry model (`load_format: dry`). Times of zero do not sleep."""

    vocab_size: int = 512  # token ids of the dry model, at least 261
    max_model_len: int = 8192  # tokens of prompt + output that the dry model takes
    step_ms: float = 0.0  # milliseconds that every step takes, whatever is in it
    prefill_token_us: float = 0.0  # microseconds that a step takes longer for each prompt token in it
    decode_token_us: float = 0.0  # microseconds that a step takes longer for each decoding request in it

    def __post_init__(self) -> None:
        _coerce(self)
        _at_least(self, "vocab_size", 261)  # 256 bytes and the special tokens of the byte tokenizer
        _at_least(self, "max_model_len", 2)
        for name in ("step_ms", "prefill_token_us", "decode_token_us"):
            _at_least(self, name, 0)


@dataclass(frozen=True)
class ModelConfig:
    path: str = "tiny-target"  # a folder, a hub name, or a shipped model: tiny-target, tiny-draft
    load_format: LoadFormat = LoadFormat.auto  # where the weights come from
    hf_config: dict[str, Any] | None = None  # a config.json given inline, for dummy weights without a folder
    tokenizer: str | None = None  # a folder or a hub name; default: the model's own
    dtype: DType = DType.auto  # of weights, activations and KV
    device: Device = Device.auto  # where the model runs
    kernels: KernelChoice = KernelChoice.auto  # of everything between the matmuls and the attention
    max_model_len: int | None = None  # tokens of prompt + output; default: the model's own limit
    seed: int = 0  # of the random weights of load_format=dummy
    dry: DryConfig = field(default_factory=DryConfig)

    def __post_init__(self) -> None:
        _coerce(self)
        if not self.path:
            raise ConfigError("model.path is empty: give a folder, a hub name, or tiny-target")
        if self.hf_config is not None and self.load_format is not LoadFormat.dummy:
            raise ConfigError(
                f"model.hf_config goes with model.load_format=dummy, not {self.load_format.value}: "
                "a folder brings its own config.json"
            )
        if self.max_model_len is not None:
            _at_least(self, "max_model_len", 2)


@dataclass(frozen=True)
class CacheConfig:
    layout: Layout = Layout.paged  # how KV memory is given to requests
    block_size: int = 16  # tokens a block
    num_blocks: int | None = None  # blocks of KV; default: as many as the memory holds, and the batch can use
    memory_gib: float | None = None  # GiB for KV; default: 0.5 on a CPU, what gpu_memory_utilization leaves on a GPU
    gpu_memory_utilization: float = 0.9  # share of the GPU's memory for weights, activations and KV together
    prefix_caching: bool = True  # prompts that begin alike share the KV of their beginning, also over time
    num_host_blocks: int | None = None  # blocks of swap space; default: num_blocks with preemption=swap, else none
    watermark: float = 0.01  # share of the pool that admission leaves free for running requests to grow

    def __post_init__(self) -> None:
        _coerce(self)
        _at_least(self, "block_size", 1)
        if self.num_blocks is not None:
            _at_least(self, "num_blocks", 1)
        if self.num_host_blocks is not None:
            _at_least(self, "num_host_blocks", 0)
        if self.memory_gib is not None and not self.memory_gib > 0:
            raise ConfigError(f"cache.memory_gib must be above 0, got {self.memory_gib}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"cache.gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"cache.watermark must be in [0, 1), got {self.watermark}")
        if self.layout is Layout.contiguous and self.prefix_caching:
            raise ConfigError(
                "cache.prefix_caching=true needs cache.layout=paged: contiguous requests share no blocks. "
                "Set cache.prefix_caching=false"
            )


@dataclass(frozen=True)
class SchedulerConfig:
    batching: Batching = Batching.continuous  # when requests join the batch
    policy: Policy = Policy.fcfs  # whose turn it is, and who gives way when KV memory runs out
    max_num_seqs: int = 256  # requests that hold a batch slot at once
    max_num_batched_tokens: int = 8192  # token budget of a step
    chunked_prefill: bool = True  # a prompt may be computed in parts, over several steps, beside those that decode
    preemption: Preemption = Preemption.recompute  # what becomes of the KV of a request that gives way
    overlap: When = When.auto  # launches a step before the tokens of the step before it are read

    def __post_init__(self) -> None:
        _coerce(self)
        _at_least(self, "max_num_seqs", 1)
        _at_least(self, "max_num_batched_tokens", 1)
        if self.chunked_prefill and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"scheduler.max_num_batched_tokens={self.max_num_batched_tokens} is less than "
                f"scheduler.max_num_seqs={self.max_num_seqs}: a step could not give every running request "
                "its token. Raise the first or lower the second"
            )


@dataclass(frozen=True)
class AttentionConfig:
    """Prefill and decode rows of one batch may use different backends."""

    prefill: AttentionChoice = AttentionChoice.auto  # of prompts
    decode: AttentionChoice = AttentionChoice.auto  # of requests that decode

    def __post_init__(self) -> None:
        _coerce(self)


PREFILL_GRAPH_STEP = 64  # tokens from one size of graphs.max_prefill_tokens to the next


@dataclass(frozen=True)
class GraphsConfig:
    """CUDA graphs of whole decode steps, one launch instead of hundreds, and of other steps piece by piece: everything
    between two attention calls. `capture: never` means both."""

    capture: When = When.auto  # CUDA graphs of decode steps, and in pieces of steps with prompts; never: of neither
    max_batch: int | None = None  # rows of the largest graph, larger batches run eagerly; default: max_num_seqs
    max_prefill_tokens: int = 2048  # tokens of the largest step captured in pieces, a multiple of 64; 0: none

    def __post_init__(self) -> None:
        _coerce(self)
        if self.max_batch is not None:
            _at_least(self, "max_batch", 1)
        _at_least(self, "max_prefill_tokens", 0)
        below, rest = divmod(self.max_prefill_tokens, PREFILL_GRAPH_STEP)
        if rest:
            near = (below * PREFILL_GRAPH_STEP, (below + 1) * PREFILL_GRAPH_STEP)
            raise ConfigError(
                f"graphs.max_prefill_tokens must be a multiple of {PREFILL_GRAPH_STEP}, got {self.max_prefill_tokens}: "
                f"graphs are captured in steps of as many tokens. Set {near[0]} or {near[1]} (0: no such graphs)"
            )


class SpeculationMethod(str, Enum):
    none = "none"
    draft = "draft"  # a smaller model with the same tokenizer proposes
    ngram = "ngram"  # what followed the last tokens where they came before, in the prompt or the output
    suffix = "suffix"  # the same by counts, over the outputs of finished requests as well
    synthetic = "synthetic"  # accepted at a stated rate, whatever the target says: for speed studies alone


@dataclass(frozen=True)
class DraftConfig:
    """The smaller model that proposes, for `method: draft`; with `synthetic` it runs for what it costs."""

    path: str | None = None  # a folder, a hub name, or tiny-draft
    load_format: LoadFormat = LoadFormat.auto
    hf_config: dict[str, Any] | None = None  # a config.json given inline, for dummy weights without a folder
    dtype: DType = DType.auto
    seed: int = 0  # of dummy weights

    def __post_init__(self) -> None:
        _coerce(self)
        if self.load_format is LoadFormat.dry:
            raise ConfigError(
                "speculation.draft.load_format=dry: a draft needs a model. Give weights, or set it to dummy, or take "
                "speculation.method=ngram, suffix or synthetic, which need none"
            )
        if self.hf_config is not None and self.load_format is not LoadFormat.dummy:
            raise ConfigError(
                f"speculation.draft.hf_config goes with speculation.draft.load_format=dummy, not "
                f"{self.load_format.value}: a folder brings its own config.json"
            )

    @property
    def given(self) -> bool:
        return self.path is not None or self.hf_config is not None

    def model(self, target: ModelConfig) -> ModelConfig:
        """As the loader takes it; it computes where the target does, and with the same kernels."""
        return ModelConfig(
            path=self.path or "the draft",
            load_format=self.load_format,
            hf_config=self.hf_config,
            dtype=target.dtype if self.dtype is DType.auto else self.dtype,
            device=target.device,
            kernels=target.kernels,
            seed=self.seed,
        )


MAX_DRAFT_TOKENS = 32


@dataclass(frozen=True)
class SpeculationConfig:
    """Drafts of up to `num_tokens` tokens, all of which the target verifies in one step."""

    method: SpeculationMethod = SpeculationMethod.none
    num_tokens: int = 4  # drafted for a request in a step, at most
    adaptive: bool = True  # fewer drafts, or none, where a cost model measured at start says that they do not pay
    acceptance: float | None = None  # of each synthetic proposal, the one before it being accepted
    ngram_min: int = 2  # tokens that must match, at least
    ngram_max: int = 4  # tokens that are tried first
    draft: DraftConfig = field(default_factory=DraftConfig)

    def __post_init__(self) -> None:
        _coerce(self)
        method = self.method
        if not 1 <= self.num_tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError(
                f"speculation.num_tokens must be from 1 to {MAX_DRAFT_TOKENS}, got {self.num_tokens}. To draft "
                "nothing, set speculation.method=none"
            )
        _at_least(self, "ngram_min", 1)
        if self.ngram_max < self.ngram_min:
            raise ConfigError(
                f"speculation.ngram_max={self.ngram_max} is less than speculation.ngram_min={self.ngram_min}: raise "
                "the first or lower the second"
            )
        if method is SpeculationMethod.draft and not self.draft.given:
            raise ConfigError(
                "speculation.method=draft needs speculation.draft.path: a model with the target's tokenizer, such as "
                "tiny-draft for tiny-target"
            )
        if self.acceptance is not None and not 0 <= self.acceptance <= 1:
            raise ConfigError(f"speculation.acceptance must be from 0 to 1, got {self.acceptance}")
        if method is SpeculationMethod.none:  # whatever else is set waits until there is a method again
            return
        if self.draft.given and method not in (SpeculationMethod.draft, SpeculationMethod.synthetic):
            raise ConfigError(
                f"speculation.draft goes with speculation.method=draft or synthetic, not {method.value}: no model "
                "proposes there"
            )
        if (self.acceptance is not None) != (method is SpeculationMethod.synthetic):
            raise ConfigError(
                "speculation.acceptance is the rate of speculation.method=synthetic, which needs one, and of no other"
            )

    @property
    def has_draft_model(self) -> bool:
        return self.most > 0 and self.draft.given

    @property
    def rate(self) -> float | None:
        """Of synthetic acceptance."""
        return self.acceptance if self.method is SpeculationMethod.synthetic else None

    @property
    def most(self) -> int:
        """Drafts of a request in a step, at most: 0 without speculation."""
        return 0 if self.method is SpeculationMethod.none else self.num_tokens


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine is told. `EngineConfig(model="path")` is short for `ModelConfig(path="path")`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    graphs: GraphsConfig = field(default_factory=GraphsConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    seed: int = 0  # what the seeds of requests that bring none are made from

    if TYPE_CHECKING:

        def __init__(
            self,
            model: ModelConfig | str = ...,
            cache: CacheConfig = ...,
            scheduler: SchedulerConfig = ...,
            attention: AttentionConfig = ...,
            graphs: GraphsConfig = ...,
            speculation: SpeculationConfig = ...,
            seed: int = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        if isinstance(self.model, str):
            object.__setattr__(self, "model", ModelConfig(path=self.model))
        _coerce(self)
        swap = self.scheduler.preemption is Preemption.swap
        if not swap and self.cache.num_host_blocks:
            raise ConfigError(
                f"cache.num_host_blocks={self.cache.num_host_blocks} needs scheduler.preemption=swap: "
                "recomputing uses no host memory"
            )
        if swap and self.cache.num_host_blocks == 0:
            raise ConfigError(
                "scheduler.preemption=swap needs host memory: leave cache.num_host_blocks unset (as many as on the "
                "device), or give at least 1"
            )
        if self.speculation.has_draft_model and self.model.load_format is LoadFormat.dry:
            raise ConfigError(
                "speculation.draft.path: a dry model has no weights, and no draft either. Set speculation.method to "
                "ngram, suffix or synthetic, which need none"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EngineConfig:
        """Builds the tree from nested dicts; an unknown key is an error that lists the known ones."""
        return _build(cls, values, "")

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts of plain values, which `from_dict` takes back."""
        return _plain(self)


def _build(cls: type, values: Any, path: str) -> Any:
    if isinstance(values, cls):
        return values
    if not isinstance(values, dict):
        raise ConfigError(f"{path or 'the config'} must be a mapping of settings, got {values!r}")
    known = {f.name: f for f in fields(cls)}
    hints = typing.get_type_hints(cls)
    kwargs = {}
    for key, value in values.items():
        name = f"{path}.{key}" if path else str(key)
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"unknown setting {name!r}{hint} Known here: {', '.join(known)}")
        hint_type = hints[key]
        nested = isinstance(hint_type, type) and is_dataclass(hint_type)
        if nested and not (key == "model" and isinstance(value, str)):
            value = _build(hint_type, value, name)
        kwargs[key] = value
    return cls(**kwargs)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return value.value if isinstance(value, Enum) else value


def _coerce(config: Any) -> None:
    """Checks each field against its annotation, turning strings into enum members and ints into floats."""
    cls = type(config)
    for name, hint in typing.get_type_hints(cls).items():
        value = getattr(config, name)
        options = list(typing.get_args(hint)) or [hint]
        if typing.get_origin(hint) is dict:
            options = [dict]
        if value is None and type(None) in options:
            continue
        target = next((t for t in options if t is not type(None)), hint)
        target = typing.get_origin(target) or target
        if issubclass(target, Enum):
            try:
                object.__setattr__(config, name, target(value))
            except ValueError:
                allowed = ", ".join(member.value for member in target)
                raise ConfigError(f"{_key(config, name)} must be one of {allowed}; got {value!r}") from None
        elif target is float and isinstance(value, int) and not isinstance(value, bool):
            object.__setattr__(config, name, float(value))
        elif not isinstance(value, target) or (target is int and isinstance(value, bool)):
            raise ConfigError(f"{_key(config, name)} must be {target.__name__}, got {value!r}")


def _key(config: Any, name: str) -> str:
    """The dotted key as it is typed: CacheConfig, block_size -> cache.block_size."""
    section = type(config).__name__.removesuffix("Config").lower()
    if section == "draft":
        section = "speculation.draft"
    return name if section == "engine" else f"{section}.{name}"


def _at_least(config: Any, name: str, minimum: float) -> None:
    value = getattr(config, name)
    if value < minimum:
        raise ConfigError(f"{_key(config, name)} must be at least {minimum}, got {value}")


def replace(config: EngineConfig, **sections: dict[str, Any]) -> EngineConfig:
    """A copy with some settings changed: `replace(config, cache={"prefix_caching": False})`."""
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **changed)
