"""An HTTP/1.1 connection for one request at a time, and what its server-sent events say. While an answer streams in,
each read is noted with its time and nothing is decoded, so that the client costs little where the clock runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

DONE = b"[DONE]"
Read = tuple[float, bytes]  # when a piece of the body was read, and the piece


@dataclass
class Exchange:
    sent: float | None = None  # when it was written
    status: int = 0
    reads: list[Read] = field(default_factory=list)  # of the body
    error: str = ""  # of the connection


class Connection(asyncio.Protocol):
    def __init__(self, gone: Callable[[Connection], None]) -> None:
        """`gone` is called when the connection is lost while it is idle."""
        self._gone, self._now = gone, 0.0
        self._exchange: Exchange | None = None
        self._ended: Callable[[], None] | None = None
        self._answered = False  # a byte of the answer has come
        self.uses = 0  # requests sent
        self.stale = False  # the server had closed it before it could know of the request

    def send(self, request: bytes, exchange: Exchange, ended: Callable[[], None]) -> None:
        """`ended`: called when the answer is complete, or the connection lost; then it is free unless `is_closing`."""
        self._exchange, self._ended, self._answered = exchange, ended, False
        self.uses += 1
        exchange.sent = time.perf_counter()
        self._transport.write(request)

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._gone = lambda _: None
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        import httptools  # of what serves, which the rest of the lab does without

        assert isinstance(transport, asyncio.Transport)
        self._transport, self._broken = transport, httptools.HttpParserError
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self._answered = True
        try:
            self._parser.feed_data(data)
        except self._broken as error:
            self._transport.abort()
            self._end(f"the answer is no HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        if self._exchange is None:
            self._gone(self)
            return
        self.stale = self.uses > 1 and not self._answered
        self._end(f"the connection was lost: {error or 'the server closed it'}")

    # What the parser calls:
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


@dataclass
class Answer:
    # One a token; tokens of one event share the time at which its end was read.
    token_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # empty where the server does not tell them
    cached_tokens: int | None = None  # of the prompt, found in a prefix cache; None where the server does not tell
    spans: dict[str, float] = field(default_factory=dict)  # as RequestMetrics.spans, where the server tells them
    error: str = ""  # why it is not complete


def read_answer(reads: Sequence[Read]) -> Answer:
    """How many tokens an event has is told by its `token_ids`, else by its `usage`, else it is one. Where that does not
    add up to what the server counted in the end, the answer is an error: times would be guesses."""
    answer, done, rest = Answer(), False, b""
    for at, piece in reads:
        *events, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
            done |= data == DONE
            try:
                _take(answer, msgspec.json.decode(data, type=dict) if data and data != DONE else {}, at)
            except (ValueError, TypeError, AttributeError) as error:
                answer.error = answer.error or f"an event is none of the completions API: {error}"
    if not answer.error and not done:
        answer.error = "the stream ended before its last event"
    return answer


def _take(answer: Answer, event: Mapping[str, Any], at: float) -> None:
    if error := event.get("error"):
        answer.error = error.get("message", "an error without a message")
    usage, known = event.get("usage") or {}, len(answer.token_times)
    counted = usage.get("completion_tokens", 0)
    answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", answer.cached_tokens)
    answer.spans = usage.get("spans") or answer.spans
    for choice in event.get("choices", ())[:1]:
        token_ids = choice.get("token_ids")
        answer.token_ids += token_ids or ()
        texts = counted - known if usage else bool(choice.get("text"))
        answer.token_times += [at] * (texts if token_ids is None else len(token_ids))
    if usage and not event.get("choices") and counted != known:
        answer.error = answer.error or (
            f"the server generated {counted} tokens and its events account for {known}: it must know "
            "`return_token_ids`, or `continuous_usage_stats`"
        )
