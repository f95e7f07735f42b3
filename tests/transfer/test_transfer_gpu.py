"""Engines on GPUs, one for prompts and one that decodes: tokens and their log-probabilities are to the bit those of one
engine, in numerics that do not depend on the batch. With one GPU both are on it."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.core.config import ParallelConfig, replace
from mini_infer.serving.link.stream import Stream
from mini_infer.serving.processes.async_engine import AsyncEngine
from mini_infer.serving.processes.launch import EngineProcess

PROMPTS = [[7 + (n * n) % 900 for n in range(length)] for length in (2, 17, 300, 800)]
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 1.0, "ignore_eos": True},
    {"temperature": 0.8, "ignore_eos": True, "presence_penalty": 1.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "grammar": ("regex", "[a-z]{3,8}( [a-z]+)*")},
]
PARAMS = [SamplingParams(seed=n, max_tokens=24, logprobs=1, **case) for n, case in enumerate(SAMPLED)]
Told = list[tuple[int, float]]  # tokens with their log-probabilities
CONFIG = EngineConfig.from_dict(
    {
        "model": {"path": "tiny-target", "dtype": "bfloat16", "device": "cuda"},
        "cache": {"memory_gib": 0.5, "prefix_caching": False},
        "scheduler": {"max_num_batched_tokens": 128, "max_num_seqs": 8},
        "numerics": "batch_invariant",
        "parallel": {"hand_over": "always"},
    }
)


def told_by_one_engine() -> list[Told]:
    engine = LLMEngine(replace(CONFIG, parallel={"hand_over": "auto"}))
    outputs = [output.outputs[0] for output in engine.generate(PROMPTS, PARAMS)]
    engine.close()
    return [[(entry.token_id, entry.logprob) for entry in output.logprobs or ()] for output in outputs]


async def told_by(stream: Stream) -> Told:
    return [(entry.token_id, entry.logprob) async for delta in stream for entry in delta.logprobs or ()]


async def told_apart(folder: Path, connector: str, *ranks: int) -> tuple[list[Told], int]:
    """And how many prompts were handed over. Engines of several ranks share GPUs, each of which is one of both."""
    count = torch.cuda.device_count()
    with ExitStack() as stack:
        paths = []
        for number, (role, tensor) in enumerate(zip(("prefill", "decode"), ranks or (1, 1), strict=True)):
            order = [(number + shift) % count for shift in range(count)]
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, order))}
            config = replace(CONFIG, parallel={role: 1, "connector": connector, "tensor": tensor})
            paths.append(str(folder / role))
            stack.callback(EngineProcess(config, socket_path=paths[-1], environment=environment).stop)
        engine = await AsyncEngine.connect(*paths, parallel=ParallelConfig(prefill=1, decode=1))
        try:
            while any(replica.failure is not None for replica in engine.replicas):
                await asyncio.sleep(0.1)
            streams = [engine.submit(prompt, own) for prompt, own in zip(PROMPTS, PARAMS, strict=True)]
            found = await asyncio.gather(*map(told_by, streams))
            moved = 0
            for _ in range(30):  # stats come every 0.1 s
                moved = engine.replicas[1].stats.kv_transfers
                await asyncio.sleep(0.1)
            return found, moved
        finally:
            await engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("connector", ["memory", "stream", "nixl"])
def test_tokens_are_those_of_one_engine(tmp_path: Path, connector: str) -> None:
    if connector == "nixl":
        pytest.importorskip("nixl")
    expected = told_by_one_engine()
    found, moved = asyncio.run(asyncio.wait_for(told_apart(tmp_path, connector), 240))
    assert found == expected
    assert moved == len(PROMPTS)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [(2, 2), (2, 1), (1, 2)], ids=str)
def test_tokens_are_those_of_one_engine_over_ranks(tmp_path: Path, ranks: tuple[int, int]) -> None:
    """Each rank pushes to the ranks that keep the same heads, all of which are on another GPU or on its own."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    expected = told_by_one_engine()
    found, moved = asyncio.run(asyncio.wait_for(told_apart(tmp_path, "memory", *ranks), 240))
    assert found == expected
    assert moved == len(PROMPTS)
