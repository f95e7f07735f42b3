"""Engines on several machines: prompts that come over TCP, and clocks that differ."""

from __future__ import annotations

import asyncio
from pathlib import Path

from served import PROMPT, SHORT, TIMEOUT_S, dry_config, until, whole

from mini_infer import LLMEngine
from mini_infer.core.config import ParallelConfig, replace
from mini_infer.serving.link.wire import Add, FrameReader, FrameWriter, Ready, command_decoder
from mini_infer.serving.processes.async_engine import AsyncEngine
from mini_infer.serving.processes.launch import EngineProcess


def test_prompts_are_computed_over_tcp(tmp_path: Path) -> None:
    paths = [str(tmp_path / role) for role in ("prefill", "decode")]
    roles = ({"prefill": 1}, {"decode": 1, "hand_over": "always"})
    configs = [replace(dry_config(), parallel={**role, "connector": "stream"}) for role in roles]
    processes = [
        EngineProcess(config, socket_path=path, prompts_at="tcp://127.0.0.1")
        for config, path in zip(configs, paths, strict=True)
    ]

    async def use() -> list[int]:
        engine = await AsyncEngine.connect(*paths, parallel=ParallelConfig(prefill=1, decode=1))
        try:
            await until(lambda: all(replica.failure is None for replica in engine.replicas))
            info = engine.replicas[0].info
            assert info is not None
            assert (info.prompts_at or "").startswith("tcp://127.0.0.1:")
            (delta,) = await whole(engine.submit(PROMPT, SHORT))
            await until(lambda: engine.replicas[1].stats.kv_transfers == 1)
            return delta.token_ids
        finally:
            await engine.close()

    try:
        found = asyncio.run(asyncio.wait_for(use(), TIMEOUT_S))
    finally:
        for process in processes:
            process.stop()
    assert found == LLMEngine(dry_config()).generate([PROMPT], SHORT)[0].outputs[0].token_ids


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
