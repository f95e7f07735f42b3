"""Engines of several ranks, one for prompts and one that decodes: the tokens of one engine."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))

from engine_pair import PREFILL, Pair

from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.core.config import Device, LoadFormat, ModelConfig, Numerics
from mini_infer.core.errors import RankError

PROMPTS = [[7 + (n * n) % 90 for n in range(length)] for length in (2, 17, 70)]
PARAMS = [SamplingParams(temperature=float(n % 2), seed=n, max_tokens=6, ignore_eos=True) for n in range(len(PROMPTS))]
CONFIG = EngineConfig.from_dict(
    {
        "model": {"path": "tiny-target", "device": "cpu", "threads": 1},
        "cache": {"num_blocks": 64, "prefix_caching": False},
        "scheduler": {"max_num_batched_tokens": 32, "max_num_seqs": 4},
        "parallel": {"hand_over": "always"},
        "seed": 0,
    }
)


def tokens_of(pair: Pair, params: list[SamplingParams]) -> list[list[Any]]:
    """Tokens, and log-probabilities where they are asked for."""
    found: dict[str, list[Any]] = {}
    for number, (prompt, own) in enumerate(zip(PROMPTS, params, strict=False)):
        pair.decode.add_request(prompt, own, request_id=f"r{number}", prefill_at=PREFILL)
    while pair.decode.has_unfinished_requests():
        pair.settle()
        for output in pair.step():
            for completion in output.outputs:
                found.setdefault(output.request_id, []).extend(completion.logprobs_delta or completion.token_ids_delta)
    return [found[f"r{number}"] for number in range(len(params))]


@pytest.fixture
def make_pair(ranks_are_forked: None) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(*about: Any) -> Pair:
        made.append(Pair(*about))
        return made[-1]

    yield make
    for pair in made:
        for engine in filter(None, (pair.prefill, pair.decode)):
            engine.close()


@pytest.fixture(scope="module")
def tokens() -> list[list[int]]:
    outputs = LLMEngine(CONFIG).generate(PROMPTS, PARAMS)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"tensor": 2}, {"tensor": 2}),
        ({"tensor": 2}, {"tensor": 1}),
        ({"tensor": 1}, {"pipeline": 2}),
        ({"pipeline": 2}, {"tensor": 2}),
    ],
    ids=str,
)
def test_tokens_are_those_of_one_engine(
    make_pair: Callable[..., Pair], tokens: list[list[int]], prefill: dict[str, int], decode: dict[str, int]
) -> None:
    pair = make_pair(CONFIG, prefill, decode)
    assert tokens_of(pair, PARAMS) == tokens
    assert (pair.receiver.num_received, pair.receiver.num_failed) == (len(PROMPTS), 0)
    holding = pair.decode.executor.holding
    assert holding is not None
    blocks = sum(-(-(len(prompt) - 1) // holding.store.block_size) for prompt in PROMPTS)
    whole = holding.whole.bytes_per_block(holding.store.block_size)
    assert pair.receiver.num_bytes >= blocks * whole, "every rank has sent its part"


def test_log_probabilities_are_equal_to_the_bit(make_pair: Callable[..., Pair]) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 101, "max_position_embeddings": 128}
    config = dataclasses.replace(
        CONFIG,
        model=ModelConfig(
            path="made up",
            load_format=LoadFormat.dummy,
            hf_config={"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape},
            device=Device.cpu,
        ),
        numerics=Numerics.batch_invariant,
    )
    params = [SamplingParams(temperature=1.0, seed=n, max_tokens=3, logprobs=1) for n in range(2)]
    outputs = LLMEngine(config).generate(PROMPTS[:2], params)
    expected = [output.outputs[0].logprobs for output in outputs]
    assert tokens_of(make_pair(config, {"tensor": 2}, {"tensor": 1}), params) == expected


def test_a_rank_that_is_killed_ends_the_engine_for_prompts_alone(
    make_pair: Callable[..., Pair], tokens: list[list[int]]
) -> None:
    pair = make_pair(CONFIG, {"tensor": 2}, {"tensor": 1})
    prefill: Any = pair.prefill
    for number, (prompt, own) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        pair.decode.add_request(prompt, own, request_id=f"r{number}", prefill_at=PREFILL)
    pair.step()
    (process,) = prefill.executor._ranks.processes
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(RankError, match=r"^rank 1 .* was killed by SIGKILL"):
        pair.settle()
    pair.kill_prefill()
    assert tokens_of(pair, []) == []
    assert pair.receiver.num_failed == len(PROMPTS)
