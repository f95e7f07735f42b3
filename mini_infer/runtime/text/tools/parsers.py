"""Calls as models write them, read as they come; which format is whose says formats.py.

hermes    Hermes, Qwen 2.5 and 3: <tool_call>{"name": "f", "arguments": {...}}</tool_call>, as often as there are
          calls
mistral   [TOOL_CALLS] and a list of {"name": "f", "arguments": {...}}; or, of newer models,
          [TOOL_CALLS]f[ARGS]{...} for each call
llama3    the whole answer is {"name": "f", "parameters": {...}}, behind <|python_tag|> or not, with semicolons
          between several
"""

from __future__ import annotations

from mini_infer.runtime.text.pieces import Kind, Piece, Source, Steps
from mini_infer.runtime.text.tools.calls import give_back, read_call, value

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TOOL_CALLS, ARGS = "[TOOL_CALLS]", "[ARGS]"
PYTHON_TAG = "<|python_tag|>"
IN_NAME = "_-."


def hermes(source: Source, pieces: list[Piece]) -> Steps[None]:
    while (begin := (yield from source.text_up_to(OPEN, pieces))) is not None:
        yield from source.skip_white()
        if (yield from read_call(source, pieces, begin)):
            yield from source.skip_white()
            yield from source.skip(CLOSE)
            yield from source.skip_white()


def mistral(source: Source, pieces: list[Piece]) -> Steps[None]:
    while (begin := (yield from source.text_up_to(TOOL_CALLS, pieces))) is not None:
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


def llama3(source: Source, pieces: list[Piece]) -> Steps[None]:
    yield from source.skip_white()
    if (yield from source.skip(PYTHON_TAG)):
        yield from source.skip_white()
    while (yield from source.peek()) == "{" and (yield from read_call(source, pieces, 0)):
        yield from source.skip_white()
        source.forget()
        if (yield from source.skip(";")):
            yield from source.skip_white()
    source.at = 0
    yield from source.rest(pieces)
