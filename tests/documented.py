"""Commands of the documents: the lines of their blocks without a language, and commands within their text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))]
PAGES.append(ROOT / "mini_infer" / "assets" / "README.md")
_INLINE = re.compile(r"`((?:python (?:run\.py|-m) |mini-infer-\w+ )[^`<]+)`")


class Block(NamedTuple):
    page: str
    line: int  # of its first one, from 1 on
    language: str
    text: str


class Command(NamedTuple):
    page: str
    line: int
    words: list[str]  # as a shell hands them on

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"


def blocks() -> Iterator[Block]:
    for path in PAGES:
        page, opened = path.relative_to(ROOT).as_posix(), None
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines, 1):
            if line.startswith("```"):
                if opened is None:
                    opened = number
                else:
                    text = "\n".join(lines[opened : number - 1]) + "\n"
                    yield Block(page, opened + 1, lines[opened - 1][3:], text)
                    opened = None


def commands() -> list[Command]:
    """Each once, where it stands first."""
    found = []
    for block in blocks():
        if block.language == "":
            begun, line = "", block.line
            for number, text in enumerate(block.text.splitlines(), block.line):
                begun, line = begun + text, line if begun else number
                if begun.endswith("\\"):
                    begun = begun[:-1]
                    continue
                if words := shlex.split(begun, comments=True):
                    found.append(Command(block.page, line, words))
                begun = ""
    for path in PAGES:
        text = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), path.read_text(), flags=re.S | re.M)
        for match in _INLINE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Command(path.relative_to(ROOT).as_posix(), line, shlex.split(match[1])))
    return list({shlex.join(command.words): command for command in reversed(found)}.values())[::-1]
