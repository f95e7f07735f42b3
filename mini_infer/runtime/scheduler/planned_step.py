"""A step while the scheduler plans it, and until it is booked."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from mini_infer.core.plan import Admission, Growth, PromptLogprobs, StepPlan, Transfer
from mini_infer.core.request import Request

_plan_fields = attrgetter(*StepPlan._fields)


class PlannedStep:
    """Rows, and what comes with them, until `plan`; after that, whose rows they are. All of it is the scheduler's.

    Args:
        budget: tokens that the step may compute; `budget` is what is left of them.
    """

    def __init__(self, step: int, now: float, budget: int) -> None:
        self.step = step
        self.now = now
        self.budget = budget
        self.rows: list[Request] = []
        self.preempted_since: set[Request] = set()  # after it was planned: their blocks are somebody else's now
        self.short_of_blocks = False  # somebody waits for a block of the next token, or has given way for one
        self.promised = 0  # blocks that will be free soon, and for whom is settled
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
        self.transfers: list[Transfer] = []
        self.awaits_transfers = False
        self.preempted: list[str] = []
        self.prefix_queried_tokens = 0
        self.prefix_hit_tokens = 0

    def add_decode_rows(self, requests: list[Request]) -> None:
        """The next token of each; they are the step's first rows. A row a request and step: the engine's hottest loop,
        and list comprehensions are the fastest there is."""
        self.rows = requests
        self.num_decode_rows = len(requests)
        self.req_indices = [request.req_index for request in requests]  # type: ignore[misc]  # who runs has one
        self.starts = [request.num_computed_tokens for request in requests]
        self.counts = [1] * len(requests)
        self.samples = [True] * len(requests)
        self.budget -= len(requests)
        for request in requests:
            request.num_computed_tokens += 1
            request.num_in_flight += 1

    def add_prompt_row(self, request: Request, count: int) -> None:
        """The next `count` tokens of its prompt. It samples where they complete it."""
        row, start = len(self.rows), request.num_computed_tokens
        completes = start + count == request.num_tokens
        assert request.req_index is not None
        if not request.is_announced:
            request.is_announced = True
            self.admissions.append(
                Admission(
                    request.req_index,
                    request.request_id,
                    request.token_ids.copy(),
                    request.prompt_len,
                    request.block_table.copy(),
                    request.params,
                    request.seed,
                    request.stop_ids,
                )
            )
        if request.prompt_logprobs is not None and start + 1 < request.prompt_len:
            followed = min(count, request.prompt_len - 1 - start)
            self.prompt_logprobs.append(PromptLogprobs(row, followed, request.params.prompt_logprobs or 0))
        if request.constraint is not None and completes:
            self.masks[row] = request.constraint.mask
        self.rows.append(request)
        self.req_indices.append(request.req_index)
        self.starts.append(start)
        self.counts.append(count)
        self.samples.append(completes)
        self.budget -= count
        request.num_computed_tokens += count
        request.num_in_flight += completes

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

    def plan(self) -> StepPlan:
        return StepPlan(*_plan_fields(self))
