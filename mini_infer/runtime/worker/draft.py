"""The draft model of a worker: whether it goes with the target, and its part of a step."""

from __future__ import annotations

import logging

from mini_infer.core.config import EngineConfig, ModelConfig
from mini_infer.core.errors import ConfigError, ModelError
from mini_infer.modeling.model import Model
from mini_infer.runtime.sampling.sampler import Sampler
from mini_infer.runtime.text.tokenizer import NoTokenizer, Tokenizer, load_tokenizer
from mini_infer.runtime.worker.limits import Limits
from mini_infer.runtime.worker.memory import allocate_kv
from mini_infer.runtime.worker.request_states import RequestStates
from mini_infer.runtime.worker.served_model import ServedModel
from mini_infer.runtime.worker.torch_model import TorchModel
from mini_infer.speculative.draft_kv import DraftKV
from mini_infer.speculative.draft_model import DraftModel

logger = logging.getLogger(__name__)

PADDING_IDS = 1024  # models of one family round the size of one vocabulary up, each in its own way


def plan_draft(
    config: EngineConfig, target: ServedModel, tokenizer: Tokenizer, uncapturable: str | None
) -> ServedModel | None:
    """The draft model, None where there is none. Raises ConfigError where it cannot propose for the target."""
    if not config.speculation.has_draft_model:
        return None
    name = f"speculation.draft.path={config.speculation.draft.path}"
    try:
        draft = ServedModel.plan(config, config.speculation.draft.model(config.model), target.device, uncapturable)
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
