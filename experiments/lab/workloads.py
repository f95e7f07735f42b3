"""Workloads: what is asked of every variant. Prompts are token ids of exactly the stated length, output lengths are
fixed, and warm-up prompts share no start with measured ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mini_infer.assets.prompts import heldout_prompts
from mini_infer.core.errors import ConfigError

START = 16  # tokens: no two prompts of a workload without shared prefixes begin with the same START tokens


@dataclass(frozen=True)
class Item:
    """One request: it gets exactly `output_tokens` tokens, end-of-sequence or not."""

    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True)
class Inputs:
    measured: tuple[Item, ...]
    warmup: tuple[Item, ...]


class Vocabulary(Protocol):
    """What a workload needs to know of a model."""

    @property
    def size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Workload:
    """`concurrency` requests are in flight at once (all of them, where it is not given): the next one arrives when
    there is a place for it."""

    count: int = 16
    concurrency: int | None = None

    def __post_init__(self) -> None:
        _positive(self, "count")
        if self.concurrency is not None:
            _positive(self, "concurrency")

    @property
    def in_flight(self) -> int:
        return min(self.concurrency or self.count, self.count)

    @property
    def num_warmup(self) -> int:
        """Enough for the measured concurrency to be reached."""
        return max(self.in_flight, 2)

    def make(self, vocabulary: Vocabulary, seed: int) -> Inputs:
        raise NotImplementedError


@dataclass(frozen=True)
class Fixed(Workload):
    """Random token ids, all prompts and all outputs of one length."""

    prompt_tokens: int = 128
    output_tokens: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(self, "prompt_tokens")
        _positive(self, "output_tokens")

    def make(self, vocabulary: Vocabulary, seed: int) -> Inputs:
        rng = np.random.default_rng(seed)
        starts: set[tuple[int, ...]] = set()

        def item() -> Item:
            for _ in range(100):
                prompt = tuple(rng.integers(0, vocabulary.size, self.prompt_tokens).tolist())
                if prompt[:START] not in starts:
                    starts.add(prompt[:START])
                    return Item(prompt, self.output_tokens)
            raise ConfigError(
                f"workload.count={self.count} prompts of workload.prompt_tokens={self.prompt_tokens} from "
                f"{vocabulary.size} token ids cannot all begin differently: make them longer or fewer"
            )

        measured = tuple(item() for _ in range(self.count))
        return Inputs(measured, tuple(item() for _ in range(self.num_warmup)))


@dataclass(frozen=True)
class Text(Workload):
    """Held-out Python code, each prompt up to where a function's body begins. Lengths are spread over a range, in
    tokens of the shipped tokenizer; output lengths are drawn evenly from theirs."""

    min_prompt_tokens: int = 32
    max_prompt_tokens: int = 160
    min_output_tokens: int = 16
    max_output_tokens: int = 96

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in ("prompt", "output"):
            low, high = f"min_{kind}_tokens", f"max_{kind}_tokens"
            _positive(self, low)
            if getattr(self, high) < getattr(self, low):
                raise ConfigError(f"workload.{high}={getattr(self, high)} is below workload.{low}={getattr(self, low)}")

    def make(self, vocabulary: Vocabulary, seed: int) -> Inputs:
        rng = np.random.default_rng(seed)
        needed = self.count + self.num_warmup
        wanted = needed
        while True:  # until enough of them begin differently; heldout_prompts says so when there are no more
            texts = heldout_prompts(wanted, self.min_prompt_tokens, self.max_prompt_tokens, seed)
            prompts: dict[tuple[int, ...], tuple[int, ...]] = {}  # by how they begin
            for text in texts:
                tokens = tuple(vocabulary.encode(text))
                prompts.setdefault(tokens[:START], tokens)
            if len(prompts) >= needed:
                break
            wanted *= 2
        outputs = rng.integers(self.min_output_tokens, self.max_output_tokens + 1, needed).tolist()
        items = [Item(prompt, output) for prompt, output in zip(prompts.values(), outputs, strict=False)]
        return Inputs(tuple(items[: self.count]), tuple(items[self.count :]))


WORKLOADS: dict[str, type[Workload]] = {"fixed": Fixed, "text": Text}


def _positive(workload: Workload, name: str) -> None:
    value = getattr(workload, name)
    if value < 1:
        raise ConfigError(f"workload.{name} must be at least 1, got {value}")
