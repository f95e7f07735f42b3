"""JSON, whole or in pieces. An iterator is written as the list of what it brings, which need never be there at once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import msgspec

AT_ONCE = 4  # entries of an iterator: a fraction of a millisecond, with 64 log-probabilities each


def _listed(value: Any) -> list[Any]:
    if isinstance(value, Iterator):
        return list(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be written as JSON")


encode = msgspec.json.Encoder(enc_hook=_listed).encode  # a str in 0.1 us; never a lone surrogate in a decoded text


def pieces(value: Any) -> Iterator[bytes]:
    """What `encode` gives, when joined."""
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


def in_blocks(written: Iterator[bytes], size: int) -> Iterator[bytes]:
    """The same bytes, at least `size` at a time but for the last ones."""
    block = bytearray()
    for piece in written:
        block += piece
        if len(block) >= size:
            yield bytes(block)
            block.clear()
    if block:
        yield bytes(block)


def _enclosed(begin: bytes, entries: Iterator[Any], end: bytes) -> Iterator[bytes]:
    yield begin
    for number, entry in enumerate(entries):
        if number:
            yield b","
        yield from entry
    yield end
