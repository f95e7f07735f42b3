"""What the scheduler tells the runner (StepPlan), what it hears back (StepResult), and what is kept (StepRecord).

A plan is a plain record without tensors: it can be printed, compared, sent to another process, or run by the dry
model. It carries only what changed: a request's tokens and block table travel once, with its first row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mini_infer.core.request import NO_ADAPTER, SamplingParams, TokenLogprob

NO_DRAFT = -1  # where a token id may stand
NONE: Mapping[int, Any] = {}  # nobody writes to it


class Admission(NamedTuple):
    """A req_index's new owner. Sent with a request's first row, and again with the first after a preemption."""

    req_index: int
    request_id: str
    token_ids: list[int]  # prompt and whatever output it already has
    prompt_len: int
    block_table: list[int]
    params: SamplingParams
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()  # end-of-sequence (unless ignored) and stop tokens
    adapter: str = ""  # by the key of its contents; "": none
    adapter_slot: int = NO_ADAPTER  # where on the device it is to be


class Growth(NamedTuple):
    """Blocks appended to the table of the request at `req_index`, from table index `first` on."""

    req_index: int
    first: int
    blocks: list[int]


class Draft(NamedTuple):
    """Tokens proposed behind a running request's last one."""

    length: int
    token_ids: Sequence[int] = ()  # as many; none where a draft model writes them, on the device


class PromptLogprobs(NamedTuple):
    """A row whose first `num_tokens` are followed by prompt tokens that the caller wants log-probabilities of."""

    row: int
    num_tokens: int
    num_top: int  # alternatives beside each


class Transfer(NamedTuple):
    """Blocks to copy between the device and the host, or between the host and files: `files` are read before blocks are
    copied to the device, or written where `to_host`."""

    transfer_id: int
    to_host: bool
    pairs: list[tuple[int, int]]  # (source block, destination block)
    of_prefixes: bool = False  # they are the prefix cache's; else those of a request that is swapped
    files: Sequence[tuple[int, bytes]] = ()  # (host block, hash of its tokens)

    def copy(self, device: Any, host: Any) -> None:
        """Of arrays by block."""
        source, destination = (device, host) if self.to_host else (host, device)
        for place, other in self.pairs:
            destination[other] = source[place]


class Push(NamedTuple):
    """Blocks to copy to the engine that a prompt is computed for, while the step computes later layers."""

    transfer_id: int
    pairs: list[tuple[int, int]]  # (block here, block there)


class StepPlan(NamedTuple):
    """One step's batch, row by row. Row i computes tokens [starts[i], starts[i] + counts[i]) of the request at
    req_indices[i], and samples one token after the last of them where samples[i].

    Rows [0, num_decode_rows) are running requests; the rest are prompts or chunks of prompts. A running request's last
    token may have drafts behind it: then a token is sampled after each of its tokens, to verify them. Rows with fewer
    drafts come first.

        req_indices  [ 4   0   7 | 2    5  ]      decode rows | prefill rows
        starts       [ 91  17  40| 0    512 ]
        counts       [ 1   1   3 | 300  1024]     request 7 has two drafts
        samples      [ y   y   y | y    n  ]      the last row's prompt goes on in the next step
    """

    step: int
    req_indices: Sequence[int] = ()
    starts: Sequence[int] = ()
    counts: Sequence[int] = ()
    samples: Sequence[bool] = ()
    num_decode_rows: int = 0
    admissions: Sequence[Admission] = ()
    growths: Sequence[Growth] = ()
    masks: Mapping[int, bytes] = NONE  # sampling row -> Constraint.mask
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    drafts: Mapping[int, Sequence[int]] = NONE  # row -> its drafts, where the host proposed them
    num_drafts: int = 0  # of all rows
    following: Sequence[int] = ()  # rows whose last step's drafts are not read: `starts` is where they begin at most
    keeps_up: bool = False  # drafts are worth making these days: a draft model computes prompts beside the target
    transfers: Sequence[Transfer] = ()  # to be started; whoever reads their blocks comes later
    pushes: Sequence[Push] = ()  # of prompts in this step
    awaits_transfers: bool = False  # there is nothing to do before one that is under way has ended
    preempted: Sequence[str] = ()  # request ids
    prefix_queried_tokens: int = 0  # prompt tokens looked up in the prefix cache this step
    prefix_hit_tokens: int = 0  # wherever they were found
    host_hit_tokens: int = 0  # of them, those that come back from host memory
    disk_hit_tokens: int = 0  # ... or from files

    @classmethod
    def alike(cls, rows: int, start: int, count: int, *, decode: bool, **others: Any) -> StepPlan:
        """Of the first requests `count` tokens each, all of which sample: to warm up or to measure with."""
        columns = list(range(rows)), [start] * rows, [count] * rows, [True] * rows
        if decode:
            return cls(0, *columns, num_decode_rows=rows, num_drafts=rows * (count - 1), **others)
        return cls(0, *columns, num_decode_rows=0, **others)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do. A plan without rows may still have blocks to copy, or to wait for."""
        return not (self.req_indices or self.transfers or self.awaits_transfers)

    @property
    def has_drafts(self) -> bool:
        """Whether it is a step with drafts, or follows one that is not read yet as if it were."""
        return self.num_drafts > 0 or bool(self.following)

    @property
    def num_rows(self) -> int:
        return len(self.req_indices)

    def as_decode_rows(self) -> StepPlan | None:
        """The step as one of decode rows alone, where it can be computed so: a prompt whose last token is all that is
        missing, since its beginning was found in a cache or came from another engine, is a row like any. Else None."""
        n = self.num_decode_rows
        if n == self.num_rows:
            return self
        more = self.has_drafts or self.keeps_up or self.prompt_logprobs or self.pushes
        if more or not all(self.samples[n:]) or any(count > 1 for count in self.counts[n:]):
            return None
        return self._replace(num_decode_rows=self.num_rows)

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(self.counts[self.num_decode_rows :])

    @property
    def decode_context(self) -> int:
        """KV slots that the running requests' rows attend to, their own tokens' among them."""
        return sum(self.starts[: self.num_decode_rows]) + sum(self.counts[: self.num_decode_rows])

    @property
    def prompt_attention(self) -> tuple[int, int, int]:
        """Of prompt rows: the KV slots that the one which looks furthest attends to, its own tokens' among them, those
        of all rows, and the (query, key) pairs of all."""
        reach = context = pairs = 0
        for row in range(self.num_decode_rows, len(self.counts)):
            start, count = self.starts[row], self.counts[row]
            reach = max(reach, start + count)
            context += start + count
            pairs += count * start + count * (count + 1) // 2
        return reach, context, pairs

    def num_blocks_moved(self, to_host: bool, of_prefixes: bool) -> int:
        kind = to_host, of_prefixes
        return sum(len(moved.pairs) for moved in self.transfers if (moved.to_host, moved.of_prefixes) == kind)

    @property
    def num_blocks_pushed(self) -> int:
        return sum([len(push.pairs) for push in self.pushes])

    def num_files(self, written: bool) -> int:
        return sum(len(moved.files) for moved in self.transfers if moved.to_host is written)

    def drafts_of(self, row: int) -> int:
        """Drafts that the row verifies."""
        return self.counts[row] - 1 if row < self.num_decode_rows else 0


class ExpertTraffic(NamedTuple):
    """Tokens on their way to experts of other ranks and back: a step's, of one rank's tokens."""

    sent_bytes: int
    ideal_bytes: int  # a row there and a row back for each other rank where a token has experts
    route_s: float
    dispatch_s: float
    experts_s: float
    combine_s: float


class StepResult(NamedTuple):
    """Row i's new tokens (none where the plan does not sample), and their logprobs where a request wants them. Of a row
    with drafts: those that were accepted, and one more."""

    tokens: list[list[int]]
    logprobs: Mapping[int, Sequence[TokenLogprob]] = NONE  # row -> one an element of tokens[row]
    prompt_logprobs: Mapping[int, Sequence[TokenLogprob]] = NONE  # row -> as the plan asks for them
    draft_s: float = 0.0  # of the step's time, what proposing took a draft model
    transfers_done: tuple[int, ...] = ()  # ids of those whose copies have ended since the step collected before
    failed: Mapping[int, Sequence[int]] = NONE  # of those: id -> host blocks that files did not give, or take
    expert_tokens: tuple[tuple[int, ...], ...] = ()  # as in StepRecord, like the next two
    rank_tokens: tuple[tuple[int, ...], ...] = ()
    expert_traffic: ExpertTraffic | None = None


class KVUsage(NamedTuple):
    """State of the KV cache in slots (one slot holds one token's K and V)."""

    total_blocks: int
    used_blocks: int  # referenced by a request
    cached_blocks: int  # free, but still holding a prefix that a later prompt may hit
    used_slots: int  # slots that hold a live token; blocks shared by n requests count once
    reserved_slots: int  # slots of all referenced blocks
    host_blocks_used: int  # of swapped requests, or being copied
    host_cached_blocks: int = 0  # the others that hold a prefix


class StepRecord(NamedTuple):
    """What happened in one step. Every engine metric is derived from these and from the requests' timestamps."""

    step: int
    start_time: float  # seconds on the engine's clock
    end_time: float
    schedule_s: float
    execute_s: float
    update_s: float
    prefill_tokens: int
    decode_tokens: int  # one a running request that had not ended by then: drafts count apart
    sampled_tokens: int
    num_running: int  # after the step
    num_prefilling: int
    num_waiting: int
    num_swapped: int  # whose KV lies in host memory, or is on its way back
    kv: KVUsage
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    evictions: int  # cached blocks overwritten
    preempted: tuple[str, ...]  # request ids
    swapped_out_blocks: int
    swapped_in_blocks: int
    # Request ids, one an ended completion (a request with n = 3 comes up three times).
    finished: tuple[str, ...]  # by stop or length, in this step
    aborted: tuple[str, ...]  # by the caller, since the step before
    failed: tuple[str, ...]  # by an error of the engine's, since the step before
    # By place: of the requests with at least i + 1 drafts, how many there were, and how many of the drafts up to that
    # one were all accepted.
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    draft_s: float = 0.0  # of execute_s, what proposing took; on a GPU, of the device's time
    dropped_rows: int = 0  # of requests whose end was read after the step was launched: nobody got their tokens
    # By layer with experts, and by expert: the tokens that went there. Empty without model.count_experts.
    expert_tokens: tuple[tuple[int, ...], ...] = ()
    rank_tokens: tuple[tuple[int, ...], ...] = ()  # the same by the rank that computed them; empty where there is one
    expert_traffic: ExpertTraffic | None = None  # of rank 0; None where nobody counts, or there is one rank
    decode_context: int = 0  # as of a StepPlan, like the next three: what simulation/costs.py is fitted to
    prompt_reach: int = 0
    prompt_context: int = 0
    prompt_pairs: int = 0
    host_hit_tokens: int = 0  # of prefix_hit_tokens
    disk_hit_tokens: int = 0  # of prefix_hit_tokens
    saved_blocks: int = 0  # of prefixes: to host memory
    loaded_blocks: int = 0  # and back
    written_blocks: int = 0  # to files, or found there by whoever was to write them
    read_blocks: int = 0  # and back
    lost_blocks: int = 0  # of both, those with which it did not work

    @property
    def decode_rows(self) -> int:
        """Running requests of which tokens were computed: those that `drafted` and `accepted` count."""
        return self.decode_tokens + self.dropped_rows

    @property
    def expert_imbalance(self) -> float | None:
        """Tokens of the busiest expert by those of the average one, the mean over layers; None: nobody counted."""
        return _imbalance(self.expert_tokens)

    @property
    def rank_imbalance(self) -> float | None:
        """The same of the ranks that share experts; None, too, where there is one."""
        return _imbalance(self.rank_tokens)

    @property
    def verified_tokens(self) -> int:
        """Tokens of running requests that were computed: the last ones, and drafts."""
        return self.decode_rows + sum(self.drafted)

    @property
    def host_s(self) -> float:
        """To schedule the step, and to book it."""
        return self.schedule_s + self.update_s


def _imbalance(tokens: tuple[tuple[int, ...], ...]) -> float | None:
    """The most in a layer by its average, the mean over layers; None where there is nothing."""
    ratios = [max(layer) * len(layer) / sum(layer) for layer in tokens if any(layer)]
    return sum(ratios) / len(ratios) if ratios else None


def count_drafts(plan: StepPlan, result: StepResult) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`drafted` and `accepted` of a StepRecord."""
    if not plan.num_drafts:
        return (), ()
    most = max(plan.counts[: plan.num_decode_rows]) - 1
    drafted, accepted = [0] * most, [0] * most
    for row in range(plan.num_decode_rows):
        for place in range(plan.drafts_of(row)):
            drafted[place] += 1
            accepted[place] += place + 1 < len(result.tokens[row])
    return tuple(drafted), tuple(accepted)
