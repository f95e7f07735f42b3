"""An HTTP/1.1 connection for one request at a time, and what its server-sent events say. While an answer streams in,
each read is noted with its time and nothing is decoded, so that the client costs little where the clock runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httptools
import msgspec


class Exchange:
    """One request and what came back of it."""

    __slots__ = ("error", "reads", "sent", "status")

    def __init__(self) -> None:
        self.sent: float | None = None  # when it was written
        self.status = 0
        self.reads: list[Read] = []  # of the body
        self.error = ""  # of the connection


class Connection(asyncio.Protocol):
    def __init__(self, gone: Callable[[Connection], None]) -> None:
        """`gone` is called when the connection is lost while it is idle."""
        self._gone = gone
        self._clock = time.perf_counter
        self._now = 0.0
        self._exchange: Exchange | None = None
        self._ended: Callable[[], None] | None = None
        self._answered = False  # a byte of the answer has come
        self.uses = 0  # requests sent
        self.stale = False  # the server had closed it before it could know of the request

    def send(self, request: bytes, exchange: Exchange, ended: Callable[[], None]) -> None:
        """`ended`: called when the answer is complete, or the connection lost; then it is free unless `is_closing`."""
        self._exchange, self._ended, self._answered = exchange, ended, False
        self.uses += 1
        exchange.sent = self._clock()
        self._transport.write(request)

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._gone = lambda _: None
        self._transport.abort()

    # --- asyncio's side -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        self._answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._transport.abort()
            self._end(f"the answer is no HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        if self._exchange is None:
            self._gone(self)
            return
        self.stale = self.uses > 1 and not self._answered
        self._end(f"the connection was lost: {error or 'the server closed it'}")

    # --- the parser's side ----------------------------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        assert self._exchange is not None
        self._exchange.reads.append((self._now, body))

    def on_message_complete(self) -> None:
        assert self._exchange is not None
        self._exchange.status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self._transport.close()
        self._end("")

    def _end(self, error: str) -> None:
        exchange, ended = self._exchange, self._ended
        if exchange is None or ended is None:
            return
        exchange.error = error
        self._exchange = self._ended = None
        ended()


DONE = b"[DONE]"
Read = tuple[float, bytes]  # when a piece of the body was read, and the piece


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    spans: dict[str, float] | None = None


class _Error(msgspec.Struct):
    message: str = "an error without a message"


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass
class Answer:
    # One a token; tokens of one event share the time at which its end was read.
    token_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # empty where the server does not tell them
    cached_tokens: int | None = None  # of the prompt, found in a prefix cache; None where the server does not tell
    spans: dict[str, float] = field(default_factory=dict)  # as RequestMetrics.spans, where the server tells them
    error: str = ""  # why it is not complete

    @property
    def first_scheduled(self) -> float | None:
        """By this clock: so long before the first token was read as the server says. None where it does not."""
        parts = [seconds for name, seconds in self.spans.items() if name not in ("queue", "transfer")]
        return self.token_times[0] - sum(parts) if parts and self.token_times else None


def read_answer(reads: Sequence[Read]) -> Answer:
    """How many tokens an event has is told by its `token_ids`, else by its `usage`, else it is one. Where that does not
    add up to what the server counted in the end, the answer is an error: times would be guesses."""
    answer = Answer()
    done = False
    rest = b""
    for at, piece in reads:
        *events, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
            if data == DONE:
                done = True
            elif data:
                _take(answer, data, at)
    if not answer.error and not done:
        answer.error = "the stream ended before its last event"
    return answer


def _take(answer: Answer, data: bytes, at: float) -> None:
    try:
        event = _decode(data)
    except msgspec.DecodeError as error:
        answer.error = answer.error or f"an event is none of the completions API: {error}"
        return
    if event.error is not None:
        answer.error = event.error.message
    usage = event.usage
    if usage is not None and usage.prompt_tokens_details is not None:
        answer.cached_tokens = usage.prompt_tokens_details.cached_tokens
    if usage is not None and usage.spans is not None:
        answer.spans = usage.spans
    if event.choices:
        choice = event.choices[0]
        if choice.token_ids is not None:
            answer.token_ids += choice.token_ids
            count = len(choice.token_ids)
        elif usage is not None:
            count = usage.completion_tokens - len(answer.token_times)
        else:
            count = 1 if choice.text else 0
        answer.token_times += [at] * count
    elif usage is not None and usage.completion_tokens != len(answer.token_times):
        answer.error = answer.error or (
            f"the server generated {usage.completion_tokens} tokens and its events account for "
            f"{len(answer.token_times)}: it must know `return_token_ids`, or `continuous_usage_stats`"
        )
