"""Mistral: [TOOL_CALLS] and a list of {"name": "f", "arguments": {...}}; or, of newer models, [TOOL_CALLS]f[ARGS]{...}
for each call."""

from __future__ import annotations

from mini_infer.runtime.text.pieces import Kind, Piece, Source, Steps
from mini_infer.runtime.text.tools.calls import give_back, read_call, value

OPEN, ARGS = "[TOOL_CALLS]", "[ARGS]"
IN_NAME = "_-."


def parse(source: Source, pieces: list[Piece]) -> Steps[None]:
    while (begin := (yield from source.text_up_to(OPEN, pieces))) is not None:
        yield from source.skip_white()
        if (yield from source.skip("[")):
            yield from _list(source, pieces, begin)
        else:
            yield from _named(source, pieces, begin)
        yield from source.skip_white()


def _list(source: Source, pieces: list[Piece], begin: int) -> Steps[None]:
    more = True
    while more:
        yield from source.skip_white()
        if not (yield from read_call(source, pieces, begin)):
            return
        yield from source.skip_white()
        source.forget()
        begin = 0
        more = yield from source.skip(",")
    yield from source.skip("]")


def _named(source: Source, pieces: list[Piece], begin: int) -> Steps[None]:
    start = source.at
    while (char := (yield from source.peek())) and (char.isalnum() or char in IN_NAME):
        source.at += 1
    name = source.text[start : source.at]
    yield from source.skip(ARGS)
    yield from source.skip_white()
    if not name or (yield from source.peek()) != "{":
        give_back(source, pieces, begin)
        return
    pieces.append(Piece(Kind.call, name))
    source.forget()
    yield from value(source, pieces)
