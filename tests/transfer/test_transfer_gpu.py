"""Engines on GPUs, one for prompts and one that decodes: tokens are to the bit those of one engine, in numerics that
do not depend on the batch. With one GPU both are on it."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.core.config import ParallelConfig, replace
from mini_infer.serving.link.stream import Stream
from mini_infer.serving.processes.async_engine import AsyncEngine
from mini_infer.serving.processes.launch import EngineProcess

PROMPTS = [[7 + (n * n) % 900 for n in range(length)] for length in (2, 17, 300, 800)]
PARAMS = [SamplingParams(temperature=float(n % 2), seed=n, max_tokens=24, ignore_eos=True) for n in range(len(PROMPTS))]
CONFIG = EngineConfig.from_dict(
    {
        "model": {"path": "tiny-target", "dtype": "bfloat16", "device": "cuda"},
        "cache": {"memory_gib": 0.5, "prefix_caching": False},
        "scheduler": {"max_num_batched_tokens": 128, "max_num_seqs": 8},
        "numerics": "batch_invariant",
        "parallel": {"hand_over": "always"},
    }
)


async def tokens_of(stream: Stream) -> list[int]:
    return [token async for delta in stream for token in delta.token_ids]


async def tokens_apart(folder: Path, connector: str, *ranks: int) -> tuple[list[list[int]], int]:
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
            found = await asyncio.gather(*map(tokens_of, streams))
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
    one = LLMEngine(replace(CONFIG, parallel={"hand_over": "auto"}))
    expected = [output.outputs[0].token_ids for output in one.generate(PROMPTS, PARAMS)]
    one.close()
    found, moved = asyncio.run(asyncio.wait_for(tokens_apart(tmp_path, connector), 240))
    assert found == expected
    assert moved == len(PROMPTS)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [(2, 2), (2, 1), (1, 2)], ids=str)
def test_tokens_are_those_of_one_engine_over_ranks(tmp_path: Path, ranks: tuple[int, int]) -> None:
    """Each rank pushes to the ranks that keep the same heads, all of which are on another GPU or on its own."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    one = LLMEngine(replace(CONFIG, parallel={"hand_over": "auto"}))
    expected = [output.outputs[0].token_ids for output in one.generate(PROMPTS, PARAMS)]
    one.close()
    found, moved = asyncio.run(asyncio.wait_for(tokens_apart(tmp_path, "memory", *ranks), 240))
    assert found == expected
    assert moved == len(PROMPTS)
