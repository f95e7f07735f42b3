"""A step while the scheduler plans it, and until it is booked."""

from __future__ import annotations

from collections.abc import Sequence

from mini_infer.core.config import SchedulerConfig
from mini_infer.core.plan import Admission, Growth, PromptLogprobs, StepPlan
from mini_infer.core.request import Request


class PlannedStep:
    """Rows, and what comes with them, until `plan`; after that, whose rows they are. All of it is the scheduler's."""

    def __init__(self, now: float, config: SchedulerConfig) -> None:
        self.now = now
        self.entered: list[Request] = []  # took a slot in this step
        self.swapped_out: list[Request] = []
        self.budget = config.max_num_batched_tokens
        self.rows: list[tuple[Request, int]] = []  # with how often it had been preempted by then
        self.req_indices: list[int] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.samples: list[bool] = []
        self.num_decode_rows = 0
        self.admissions: list[Admission] = []
        self.growths: list[Growth] = []
        self.masks: dict[int, bytes] = {}
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.drafts: dict[int, Sequence[int]] = {}  # row -> tokens
        self.num_drafts = 0
        self.following: list[int] = []
        self.keeps_up = False
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.preempted: list[str] = []
        self.prefix_queried_tokens = 0
        self.prefix_hit_tokens = 0

    def sort_decode_rows(self) -> None:
        """Brings rows with fewer drafts before those with more."""
        order = sorted(range(self.num_decode_rows), key=self.counts.__getitem__)
        self.rows = [self.rows[row] for row in order]
        self.req_indices, self.starts, self.counts = (
            [column[row] for row in order] for column in (self.req_indices, self.starts, self.counts)
        )
        place = {row: index for index, row in enumerate(order)}
        self.masks = {place[row]: mask for row, mask in self.masks.items()}
        self.drafts = {place[row]: tokens for row, tokens in self.drafts.items()}
        self.following = [place[row] for row in self.following]

    def plan(self, number: int) -> StepPlan:
        return StepPlan(
            step=number,
            req_indices=self.req_indices,
            starts=self.starts,
            counts=self.counts,
            samples=self.samples,
            num_decode_rows=self.num_decode_rows,
            admissions=self.admissions,
            growths=self.growths,
            masks=self.masks,
            prompt_logprobs=self.prompt_logprobs,
            drafts=self.drafts,
            num_drafts=self.num_drafts,
            following=self.following,
            keeps_up=self.keeps_up,
            swap_out=self.swap_out,
            swap_in=self.swap_in,
            preempted=self.preempted,
            prefix_queried_tokens=self.prefix_queried_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
        )
