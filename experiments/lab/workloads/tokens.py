"""Token ids: random ones of which no two prompts begin alike, and those of a trace's blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.lab.workloads.base import START
from experiments.lab.workloads.trace_file import HASH_BLOCK
from mini_infer.core.errors import ConfigError

TRIES = 100
SMALLEST_BLOCK = 4  # tokens: enough ids of any vocabulary for the blocks of a trace to stay different


class RandomTokens:
    """Every sequence that `draw` gives differs from all others within its first START tokens."""

    def __init__(self, vocabulary_size: int, rng: np.random.Generator) -> None:
        self._size = vocabulary_size
        self._rng = rng
        self._starts: set[tuple[int, ...]] = set()

    def any(self, length: int) -> tuple[int, ...]:
        """Tokens that stand in the middle of a prompt, where nothing depends on what else begins like them."""
        return tuple(self._rng.integers(0, self._size, length).tolist())

    def draw(self, length: int) -> tuple[int, ...]:
        """Raises ConfigError where there are no more different beginnings of this length."""
        for _ in range(TRIES):
            tokens = self.any(length)
            if self.claim(tokens):
                return tokens
        raise ConfigError(
            f"sequences of {length} tokens from {self._size} token ids cannot all begin differently "
            f"({len(self._starts)} beginnings are taken): make the workload's prompts longer, or fewer"
        )

    def claim(self, tokens: tuple[int, ...]) -> bool:
        """Whether nothing began like this yet; from now on, something does."""
        start = tokens[:START]
        new = start not in self._starts
        self._starts.add(start)
        return new


class HashBlocks:
    """Prompts made from block ids: the same id gives the same tokens, so that prompts share what they shared.

    Shrinking divides every position by one factor. A block of 512 tokens then covers the same shrunk positions in every
    prompt, and a shared beginning keeps its share of the prompt:

        shrink = 4    [    id 7, 128 tokens    |    id 9, 128    |  id 12, 37 of 128 ]
                      [    id 7, 128 tokens    |    id 9, 128    |  id 31, 128   | ...
                       <--------- shared, 256 of 293 --------->
    """

    def __init__(self, tokens: RandomTokens, shrink: float) -> None:
        self._tokens = tokens
        self._shrink = shrink
        self._block_tokens: dict[int, tuple[int, ...]] = {}
        # Prompts so far, as a tree: (parent, id) -> node, and how many tokens of a node's block some prompt had.
        self._nodes: dict[tuple[int | None, int], int] = {}
        self._had: list[int] = []

    def prompt(self, ids: Sequence[int], length: int) -> tuple[tuple[int, ...], int]:
        """The prompt of `length` shrunk tokens, and how many of them, from the start on, an earlier prompt had too."""
        prompt: list[int] = []
        shared, sharing = 0, True
        parent: int | None = None
        for index, block_id in enumerate(ids):
            start, end = shrunk(index * HASH_BLOCK, self._shrink), shrunk((index + 1) * HASH_BLOCK, self._shrink)
            taken = min(end, length) - start
            if taken <= 0:
                break
            prompt += self._tokens_of(block_id)[:taken]
            node = self._nodes.setdefault((parent, block_id), len(self._had))
            if node == len(self._had):
                self._had.append(0)
            if sharing:
                common = min(taken, self._had[node])
                shared += common
                sharing = common == end - start
            self._had[node] = max(self._had[node], taken)
            parent = node
        return tuple(prompt), shared

    def _tokens_of(self, block_id: int) -> tuple[int, ...]:
        if block_id not in self._block_tokens:
            # Rounding makes some shrunk blocks a token longer: what tells blocks apart stands in the part that all
            # of them have.
            surely = shrunk(HASH_BLOCK, self._shrink)
            self._block_tokens[block_id] = self._tokens.draw(surely) + self._tokens.any(2)
        return self._block_tokens[block_id]


def shrunk(tokens: int, shrink: float) -> int:
    """Where position `tokens` of a recorded prompt comes to lie. The order of positions stays."""
    return int(tokens / shrink)
