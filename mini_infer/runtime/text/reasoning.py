"""What a model thinks, told from what it says: <think> ... </think> at the beginning of its answer."""

from __future__ import annotations

from mini_infer.runtime.text.pieces import Kind, Parser, Piece, Source, Steps

OPEN, CLOSE = "<think>", "</think>"


class ReasoningParser:
    """
    Args:
        inside: the prompt has ended with <think>.
        rest: takes what is said behind it apart; None where that is text alone.
    """

    def __init__(self, inside: bool, rest: Parser | None) -> None:
        self._inside = inside
        self._parser = Parser(self._parse)
        self._rest = rest

    @property
    def passes(self) -> bool:
        """As with Parser."""
        return self._parser.passes and (self._rest is None or self._rest.passes)

    def push(self, text: str, last: bool = False) -> list[Piece]:
        """As with Parser."""
        pieces = self._parser.push(text, last)
        if self._rest is None:
            return pieces
        found = [piece for piece in pieces if piece.kind is Kind.reasoning]
        said = "".join(piece.text for piece in pieces if piece.kind is Kind.text)
        return found + (self._rest.push(said, last) if said or last else [])

    def _parse(self, source: Source, pieces: list[Piece]) -> Steps[None]:
        if not self._inside:
            yield from source.skip_white()
            if not (yield from source.skip(OPEN)):
                source.at = 0
                yield from source.rest(pieces)
                return
        yield from source.skip_white()
        yield from source.text_up_to(CLOSE, pieces, Kind.reasoning)
        yield from source.skip_white()
        yield from source.rest(pieces)
