"""Engines on several machines: prompts that come over TCP, and clocks that differ."""

from __future__ import annotations

import asyncio
from pathlib import Path

from cable import Cable
from roles import Engines, with_engines
from served import ENDLESS, PROMPT, SHORT, TIMEOUT_S, dry_config, until, whole

from mini_infer import LLMEngine, SamplingParams
from mini_infer.core.config import replace
from mini_infer.serving.link.wire import Add, FrameReader, FrameWriter, Ready, command_decoder
from mini_infer.serving.processes.async_engine import AsyncEngine

TCP = "tcp://127.0.0.1"


def test_prompts_are_computed_over_tcp(tmp_path: Path) -> None:
    config = replace(dry_config(), parallel={"connector": "stream", "hand_over": "always"})

    async def use(both: Engines) -> list[int]:
        assert prompts_at(both).startswith("tcp://127.0.0.1:")
        (delta,) = await whole(both.client.submit(PROMPT, SHORT))
        await until(lambda: both.stats("decode").kv_transfers == 1)
        return delta.token_ids

    found = with_engines(Engines(tmp_path, config, TCP), use)
    assert found == LLMEngine(dry_config()).generate([PROMPT], SHORT)[0].outputs[0].token_ids


def prompts_at(both: Engines) -> str:
    info = both.client.replicas[0].info
    assert info is not None
    assert info.prompts_at is not None
    return info.prompts_at


def test_short_prompts_stay_with_a_stream_and_long_ones_go(tmp_path: Path) -> None:
    """The way there and back takes 20 ms; for so long 200 tokens are computed, and the stream waits."""
    config = replace(dry_config(prefill_token_us=100, decode_token_us=3000), cache={"prefix_caching": False})
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    async def use(both: Engines) -> list[int]:
        cable = Cable(prompts_at(both), delay_s=0.01)
        both.client.replicas[0].info.prompts_at = cable.address  # type: ignore[union-attr]

        def counts() -> tuple[int, int]:
            return both.stats("decode").kv_transfers, both.stats("decode").prompts_computed_here

        async def went(tokens: int, times: int) -> int:
            before = counts()
            for _ in range(times):
                await whole(both.client.submit([65] * tokens, one))
            await until(lambda: sum(counts()) == sum(before) + times)
            return counts()[0] - before[0]

        stream = both.client.submit(PROMPT, ENDLESS)
        await until(lambda: counts() == (1, 0))
        for tokens in (2, 1200):  # to learn from
            await went(tokens, 3)
        found = [await went(tokens, 4) for tokens in (1200, 2)]
        stream.abort()
        cable.close()
        return found

    assert with_engines(Engines(tmp_path, config, TCP), use) == [4, 0]


def test_times_are_told_on_the_clock_of_the_engine(tmp_path: Path) -> None:
    """A stand-in for an engine, on a machine that was started long ago."""
    path, asked = str(tmp_path / "engine"), []
    started = 1e7

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ready = Ready("dry", 4096, 512, dry_config().to_dict(), {}, 1, machine="another", now=started)
        writer.write(FrameWriter().frame(ready))
        frames = FrameReader()
        while data := await reader.read(2**16):
            commands = [command_decoder.decode(frame) for frame in frames.feed(data)]
            asked.extend(command for command in commands if isinstance(command, Add))
        writer.close()

    async def use() -> None:
        server = await asyncio.start_unix_server(serve, path)
        engine = await AsyncEngine.connect(path)
        engine.submit(PROMPT, SHORT, deadline_s=30)
        await until(lambda: bool(asked))
        await engine.close()
        server.close()

    asyncio.run(asyncio.wait_for(use(), TIMEOUT_S))
    (add,) = asked
    assert 0 <= add.arrival_time - started < TIMEOUT_S
    assert add.deadline_time is not None
    assert abs(add.deadline_time - add.arrival_time - 30) < 1e-3
