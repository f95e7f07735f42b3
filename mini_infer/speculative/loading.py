"""From a SpeculationConfig to who proposes."""

from __future__ import annotations

from collections.abc import Callable

from mini_infer.core.speculation_config import SpeculationConfig, SpeculationMethod
from mini_infer.speculative.adapt import DraftLengths
from mini_infer.speculative.costs import StepCosts
from mini_infer.speculative.proposer import AsManyAsThereAre, NoProposer, Proposer, Source
from mini_infer.speculative.sources import MadeUp, OnDevice, ngram_source, suffix_source


def make_proposer(
    speculation: SpeculationConfig, vocab_size: int, step_costs: Callable[[], StepCosts]
) -> Proposer | NoProposer:
    """
    Args:
        step_costs: by which it is chosen how many drafts a request gets, unless it is as many as there are.
    """
    if speculation.method is SpeculationMethod.none:
        return NoProposer()
    most, source = speculation.num_tokens, _source(speculation, vocab_size)
    if not speculation.adaptive:
        return Proposer(source, AsManyAsThereAre(), most)
    costs = step_costs()
    return Proposer(source, DraftLengths(costs, most), most, waiting_cost=costs.waiting)


def _source(speculation: SpeculationConfig, vocab_size: int) -> Source:
    if speculation.has_draft_model:
        return OnDevice()
    if speculation.method is SpeculationMethod.ngram:
        return ngram_source(speculation.ngram_min, speculation.ngram_max)
    if speculation.method is SpeculationMethod.suffix:
        return suffix_source()
    return MadeUp(vocab_size)
