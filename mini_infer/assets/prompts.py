"""Prompts from the held-out modules: real code that the shipped models have never seen, cut where code is begun.

A prompt ends after a function's signature and docstring, so that what follows is the function's body, and begins
after a blank line some way above.
"""

from __future__ import annotations

import ast
import functools
import random
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from mini_infer.assets.corpus import Source
from mini_infer.core.errors import ConfigError

ASSETS = Path(__file__).parent
HELD_OUT_DIR = ASSETS / "heldout"
SUFFIX = ".txt"  # textwrap.py ships as textwrap.py.txt: text to read, not code to import, lint or type-check


@dataclass(frozen=True)
class Prompt:
    source: Source
    start: int  # character offsets into source.text
    end: int
    num_tokens: int

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]


def heldout_sources() -> list[Source]:
    """The shipped held-out modules, whole, in order of name."""
    return [
        Source(file.name.removesuffix(SUFFIX), file.read_text(encoding="utf-8"))
        for file in sorted(HELD_OUT_DIR.glob(f"*.py{SUFFIX}"))
    ]


def heldout_prompts(n: int | None = None, min_tokens: int = 32, max_tokens: int = 512, seed: int = 0) -> list[str]:
    """`n` different prompts (None: all) with lengths spread over [min_tokens, max_tokens] of the shipped tokenizer.

    Equal arguments give equal prompts, on any machine.

    Raises:
        ConfigError: there are fewer than `n` such prompts.
    """
    return [prompt.text for prompt in draw_prompts(n, min_tokens, max_tokens, seed)]


def draw_prompts(n: int | None = None, min_tokens: int = 32, max_tokens: int = 512, seed: int = 0) -> list[Prompt]:
    """As heldout_prompts, with each prompt's place in its module."""
    if not 1 <= min_tokens <= max_tokens:
        raise ConfigError(
            f"heldout_prompts: min_tokens={min_tokens}, max_tokens={max_tokens}; wanted 1 <= min_tokens <= max_tokens"
        )
    rng, cuts = random.Random(seed), list(_cuts())
    rng.shuffle(cuts)
    prompts: list[Prompt] = []
    for source, token_starts, blocks, cut in cuts:
        if len(prompts) == n:
            break
        wanted = rng.randint(min_tokens, max_tokens)
        start = _longest_start(blocks, token_starts, cut, min_tokens, wanted)
        if start is not None:
            prompts.append(Prompt(source, start, cut, _tokens_between(token_starts, start, cut)))
    if n is not None and len(prompts) < n:
        raise ConfigError(
            f"heldout_prompts: only {len(prompts)} of n={n} prompts of {min_tokens} to {max_tokens} tokens exist; "
            "ask for fewer, or widen the range"
        )
    return prompts


@functools.cache
def _cuts() -> list[tuple[Source, list[int], list[int], int]]:
    """(module, where its tokens start, where its blocks start, a place to cut it at), of all modules; to be left as it
    is."""
    tokenizer = Tokenizer.from_file(str(ASSETS / "tiny-target" / "tokenizer.json"))
    cuts = []
    for source in heldout_sources():
        token_starts = [start for start, _ in tokenizer.encode(source.text).offsets]
        blocks = list(_block_starts(source.text))
        cuts += [(source, token_starts, blocks, cut) for cut in _body_starts(source.text)]
    return cuts


def _longest_start(blocks: list[int], token_starts: list[int], cut: int, min_tokens: int, wanted: int) -> int | None:
    """The block start that gives the longest prompt of min_tokens to `wanted` tokens; None where none does."""
    for start in blocks[: bisect_left(blocks, cut)]:
        tokens = _tokens_between(token_starts, start, cut)
        if tokens <= wanted:
            return start if tokens >= min_tokens else None
    return None


def _tokens_between(token_starts: list[int], start: int, end: int) -> int:
    return bisect_left(token_starts, end) - bisect_left(token_starts, start)


def _block_starts(text: str) -> Iterator[int]:
    """Offset of each line that follows a blank line, and of the first."""
    offset, after_blank = 0, True
    for line in text.splitlines(keepends=True):
        blank = not line.strip()
        if after_blank and not blank:
            yield offset
        after_blank = blank
        offset += len(line)


def _body_starts(text: str) -> Iterator[int]:
    """Offset of the first line of each function's body, its docstring passed over.

    Left out: bodies on the line of their `def`, and those that a blank line sets off, since the blank line would
    be half a token.
    """
    lines = text.splitlines(keepends=True)
    line_offsets = [0]
    for line in lines:
        line_offsets.append(line_offsets[-1] + len(line))
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        if body and body[0].lineno > node.lineno:
            previous = lines[body[0].lineno - 2]
            if previous.strip() and not previous.lstrip().startswith("#"):
                yield line_offsets[body[0].lineno - 1]
