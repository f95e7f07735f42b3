"""What tests of workloads share: a vocabulary without a model, and the real engine, request by request."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.lab.workloads import START, Inputs, Item
from mini_infer import EngineConfig, LLMEngine, SamplingParams

BLOCK = 16


class Letters:
    """One token a character."""

    def __init__(self, size: int = 128, max_model_len: int = 8192) -> None:
        self.size = size
        self.max_model_len = max_model_len
        self.tokenizer = self

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


DRY = Letters(size=512)  # the dry model's vocabulary and length


def starts(items: Sequence[Item]) -> list[tuple[int, ...]]:
    return [item.prompt[:START] for item in items]


def dry_engine(block_size: int = BLOCK) -> LLMEngine:
    cache = {"block_size": block_size, "num_blocks": 4096 * 16 // block_size}
    return LLMEngine(EngineConfig.from_dict({"model": {"load_format": "dry"}, "cache": cache}))


def serve_in_turn(engine: LLMEngine, items: Sequence[Item]) -> list[tuple[int, int]]:
    """One after another: (tokens of the whole prompt, those of them found in the prefix cache) of each."""
    contexts: list[list[int]] = []
    found = []
    for item in items:
        prompt = [*(contexts[item.follows] if item.follows is not None else []), *item.prompt]
        params = SamplingParams(temperature=0, max_tokens=item.output_tokens, ignore_eos=True)
        completion = engine.generate(prompt, params)[0].outputs[0]
        assert len(completion.token_ids) == item.output_tokens
        contexts.append([*prompt, *completion.token_ids])
        found.append((len(prompt), completion.metrics.num_cached_tokens))
    return found


def intended(items: Sequence[Item], found: Sequence[tuple[int, int]], block_size: int = BLOCK) -> list[int]:
    """What a prefix cache should have found: whole blocks, and never the prompt's last token."""
    return [
        min(item.shared_tokens, length - 1) // block_size * block_size
        for item, (length, _) in zip(items, found, strict=True)
    ]


def assert_hits_are_intended(inputs: Inputs, block_size: int = BLOCK) -> int:
    """Warm-up, priming and pass in one engine, as an experiment runs them. Returns the tokens that were found."""
    engine = dry_engine(block_size)
    assert {cached for item, (_, cached) in zip(inputs.warmup, serve_in_turn(engine, inputs.warmup), strict=True)
            if item.follows is None} == {0}  # fmt: skip
    assert {cached for _, cached in serve_in_turn(engine, inputs.prime)} <= {0}
    found = serve_in_turn(engine, inputs.measured)
    hits = [cached for _, cached in found]
    assert hits == intended(inputs.measured, found, block_size)
    return sum(hits)
