"""Workloads have the stated lengths, are the same for the same seed, and never warm the cache for what is measured."""

from collections.abc import Sequence

import pytest

from experiments.lab import workloads
from experiments.lab.vocabulary import ModelVocabulary
from experiments.lab.workloads import START, Fixed, Text
from mini_infer.core.config import ModelConfig
from mini_infer.core.errors import ConfigError


class Letters:
    """One token a character."""

    size = 128

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


def starts(items):
    return [item.prompt[:START] for item in items]


def test_fixed_prompts_have_exact_lengths_and_share_no_start():
    load = Fixed(count=20, concurrency=4, prompt_tokens=33, output_tokens=7)
    inputs = load.make(Letters(), seed=3)
    assert {len(item.prompt) for item in inputs.measured} == {33}
    assert {item.output_tokens for item in inputs.measured} == {7}
    assert (len(inputs.measured), len(inputs.warmup)) == (20, 4)
    assert len({*starts(inputs.measured), *starts(inputs.warmup)}) == 24
    assert all(0 <= token < 128 for item in inputs.measured for token in item.prompt)
    assert load.make(Letters(), seed=3) == inputs
    assert load.make(Letters(), seed=4) != inputs


def test_text_prompts_are_held_out_code_of_unequal_lengths():
    load = Text(count=16, min_prompt_tokens=32, max_prompt_tokens=160, min_output_tokens=2, max_output_tokens=9)
    vocabulary = ModelVocabulary(ModelConfig())
    inputs = load.make(vocabulary, seed=0)
    lengths = [len(item.prompt) for item in inputs.measured]
    assert len(inputs.measured) == 16
    assert len(set(lengths)) > 5
    assert min(lengths) >= 30  # cut out of its module, a prompt may lose or gain a token at its ends
    assert max(lengths) <= 162
    assert {2 <= item.output_tokens <= 9 for item in inputs.measured} == {True}
    assert len({item.output_tokens for item in inputs.measured}) > 3
    assert "def " in vocabulary.decode(inputs.measured[0].prompt)
    assert len({*starts(inputs.measured), *starts(inputs.warmup)}) == len(inputs.measured) + len(inputs.warmup)
    assert load.make(vocabulary, seed=0) == inputs


def test_texts_with_one_beginning_are_used_once(monkeypatch):
    asked = []

    def some(n, min_tokens, max_tokens, seed):
        asked.append(n)
        return [f"{i // 2:04d} the same beginning and then {i}" for i in range(n)]

    monkeypatch.setattr(workloads, "heldout_prompts", some)
    inputs = Text(count=4, concurrency=2).make(Letters(), seed=0)
    assert asked == [6, 12]
    assert len({*starts(inputs.measured), *starts(inputs.warmup)}) == 6


def test_impossible_workloads_are_named():
    with pytest.raises(ConfigError, match=r"workload\.count must be at least 1"):
        Fixed(count=0)
    with pytest.raises(ConfigError, match=r"max_output_tokens=3 is below workload\.min_output_tokens=16"):
        Text(max_output_tokens=3)
    with pytest.raises(ConfigError, match="cannot all begin differently"):
        Fixed(count=500, prompt_tokens=1).make(Letters(), seed=0)
