"""What is known of a pass when it is judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from experiments.lab.measure.clocks import Drift
from experiments.lab.measure.traces import RequestTrace, Served
from experiments.lab.workloads import Item


@dataclass(frozen=True)
class Evidence:
    """
    Attributes:
        vocab_size: ids from 0 to it are tokens.
        drift: of the clocks, during the pass.
        made_up_prompts: random tokens, for which there are real drafts: their acceptance is no setting.
        first_tokens: of the same variant in its first repeat, where greedy tokens must be the same in all of them.
        items: what was asked for in the pass.
        before: what the subject had served, and not forgotten, when the pass began; None where nobody knows.
        floors_s: the least seconds that the hardware allows each step; empty where that is not known.
    """

    served: Served
    vocab_size: int
    drift: Drift = field(default_factory=Drift)
    first_tokens: Sequence[Sequence[int]] | None = None
    made_up_prompts: bool = False
    items: Sequence[Item] = ()
    before: Sequence[Item] | None = None
    floors_s: Sequence[float] = ()

    @property
    def requests(self) -> Sequence[RequestTrace]:
        return self.served.requests
