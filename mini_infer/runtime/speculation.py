"""From a SpeculationConfig to who proposes: a proposer for the scheduler, a draft model for the runner."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mini_infer.cache.kv_store import KVStore
from mini_infer.cache.swap import HostStore
from mini_infer.core.config import EngineConfig, LoadFormat, ModelConfig
from mini_infer.core.errors import ConfigError, ModelError
from mini_infer.core.speculation_config import SpeculationConfig, SpeculationMethod
from mini_infer.kernels.ops import Kernels
from mini_infer.modeling.checkpoint import resolve_folder
from mini_infer.modeling.decoder import Decoder
from mini_infer.modeling.loader import load_model, load_spec, resolve_dtype
from mini_infer.modeling.spec import ModelSpec
from mini_infer.runtime.acceptance import Acceptance, AsVerified, AtARate
from mini_infer.runtime.capture import GraphMemory
from mini_infer.runtime.draft_kv import DraftKV
from mini_infer.runtime.drafter import DraftModel
from mini_infer.runtime.memory import KVShape, Limits, allocate_kv, require_room_for_weights, weight_bytes
from mini_infer.runtime.progress import progress_bar
from mini_infer.runtime.row_graphs import NoRowGraphs, RowGraphs, descriptors
from mini_infer.runtime.sampler import Sampler
from mini_infer.runtime.slots import SlotState
from mini_infer.runtime.startup import CaptureReport
from mini_infer.runtime.tokenizer import NoTokenizer, Tokenizer, load_tokenizer
from mini_infer.runtime.torch_model import AttentionBackends, TorchModel
from mini_infer.speculative.adapt import DraftLengths
from mini_infer.speculative.costs import StepCosts
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


def make_proposer(config: EngineConfig, vocab_size: int, costs: tuple[StepCosts, float] | None) -> ProposerMaker:
    """
    Args:
        costs: of steps, and of waiting for the one before, by which it is chosen how many drafts a request gets; None:
            as many as there are.
    """
    speculation = config.speculation
    if speculation.method is SpeculationMethod.none:
        return NoProposer

    def make() -> Proposer:
        most = speculation.num_tokens
        source = _source(speculation, vocab_size)
        if costs is None:
            return Proposer(source, AsManyAsThereAre(), most)
        return Proposer(source, DraftLengths(costs[0], most), most, waiting_cost=costs[1])

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


def make_acceptance(speculation: SpeculationConfig, sampler: Sampler, slots: SlotState) -> Acceptance:
    if speculation.rate is None:
        return AsVerified()
    return AtARate(speculation.rate, sampler, slots.mail)


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


def capture_rows(
    config: EngineConfig,
    slots: SlotState,
    model: TorchModel,
    query_lens: Sequence[int],
    memory: GraphMemory | None,
) -> tuple[RowGraphs | NoRowGraphs, CaptureReport]:
    """
    Args:
        query_lens: tokens a row.
        memory: of captured graphs; None: nothing is to be captured.
    """
    if memory is None or not query_lens:
        return NoRowGraphs(), CaptureReport()
    most = min(config.graphs.max_batch or config.scheduler.max_num_seqs, config.scheduler.max_num_seqs)
    rows = sorted({min(2**i, most) for i in range(most.bit_length() + 1)})
    graphs = RowGraphs(slots, model.forward_eagerly, descriptors(rows, query_lens))
    return graphs, graphs.capture(memory, progress_bar("capturing CUDA graphs of drafts"))


def make_drafter(
    config: EngineConfig,
    draft: DraftSpec,
    model: Decoder,
    backends: AttentionBackends,
    memory: GraphMemory | None,
    limits: Limits,
    slots: SlotState,
    sampler: Sampler,
    device: torch.device,
) -> DraftModel:
    """Takes the draft's KV memory: as many blocks as the target's, each with the same number."""
    try:
        store = allocate_kv(draft.kv_shape, limits.num_blocks, device)
    except ConfigError as error:
        raise ConfigError(f"speculation.draft has as many KV blocks as the target: {error}") from error
    host = HostStore(store, limits.num_host_blocks) if limits.num_host_blocks else None
    fewer = draft.spec.vocab_size < sampler.vocab_size
    torch_model = TorchModel(model, store, host, backends, known_tokens=draft.spec.vocab_size if fewer else None)
    return DraftModel(
        torch_model,
        DraftKV(slots.spare_slot, slots.max_model_len, store.block_size, store.num_blocks, limits.num_host_blocks),
        slots,
        sampler,
        vocab_size=min(draft.spec.vocab_size, sampler.vocab_size),
        max_tokens=config.scheduler.max_num_batched_tokens,
        graphs=capture_rows(config, slots, torch_model, (1, 2), memory)[0],
    )
