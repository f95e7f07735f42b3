"""Real prompts for the models that ship: held-out Python code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from experiments.lab.config.spec import Count, Share
from experiments.lab.workloads.base import START, Counted, Inputs, Item, Vocabulary
from mini_infer.assets.prompts import heldout_prompts
from mini_infer.core.errors import ConfigError


@dataclass(frozen=True)
class Text(Counted, kind="text"):
    """Held-out Python code, each prompt up to where a function's body begins. Lengths are spread over a range, in
    tokens of the shipped tokenizer; output lengths are drawn evenly from theirs."""

    most: ClassVar[int | None] = 180  # of the lengths below, beside a warm-up

    min_prompt_tokens: Count = 32
    max_prompt_tokens: Count = 160
    min_output_tokens: Count = 16
    max_output_tokens: Count = 96
    # Share of the prompt that follows it once more, from its beginning, as when a text is asked for with few changes;
    # the whole is then so much longer.
    again: Share = 0.0

    def _make(self, vocabulary: Vocabulary, seed: int) -> Inputs:
        rng = np.random.default_rng(seed)
        needed = self.count + self.num_warmup
        prompts: dict[tuple[int, ...], tuple[int, ...]] = {}  # by how they begin
        for text in heldout_prompts(None, self.min_prompt_tokens, self.max_prompt_tokens, seed):
            tokens = tuple(vocabulary.tokenizer.encode(text))
            prompts.setdefault(tokens[:START], tokens + tokens[: round(self.again * len(tokens))])
            if len(prompts) == needed:
                break
        else:
            lengths = f"of {self.min_prompt_tokens} to {self.max_prompt_tokens} tokens that begin differently"
            ways = "lower workload.count or workload.concurrency, or widen workload.min_ .. max_prompt_tokens"
            asked = f"workload.count={self.count} and {self.num_warmup} for the warm-up"
            raise ConfigError(f"{asked} are more than the {len(prompts)} held-out prompts {lengths}: {ways}")
        outputs = rng.integers(self.min_output_tokens, self.max_output_tokens + 1, needed).tolist()
        items = [Item(prompt, output) for prompt, output in zip(prompts.values(), outputs, strict=True)]
        longest = max(items, key=lambda item: len(item.prompt) + item.output_tokens)
        most = "max_prompt_tokens", "max_output_tokens"
        self._require_room(vocabulary, len(longest.prompt), longest.output_tokens, *most)
        return self._parted(items)
