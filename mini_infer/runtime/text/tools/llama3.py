"""Llama 3: the whole answer is {"name": "f", "parameters": {...}}, behind <|python_tag|> or not. Semicolons are between
several calls."""

from __future__ import annotations

from mini_infer.runtime.text.pieces import Piece, Source, Steps
from mini_infer.runtime.text.tools.calls import read_call

OPEN = "<|python_tag|>"


def parse(source: Source, pieces: list[Piece]) -> Steps[None]:
    yield from source.skip_white()
    if (yield from source.skip(OPEN)):
        yield from source.skip_white()
    while (yield from source.peek()) == "{" and (yield from read_call(source, pieces, 0)):
        yield from source.skip_white()
        source.forget()
        if (yield from source.skip(";")):
            yield from source.skip_white()
    source.at = 0
    yield from source.rest(pieces)
