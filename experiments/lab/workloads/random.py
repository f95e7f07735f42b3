"""Unrelated random prompts: all of one length, or lengths spread evenly over a range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from experiments.lab import check
from experiments.lab.workloads.base import Arriving, Inputs, Item, Vocabulary, generator
from experiments.lab.workloads.tokens import RandomTokens


@dataclass(frozen=True)
class Fixed(Arriving):
    """All prompts and all outputs of one length."""

    kind: ClassVar[str] = "fixed"

    count: int = 16
    prompt_tokens: int = 128
    output_tokens: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least("workload", self, 1, "count", "prompt_tokens", "output_tokens")

    @property
    def num_requests(self) -> int:
        return self.count

    def _make(self, vocabulary: Vocabulary, seed: int) -> Inputs:
        way_out = f"lower workload.prompt_tokens={self.prompt_tokens} or workload.output_tokens={self.output_tokens}"
        self._require_room(vocabulary, self.prompt_tokens, self.output_tokens, way_out)
        tokens = RandomTokens(vocabulary.size, generator(seed, "tokens"))
        items = [Item(tokens.draw(self.prompt_tokens), self.output_tokens) for _ in range(self.count + self.num_warmup)]
        return Inputs(tuple(items[: self.count]), tuple(items[self.count :]))


@dataclass(frozen=True)
class Uniform(Arriving):
    """Lengths drawn evenly from a range, ends included. The defaults are the benchmark of nano-vllm."""

    kind: ClassVar[str] = "uniform"

    count: int = 256
    min_prompt_tokens: int = 100
    max_prompt_tokens: int = 1024
    min_output_tokens: int = 100
    max_output_tokens: int = 1024
    # How much of the range of output lengths is used, about its middle: at 0 all outputs have the middle length, at 1
    # the range is whole. The mean stays where it is.
    output_spread: float = 1.0
    # Share of requests with priority 0 and the name "urgent"; the others have priority 1 and the name "normal". At 0
    # there is one class, without a name.
    urgent_share: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least("workload", self, 1, "count", "min_prompt_tokens", "min_output_tokens")
        check.ordered("workload", self, "min_prompt_tokens", "max_prompt_tokens")
        check.ordered("workload", self, "min_output_tokens", "max_output_tokens")
        check.share("workload", self, "output_spread", "urgent_share")

    @property
    def num_requests(self) -> int:
        return self.count

    def _make(self, vocabulary: Vocabulary, seed: int) -> Inputs:
        way_out = (
            f"lower workload.max_prompt_tokens={self.max_prompt_tokens} or "
            f"workload.max_output_tokens={self.max_output_tokens}"
        )
        self._require_room(vocabulary, self.max_prompt_tokens, self.max_output_tokens, way_out)
        total = self.count + self.num_warmup
        prompts = self._lengths(
            generator(seed, "prompt lengths"), total, self.min_prompt_tokens, self.max_prompt_tokens
        )
        middle = (self.min_output_tokens + self.max_output_tokens) / 2
        reach = (self.max_output_tokens - self.min_output_tokens) / 2 * self.output_spread
        outputs = self._lengths(generator(seed, "output lengths"), total, round(middle - reach), round(middle + reach))
        classes = self._classes(seed)
        tokens = RandomTokens(vocabulary.size, generator(seed, "tokens"))
        items = [
            Item(tokens.draw(prompt), output, priority=priority, name=name)
            for prompt, output, (priority, name) in zip(prompts, outputs, classes, strict=True)
        ]
        return Inputs(tuple(items[: self.count]), tuple(items[self.count :]))

    def _lengths(self, rng: np.random.Generator, total: int, low: int, high: int) -> list[int]:
        """The same draws for every range, so that two ranges differ by their width alone."""
        return (low + np.floor(rng.random(total) * (high - low + 1))).astype(int).tolist()

    def _classes(self, seed: int) -> list[tuple[int, str]]:
        """Priority and name of each request, of the warm-up's too. Exactly the share of the measured ones is urgent."""
        if self.urgent_share == 0:
            return [(0, "")] * (self.count + self.num_warmup)
        order = generator(seed, "urgent").permutation(self.count)
        urgent = set(order[: round(self.urgent_share * self.count)].tolist())
        every = [index % self.count for index in range(self.count + self.num_warmup)]
        return [(0, "urgent") if index in urgent else (1, "normal") for index in every]
