"""A request's life: what was asked (SamplingParams), its state (Request), what comes back (RequestOutput)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from mini_infer.core.errors import RequestError


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends. Raises RequestError on impossible values."""

    n: int = 1  # completions of the same prompt, which share the prompt's KV blocks
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # keep the k most likely tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of tokens whose probability reaches top_p
    min_p: float = 0.0  # keep tokens at least min_p times as likely as the most likely one
    seed: int | None = None  # the same seed and prompt give the same tokens, whatever else is in the batch
    repetition_penalty: float = 1.0  # over prompt and output (Keskar et al. 2019, arXiv:1909.05858)
    presence_penalty: float = 0.0  # subtracted once from a token that the output holds
    frequency_penalty: float = 0.0  # subtracted for every time that the output holds it
    max_tokens: int | None = 128  # None: up to the model's length
    min_tokens: int = 0  # no end-of-sequence, stop token or stop string before this many
    ignore_eos: bool = False
    stop: Sequence[str] = ()  # strings that end the text; a single string, or None, will do
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None  # this many alternatives beside each token; 0: the token's own only
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {getattr(self, name)!r}", name)
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            _number(name, getattr(self, name))
        for name in ("n", "top_k", "min_tokens"):
            _integer(name, getattr(self, name))
        for name in ("seed", "max_tokens", "logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name))
        _require("n", self.n, 1 <= self.n <= 256, "from 1 to 256")
        _require("temperature", self.temperature, 0 <= self.temperature <= 100, "from 0 (greedy) to 100")
        _require("top_k", self.top_k, self.top_k >= 0, "0 (all tokens) or more")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 to 1")
        _require(
            "repetition_penalty",
            self.repetition_penalty,
            0 < self.repetition_penalty <= 10,
            "above 0, at most 10",
        )
        _require("presence_penalty", self.presence_penalty, abs(self.presence_penalty) <= 2, "from -2 to 2")
        _require("frequency_penalty", self.frequency_penalty, abs(self.frequency_penalty) <= 2, "from -2 to 2")
        _require(
            "max_tokens",
            self.max_tokens,
            self.max_tokens is None or self.max_tokens >= 1,
            "at least 1, or None",
        )
        limit = math.inf if self.max_tokens is None else self.max_tokens
        _require("min_tokens", self.min_tokens, 0 <= self.min_tokens <= limit, f"from 0 to max_tokens ({limit})")
        _require(
            "logprobs",
            self.logprobs,
            self.logprobs is None or 0 <= self.logprobs <= 64,
            "from 0 to 64, or None",
        )
        if self.seed is not None:
            _require("seed", self.seed, 0 <= self.seed < 2**63, "from 0 to 2**63 - 1")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop must hold non-empty strings, got {text!r}", "stop")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class FinishReason(str, Enum):
    stop = "stop"  # end-of-sequence, a stop token or a stop string
    length = "length"  # max_tokens, or the model's length
    abort = "abort"  # the caller asked for it
    error = "error"  # the engine could not finish it


class RequestStatus(Enum):
    waiting = "waiting"
    prefilling = "prefilling"  # holds a slot and blocks; its prompt is not all computed
    running = "running"  # one token a step
    swapped = "swapped"  # its KV lies in host memory
    finished = "finished"


class Request:
    """One sequence in the engine. The scheduler owns it; `block_table` is written by the KVManager alone.

    `num_computed_tokens` chases `num_tokens`: the KV of token_ids[:num_computed_tokens] is in the cache, or
    will be when the steps already planned have run. Between a step's launch and its booking `num_in_flight` counts
    the token that it brings, and the next step may already compute that token's KV.
    """

    __slots__ = (
        "arrival_time",
        "block_hashes",
        "block_table",
        "cache_salt",
        "finish_reason",
        "first_scheduled_time",
        "fork_of",
        "max_total_tokens",
        "min_total_tokens",
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
        "request_id",
        "seed",
        "slot",
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
    ) -> None:
        self.request_id = request_id  # the caller's name for it; n > 1 completions share it
        self.params = params
        self.token_ids: list[int] = list(prompt_token_ids)  # prompt, then output
        self.prompt_len = len(self.token_ids)
        self.num_tokens = self.prompt_len  # == len(token_ids), kept because the hot loop reads it
        self.num_computed_tokens = 0
        self.num_in_flight = 0  # tokens that steps not booked yet will bring; never more than 1 outside `schedule`
        self.num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache when first admitted
        self.max_total_tokens = max_total_tokens  # it ends with "length" when num_tokens reaches this
        self.min_total_tokens = self.prompt_len + params.min_tokens
        self.stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_token_ids)
        self.seed = seed
        self.priority = priority
        self.arrival_time = arrival_time
        self.cache_salt = cache_salt
        self.fork_of = fork_of  # the sibling (n > 1) whose prompt blocks this one shares
        self.order = 0  # arrival order, given by the scheduler
        self.status = RequestStatus.waiting
        self.slot: int | None = None  # its row in the runner's per-slot state, while it is in a batch
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []  # chained hashes of its full blocks, as far as they were needed
        self.num_committed_blocks = 0  # leading blocks that are filled for sure, and may be shared
        self.num_preemptions = 0
        self.finish_reason: FinishReason | None = None
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
    def ended_by_token(self) -> bool:
        """Whether its last token is an end-of-sequence or a stop token, and so no text."""
        return self.finish_reason is FinishReason.stop and not isinstance(self.stop_reason, str)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, tokens={self.prompt_len}+{self.num_output_tokens}, "
            f"computed={self.num_computed_tokens}, slot={self.slot})"
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
        logprobs = self.logprobs
        return None if logprobs is None else logprobs[len(logprobs) - len(self.token_ids_delta) :]


@dataclass(slots=True)
class RequestOutput:
    """The completions of one request that have something new in this step; `generate` returns all n of them."""

    request_id: str
    prompt: str | None  # where the prompt was given as text
    prompt_token_ids: list[int]
    finished: bool  # all n completions are
    outputs: list[CompletionOutput]


def _tuple(name: str, value: object) -> tuple:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise RequestError(f"{name} must be a list, got {value!r}", name)
    return tuple(value)


def _integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}", name)


def _number(name: str, value: object) -> None:
    ok = not isinstance(value, bool) and isinstance(value, (int, float))
    if not ok or not abs(value) < math.inf:  # type: ignore[arg-type]  # an int may be too large for isfinite
        raise RequestError(f"{name} must be a finite number, got {value!r}", name)


def _require(name: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise RequestError(f"{name} must be {allowed}; got {value!r}", name)
