"""Answers: a stream of server-sent events, or one JSON object. Both watch the client and end with its connection.

A streamed token is the hot path of the API process: the constant parts of its event are made once a request, only the
text is encoded, and the bytes go straight to ASGI's `send`, in the pass that takes in the engine's message. When the
client or the event loop is slow, the engine's streams merge what nobody has fetched yet, so that later events carry
more text.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from itertools import chain, islice, takewhile
from typing import Any, Protocol

from fastapi import Response
from starlette.types import Message, Receive, Scope, Send

from mini_infer.core.request import FinishReason
from mini_infer.serving.api.errors import ApiError, as_api_error
from mini_infer.serving.api.schema import StreamOptions
from mini_infer.serving.http.writing import body_writer, encode, in_blocks, pieces
from mini_infer.serving.link.stream import Blocked, Stream
from mini_infer.serving.link.wire import DEADLINE, Delta, merge

DONE = b"data: [DONE]\n\n"
CLIENT_LEFT = 499  # as other servers log it
LOGPROB_BYTES = 12  # of one of a prompt, as it comes
BLOCK = 2**14  # bytes of a long answer
BLOCK_S = 0.001  # in which they are written
PAUSE_S = 0.001  # between two blocks of whatever answers, at least: the others' turn
FEW = 512  # log-probabilities that are written in one go: about half a millisecond
Event = bytes | Iterator[bytes]  # pieces, where it is long
SERVER_SEND = "mini_infer.send"  # in the scope: the server's own `send`, without what the web framework wraps around it


def new_id(prefix: str, own: str | None = None) -> str:
    """Of an answer. `own` is what its request wants it to be called."""
    return f"{prefix}-{own or uuid.uuid4().hex}"


class Renderer(Protocol):
    """How one request's outcome is written; `prompt` counts the prompts of a batch."""

    def event(self, prompt: int, delta: Delta) -> Event:
        """What carries a delta; empty where there is nothing to tell."""

    def last_event(self, usage: dict[str, Any]) -> bytes:
        """What a stream ends with."""

    def whole(self, prompts: Sequence[Sequence[Delta]], usage: dict[str, Any]) -> dict[str, Any]:
        """One answer for everything: for each prompt, its completions in order."""


class Running:
    """The answers under way."""

    def __init__(self) -> None:
        self.answers: set[Answer] = set()
        self._writing = asyncio.Lock()

    async def write(self, blocks: Iterator[bytes], send: Callable[[bytes], Blocked]) -> None:
        """Of a long answer: a block at a time, whosever it is, as fast as its client reads. Others go on in between."""
        while True:
            async with self._writing:
                block = next(blocks, None)
                await asyncio.sleep(PAUSE_S)
            if block is None:
                return
            if (blocked := send(block)) is not None:
                await blocked


class Answer(Response):
    """Ends its engine streams when it is done, when the client goes away, and when it is told to. It is one of
    `running` until it has ended."""

    def __init__(self, streams: Sequence[Stream], render: Renderer, running: Running, request_id: str) -> None:
        self._streams = streams
        self._render = render
        self._running = running
        self._ended_by: ApiError | None = None
        self._left = False
        self._common_headers = [(b"x-request-id", request_id.encode()), (b"cache-control", b"no-cache")]
        self.background = None  # what FastAPI asks of a Response
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._running.answers.add(self)
        watch = asyncio.ensure_future(_disconnected(receive))
        watch.add_done_callback(self._leave)
        deadline = min((stream.deadline for stream in self._streams if stream.deadline is not None), default=None)
        # The engine keeps it, too, and ends the request sooner; unless it hangs.
        timer = None if deadline is None else asyncio.get_running_loop().call_at(deadline, self.end, _bad_end(DEADLINE))
        try:
            await self._run(send, scope.get(SERVER_SEND, send))
        except Exception as error:
            # The stream of a client that is gone, or of a server that shuts down, ends with an abort.
            await self._fail(as_api_error(self._ended_by or error), send)
        finally:
            self._running.answers.discard(self)
            watch.cancel()
            if timer is not None:
                timer.cancel()
            self._abort()

    def end(self, error: ApiError) -> None:
        self._ended_by = error
        self._abort()

    def _leave(self, _: object) -> None:
        self._left = True
        self._abort()

    def _abort(self) -> None:
        for stream in self._streams:
            stream.abort()

    def usage(self) -> dict[str, Any]:
        used = [stream.usage for stream in self._streams]
        prompt = sum(usage.prompt_tokens for usage in used)
        completion = sum(usage.completion_tokens for usage in used)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in used)},
        }

    def _require_end(self, stream: Stream) -> None:
        """A stream that is aborted ends like one that is complete. One that was complete before stays so."""
        if self._left or stream.aborted:
            raise ApiError(CLIENT_LEFT, "the client closed the connection", code="client_left")  # for the log alone

    def _write(self, written: Iterator[bytes], send: Callable[[bytes], Blocked]) -> Coroutine[Any, Any, None]:
        """All of it, or as much as there is somebody to read it: what has begun ends, even behind its deadline."""
        blocks = in_blocks(written, BLOCK, BLOCK_S)
        return self._running.write(takewhile(lambda _: not self._left, blocks), send)

    async def _run(self, send: Send, server_send: Send) -> None:
        """`server_send` is quicker, and knows nothing of the framework's: for when `send` has begun the answer."""
        raise NotImplementedError

    async def _fail(self, error: ApiError, send: Send) -> None:
        raise error


class WholeAnswer(Answer):
    """One JSON object, when everything is computed. With log-probabilities it can be long: then it is written in
    pieces, as fast as the client reads them, and streams go on in between."""

    async def _run(self, send: Send, server_send: Send) -> None:
        prompts = await _together([self._collect(stream) for stream in self._streams])
        whole = self._render.whole(prompts, self.usage())
        headers = [(b"content-type", b"application/json"), *self._common_headers]
        if sum(_num_logprobs(delta) for deltas in prompts for delta in deltas) <= FEW:
            body = encode(whole)
            await send(_start([*headers, (b"content-length", b"%d" % len(body))]))
            await send({"type": "http.response.body", "body": body})
            return

        await send(_start(headers))
        await self._write(
            pieces(whole), lambda block: send({"type": "http.response.body", "body": block, "more_body": True})
        )
        if not self._left:
            await send({"type": "http.response.body"})

    async def _collect(self, stream: Stream) -> list[Delta]:
        completions: dict[int, Delta] = {}
        async for delta in stream:
            merge(completions, delta.index, delta)
            _require_good_end(delta)
        self._require_end(stream)
        return [completions[index] for index in sorted(completions)]


class EventStream(Answer):
    """Server-sent events. The status line waits for the first of them, so that a refusal can still be a 400."""

    _started = False

    async def _run(self, send: Send, server_send: Send) -> None:
        self._starting = asyncio.Lock()
        self._writing = asyncio.Lock()  # held while a long event is written: no other one may begin within it
        work = [self._forward(prompt, stream, send, server_send) for prompt, stream in enumerate(self._streams)]
        await _together(work)
        await send({"type": "http.response.body", "body": self._render.last_event(self.usage())})

    async def _forward(self, prompt: int, stream: Stream, send: Send, server_send: Send) -> None:
        send_body = body_writer(server_send)

        def write(deltas: Collection[Delta]) -> Blocked:
            return told(self._events(prompt, deltas))

        def told(events: Event) -> Blocked:
            if isinstance(events, bytes) and not self._writing.locked():
                return send_body(events) if events else None
            return asyncio.shield(written(events))  # another prompt's end cuts no event

        async def written(events: Event) -> None:
            async with self._writing:
                if not isinstance(events, bytes):
                    await self._write(events, send_body)
                elif events and (blocked := send_body(events)) is not None:
                    await blocked

        async for delta in stream:  # the first one: what is wrong with the request itself is known now
            events = self._events(prompt, [delta])
            if not self._started:
                await self._start(send)
            if (blocked := told(events)) is not None:
                await blocked
            break
        await stream.forward(write)
        self._require_end(stream)

    def _events(self, prompt: int, deltas: Collection[Delta]) -> Event:
        events = []
        for delta in deltas:
            if delta.finish_reason is not None:
                _require_good_end(delta)
            events.append(self._render.event(prompt, delta))
        return events[0] if len(events) == 1 else joined(events)

    async def _start(self, send: Send) -> None:
        async with self._starting:  # several prompts' streams share one answer
            if not self._started:
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
                await send(_start([*headers, *self._common_headers]))
                self._started = True

    async def _fail(self, error: ApiError, send: Send) -> None:
        if not self._started:
            raise error
        async with self._writing:
            # No [DONE] behind it: the answer is not complete.
            await send({"type": "http.response.body", "body": b"data: " + error.body + b"\n\n"})


def joined(events: Sequence[Event]) -> Event:
    short = [event for event in events if isinstance(event, bytes)]
    if len(short) == len(events):
        return b"".join(short)
    return chain.from_iterable([event] if isinstance(event, bytes) else event for event in events)


def _num_logprobs(delta: Delta) -> int:
    """About, where there are a prompt's."""
    own = sum(1 + len(token.top) for token in delta.logprobs or ())
    return own if delta.prompt_logprobs is None else own + delta.prompt_logprobs.num_bytes // LOGPROB_BYTES


def _start(headers: list[tuple[bytes, bytes]]) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": headers}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _together(work: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """All results in order; the first failure ends the rest.

    Each in a task of its own, also a single one: a token that wakes it then finds it at once, and not at the end of
    the dozen coroutines in which the web framework wraps an answer.
    """
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _require_good_end(delta: Delta) -> None:
    reason = delta.finish_reason
    if reason in (FinishReason.error.value, FinishReason.abort.value, DEADLINE):
        raise _bad_end(reason)


def _bad_end(reason: str) -> ApiError:
    if reason == DEADLINE:
        return ApiError(
            504,
            "the request did not finish within its timeout: ask for fewer tokens, or for a longer `timeout`",
            type="timeout_error",
            code="deadline_exceeded",
        )
    message = f"the engine ended the request with {reason!r}; the server's log tells why"
    return ApiError(500, message, type="server_error", code=f"request_{reason}")


class EventTemplate:
    """The constant parts of one choice's events, as bytes around the text.

        data: {"id":...,"choices":[{"index":0,"delta":{"content":  TEXT  },"logprobs":null,"finish_reason":null}]}

    Args:
        common: id, object, created and model of every event.
        before: makes what stands before the text, of a choice's number and whether it is its first event.
        between: what closes the text.
        num_choices: of all prompts together.
        options: of the stream. With `include_usage` each event says "usage": null, and the last one brings it.
        prompt_tokens: for the usage that each event brings with `continuous_usage_stats`.
    """

    def __init__(
        self,
        common: dict[str, Any],
        before: Callable[[int, bool], bytes],
        between: bytes,
        num_choices: int,
        options: StreamOptions | None,
        prompt_tokens: int,
    ) -> None:
        with_usage = bool(options and options.include_usage)
        self.tells_usage = bool(with_usage and options and options.continuous_usage_stats)
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0
        self._common = b"data: " + encode(common)[:-1] + b',"choices":['
        self._first_heads = {choice: self._common + before(choice, True) for choice in range(num_choices)}
        self._heads = [self._common + before(choice, False) for choice in range(num_choices)]
        self._between = between
        self._close = b"]%s}\n\n" % (b',"usage":null' if with_usage else b"")
        self._tail_alone = b',"logprobs":null,"finish_reason":null}' + self._close
        self._tail = between + self._tail_alone
        self._with_usage = with_usage

    def text(self, choice: int, text: str) -> bytes:
        return self._head(choice) + encode(text) + self._tail

    def tokens(self, choice: int, text: str, token_ids: list[int]) -> bytes:
        parts = (self._head(choice), encode(text), self._between, b',"token_ids":', encode(token_ids), self._tail_alone)
        return b"".join(parts)

    def full(
        self,
        choice: int,
        text: str,
        logprobs: dict[str, Any] | None,
        delta: Delta,
        token_ids: list[int] | None = None,
        *,
        echoes: bool = False,
    ) -> Event:
        """With logprobs, which may be those of a prompt that it `echoes`, too, or a finish reason."""
        rest: dict[str, Any] = {
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if token_ids is not None:
            rest["token_ids"] = token_ids
        begin = self._head(choice) + encode(text) + self._between + b","
        if _num_logprobs(delta) <= FEW and not echoes:
            return begin + encode(rest)[1:] + self._close
        return chain([begin], islice(pieces(rest), 1, None), [self._close])

    def begins(self, choice: int) -> bool:
        """Whether the choice's next event is its first, and of its caller's own making."""
        return self._first_heads.pop(choice, None) is not None

    def choice(self, choice: dict[str, Any], delta: Delta, *, echoes: bool = False) -> Event:
        """An event of its caller's own making."""
        end = b"]" + self._usage_so_far() if self.tells_usage else self._close
        if _num_logprobs(delta) <= FEW and not echoes:
            return self._common + encode(choice) + end
        return chain([self._common], pieces(choice), [end])

    def count(self, delta: Delta) -> None:
        """Takes its tokens into the usage that the next events tell."""
        self._completion_tokens += len(delta.token_ids)

    def _usage_so_far(self) -> bytes:
        prompt, completion = self._prompt_tokens, self._completion_tokens
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return b',"usage":' + encode(usage) + b"}\n\n"

    def _head(self, choice: int) -> bytes:
        """Of the choice's next event."""
        return self._first_heads.pop(choice, self._heads[choice])

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last event, where the usage was asked for."""
        return self._common + b'],"usage":' + encode(usage) + b"}\n\n" if self._with_usage else b""
