"""A request's life: its state (Request), and what comes back (RequestOutput)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from mini_infer.core.sampling_params import SamplingParams


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
    swapping_in = "swapping_in"  # holds a req_index and blocks; its KV is on its way into them
    finished = "finished"


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


class Request:
    """One sequence in the engine. The scheduler owns it; `block_table` is written by the KVManager alone.

    `num_computed_tokens` chases `num_tokens`: the KV of token_ids[:num_computed_tokens] is in the cache, or
    will be when the steps already planned have run. Between a step's launch and its booking `num_in_flight` counts
    the token that it brings, and the next step may already compute that token's KV. Drafts raise both; those that are
    rejected set the counter back.
    """

    __slots__ = (
        "arrival_time",
        "block_hashes",
        "block_table",
        "cache_salt",
        "constraint",
        "ended_by_token",
        "finish_reason",
        "first_scheduled_time",
        "fork_of",
        "grow_after",
        "is_announced",
        "max_total_tokens",
        "min_total_tokens",
        "must_be_read",
        "num_cached_tokens",
        "num_committed_blocks",
        "num_computed_tokens",
        "num_in_flight",
        "num_preemptions",
        "num_tokens",
        "order",
        "params",
        "priority",
        "prompt_len",
        "prompt_logprobs",
        "quiet_until",
        "req_index",
        "request_id",
        "seed",
        "status",
        "stop_ids",
        "stop_reason",
        "token_ids",
        "token_times",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_total_tokens: int,
        eos_token_ids: Sequence[int] = (),
        seed: int = 0,
        priority: int = 0,
        arrival_time: float = 0.0,
        cache_salt: str = "",
        fork_of: Request | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self.request_id = request_id  # the caller's name for it; n > 1 completions share it
        self.params = params
        self.token_ids: list[int] = list(prompt_token_ids)  # prompt, then output
        self.prompt_len = len(self.token_ids)
        self.num_tokens = self.prompt_len  # == len(token_ids), kept because the hot loop reads it
        self.num_computed_tokens = 0
        self.num_in_flight = 0  # tokens that steps not booked yet will bring: drafts count as accepted
        self.num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache when first admitted
        self.max_total_tokens = max_total_tokens  # it ends with "length" when num_tokens reaches this
        self.min_total_tokens = self.prompt_len + params.min_tokens
        self.stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_token_ids)
        # Whether what it samples depends on where it stands or on what it said, beyond what lies on the device.
        self.must_be_read = constraint is not None or params.adjusts_logits or params.logprobs is not None
        self.seed = seed
        self.priority = priority
        self.arrival_time = arrival_time
        self.cache_salt = cache_salt
        self.fork_of = fork_of  # the sibling (n > 1) whose prompt blocks this one shares
        self.constraint = constraint  # it has taken in the whole output
        # From the second token on as they are computed; None where nobody asks. Siblings have the leader's prompt.
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        if params.prompt_logprobs is not None and fork_of is None:
            self.prompt_logprobs = [None]
        self.order = 0  # arrival order, given by the scheduler
        self.status = RequestStatus.waiting
        self.req_index: int | None = None  # its row in the per-request state on the device, while it is in a batch
        self.is_announced = False  # a plan has told the device of it, since it was given its req_index
        # Up to here the scheduler has nothing to decide: its next token needs no block and is not beyond its end
        # (grow_after), and the one that comes fills no block and does not end it (quiet_until). 0: not known.
        self.grow_after = 0
        self.quiet_until = 0
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []  # chained hashes of its full blocks, as far as they were needed
        self.num_committed_blocks = 0  # leading blocks that are filled for sure, and may be shared
        self.num_preemptions = 0
        self.finish_reason: FinishReason | None = None
        self.ended_by_token = False  # its last token is an end-of-sequence or a stop token, and so no text
        self.stop_reason: int | str | None = None  # the stop token or string that ended it; None for end-of-sequence
        self.first_scheduled_time: float | None = None
        self.token_times: list[float] = []  # when each output token appeared

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
