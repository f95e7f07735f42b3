"""The EngineConfig tree: every setting of the engine, typed, validated and immutable.

Plain dataclasses, so that this module needs neither torch nor Hydra. Enum members carry the name that is
typed on a command line; a plain string of that name is accepted wherever an enum is expected.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from mini_infer.core.config_checks import at_least, coerce, field_types
from mini_infer.core.errors import ConfigError
from mini_infer.core.model_config import (  # noqa: F401  # importers of the tree find its parts here
    Device,
    DryConfig,
    DType,
    Implementation,
    KernelChoice,
    LoadFormat,
    ModelConfig,
    Quantization,
    Routing,
)
from mini_infer.core.speculation_config import SpeculationConfig


class When(str, Enum):
    auto = "auto"  # where it helps: on a GPU
    always = "always"
    never = "never"


class Layout(str, Enum):
    paged = "paged"  # blocks are taken as a request grows
    contiguous = "contiguous"  # baseline: one stretch of max_model_len slots for a request's whole life


class CacheDType(str, Enum):
    auto = "auto"  # fp8 where a quantized folder brings scales for it; else the model's dtype
    fp8 = "fp8"  # float8_e4m3fn, with a scale for each head of keys and of values: the folder's, or 1


class Batching(str, Enum):
    continuous = "continuous"  # requests join and leave between steps
    static = "static"  # baseline: a batch is admitted together, and the next one when all of it is done


class Policy(str, Enum):
    fcfs = "fcfs"  # in order of arrival
    shortest = "shortest"  # short prompts before long ones, which age: see ageing_tokens_per_s
    priority = "priority"  # smaller number first, then arrival
    patience = "patience"  # by arrival, with a priority of n as if n seconds later


class Preemption(str, Enum):
    recompute = "recompute"  # drop the KV and compute it again later
    swap = "swap"  # move the KV to host memory and back


class Numerics(str, Enum):
    fast = "fast"  # the fastest kernel for each number of rows; they round differently
    batch_invariant = (
        "batch_invariant"  # every sum in one order: a request's tokens are the same in any company, to the bit
    )


class AttentionChoice(str, Enum):
    auto = "auto"  # the first of the others that can serve the model on this machine
    flash_attn = "flash_attn"  # FlashAttention-4: prefill on Hopper and Blackwell
    triton = "triton"  # our own kernels, Flash Decoding among them
    sdpa = "sdpa"  # torch.nn.functional.scaled_dot_product_attention over gathered blocks
    batch_invariant = "batch_invariant"  # our own kernel with one order of sums, for prompts and decode alike


@dataclass(frozen=True)
class CacheConfig:
    layout: Layout = Layout.paged  # how KV memory is given to requests
    dtype: CacheDType = CacheDType.auto  # of keys and values
    block_size: int = 16  # tokens a block
    num_blocks: int | None = None  # blocks of KV; default: as many as the memory holds, and the batch can use
    memory_gib: float | None = None  # GiB for KV; default: 0.5 on a CPU, what gpu_memory_utilization leaves on a GPU
    gpu_memory_utilization: float = 0.9  # share of the GPU's memory for weights, activations and KV together
    gpu_shared: bool = False  # other engines use the GPU, too: the share is this one's own, whatever they take
    prefix_caching: bool = True  # prompts that begin alike share the KV of their beginning, also over time
    num_host_blocks: int | None = None  # blocks of swap space, for preemption=swap; or give host_memory_gib
    host_memory_gib: float | None = None  # GiB of it, page-locked; default: the pool's, up to 4
    host_prefix_gib: float | None = None  # GiB of host memory, page-locked, for prefixes that the pool gives up
    disk_prefix_path: str | None = None  # folder of files that prefixes go to from there; engines may share it
    disk_prefix_gib: float | None = None  # GiB of them, about; default: half of what the disk has free
    watermark: float = 0.01  # share of the pool that admission leaves free for running requests to grow

    def __post_init__(self) -> None:
        coerce(self)
        at_least(self, 1, "block_size", "num_blocks")
        at_least(self, 0, "num_host_blocks")
        if self.num_host_blocks is not None and self.host_memory_gib is not None:
            raise ConfigError("cache.num_host_blocks and cache.host_memory_gib say the same: set one of them")
        for name in ("memory_gib", "host_memory_gib", "host_prefix_gib", "disk_prefix_gib"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"cache.{name} must be above 0, got {value}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"cache.gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"cache.watermark must be in [0, 1), got {self.watermark}")
        if self.layout is Layout.contiguous and self.prefix_caching:
            raise ConfigError(
                "cache.prefix_caching=true needs cache.layout=paged: contiguous requests share no blocks. "
                "Set cache.prefix_caching=false"
            )
        if self.host_prefix_gib is not None and not self.prefix_caching:
            raise ConfigError(
                f"cache.host_prefix_gib={self.host_prefix_gib} is memory for what the prefix cache gives up, and "
                "cache.prefix_caching=false. Set it to true, or leave cache.host_prefix_gib unset"
            )
        if self.disk_prefix_path == "":
            raise ConfigError("cache.disk_prefix_path is empty: name a folder, or leave it unset (null) for no files")
        if self.disk_prefix_path is not None and self.host_prefix_gib is None:
            raise ConfigError(
                f"cache.disk_prefix_path={self.disk_prefix_path}: blocks go to files from host memory, and come back "
                "through it. Set cache.host_prefix_gib, too"
            )
        if self.disk_prefix_gib is not None and self.disk_prefix_path is None:
            raise ConfigError(f"cache.disk_prefix_gib={self.disk_prefix_gib} bounds files: set cache.disk_prefix_path")


@dataclass(frozen=True)
class SchedulerConfig:
    batching: Batching = Batching.continuous  # when requests join the batch
    policy: Policy = Policy.fcfs  # whose turn it is, and who gives way when KV memory runs out
    ageing_tokens_per_s: float = 2048.0  # policy=shortest: a second of waiting outweighs so many more prompt tokens
    max_num_seqs: int = 256  # requests that hold a batch slot at once
    max_num_batched_tokens: int = 8192  # token budget of a step
    chunked_prefill: bool = True  # a prompt may be computed in parts, over several steps, beside those that decode
    preemption: Preemption = Preemption.recompute  # what becomes of the KV of a request that gives way
    overlap: When = When.auto  # launches a step before the tokens of the step before it are read

    def __post_init__(self) -> None:
        coerce(self)
        at_least(self, 1, "max_num_seqs", "max_num_batched_tokens")
        if not self.ageing_tokens_per_s > 0:
            raise ConfigError(f"scheduler.ageing_tokens_per_s must be above 0, got {self.ageing_tokens_per_s}")
        if self.chunked_prefill and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"scheduler.max_num_batched_tokens={self.max_num_batched_tokens} is less than "
                f"scheduler.max_num_seqs={self.max_num_seqs}: a step could not give every running request "
                "its token. Raise the first or lower the second"
            )


class MLAForm(str, Enum):
    auto = "auto"  # a cache of latents, expanded for prompts, absorbed for few new tokens; batch_invariant: naive
    naive = "naive"  # a cache of the keys and values of every head
    latent = "latent"  # a cache of latents, of which keys and values are made wherever they are attended to
    absorbed = "absorbed"  # a cache of latents, attended to as they are: the up-projections go to query and output


@dataclass(frozen=True)
class AttentionConfig:
    """Prefill and decode rows of one batch may use different backends."""

    prefill: AttentionChoice = AttentionChoice.auto  # of prompts
    decode: AttentionChoice = AttentionChoice.auto  # of requests that decode
    mla: MLAForm = MLAForm.auto  # of models with multi-head latent attention; others have but one form
    mla_crossover: int = 32  # mla=auto: prompts with no more new tokens absorb, too (reports/mla_crossover.md)

    def __post_init__(self) -> None:
        coerce(self)
        at_least(self, 0, "mla_crossover")


@dataclass(frozen=True)
class GraphsConfig:
    """CUDA graphs of decode steps, one launch instead of hundreds, and of steps with prompts, whole or piece by piece:
    everything between two attention calls. `capture: never` means both."""

    capture: When = When.auto  # CUDA graphs of decode steps, and of steps with prompts; never: of neither
    max_batch: int | None = None  # rows of the largest graph, larger batches run eagerly; default: max_num_seqs
    max_prefill_tokens: int = 2048  # of the largest captured step with prompts; 64 apart, above 2,048 256; 0: none

    def __post_init__(self) -> None:
        coerce(self)
        at_least(self, 1, "max_batch")
        at_least(self, 0, "max_prefill_tokens")


class Dispatch(str, Enum):
    """Rows on their way to experts, and the products there."""

    grouped = "grouped"  # just those that go, each once a rank; one grouped product over what arrived
    packed = "packed"  # the same, a product for each expert
    padded = "padded"  # baseline: equal buffers for all experts
    direct = "direct"  # kernels write them into the other ranks' memory; the host counts nothing, so CUDA graphs do it
    auto = "auto"  # direct on GPUs that reach each other's memory, and else grouped


class RouterPolicy(str, Enum):
    prefix_aware = "prefix_aware"  # to whoever holds most of the prompt, unless that one has far more to do
    least_loaded = "least_loaded"  # to whoever has the fewest requests
    round_robin = "round_robin"  # to each in turn


class Launcher(str, Enum):
    processes = "processes"  # of this machine
    ray = "ray"  # actors of a Ray cluster, wherever it has room for all ranks of an engine


class HandOver(str, Enum):
    auto = "auto"  # prompts whose transfer costs less than the decode steps that computing them here would hold up
    always = "always"  # all prompts of which KV is missing


NO_NIXL = (
    "parallel.connector=nixl: the package nixl is not installed. pip install -e '.[nixl]', or set parallel.connector="
    "memory on one machine, or stream"
)


class Connector(str, Enum):
    memory = "memory"  # written into the decoding engine's memory: peer memory of GPUs, shared memory on CPUs
    stream = "stream"  # through a socket, and host memory on both sides
    nixl = "nixl"  # written into the decoding engine's memory, on any machine, by the library of that name


class AllReduce(str, Enum):
    auto = "auto"  # by our own kernel up to the size at which the library is faster, measured at start
    library = "library"  # NCCL on GPUs, gloo on CPUs


@dataclass(frozen=True)
class ParallelConfig:
    """Processes that compute one model together, each on a device of its own (docs/parallel.md), and engines beside
    each other behind one server (docs/replicas.md)."""

    tensor: int = 1  # ranks that share every layer's heads and columns
    expert: int = 1  # ranks that share every layer's experts; of its attention each has all, or the part of `tensor`
    dispatch: Dispatch = Dispatch.auto  # how tokens get to the experts of other ranks
    redundant_experts: int = 0  # of each layer, that have a copy on a second rank: those that most tokens went to
    pipeline: int = 1  # stages of layers, each of the ranks above; as many steps are computed at a time
    all_reduce: AllReduce = AllReduce.auto  # how their sums are made
    timeout_s: float = 60.0  # a step that takes longer ends the engine: some rank hangs
    start_timeout_s: float = 900.0  # so does a start, of several ranks: loading the model takes most of it
    replicas: int = 1  # engines behind one mini-infer-serve, each with a model and a cache of its own
    routing: RouterPolicy = RouterPolicy.prefix_aware  # which replica gets a request
    launcher: Launcher = Launcher.processes  # what the engines behind mini-infer-serve are
    prefill: int = 0  # engines that compute prompts for those of `decode`, instead of replicas that do both
    decode: int = 0  # engines that decode, and get prompts' KV from those of `prefill`
    hand_over: HandOver = HandOver.auto  # which prompts the engines of `prefill` compute
    connector: Connector = Connector.memory  # how their KV gets to the engines of `decode`
    prefill_tensor: int | None = None  # ranks of each engine of `prefill`; default: as `tensor`

    def __post_init__(self) -> None:
        coerce(self)
        at_least(self, 1, "tensor", "expert", "pipeline", "replicas")
        at_least(self, 0, "prefill", "decode")
        if self.prefill_tensor is not None:
            at_least(self, 1, "prefill_tensor")
            if not self.prefill:
                raise ConfigError(
                    f"parallel.prefill_tensor={self.prefill_tensor} is of engines for prompts: set parallel.prefill "
                    "and parallel.decode, or parallel.tensor for all engines"
                )
        for name in ("timeout_s", "start_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"parallel.{name} must be above 0, got {getattr(self, name)}")
        at_least(self, 0, "redundant_experts")
        if self.redundant_experts and (self.expert == 1 or self.redundant_experts % self.expert):
            raise ConfigError(
                f"parallel.redundant_experts={self.redundant_experts} with parallel.expert={self.expert}: each of "
                "several ranks that share experts has room for as many copies. Set it to a multiple of "
                f"parallel.expert{', which is to be 2 or more' if self.expert == 1 else ''}, or to 0"
            )
        if self.expert > 1 and self.tensor not in (1, self.expert):
            raise ConfigError(
                f"{self.asked}: ranks that share experts share heads with all of each other or with none. Set "
                f"parallel.tensor to 1 or {self.expert}, or parallel.expert=1"
            )
        if self.prefill or self.decode:
            roles = f"parallel.prefill={self.prefill} and parallel.decode={self.decode}"
            if self.replicas > 1:
                raise ConfigError(f"{roles} are engines instead of parallel.replicas={self.replicas}: set that to 1")
            if self.connector is Connector.stream and max(self.ranks, self.prefill_tensor or 1) > 1:
                raise ConfigError(
                    f"{roles} with parallel.connector=stream: one rank sends to one other. Set parallel.connector="
                    "memory, which works with any number of them on one machine, or nixl"
                )
            if self.launcher is not Launcher.processes and self.connector is Connector.memory:
                raise ConfigError(
                    f"{roles} with parallel.launcher={self.launcher.value} may be on two machines, which have no "
                    "memory in common: set parallel.connector=stream, or nixl"
                )

    def require_both_roles(self) -> None:
        """Raises ConfigError where engines behind one server are to have one role alone."""
        if bool(self.prefill) != bool(self.decode):
            raise ConfigError(
                f"parallel.prefill={self.prefill} and parallel.decode={self.decode}: there are engines of both "
                "kinds or of none. Set both to at least 1, or both to 0"
            )

    def require_one(self) -> None:
        """Raises ConfigError where it takes a server: an engine by itself is one, and here."""
        if self.replicas > 1:
            raise ConfigError(
                f"parallel.replicas={self.replicas}: replicas are engines behind mini-infer-serve, and this is one "
                "engine. Set parallel.replicas=1"
            )
        if self.prefill and self.decode:
            raise ConfigError(
                f"parallel.prefill={self.prefill} and parallel.decode={self.decode} are engines behind "
                "mini-infer-serve, and this is one engine. Set both to 0"
            )
        if self.launcher is not Launcher.processes:
            raise ConfigError(
                f"parallel.launcher={self.launcher.value} places engines behind mini-infer-serve, and this one is "
                "here. Set parallel.launcher=processes"
            )

    @property
    def of_one(self) -> ParallelConfig:
        """What an engine has of this that does by itself what all of them do."""
        alone: dict[str, Any] = {"replicas": 1, "prefill": 0, "decode": 0, "prefill_tensor": None}
        return dataclasses.replace(self, launcher=Launcher.processes, **alone)

    @property
    def of_engines(self) -> list[ParallelConfig]:
        """What each engine behind one server has of this, those for prompts first."""
        one = self.of_one
        if not (self.prefill or self.decode):
            return [one] * self.replicas
        prompts = dataclasses.replace(one, prefill=1, tensor=self.prefill_tensor or self.tensor)
        return [prompts] * self.prefill + [dataclasses.replace(one, decode=1)] * self.decode

    @property
    def ranks_of_stage(self) -> int:
        return max(self.tensor, self.expert)

    @property
    def engines(self) -> int:
        """Behind one server. Those of `prefill` come first."""
        return self.prefill + self.decode or self.replicas

    @property
    def ranks(self) -> int:
        """Processes of one engine."""
        return self.ranks_of_stage * self.pipeline

    @property
    def asked(self) -> str:
        """What makes their number, as it is typed."""
        sizes = {"tensor": self.tensor, "expert": self.expert, "pipeline": self.pipeline}
        asked = [f"parallel.{name}={size}" for name, size in sizes.items() if size > 1]
        return " and ".join(asked) or "parallel.tensor=1"

    @property
    def has_ranks(self) -> bool:
        """Whether one of the engines behind a server has several."""
        return any(engine.ranks > 1 for engine in self.of_engines)


_MOST_RANK = 512


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters of the model's products, another for each request where that is asked (docs/lora.md)."""

    max_adapters: int = 0  # that requests of one batch can have between them: so many are on the device; 0: none
    max_rank: int = 16  # of an adapter; up to 512
    adapters: dict[str, str] = field(default_factory=dict)  # those there are from the start: name -> PEFT folder
    dummy: int = 0  # so many more of random weights and rank max_rank, named dummy-0, dummy-1, ...: to measure with

    @property
    def dummy_names(self) -> list[str]:
        return [f"dummy-{number}" for number in range(self.dummy)]

    def __post_init__(self) -> None:
        coerce(self)
        at_least(self, 0, "max_adapters", "dummy")
        at_least(self, 1, "max_rank")
        if self.max_rank > _MOST_RANK:
            raise ConfigError(
                f"lora.max_rank={self.max_rank} is more than the {_MOST_RANK} that kernels have room for: set it to "
                "the largest rank of the adapters, or merge larger ones into the model"
            )
        for name, path in self.adapters.items():
            if not (isinstance(name, str) and name.split() == [name] and isinstance(path, str) and path):
                raise ConfigError(f"lora.adapters must be names, without spaces, and folders, got {name!r}: {path!r}")
        if (self.adapters or self.dummy) and not self.max_adapters:
            raise ConfigError(
                f"lora.adapters and lora.dummy make {len(self.adapters) + self.dummy}, and lora.max_adapters=0 takes "
                "none: set it to how many a batch may have between its requests"
            )


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine is told. `EngineConfig(model="path")` is short for `ModelConfig(path="path")`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    graphs: GraphsConfig = field(default_factory=GraphsConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    numerics: Numerics = Numerics.fast  # in which order sums are made
    seed: int | None = None  # what the seeds of requests that bring none are made from; default: fresh each time

    if TYPE_CHECKING:

        def __init__(
            self,
            model: ModelConfig | str = ...,
            cache: CacheConfig = ...,
            scheduler: SchedulerConfig = ...,
            attention: AttentionConfig = ...,
            graphs: GraphsConfig = ...,
            speculation: SpeculationConfig = ...,
            parallel: ParallelConfig = ...,
            lora: LoraConfig = ...,
            numerics: Numerics = ...,
            seed: int | None = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        if isinstance(self.model, str):
            object.__setattr__(self, "model", ModelConfig(path=self.model))
        coerce(self)
        swap = self.scheduler.preemption is Preemption.swap
        for name in ("num_host_blocks", "host_memory_gib"):
            if not swap and getattr(self.cache, name):
                raise ConfigError(
                    f"cache.{name}={getattr(self.cache, name)} needs scheduler.preemption=swap: "
                    "recomputing uses no host memory"
                )
        if swap and self.cache.num_host_blocks == 0:
            raise ConfigError(
                "scheduler.preemption=swap needs host memory: leave cache.num_host_blocks unset, or give at least 1"
            )
        if self.speculation.has_draft_model and self.model.load_format is LoadFormat.dry:
            raise ConfigError(
                "speculation.draft.path: a dry model has no weights, and no draft either. Set speculation.method to "
                "ngram, suffix or synthetic, which need none"
            )
        if self.parallel.ranks > 1 and self.model.load_format is LoadFormat.dry:
            raise ConfigError(
                f"{self.parallel.asked}: a dry model has nothing that ranks could share. Set one rank, or "
                "model.load_format=dummy for random weights"
            )
        if self.parallel.prefill or self.parallel.decode:
            for name, value, stands in (
                ("speculation.method", "draft", self.speculation.has_draft_model),
                ("cache.layout", "contiguous", self.cache.layout is Layout.contiguous),
            ):
                if stands:
                    raise ConfigError(
                        f"{name}={value} with parallel.prefill or parallel.decode: only the blocks of the model itself "
                        f"are sent. Set another {name}, or parallel.replicas instead"
                    )
        if self.lora.max_adapters and (self.parallel.prefill or self.parallel.decode):
            raise ConfigError(
                f"lora.max_adapters={self.lora.max_adapters} with parallel.prefill or parallel.decode: an engine does "
                "not tell the other which adapter a prompt has. Set parallel.replicas instead"
            )
        if self.parallel.pipeline > 1 and self.model.count_experts:
            raise ConfigError(
                f"parallel.pipeline={self.parallel.pipeline} with model.count_experts=true: each stage would count the "
                "experts of its own layers. Set one of them back"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EngineConfig:
        """Builds the tree from nested dicts; an unknown key is an error that lists the known ones."""
        return _build(cls, values, "")

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts of plain values, which `from_dict` takes back."""

        def plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
            return {name: value.value if isinstance(value, Enum) else value for name, value in items}

        return dataclasses.asdict(self, dict_factory=plain)


def _build(cls: type, values: Any, path: str) -> Any:
    if isinstance(values, cls):
        return values
    if not isinstance(values, dict):
        raise ConfigError(f"{path or 'the config'} must be a mapping of settings, got {values!r}")
    known = {f.name: f for f in fields(cls)}
    hints = field_types(cls)
    kwargs = {}
    for key, value in values.items():
        name = f"{path}.{key}" if path else str(key)
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ConfigError(f"unknown setting {name!r}{hint} Known here: {', '.join(known)}")
        hint_type = hints[key]
        nested = isinstance(hint_type, type) and is_dataclass(hint_type)
        if nested and not (key == "model" and isinstance(value, str)):
            value = _build(hint_type, value, name)
        kwargs[key] = value
    return cls(**kwargs)


def replace(config: EngineConfig, **sections: dict[str, Any]) -> EngineConfig:
    """A copy with some settings changed: `replace(config, cache={"prefix_caching": False})`."""
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **changed)
