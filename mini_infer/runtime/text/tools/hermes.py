"""Hermes, Qwen 2.5 and 3: <tool_call>{"name": "f", "arguments": {...}}</tool_call>, as often as there are calls."""

from __future__ import annotations

from mini_infer.runtime.text.pieces import Piece, Source, Steps
from mini_infer.runtime.text.tools.calls import read_call

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def parse(source: Source, pieces: list[Piece]) -> Steps[None]:
    while (begin := (yield from source.text_up_to(OPEN, pieces))) is not None:
        yield from source.skip_white()
        if (yield from read_call(source, pieces, begin)):
            yield from source.skip_white()
            yield from source.skip(CLOSE)
            yield from source.skip_white()
