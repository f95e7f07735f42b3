"""From a SpeculationConfig to who proposes: a proposer for the scheduler, a draft model for the runner."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mini_infer.cache.kv_store import KVStore
from mini_infer.cache.transfer import HostStore
from mini_infer.core.config import EngineConfig, LoadFormat, ModelConfig
from mini_infer.core.errors import ConfigError, ModelError
from mini_infer.core.speculation_config import SpeculationConfig, SpeculationMethod
from mini_infer.kernels.ops import Kernels
from mini_infer.modeling.checkpoint import resolve_folder
from mini_infer.modeling.decoder import Decoder
from mini_infer.modeling.loader import load_model, load_spec, resolve_dtype
from mini_infer.modeling.spec import ModelSpec
from mini_infer.runtime.graphs.capture import GraphMemory
from mini_infer.runtime.graphs.decode_graphs import BatchDescriptor
from mini_infer.runtime.graphs.row_graphs import row_grid
from mini_infer.runtime.sampling.sampler import Sampler
from mini_infer.runtime.text.tokenizer import NoTokenizer, Tokenizer, load_tokenizer
from mini_infer.runtime.worker.memory import KVShape, Limits, allocate_kv, require_room_for_weights, weight_bytes
from mini_infer.runtime.worker.progress import progress_bar
from mini_infer.runtime.worker.request_states import RequestStates
from mini_infer.runtime.worker.startup import CaptureReport
from mini_infer.runtime.worker.torch_model import AttentionBackends, TorchModel
from mini_infer.speculative.adapt import DraftLengths
from mini_infer.speculative.costs import StepCosts
from mini_infer.speculative.draft_kv import DraftKV
from mini_infer.speculative.draft_steps import DraftSteps
from mini_infer.speculative.drafter import Drafter, DraftModel, NoDrafter
from mini_infer.speculative.proposer import AsManyAsThereAre, NoProposer, Proposer, Source
from mini_infer.speculative.sources import MadeUp, OnDevice, ngram_source, suffix_source

logger = logging.getLogger(__name__)

ProposerMaker = Callable[[], Proposer | NoProposer]
PADDING_IDS = 1024  # models of one family round the size of one vocabulary up, each in its own way


def require_room_for_drafts(speculation: SpeculationConfig, max_model_len: int) -> None:
    """Raises ConfigError where no request is long enough for a draft of full length."""
    if speculation.most and speculation.most > max_model_len - 2:  # a prompt of one token, and the one behind the draft
        raise ConfigError(
            f"speculation.num_tokens={speculation.num_tokens} drafts do not fit in a request of {max_model_len} tokens "
            f"(model.max_model_len): lower the first to {max(1, max_model_len - 2)} or less, or raise the second"
        )


def make_proposer(config: EngineConfig, vocab_size: int, step_costs: Callable[[], StepCosts]) -> ProposerMaker:
    """
    Args:
        step_costs: by which it is chosen how many drafts a request gets, unless it is as many as there are.
    """
    speculation = config.speculation
    if speculation.method is SpeculationMethod.none:
        return NoProposer

    def make() -> Proposer:
        most = speculation.num_tokens
        source = _source(speculation, vocab_size)
        if not speculation.adaptive:
            return Proposer(source, AsManyAsThereAre(), most)
        costs = step_costs()
        return Proposer(source, DraftLengths(costs, most), most, waiting_cost=costs.waiting)

    return make


def describe_speculation(speculation: SpeculationConfig) -> str:
    """For a run's record: "draft, up to 4 tokens, as many as pay". What is synthetic says so."""
    if not speculation.most:
        return speculation.method.value
    many = "as many as pay" if speculation.adaptive else "always"
    rate = "" if speculation.rate is None else f" at a rate of {speculation.rate}"
    return f"{speculation.method.value}{rate}, up to {speculation.num_tokens} tokens, {many}"


def _source(speculation: SpeculationConfig, vocab_size: int) -> Source:
    if speculation.has_draft_model:
        return OnDevice()
    if speculation.method is SpeculationMethod.ngram:
        return ngram_source(speculation.ngram_min, speculation.ngram_max)
    if speculation.method is SpeculationMethod.suffix:
        return suffix_source()
    return MadeUp(vocab_size)


# ---------------------------------------------------------------------------------------------- the draft model


@dataclass(frozen=True)
class DraftSpec:
    """A draft model that goes with the target, before its weights are loaded."""

    config: ModelConfig
    spec: ModelSpec
    dtype: torch.dtype
    kv_shape: KVShape

    @property
    def block_bytes(self) -> int:
        return KVStore.bytes_per_block(**self.kv_shape)

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.spec, self.dtype)


def check_draft(
    config: EngineConfig, target: ModelSpec, target_dtype: torch.dtype, tokenizer: Tokenizer, device: torch.device
) -> DraftSpec | None:
    """The draft model, None where there is none. Raises ConfigError where it cannot propose for the target."""
    if not config.speculation.has_draft_model:
        return None
    own = config.speculation.draft.model(config.model)
    name = f"speculation.draft.path={config.speculation.draft.path}"
    try:
        if own.hf_config is None:
            resolve_folder(own.path, weights=own.load_format is LoadFormat.auto)
        spec = load_spec(own)
    except ModelError as error:
        raise ConfigError(f"{name}: {error}") from error
    if abs(spec.vocab_size - target.vocab_size) > PADDING_IDS or not _same_tokenizer(own, tokenizer):
        raise ConfigError(
            f"{name} has another vocabulary than the target ({spec.vocab_size} tokens and {target.vocab_size}): its "
            "drafts would mean something else there. Take a smaller model of the target's family"
        )
    dtype = resolve_dtype(own, spec, device)
    if weight_bytes(spec, dtype) > weight_bytes(target, target_dtype):
        logger.warning("%s is larger than the target: drafting will take longer than it can save", name)
    kv_shape: KVShape = {
        "num_layers": spec.num_layers,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "block_size": config.cache.block_size,
        "dtype": dtype,
    }
    return DraftSpec(own, spec, dtype, kv_shape)


def _same_tokenizer(draft: ModelConfig, target: Tokenizer) -> bool:
    """As far as both are there: a shape alone has none."""
    if draft.hf_config is not None or isinstance(target, NoTokenizer):
        return True
    own = load_tokenizer(draft)
    if isinstance(own, NoTokenizer) or own.definition == target.definition:
        return True
    return own.token_bytes is not None and own.token_bytes == target.token_bytes


def load_draft(draft: DraftSpec, max_model_len: int, lookahead: int, device: torch.device, kernels: Kernels) -> Decoder:
    """The model with its weights, for requests of `max_model_len` tokens and `lookahead` tokens of padding behind."""
    require_room_for_weights(draft.weight_bytes, draft.config.path, draft.dtype, device)
    if draft.spec.max_model_len < max_model_len:
        logger.warning(
            "the draft's own limit is %d tokens: beyond, drafts for longer requests get worse", draft.spec.max_model_len
        )
    return load_model(draft.config, draft.spec, draft.dtype, device, max_model_len + lookahead, kernels)


# ---------------------------------------------------------------------------------------------- steps with drafts


@dataclass(frozen=True)
class LoadedDraft:
    """A draft model, without KV memory."""

    of: DraftSpec
    model: Decoder
    backends: AttentionBackends
    can_be_captured: bool

    def with_kv(self, limits: Limits, device: torch.device, known_tokens: int) -> TorchModel:
        """As many blocks as the target's, each with the same number.

        Args:
            known_tokens: the target's vocabulary.
        """
        try:
            store = allocate_kv(self.of.kv_shape, limits.num_blocks, device)
        except ConfigError as error:
            raise ConfigError(f"speculation.draft has as many KV blocks as the target: {error}") from error
        host = HostStore(store, limits.num_host_blocks) if limits.num_host_blocks else None
        own_tokens = self.of.spec.vocab_size
        fewer = own_tokens if own_tokens < known_tokens else None
        return TorchModel(self.model, store, host, self.backends, known_tokens=fewer)


@dataclass(frozen=True)
class DraftParts:
    steps: DraftSteps
    model: TorchModel
    draft_model: TorchModel | None

    def capture(self, config: EngineConfig, memory: GraphMemory, prompt_sizes: Sequence[int]) -> CaptureReport:
        """CUDA graphs of steps of rows with drafts.

        Args:
            prompt_sizes: numbers of tokens of prompts that a draft model computes as graphs in pieces.
        """
        if self.draft_model is not None and prompt_sizes:
            self.draft_model.capture_pieces(prompt_sizes, memory, progress_bar("capturing CUDA graphs of the draft"))
        grid = _row_grid(config)
        new_draft_logits = None if self.draft_model is None else self.draft_model.new_logits
        progress = progress_bar("capturing CUDA graphs of drafts")
        return self.steps.graphs.capture(grid, self.model.new_logits, new_draft_logits, memory, progress)


def make_draft_steps(
    config: EngineConfig,
    model: TorchModel,
    draft: LoadedDraft | None,
    limits: Limits,
    req_indices: RequestStates,
    sampler: Sampler,
    device: torch.device,
    overlap: bool,
) -> DraftParts:
    """Takes the draft's KV memory."""
    drafter: Drafter = NoDrafter()
    draft_model = None
    if draft is not None:
        draft_model = draft.with_kv(limits, device, sampler.vocab_size)
        longest, block_size = req_indices.max_model_len, config.cache.block_size
        drafter = DraftModel(
            draft_model,
            DraftKV(req_indices.padding_index, longest, block_size, limits.num_blocks + 1, limits.num_host_blocks),
            req_indices,
            sampler,
            vocab_size=min(draft.of.spec.vocab_size, sampler.vocab_size),
            max_tokens=config.scheduler.max_num_batched_tokens,
        )
    steps = DraftSteps(model, req_indices, sampler, drafter, config.speculation.rate, always_rows=overlap)
    return DraftParts(steps, model, draft_model)


def row_logits_bytes(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, draft: DraftSpec | None) -> int:
    """What graphs of rows with drafts keep for their logits, on a GPU."""
    grid = _row_grid(config)
    target = max((d.num_tokens for d in grid), default=0) * spec.vocab_size * dtype.itemsize
    if draft is None:
        return target
    drafts = max((d.num_tokens - d.num_rows for d in grid), default=0)
    return target + drafts * draft.spec.vocab_size * draft.dtype.itemsize


def _row_grid(config: EngineConfig) -> list[BatchDescriptor]:
    """Steps of rows with drafts that are to be captured."""
    most = config.scheduler.max_num_seqs
    return row_grid(min(config.graphs.max_batch or most, most), config.speculation.most)
