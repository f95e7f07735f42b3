"""Engines of several ranks, one for prompts and one that decodes: the tokens of one engine, to the bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))

from engine_pair import PREFILL, Pair

from mini_infer import EngineConfig, LLMEngine, SamplingParams

PROMPTS = [[7 + (n * n) % 900 for n in range(length)] for length in (2, 17, 70)]
PARAMS = [SamplingParams(temperature=float(n % 2), seed=n, max_tokens=6, ignore_eos=True) for n in range(len(PROMPTS))]
CONFIG = EngineConfig.from_dict(
    {
        "model": {"path": "tiny-target", "device": "cpu", "threads": 1},
        "cache": {"num_blocks": 64, "prefix_caching": False},
        "scheduler": {"max_num_batched_tokens": 32, "max_num_seqs": 4},
        "numerics": "batch_invariant",
        "parallel": {"hand_over": "always"},
        "seed": 0,
    }
)


def tokens_apart(pair: Pair) -> list[list[int]]:
    found: dict[str, list[int]] = {}
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        pair.decode.add_request(prompt, params, request_id=f"r{number}", prefill_at=PREFILL)
    for _ in range(1000):
        pair.settle()
        for output in pair.step():
            for completion in output.outputs:
                found.setdefault(output.request_id, []).extend(completion.token_ids_delta)
        if not pair.decode.has_unfinished_requests():
            break
    return [found[f"r{number}"] for number in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def tokens() -> list[list[int]]:
    one = LLMEngine(CONFIG)
    return [output.outputs[0].token_ids for output in one.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"tensor": 2}, {"tensor": 2}),
        ({"tensor": 2}, {"tensor": 1}),
        ({"tensor": 1}, {"pipeline": 2}),
        pytest.param({"pipeline": 2}, {"tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tokens_are_those_of_one_engine(
    ranks_are_forked: None, tokens: list[list[int]], prefill: dict[str, int], decode: dict[str, int]
) -> None:
    pair = Pair(CONFIG, prefill, decode)
    try:
        assert tokens_apart(pair) == tokens
        assert pair.receiver.num_received == len(PROMPTS)
        assert pair.receiver.num_failed == 0
        store = pair.decode.executor.holding
        assert store is not None
        assert pair.receiver.num_bytes > 0
    finally:
        assert pair.prefill is not None
        pair.prefill.close()
        pair.decode.close()
