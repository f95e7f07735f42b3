"""From a SpeculationConfig to a Speculator."""

from __future__ import annotations

from collections.abc import Callable

from mini_infer.core.speculation_config import SpeculationConfig, SpeculationMethod
from mini_infer.speculative.policy import FixedDraftLength
from mini_infer.speculative.policy.adaptive import AdaptiveDraftLength
from mini_infer.speculative.policy.costs import StepCosts
from mini_infer.speculative.proposers import OnDevice, Proposer
from mini_infer.speculative.proposers.lookup import ngram_proposer, suffix_proposer
from mini_infer.speculative.proposers.synthetic import SyntheticProposer
from mini_infer.speculative.speculator import NoSpeculation, Speculator


def make_speculator(
    speculation: SpeculationConfig, vocab_size: int, step_costs: Callable[[], StepCosts]
) -> Speculator | NoSpeculation:
    """
    Args:
        step_costs: by which it is chosen how many drafts a request gets, unless it is as many as there are.
    """
    if speculation.method is SpeculationMethod.none:
        return NoSpeculation()
    most, proposer = speculation.num_tokens, _proposer(speculation, vocab_size)
    if not speculation.adaptive:
        return Speculator(proposer, FixedDraftLength(), most)
    costs = step_costs()
    return Speculator(proposer, AdaptiveDraftLength(costs, most), most, waiting_cost=costs.waiting)


def _proposer(speculation: SpeculationConfig, vocab_size: int) -> Proposer:
    if speculation.has_draft_model:
        return OnDevice()
    if speculation.method is SpeculationMethod.ngram:
        return ngram_proposer(speculation.ngram_min, speculation.ngram_max)
    if speculation.method is SpeculationMethod.suffix:
        return suffix_proposer()
    return SyntheticProposer(vocab_size)
