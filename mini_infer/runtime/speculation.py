"""From a SpeculationConfig to who proposes."""

from __future__ import annotations

from collections.abc import Callable

from mini_infer.core.config import EngineConfig, SpeculationConfig, SpeculationMethod
from mini_infer.core.errors import ConfigError
from mini_infer.speculative.proposer import AsManyAsThereAre, Lengths, NoProposer, Proposer, Source
from mini_infer.speculative.sources import MadeUp, OnDevice, ngram_source, suffix_source

ProposerMaker = Callable[[], Proposer | NoProposer]


def require_room_for_drafts(speculation: SpeculationConfig, max_model_len: int) -> None:
    """Raises ConfigError where no request is long enough for a draft of full length."""
    if speculation.most and speculation.most > max_model_len - 2:  # a prompt of one token, and the one behind the draft
        raise ConfigError(
            f"speculation.num_tokens={speculation.num_tokens} drafts do not fit in a request of {max_model_len} tokens "
            f"(model.max_model_len): lower the first to {max(1, max_model_len - 2)} or less, or raise the second"
        )


def make_proposer(config: EngineConfig, vocab_size: int, lengths: Callable[[], Lengths] | None = None) -> ProposerMaker:
    """
    Args:
        lengths: makes what chooses how many drafts a request gets; None: as many as there are.
    """
    speculation = config.speculation
    if speculation.method is SpeculationMethod.none:
        return NoProposer

    def make() -> Proposer:
        return Proposer(_source(speculation, vocab_size), (lengths or AsManyAsThereAre)(), speculation.num_tokens)

    return make


def _source(speculation: SpeculationConfig, vocab_size: int) -> Source:
    if speculation.draft.given:
        return OnDevice()
    if speculation.method is SpeculationMethod.ngram:
        return ngram_source(speculation.ngram_min, speculation.ngram_max)
    if speculation.method is SpeculationMethod.suffix:
        return suffix_source()
    return MadeUp(vocab_size)
