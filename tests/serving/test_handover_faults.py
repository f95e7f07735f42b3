"""Either engine is killed before, in the middle of and after a transfer, as others can see it: answers are right or end
with one error, no block stays taken, and of those that have died and come back nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from cells import cells
from roles import ROLES, Engines, with_engines
from served import dry_config, until

from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.core.config import replace
from mini_infer.serving.link.link import EngineDead
from mini_infer.serving.link.stream import Stream

WAYS = {"memory": ("memory", None), "stream": ("stream", None), "tcp": ("stream", "tcp://127.0.0.1")}
PHASES = ("before", "during", "after")
CHUNK = 64
CHUNKS = 12  # of a prompt in whose computation somebody is killed
CONFIG = replace(
    dry_config(step_ms=5, prefill_token_us=600),
    scheduler={"max_num_batched_tokens": CHUNK, "max_num_seqs": 8},
    cache={"prefix_caching": False},
)
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def prompt_of(number: int, chunks: int = CHUNKS) -> list[int]:
    """Of so many chunks, but for a part of the last one."""
    return [33 + (number + n * n) % 90 for n in range(CHUNK * chunks - 7)]


def alone(prompt: list[int]) -> list[int]:
    return LLMEngine(dry_config()).generate([prompt], PARAMS)[0].outputs[0].token_ids


async def read(stream: Stream, tokens: list[int]) -> str:
    """What it ends with, "" where that is no error."""
    try:
        async for delta in stream:
            tokens += delta.token_ids
    except EngineDead as error:
        return str(error)
    return ""


async def a_request_is_handed_over(both: Engines, number: int) -> None:
    came, tokens, prompt = both.stats("decode").kv_transfers, list[int](), prompt_of(number, chunks=1)
    assert await read(both.client.submit(prompt, PARAMS), tokens) == ""
    assert tokens == alone(prompt)
    await until(lambda: both.stats("decode").kv_transfers == came + 1)


async def survives(both: Engines, victim: str, phase: str, number: int = 0) -> None:
    """A request whose engine for prompts, or that which decodes it, is killed and started again."""
    stats, tokens, prompt = both.stats, list[int](), prompt_of(number)
    lost = victim == "prefill" and phase != "after"  # its KV
    came, failed = stats("decode").kv_transfers, stats("decode").kv_transfers_failed
    computed = stats("prefill").prompt_tokens
    if phase == "before":
        os.kill(both.pid("prefill"), signal.SIGSTOP)
    ending = asyncio.ensure_future(read(both.client.submit(prompt, PARAMS), tokens))
    if phase == "after":
        await until(lambda: bool(tokens))
    else:
        await until(lambda: stats("decode").num_requests_receiving == 1)
    if phase == "during":
        await until(lambda: stats("prefill").prompt_tokens >= computed + CHUNK)
    assert stats("prefill").prompt_tokens - computed < len(prompt) or phase == "after"
    both.kill(victim)
    if phase == "before" and victim == "decode":
        os.kill(both.pid("prefill"), signal.SIGCONT)

    error, expected = await ending, alone(prompt)
    if (victim, phase) == ("decode", "after"):
        assert error.startswith("replica 1: "), error
        assert tokens == expected[: len(tokens)]
        assert 0 < len(tokens) < len(expected)
    else:
        assert (error, tokens) == ("", expected)
    if victim == "prefill":
        counts = came + (not lost), failed + lost
        await until(lambda: (stats("decode").kv_transfers, stats("decode").kv_transfers_failed) == counts)
    survivor = "decode" if victim == "prefill" else "prefill"
    await until(lambda: (stats(survivor).unfinished, stats(survivor).kv_used_blocks) == (0, 0))

    both.start(victim)
    await both.serve()
    await a_request_is_handed_over(both, number)
    await until(lambda: all((stats(role).unfinished, stats(role).kv_used_blocks) == (0, 0) for role in ROLES))
    assert stats("decode").kv_transfers_failed == (counts[1] if victim == "prefill" else 0)


def engines(folder: Path, way: str) -> Engines:
    connector, listens = WAYS[way]
    return Engines(folder, replace(CONFIG, parallel={"connector": connector, "hand_over": "always"}), listens)


ALWAYS = [
    ("memory", "prefill", "during"),
    ("stream", "prefill", "after"),
    ("stream", "decode", "before"),
    ("tcp", "decode", "after"),
]


@pytest.mark.parametrize(("way", "victim", "phase"), cells(product(WAYS, ROLES, PHASES), ALWAYS))
def test_a_killed_engine_costs_no_answer(tmp_path: Path, way: str, victim: str, phase: str) -> None:
    with_engines(engines(tmp_path, way), lambda both: survives(both, victim, phase))


@pytest.mark.parametrize(("way", "victim"), cells(product(WAYS, ROLES), [("memory", "decode")]))
def test_nothing_is_left_of_those_that_died(tmp_path: Path, way: str, victim: str) -> None:
    """Where they were met, in the middle of a transfer each."""

    async def use(both: Engines) -> None:
        survivor = both.pid("decode" if victim == "prefill" else "prefill")
        held = []
        for number in range(3):
            await survives(both, victim, "during", number)
            held.append(held_by(survivor))
        first, _, last = held
        assert last["maps"] < first["maps"] + 2, "one more each time"
        assert last.pop("memory") < first.pop("memory") + 4 * 2**20
        assert {**last, "maps": 0} == {**first, "maps": 0}
        assert last["maps of KV"] == (way == "memory")

    with_engines(engines(tmp_path, way), use)


MODEL: dict[str, Any] = {
    "cache": {"memory_gib": 0.1, "prefix_caching": False},
    "scheduler": {"max_num_batched_tokens": 32, "max_num_seqs": 8},
    "parallel": {"connector": "memory", "hand_over": "always"},
}
# On a GPU steps take less than a millisecond, and engines tell of themselves ten times a second: so there are many.
ON = {"cpu": ("float32", "fast", 3, 12), "cuda": ("bfloat16", "batch_invariant", 40, 28)}
STARTS_S = 240  # of engines on GPUs, for which kernels are compiled
GPU = pytest.mark.gpu


@pytest.mark.parametrize(
    ("on", "victim"),
    [
        *(pytest.param("cpu", role, marks=pytest.mark.soak) for role in ROLES),
        *(pytest.param("cuda", role, marks=GPU) for role in ROLES),
    ],
)
def test_what_a_model_computes_survives_a_kill_in_the_middle(tmp_path: Path, on: str, victim: str) -> None:
    """Prompts of real KV, on a GPU each, into peer memory; on CPUs into shared memory."""
    gpus = None
    if on == "cuda":
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
        own, other = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
        gpus = {"prefill": f"{own},{other}", "decode": f"{other},{own}"}
    dtype, numerics, count, chunks = ON[on]
    model = {"path": "tiny-target", "device": on, "dtype": dtype}
    config = EngineConfig.from_dict({**MODEL, "model": model, "numerics": numerics})
    prompts = [prompt_of(number, chunks) for number in range(count)]
    engine = LLMEngine(config)
    expected = [output.outputs[0].token_ids for output in engine.generate(prompts, PARAMS)]
    engine.close()

    async def use(both: Engines) -> None:
        stats, survivor = both.stats, "decode" if victim == "prefill" else "prefill"
        streamed = [list[int]() for _ in prompts]
        asked = [both.client.submit(prompt, PARAMS) for prompt in prompts]
        reads = [read(stream, own) for stream, own in zip(asked, streamed, strict=True)]
        ending = asyncio.gather(*reads)
        await until(lambda: stats("prefill").prompt_tokens > 0 and stats("decode").num_requests_receiving > 0)
        both.kill(victim)
        for error, tokens, whole in zip(await ending, streamed, expected, strict=True):
            assert tokens == whole[: len(tokens)]
            assert (tokens and victim == "decode" and error.startswith("replica 1: ")) if error else tokens == whole
        if victim == "prefill":
            await until(lambda: stats("decode").kv_transfers_failed > 0)
        await until(lambda: (stats(survivor).unfinished, stats(survivor).kv_used_blocks) == (0, 0))
        both.start(victim)
        await both.serve()
        again, came = list[int](), stats("decode").kv_transfers
        assert await read(both.client.submit(prompts[0], PARAMS), again) == ""
        assert again == expected[0]
        await until(lambda: stats("decode").kv_transfers == came + 1)
        await until(lambda: all((stats(role).unfinished, stats(role).kv_used_blocks) == (0, 0) for role in ROLES))

    with_engines(Engines(tmp_path, config, gpus=gpus), use, STARTS_S)


def held_by(pid: int) -> dict[str, int]:
    process = psutil.Process(pid)
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    of_kv = sum("mini-infer-inbox" in line for line in maps)
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "maps": len(maps),
        "maps of KV": of_kv,
        "memory": process.memory_info().rss,
    }
