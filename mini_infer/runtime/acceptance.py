"""Which drafts stand: what verification says, or a stated rate."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mini_infer.core.plan import StepPlan
from mini_infer.runtime.sampler import Sampler
from mini_infer.runtime.slots import Mail, Samples
from mini_infer.speculative.synthetic import synthetic_accepts


class Acceptance(Protocol):
    def judge(self, plan: StepPlan, samples: Samples, token_ids: Tensor, drafts: Tensor) -> Tensor:
        """The tokens [S] that a plan with drafts goes on with: a draft is accepted where its token is the draft.

        Args:
            token_ids: [S], what the target picks.
            drafts: [S], the draft at each place, NO_DRAFT for none.
        """


class AsVerified:
    def judge(self, plan: StepPlan, samples: Samples, token_ids: Tensor, drafts: Tensor) -> Tensor:
        return token_ids


class AtARate:
    """Accepts at a stated rate, by a hash of (seed, position). What comes out means nothing; what it costs does.

    Log-probabilities are those of the tokens that the target would have picked.
    """

    def __init__(self, rate: float, sampler: Sampler, mail: Mail) -> None:
        self._rate, self._sampler, self._mail = rate, sampler, mail

    def judge(self, plan: StepPlan, samples: Samples, token_ids: Tensor, drafts: Tensor) -> Tensor:
        n = plan.num_decode_rows
        keys = self._sampler.keys(np.array(plan.slots[:n]))
        accepted = synthetic_accepts(keys, np.array(plan.starts[:n]) + 1, np.array(plan.counts[:n]) - 1, self._rate)
        stands = samples.places() < np.append(accepted, np.zeros(plan.num_rows - n, dtype=np.int64))[samples.rows]
        forced = self._mail.send(stands)[0].bool()
        other = (token_ids + (token_ids == drafts)).remainder(self._sampler.vocab_size)
        return torch.where(forced, drafts, other)
