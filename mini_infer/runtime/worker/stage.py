"""A runner's place in a pipeline: what its steps wait for, and what they hand on.

    stage 0   step 1 | step 2 | step 3 | step 4      each with hidden states for the next stage,
    stage 1          | step 1 | step 2 | step 3      which samples, being the last, and tells the tokens:
                     tokens:  '------->| step 3      step 3 has requests of step 1, and step 2 others

Whoever does not sample learns a step's tokens when they are needed: before the next step that has one of its requests.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from mini_infer.core.plan import StepPlan
from mini_infer.runtime.worker.step_input import IntArray, Samples

if TYPE_CHECKING:  # it is handed them
    from mini_infer.modeling.model import Model
    from mini_infer.parallel.pipeline import Pipe
    from mini_infer.runtime.worker.request_states import RequestStates


class Stage:
    """Of a model that is in one piece: nothing comes from others, and nothing goes to them.

    `real` [T] is where the tokens of a step lie among those that are computed; None: they come first.
    """

    def settle(self, plan: StepPlan | None = None) -> None:
        """Before a step: takes in all tokens that it builds on. Without a plan: all that there are."""

    def receive(self, plan: StepPlan, real: IntArray | None = None) -> None:
        """Puts the step's hidden states into the model's inbox."""

    def pass_on(self, plan: StepPlan, hidden: Tensor, real: IntArray | None = None) -> bool:
        """Whether another stage goes on with what this one has computed, which it is sent."""
        return False

    def tell(self, token_ids: Tensor, real: IntArray | None = None) -> None:
        """What has been picked [S], or with the drafts that stand there [2, S], is for the other stages, too."""


class _Unsettled(NamedTuple):
    """A step whose tokens are not known here."""

    sampled: Samples
    req_indices: frozenset[int]


class PipelineStage(Stage):
    """
    Args:
        model: this stage's part.
        states: of the requests, to which tokens are written.
        stages: of the pipeline.
    """

    def __init__(self, pipe: Pipe, model: Model, states: RequestStates, stages: int) -> None:
        self._pipe, self._states, self._stages = pipe, states, stages
        self._inbox, self._is_last = model.inbox, model.spec.is_last
        self._unsettled: deque[_Unsettled] = deque()  # oldest first

    def settle(self, plan: StepPlan | None = None) -> None:
        count = len(self._unsettled)
        if plan is not None:  # they come in the order of steps
            own = frozenset(plan.req_indices)
            needed = (n for n, step in enumerate(self._unsettled, 1) if not own.isdisjoint(step.req_indices))
            count = max(needed, default=0)
        for _ in range(count):
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        sampled = self._unsettled.popleft().sampled
        self._states.write(sampled, self._pipe.hear(len(sampled.rows)))

    def receive(self, plan: StepPlan, real: IntArray | None = None) -> None:
        if (inbox := self._inbox) is None:
            return
        hidden = self._pipe.receive(plan.num_tokens, inbox.shape[1], dtype=inbox.dtype)
        if real is None:
            inbox[: len(hidden)] = hidden
        else:
            inbox.index_copy_(0, self._states.send(real)[0].long(), hidden)

    def pass_on(self, plan: StepPlan, hidden: Tensor, real: IntArray | None = None) -> bool:
        if self._is_last:
            return False
        self._pipe.send(self._copy(hidden[: plan.num_tokens] if real is None else hidden, real))
        sampled = Samples.of(plan)
        if len(sampled.rows):
            self._unsettled.append(_Unsettled(sampled, frozenset(sampled.req_indices.tolist())))
            if len(self._unsettled) > self._stages:  # the last stage is done with it, or will be next
                self._settle_oldest()
        return True

    def tell(self, token_ids: Tensor, real: IntArray | None = None) -> None:
        self._pipe.tell(self._copy(token_ids if token_ids.dim() == 1 else token_ids[0], real))

    def _copy(self, x: Tensor, real: IntArray | None) -> Tensor:
        """The next step may write where x lies."""
        return x.clone() if real is None else x.index_select(0, self._states.send(real)[0].long())
