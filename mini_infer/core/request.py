"""A request's life: its state (Request), and what comes back (RequestOutput)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from mini_infer.core.sampling_params import SamplingParams

NO_ADAPTER = -1  # where a slot of adapters may stand
Rank = tuple[float, int]  # the smaller goes first; the second number counts arrivals


class FinishReason(str, Enum):
    stop = "stop"  # end-of-sequence, a stop token or a stop string
    length = "length"  # max_tokens, or the model's length
    abort = "abort"  # the caller asked for it
    error = "error"  # the engine could not finish it


class RequestStatus(Enum):
    waiting = "waiting"
    prefilling = "prefilling"  # holds a req_index and blocks; its prompt is not all computed
    running = "running"  # one token a step
    swapped = "swapped"  # its KV lies in host memory, or is on its way there
    loading = "loading"  # holds a req_index and blocks; KV, swapped or of a prefix, is on its way into them
    receiving = "receiving"  # likewise, and another engine computes it
    finished = "finished"

    __hash__ = object.__hash__  # statuses are keys in every step, and an Enum's own hash takes 0.15 us


class Constraint(Protocol):
    """Where one sequence stands in its grammar."""

    @property
    def mask(self) -> bytes:
        """Bit i, from the lowest bit of the first byte on, says whether token i may come next."""

    def accept(self, token_id: int) -> FinishReason | None:
        """Goes on by a token. `stop`: nothing may follow it. `error`: the grammar has no such token there, or cannot
        be followed any further. None: the text goes on."""

    def is_end(self, token_id: int) -> bool:
        """Whether the token only says that the text has ended."""


@dataclass
class Export:
    """A prompt that is computed for another engine, which has reserved blocks for it.

    `blocks` are there: those of the prompt from table index `first` on.
    """

    transfer_id: int
    first: int
    blocks: list[int]
    block_size: int
    num_pushed: int = 0  # leading blocks of the prompt that are there, or will be when the planned steps have run

    def pairs(self, table: list[int], num_computed: int) -> list[tuple[int, int]]:
        """(block here, block there) of what a step up to `num_computed` tokens adds. A block that it fills in part is
        sent again with the step that goes on in it."""
        begin = max(self.num_pushed, self.first)
        end = max(begin, -(-num_computed // self.block_size))
        self.num_pushed = max(self.num_pushed, num_computed // self.block_size)
        return list(zip(table[begin:end], self.blocks[begin - self.first : end - self.first], strict=True))


class Handover(NamedTuple):
    """How a prompt's KV came from the engine that computed it. Seconds on the clock that engines of a machine share."""

    asked: float
    begun: float  # the other engine's first step with it
    computed: float  # the end of its last one
    copying: float  # what its copies took, beside the steps or not: a duration
    arrived: float
    num_bytes: int


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One sequence in the engine. The scheduler owns it; `block_table` is written by the KVManager alone.

    `num_computed_tokens` chases `num_tokens`: the KV of token_ids[:num_computed_tokens] is in the cache, or
    will be when the steps already planned have run. Between a step's launch and its booking `num_in_flight` counts
    the token that it brings, and the next step may already compute that token's KV. Drafts raise both; those that are
    rejected set the counter back.
    """

    request_id: str  # the caller's name for it; n > 1 completions share it
    prompt_token_ids: InitVar[Sequence[int]]
    params: SamplingParams
    _: KW_ONLY
    max_total_tokens: int  # it ends with "length" when num_tokens reaches this
    eos_token_ids: InitVar[Sequence[int]] = ()
    seed: int = 0
    priority: int = 0
    arrival_time: float = 0.0
    cache_salt: str = ""
    adapter: str = ""  # the key of its contents, which is part of the salt, too; "": none
    fork_of: Request | None = None  # the sibling (n > 1) whose prompt blocks this one shares
    constraint: Constraint | None = None  # it has taken in the whole output
    prefill_at: str | None = None  # the engine that may compute its prompt (transfer/protocol.py)
    export: Export | None = None  # it is computed for another engine

    # What follows changes, but for the first four.
    prompt_len: int = field(init=False)
    min_total_tokens: int = field(init=False)
    stop_ids: frozenset[int] = field(init=False)  # end-of-sequence (unless ignored) and stop tokens
    must_be_read: bool = field(init=False)  # what it samples depends on more than what lies on the device
    token_ids: list[int] = field(init=False)  # prompt, then output; it only grows, or another one takes its place
    num_tokens: int = field(init=False)  # == len(token_ids), kept because the hot loop reads it
    num_computed_tokens: int = field(init=False, default=0)
    num_in_flight: int = field(init=False, default=0)  # tokens of steps not booked yet: drafts count as accepted
    num_cached_tokens: int | None = field(init=False, default=None)  # of the prompt, when it was first admitted
    # Of the second prompt token on, as they are computed; None where nobody asks. Siblings have the leader's prompt.
    prompt_logprobs: list[TokenLogprob | None] | None = field(init=False, default=None)
    rank: Rank = field(init=False, default=(0.0, 0))  # given by the scheduler; unique
    status: RequestStatus = field(init=False, default=RequestStatus.waiting)
    req_index: int | None = field(init=False, default=None)  # its row in the device's request state, while in the batch
    adapter_slot: int = field(init=False, default=NO_ADAPTER)  # while in the batch
    is_announced: bool = field(init=False, default=False)  # the device knows that this row is its own
    # Up to here the scheduler has nothing to decide: its next token needs no block and is not beyond its end
    # (grow_after), and the one that comes fills no block and does not end it (quiet_until). 0: not known.
    grow_after: int = field(init=False, default=0)
    quiet_until: int = field(init=False, default=0)
    block_table: list[int] = field(init=False, default_factory=list)
    block_hashes: list[bytes] = field(init=False, default_factory=list)  # of its full blocks, as far as needed
    num_committed_blocks: int = field(init=False, default=0)  # leading ones that are filled for sure: may be shared
    num_preemptions: int = field(init=False, default=0)
    finish_reason: FinishReason | None = field(init=False, default=None)
    ended_by_token: bool = field(init=False, default=False)  # by end-of-sequence or a stop token, which are no text
    stop_reason: int | str | None = field(init=False, default=None)  # stop token or string; None for end-of-sequence
    first_scheduled_time: float | None = field(init=False, default=None)
    handover: Handover | None = field(init=False, default=None)
    resumed_time: float | None = field(init=False, default=None)  # of the first step after the handover
    token_times: list[float] = field(init=False, default_factory=list)  # when each output token appeared

    def __post_init__(self, prompt_token_ids: Sequence[int], eos_token_ids: Sequence[int]) -> None:
        params = self.params
        self.token_ids = list(prompt_token_ids)
        self.prompt_len = self.num_tokens = len(self.token_ids)
        self.min_total_tokens = self.prompt_len + params.min_tokens
        self.stop_ids = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)))
        self.must_be_read = self.constraint is not None or params.adjusts_logits or params.logprobs is not None
        if params.prompt_logprobs is not None and self.fork_of is None:
            self.prompt_logprobs = [None]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.prompt_len

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.finished

    @property
    def num_reusable_tokens(self) -> int:
        """Leading tokens whose KV will do; of the others the logits are needed too."""
        if self.prompt_logprobs is None or len(self.prompt_logprobs) == self.prompt_len:
            return self.num_tokens - 1
        return len(self.prompt_logprobs) - 1

    def look_ahead(self, block_size: int) -> None:
        """Works out `grow_after` and `quiet_until`. A grammar reads every token."""
        if self.constraint is None:
            room, last = len(self.block_table) * block_size, self.max_total_tokens - 1
            fills_block = (self.num_committed_blocks + 1) * block_size
            self.grow_after = room if room < last else last
            self.quiet_until = 1 + (fills_block if fills_block < last else last)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, tokens={self.prompt_len}+{self.num_output_tokens}, "
            f"computed={self.num_computed_tokens}, index={self.req_index})"
        )


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of a sampled token under the model's own distribution, before temperature,
    penalties and truncation, with the most likely alternatives (most likely first)."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob)


@dataclass(frozen=True)
class RequestMetrics:
    """Timestamps on the engine's clock, in seconds; every latency is derived from them."""

    arrival_time: float
    first_scheduled_time: float | None
    token_times: tuple[float, ...]  # one an output token
    num_cached_tokens: int
    num_preemptions: int
    handover: Handover | None = None
    resumed_time: float | None = None  # of the first step after the handover

    @classmethod
    def of(cls, request: Request) -> RequestMetrics:
        cached, times = request.num_cached_tokens or 0, tuple(request.token_times)
        first, preempted = request.first_scheduled_time, request.num_preemptions
        return cls(request.arrival_time, first, times, cached, preempted, request.handover, request.resumed_time)

    @property
    def spans(self) -> dict[str, float] | None:
        """Seconds of each part of the time to the first token, one after the other; and where another engine computed
        the prompt, `transfer`, what the copies took in all, most of it within `prefill`. None where no token came."""
        moved, resumed, scheduled = self.handover, self.resumed_time, self.first_scheduled_time
        if not self.token_times:
            return None
        if moved is None or resumed is None:
            if scheduled is None:
                return None
            return {"queue": scheduled - self.arrival_time, "prefill": self.token_times[0] - scheduled}
        return {
            "queue": moved.begun - self.arrival_time,
            "prefill": moved.computed - moved.begun,
            "transfer_exposed": moved.arrived - moved.computed,
            "decode_wait": resumed - moved.arrived,
            "first_decode_step": self.token_times[0] - resumed,
            "transfer": moved.copying,
        }


@dataclass(slots=True)  # not frozen: hundreds are made in a step, and a frozen one costs three times as much
class CompletionOutput:
    """One completion so far: what this step added (`*_delta`), and on demand everything (`text`, `token_ids`).

    The private fields are views of lists that only ever grow, so that a step costs its delta and no more.
    """

    index: int
    text_delta: str
    token_ids_delta: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    metrics: RequestMetrics | None  # set when finished
    _texts: list[str] = field(repr=False)
    _num_texts: int = field(repr=False)
    _tokens: list[int] = field(repr=False)
    _span: tuple[int, int] = field(repr=False)
    _logprobs: list[TokenLogprob] | None = field(repr=False)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        return "".join(self._texts[: self._num_texts])

    @property
    def token_ids(self) -> list[int]:
        """All output tokens, with the one that ended it."""
        return self._tokens[slice(*self._span)]

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """One an output token, where the request asked for them."""
        return None if self._logprobs is None else self._logprobs[: self._span[1] - self._span[0]]

    @property
    def logprobs_delta(self) -> list[TokenLogprob] | None:
        if self._logprobs is None:
            return None
        end = self._span[1] - self._span[0]
        return self._logprobs[end - len(self.token_ids_delta) : end]


@dataclass(slots=True)
class RequestOutput:
    """The completions of one request that have something new in this step; `generate` returns all n of them."""

    request_id: str
    prompt: str | None  # where the prompt was given as text
    prompt_token_ids: list[int]
    finished: bool  # all n completions are
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob | None] | None = None  # where asked for, once, and None for the first token
