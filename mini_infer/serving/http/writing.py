"""An answer's bytes: JSON, whole or in pieces, and the shortest way for a piece to its connection."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import msgspec
from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from mini_infer.serving.link.stream import Blocked

AT_ONCE = 4  # entries of an iterator: a fraction of a millisecond, with 64 log-probabilities each


def _listed(value: Any) -> list[Any]:
    if isinstance(value, Iterator):
        return list(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be written as JSON")


encode = msgspec.json.Encoder(enc_hook=_listed).encode  # a str in 0.1 us; never a lone surrogate in a decoded text


def pieces(value: Any) -> Iterator[bytes]:
    """What `encode` gives, when joined. An iterator is written as the list of what it brings, which need never be there
    at once."""
    if isinstance(value, dict):
        pairs = (chain([encode(key) + b":"], pieces(each)) for key, each in value.items())
        yield from _enclosed(b"{", pairs, b"}")
    elif isinstance(value, list):
        yield from _enclosed(b"[", map(pieces, value), b"]")
    elif isinstance(value, Iterator):
        groups = iter(lambda: list(islice(value, AT_ONCE)), [])
        yield from _enclosed(b"[", ([encode(group)[1:-1]] for group in groups), b"]")
    else:
        yield encode(value)


def in_blocks(written: Iterator[bytes], size: int, seconds: float) -> Iterator[bytes]:
    """The same bytes, about `size` at a time, or as many as are written in so many seconds."""
    block = bytearray()
    until = time.perf_counter() + seconds
    for piece in written:
        block += piece
        if len(block) >= size or time.perf_counter() > until:
            yield bytes(block)
            block.clear()
            until = time.perf_counter() + seconds
    if block:
        yield bytes(block)


def _enclosed(begin: bytes, entries: Iterator[Any], end: bytes) -> Iterator[bytes]:
    yield begin
    for number, entry in enumerate(entries):
        if number:
            yield b","
        yield from entry
    yield end


def body_writer(send: Send) -> Callable[[bytes], Blocked]:
    """What sends pieces of an answer that `send`, the server's own, has begun with neither a length nor an end.

    What uvicorn does for a piece costs more than all that is done for it here, so where it serves the piece goes to its
    transport, as the same bytes. A piece for a client who is behind, and any other server, goes through `send`, for
    which the caller waits.
    """

    def through_send(body: bytes) -> Blocked:
        return send({"type": "http.response.body", "body": body, "more_body": True})

    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return through_send
    flow, write = cycle.flow, cycle.transport.write

    def to_transport(body: bytes) -> Blocked:
        if cycle.disconnected or cycle.response_complete:
            return None
        if flow.write_paused or not cycle.chunked_encoding:
            return through_send(body)
        write(b"%x\r\n%b\r\n" % (len(body), body))
        return None

    return to_transport
