"""The shortest way for a piece of a streamed answer: no coroutine is made for it while its client reads."""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from mini_infer.serving.api.stream import Blocked


def body_writer(send: Send) -> Callable[[bytes], Blocked]:
    """What sends pieces of an answer that `send`, the server's own, has begun with neither a length nor an end.

    What uvicorn does for a piece costs more than all that is done for it here, so where it serves the piece goes to its
    transport, as the same bytes. Anything out of the ordinary, and any other server, goes through `send`.
    """

    def through_send(body: bytes) -> Blocked:
        return begun(send({"type": "http.response.body", "body": body, "more_body": True}))

    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return through_send
    flow, write = cycle.flow, cycle.transport.write

    def to_transport(body: bytes) -> Blocked:
        if flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
            return through_send(body)
        write(b"%x\r\n%b\r\n" % (len(body), body))
        return None

    return to_transport


def begun(work: Awaitable[None]) -> Blocked:
    """Does what can be done of it without waiting; the rest, if there is any, is for the caller to await."""
    steps = work.__await__()
    try:
        waits_for = next(steps)
    except StopIteration:
        return None
    return _rest(steps, waits_for)


@types.coroutine
def _rest(steps: Generator[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    yield waits_for
    yield from steps
