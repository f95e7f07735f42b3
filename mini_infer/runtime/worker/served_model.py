"""A model that a worker is to serve, target or draft: what is known of it without its weights, and loading them."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from functools import cached_property

import torch

from mini_infer.attention.backend import Requirements
from mini_infer.cache.layout import KVLayout
from mini_infer.core.config import Dispatch, EngineConfig, LoadFormat, MLAForm, ModelConfig, Numerics, When
from mini_infer.core.errors import ConfigError, ModelError
from mini_infer.core.limits import Limits
from mini_infer.kernels.ops import Kernels
from mini_infer.modeling.adapters import Adapters
from mini_infer.modeling.loader import as_served, load_model, load_spec, outline, resolve_dtype
from mini_infer.modeling.model import Model
from mini_infer.modeling.model_files import resolve_folder
from mini_infer.modeling.sharding import of_each_rank, require_shared_experts
from mini_infer.modeling.spec import ModelSpec, MoESpec
from mini_infer.modeling.stages import of_stage
from mini_infer.parallel.context import ONE_RANK, ParallelContext
from mini_infer.parallel.expert import ALL_EXPERTS, ExpertRanks, settled
from mini_infer.runtime.sampling.sampler import Sampler
from mini_infer.runtime.text.tokenizer import NoTokenizer, Tokenizer, load_tokenizer
from mini_infer.runtime.worker.memory import allocate_kv, require_room_for_weights
from mini_infer.runtime.worker.request_states import RequestStates
from mini_infer.runtime.worker.torch_model import AttentionBackends, TorchModel
from mini_infer.speculative.draft_model import DraftKV, DraftModel
from mini_infer.transfer.shares import Share

NEEDS_GPU = "CUDA graphs need a GPU, not cpu"
HOST_COUNTS = "the host reads how many tokens go where; parallel.dispatch=direct leaves that to the device"


@dataclass(frozen=True)
class ServedModel:
    config: ModelConfig
    whole: ModelSpec
    spec: ModelSpec  # what this rank computes of it
    dtype: torch.dtype
    device: torch.device
    parallel: ParallelContext  # the ranks that share its layers
    experts: ExpertRanks  # those that share its experts
    kv_layout: KVLayout
    block_bytes: int  # of KV
    backends: AttentionBackends
    no_graphs: str | None  # why its steps cannot be captured in CUDA graphs; None where they can

    @classmethod
    def plan(
        cls,
        config: EngineConfig,
        model: ModelConfig,
        device: torch.device,
        kernels: Kernels,
        parallel: ParallelContext = ONE_RANK,
    ) -> ServedModel:
        """Raises ConfigError or ModelError where it cannot be served with these settings."""
        if model.hf_config is None:  # a hub name is looked up once; from here on it is a folder
            folder = resolve_folder(model.path, weights=model.load_format is LoadFormat.auto)
            model = dataclasses.replace(model, path=str(folder))
        experts = ALL_EXPERTS
        if config.parallel.expert > 1 and parallel.size > 1:  # no draft model's
            form = settled(config.parallel.dispatch, parallel, device, kernels)
            experts = ExpertRanks(parallel, form, config.parallel.redundant_experts)
            parallel = parallel if config.parallel.tensor > 1 else parallel.alone
            if form is Dispatch.direct and kernels.dispatch is None:
                raise ConfigError(
                    f"parallel.dispatch=direct: kernels of ours write to other ranks' memory, and these are "
                    f"{kernels.name}'s. Set parallel.dispatch=grouped"
                )
        shared, redundant = experts.context.size, experts.redundant
        whole = as_served(load_spec(model), config)
        spec = of_each_rank(whole, parallel.size, whole_experts=shared > 1)
        require_shared_experts(spec, shared, redundant)
        dtype = resolve_dtype(model, spec, device)
        spec = of_stage(spec, dtype, parallel, experts)
        kv_layout = spec.kv_layout(dtype)
        invariant = config.numerics is Numerics.batch_invariant
        if invariant and spec.through_transformers:
            raise ConfigError(
                f"numerics=batch_invariant: {model.path} runs through transformers' code, which sums in orders of its "
                "own. Set numerics=fast"
            )
        if config.lora.max_adapters and spec.through_transformers:
            raise ConfigError(
                f"lora.max_adapters={config.lora.max_adapters}: {model.path} runs through transformers' code, whose "
                "products are not ours to add to. Merge the adapter into the model, or set lora.max_adapters=0"
            )
        needs = Requirements(
            kv_layout,
            config.cache.block_size,
            dtype,
            device,
            sliding_window=any(spec.windows),
            batch_invariant=invariant,
            latent=spec.attention.latent,
        )
        backends, no_graphs = _select_attention(config, needs, kernels, experts)
        block_bytes = kv_layout.bytes_per_block(config.cache.block_size)
        return cls(model, whole, spec, dtype, device, parallel, experts, kv_layout, block_bytes, backends, no_graphs)

    @cached_property
    def weight_bytes(self) -> int:
        return outline(self.spec, self.dtype, self.parallel, self.experts).weight_bytes()

    @property
    def kv_share(self) -> Share:
        """What of the model's KV this rank keeps."""
        spec, attention = self.spec, self.spec.attention
        layers = spec.first_layer, spec.first_layer + spec.num_layers
        if attention.latent is not None:
            return Share(*layers)
        own = attention.num_kv_heads
        heads = self.parallel.part(own * self.parallel.size // attention.kv_copies, own)
        return Share(*layers, heads.start, heads.stop)

    @property
    def expands(self) -> bool:
        """Whether prompts make keys and values of all that is cached of them."""
        latent = self.spec.attention.latent
        return latent is not None and latent.form is not MLAForm.absorbed

    @property
    def quantization(self) -> str:
        """Of the weights, for a run's record."""
        return "none" if self.spec.quantization is None else self.spec.quantization.describe()

    @property
    def kv_dtype(self) -> str:
        """For a run's record."""
        return "float8_e4m3fn, a scale a head" if self.spec.fp8_kv else str(self.dtype).removeprefix("torch.")

    def load(self, max_len: int, kernels: Kernels, most_tokens: int, adapters: Adapters | None = None) -> Model:
        """The weights, for positions below `max_len` and steps of so many tokens, with adapters beside them. Raises
        ConfigError where they will not fit."""
        require_room_for_weights(self.weight_bytes, self.config.path, self.dtype, self.device)
        blocks = [layer.feed_forward for layer in self.spec.layers]
        chosen = max((block.router.top_k for block in blocks if isinstance(block, MoESpec)), default=0)
        widths = self.spec.hidden_size, chosen
        experts = self.experts.opened(kernels, self.device, self.dtype, *widths, most_tokens)
        what = self.config, self.spec, self.dtype, self.device, max_len, kernels
        return load_model(*what, parallel=self.parallel, experts=experts, adapters=adapters)


def _select_attention(
    config: EngineConfig, needs: Requirements, kernels: Kernels, experts: ExpertRanks
) -> tuple[AttentionBackends, str | None]:
    """The backends, and why decode steps will not be captured in CUDA graphs; None where they will."""
    capture = config.graphs.capture
    if capture is When.never:
        reason = "graphs.capture=never"
    elif needs.device.type != "cuda":
        reason = NEEDS_GPU
    elif kernels.name != "triton":
        reason = "the torch sampler cannot be captured"
    elif experts.host_counts:
        reason = HOST_COUNTS
    else:
        try:
            return AttentionBackends.select(config.attention, dataclasses.replace(needs, graphs=True)), None
        except ConfigError as error:
            reason = str(error)
    if capture is When.always:
        raise ConfigError(f"graphs.capture=always: {reason}. Set graphs.capture=auto or never")
    return AttentionBackends.select(config.attention, needs), reason


logger = logging.getLogger(__name__)

PADDING_IDS = 1024  # models of one family round the size of one vocabulary up, each in its own way


def plan_draft(config: EngineConfig, target: ServedModel, tokenizer: Tokenizer, kernels: Kernels) -> ServedModel | None:
    """The draft model, None where there is none. Raises ConfigError where it cannot propose for the target."""
    if not config.speculation.has_draft_model:
        return None
    name = f"speculation.draft.path={config.speculation.draft.path}"
    try:
        draft = ServedModel.plan(config, config.speculation.draft.model(config.model), target.device, kernels)
    except ModelError as error:
        raise ConfigError(f"{name}: {error}") from error
    vocab_size, known = draft.spec.vocab_size, target.spec.vocab_size
    if abs(vocab_size - known) > PADDING_IDS or not _same_tokenizer(draft.config, tokenizer):
        raise ConfigError(
            f"{name} has another vocabulary than the target ({vocab_size} tokens and {known}): its "
            "drafts would mean something else there. Take a smaller model of the target's family"
        )
    if draft.weight_bytes > target.weight_bytes:
        logger.warning("%s is larger than the target: drafting will take longer than it can save", name)
    return draft


def _same_tokenizer(draft: ModelConfig, target: Tokenizer) -> bool:
    """As far as both are there: a shape alone has none."""
    if draft.hf_config is not None or isinstance(target, NoTokenizer):
        return True
    own = load_tokenizer(draft)
    if isinstance(own, NoTokenizer) or own.definition == target.definition:
        return True
    return own.token_bytes is not None and own.token_bytes == target.token_bytes


def make_drafter(
    config: EngineConfig, draft: ServedModel, weights: Model, limits: Limits, states: RequestStates, sampler: Sampler
) -> tuple[DraftModel, TorchModel]:
    """Who proposes on the device, and its model, with as many blocks of KV memory as the target's, each with the same
    number."""
    block_size = config.cache.block_size
    try:
        store = allocate_kv(weights, limits.num_blocks, block_size)
    except ConfigError as error:
        raise ConfigError(f"speculation.draft has as many KV blocks as the target: {error}") from error
    vocab_size = min(draft.spec.vocab_size, sampler.vocab_size)
    fewer = vocab_size if vocab_size < sampler.vocab_size else None
    model = TorchModel(weights, store, draft.backends, known_tokens=fewer)
    kv = DraftKV(states.padding_index, states.max_model_len, block_size, limits.num_blocks + 1, limits.num_host_blocks)
    max_tokens = config.scheduler.max_num_batched_tokens
    return DraftModel(model, kv, states, sampler, vocab_size=vocab_size, max_tokens=max_tokens), model
