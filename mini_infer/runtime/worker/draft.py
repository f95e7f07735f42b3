"""The draft model of a worker: whether it goes with the target, and its part of a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from mini_infer.core.config import EngineConfig, ModelConfig
from mini_infer.core.errors import ConfigError, ModelError
from mini_infer.modeling.model import Model
from mini_infer.runtime.graphs.capture import GraphMemory
from mini_infer.runtime.graphs.step_graphs import BatchDescriptor, StepGraphs, draft_grid
from mini_infer.runtime.sampling.sampler import Sampler
from mini_infer.runtime.text.tokenizer import NoTokenizer, Tokenizer, load_tokenizer
from mini_infer.runtime.worker.limits import Limits
from mini_infer.runtime.worker.memory import allocate_kv
from mini_infer.runtime.worker.progress import progress_bar
from mini_infer.runtime.worker.request_states import RequestStates
from mini_infer.runtime.worker.served_model import ServedModel
from mini_infer.runtime.worker.startup import CaptureReport
from mini_infer.runtime.worker.torch_model import TorchModel
from mini_infer.speculative.draft_kv import DraftKV
from mini_infer.speculative.draft_model import Drafter, DraftModel

logger = logging.getLogger(__name__)

PADDING_IDS = 1024  # models of one family round the size of one vocabulary up, each in its own way


def plan_draft(
    config: EngineConfig, target: ServedModel, tokenizer: Tokenizer, sampler_name: str | None
) -> ServedModel | None:
    """The draft model, None where there is none. Raises ConfigError where it cannot propose for the target."""
    if not config.speculation.has_draft_model:
        return None
    name = f"speculation.draft.path={config.speculation.draft.path}"
    try:
        draft = ServedModel.plan(config, config.speculation.draft.model(config.model), target.device, sampler_name)
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
    config: EngineConfig,
    draft: tuple[ServedModel, Model] | None,
    limits: Limits,
    states: RequestStates,
    sampler: Sampler,
) -> tuple[Drafter, TorchModel | None]:
    """Who proposes on the device, and its model if it has one. Takes the draft's KV memory: as many blocks as the
    target's, each with the same number."""
    if draft is None:
        return Drafter(), None
    served, weights = draft
    try:
        store = allocate_kv(served.kv_layout, limits.num_blocks, config.cache.block_size, served.device)
    except ConfigError as error:
        raise ConfigError(f"speculation.draft has as many KV blocks as the target: {error}") from error
    vocab_size = min(served.spec.vocab_size, sampler.vocab_size)
    fewer = vocab_size if vocab_size < sampler.vocab_size else None
    model = TorchModel(weights, store, served.backends, known_tokens=fewer)
    longest, block_size = states.max_model_len, config.cache.block_size
    drafter = DraftModel(
        model,
        DraftKV(states.padding_index, longest, block_size, limits.num_blocks + 1, limits.num_host_blocks),
        states,
        sampler,
        vocab_size=vocab_size,
        max_tokens=config.scheduler.max_num_batched_tokens,
    )
    return drafter, model


def capture_drafts(
    config: EngineConfig,
    graphs: StepGraphs,
    model: TorchModel,
    draft: TorchModel | None,
    memory: GraphMemory,
    prompt_sizes: Sequence[int],
) -> CaptureReport:
    """CUDA graphs of steps of rows with drafts.

    Args:
        prompt_sizes: numbers of tokens of prompts that a draft model computes as graphs in pieces.
    """
    if draft is not None and prompt_sizes:
        draft.capture_pieces(prompt_sizes, memory, progress_bar("capturing CUDA graphs of the draft"))
    grid = _draft_grid(config)
    if not grid:
        return CaptureReport()
    logits = model.new_logits(max(d.num_tokens for d in grid))
    draft_logits = None if draft is None else draft.new_logits(max(d.num_tokens - d.num_rows for d in grid))
    progress = progress_bar("capturing CUDA graphs of drafts")
    return graphs.capture(grid, logits, draft_logits, memory, "tokens of drafts", progress)


def row_logits_bytes(config: EngineConfig, target: ServedModel, draft: ServedModel | None) -> int:
    """What graphs of rows with drafts keep for their logits, on a GPU."""
    grid = _draft_grid(config)
    taken = max((d.num_tokens for d in grid), default=0) * _logits_row(target)
    if draft is not None:
        taken += max((d.num_tokens - d.num_rows for d in grid), default=0) * _logits_row(draft)
    return taken


def _logits_row(model: ServedModel) -> int:
    return model.spec.vocab_size * torch.empty(0, dtype=model.dtype).element_size()


def _draft_grid(config: EngineConfig) -> list[BatchDescriptor]:
    """Steps of rows with drafts that are to be captured."""
    most = config.scheduler.max_num_seqs
    return draft_grid(min(config.graphs.max_batch or most, most), config.speculation.most)
