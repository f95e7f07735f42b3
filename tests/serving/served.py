"""Ways to serve a dry engine to a test: in a process of its own, in a thread, or turn by turn."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.serving.link.stream import Stream
from mini_infer.serving.link.wire import (
    Add,
    Command,
    Delta,
    Event,
    FrameReader,
    FrameWriter,
    event_decoder,
    merge,
    non_default_params,
)
from mini_infer.serving.processes.async_engine import AsyncEngine
from mini_infer.serving.processes.engine_process import EngineServer
from mini_infer.serving.processes.launch import MAX_QUEUED

TIMEOUT_S = 60
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = list(b"def main():")
T = TypeVar("T")


def dry_config(max_num_seqs: int = 64, max_model_len: int = 4096, **dry: float) -> EngineConfig:
    model = {"load_format": "dry", "dry": {"max_model_len": max_model_len, **dry}}
    return EngineConfig.from_dict({"model": model, "scheduler": {"max_num_seqs": max_num_seqs}})


def with_engine(path: str, use: Callable[[AsyncEngine], Awaitable[T]]) -> T:
    """Connects, runs the coroutine function, and closes."""

    async def main() -> T:
        engine = await AsyncEngine.connect(path)
        try:
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def idle(engine: AsyncEngine) -> None:
    """Nothing is left of what was submitted."""
    await asyncio.wait_for(until(lambda: not any(replica.requests for replica in engine.replicas)), 10)


def add(number: int, params: SamplingParams | dict[str, object] = ENDLESS, prompt: list[int] = PROMPT) -> Add:
    fields = params if isinstance(params, dict) else non_default_params(params)
    return Add(number, prompt, fields, 0, "", True, time.perf_counter(), None)


async def whole(stream: Stream) -> list[Delta]:
    """One delta a completion."""
    completions: dict[int, Delta] = {}
    async for delta in stream:
        merge(completions, delta.index, delta)
    return [completions[index] for index in sorted(completions)]


class HandDrivenServer:
    """An EngineServer whose turns the test takes. A turn with nothing to do would wait for ever."""

    def __init__(self, folder: Path, config: EngineConfig | None = None, max_queued: int = MAX_QUEUED) -> None:
        self.engine = LLMEngine(config or dry_config())
        self.path = str(folder / "engine")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._clients: list[HandDrivenClient] = []
        self.server = EngineServer(self.engine, self._listener, max_queued)

    def connect(self) -> HandDrivenClient:
        self._clients.append(HandDrivenClient(self.path))
        self.server.turn()
        return self._clients[-1]

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.server.turn()

    def turn_until_idle(self) -> None:
        self.turn()
        while self.engine.has_unfinished_requests():
            self.turn()

    def used_blocks(self) -> int:
        return self.engine.scheduler.usage().used_blocks

    def close(self) -> None:
        for client in self._clients:
            client.sock.close()
        self.server.close()
        self._listener.close()


class HandDrivenClient:
    """The bare socket of an API process."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(path)
        self._reader = FrameReader()
        self._writer = FrameWriter()

    def say(self, *commands: Command) -> None:
        self.sock.sendall(b"".join(map(self._writer.frame, commands)))

    def hear(self) -> list[Event]:
        """What has come."""
        self.sock.setblocking(False)
        data = b""
        with contextlib.suppress(BlockingIOError):
            while more := self.sock.recv(2**20):
                data += more
        self.sock.setblocking(True)
        return [event_decoder.decode(frame) for frame in self._reader.feed(data)]


@contextlib.contextmanager
def served_in_a_thread(folder: Path, engine: LLMEngine) -> Iterator[str]:
    """The socket's path. The server's loop ends with an error, which the test plants, or with the test run."""
    path = str(folder / "engine")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        server = EngineServer(engine, listener)

        def serve() -> None:
            with contextlib.suppress(RuntimeError):
                server.serve()
            server.close()

        threading.Thread(target=serve, daemon=True).start()
        yield path
