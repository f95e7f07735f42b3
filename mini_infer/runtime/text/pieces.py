"""An answer's text taken apart as it comes: what is said, what is thought, which functions are called.

A parser is written as if the whole text were there. It is a generator that yields where it needs more of it:

    def parse(source, pieces):
        while (yield from source.text_up_to("<tool_call>", pieces)): ...

so that the text may come in any deltas. No character is lost or repeated but those of the markup, and the white space
around it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from enum import Enum
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # each step waits for more text
WHITE = " \t\r\n"


class Kind(Enum):
    text = "text"  # said to the reader
    reasoning = "reasoning"
    call = "call"  # a function's name, where a call begins
    arguments = "arguments"  # of the call before it, as JSON


class Piece(NamedTuple):
    kind: Kind
    text: str


class Source:
    """The text so far.

    Attributes:
        at: the first character that no parser has taken.
        ended: no more comes.
        passes: whatever comes is text.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.passes = False

    def forget(self) -> None:
        """What has been taken is needed no more. Positions begin anew."""
        self.text, self.at = self.text[self.at :], 0

    def peek(self) -> Steps[str]:
        """The next character; empty at the end."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def skip_white(self) -> Steps[None]:
        while (char := (yield from self.peek())) and char in WHITE:
            self.at += 1

    def skip(self, literal: str) -> Steps[bool]:
        """Takes the literal if it comes next, and nothing else."""
        while not self.ended and len(rest := self.text[self.at : self.at + len(literal)]) < len(literal):
            if not literal.startswith(rest):
                return False
            yield
        if not self.text.startswith(literal, self.at):
            return False
        self.at += len(literal)
        return True

    def text_up_to(self, marker: str, pieces: list[Piece], kind: Kind = Kind.text) -> Steps[int | None]:
        """Hands on what comes before the marker, and takes the marker.

        Returns:
            Where the marker and the white space before it begin; None where the text has ended without one.
        """
        while True:
            self.forget()
            found = self.text.find(marker)
            end = found if found >= 0 else len(self.text) if self.ended else self._certain(marker)
            said = self.text[:end].rstrip(WHITE) if found >= 0 else self.text[:end]
            if said:
                pieces.append(Piece(kind, said))
            self.at = found + len(marker) if found >= 0 else end
            if found >= 0 or self.ended:
                return len(said) if found >= 0 else None
            yield

    def rest(self, pieces: list[Piece]) -> Steps[None]:
        """Hands on all that comes."""
        while True:
            self.forget()
            if self.text:
                pieces.append(Piece(Kind.text, self.text))
                self.at = len(self.text)
            if self.ended:
                return
            self.passes = True
            yield

    def _certain(self, marker: str) -> int:
        """How much of the text neither begins the marker nor is white space that may stand before it."""
        for start in range(max(0, len(self.text) - len(marker) + 1), len(self.text)):
            if marker.startswith(self.text[start:]):
                return len(self.text[:start].rstrip(WHITE))
        return len(self.text.rstrip(WHITE))


class Parser:
    """Runs a generator over text that comes in deltas."""

    def __init__(self, parse: Callable[[Source, list[Piece]], Steps[None]]) -> None:
        self._source = Source()
        self._pieces: list[Piece] = []
        self._steps = parse(self._source, self._pieces)
        next(self._steps, None)

    @property
    def passes(self) -> bool:
        """Whatever comes is text, as it comes."""
        return self._source.passes

    def push(self, text: str, last: bool = False) -> list[Piece]:
        """Takes in a delta, and returns what is now certain.

        Args:
            last: no more comes.
        """
        self._source.text += text
        self._source.ended = last
        next(self._steps, None)
        pieces, self._pieces[:] = list(self._pieces), []
        return pieces


def joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind as one piece; a call is always one of its own."""
    result: list[Piece] = []
    for piece in pieces:
        if result and result[-1].kind is piece.kind is not Kind.call:
            result[-1] = Piece(piece.kind, result[-1].text + piece.text)
        else:
            result.append(piece)
    return result
