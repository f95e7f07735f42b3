"""Random token ids of which no two prompts begin alike."""

from __future__ import annotations

import numpy as np

from experiments.lab.workloads.base import START
from mini_infer.core.errors import ConfigError

TRIES = 100


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
