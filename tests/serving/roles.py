"""Engines with roles, as processes without a server before them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from served import TIMEOUT_S, until

from mini_infer import EngineConfig
from mini_infer.core.config import ParallelConfig, replace
from mini_infer.serving.processes.async_engine import AsyncEngine
from mini_infer.serving.processes.launch import EngineProcess
from mini_infer.serving.stats import Stats

ROLES = ("prefill", "decode")
T = TypeVar("T")


class Engines:
    """One for prompts and one that decodes, as processes, which whoever uses them kills and starts again.

    Args:
        listens: where the one for prompts does, as of a Door; None: beside its socket.
        gpus: CUDA_VISIBLE_DEVICES of each.
    """

    def __init__(
        self, folder: Path, config: EngineConfig, listens: str | None = None, gpus: Mapping[str, str] | None = None
    ) -> None:
        self._listens, self._gpus = listens, gpus
        self._configs = {role: replace(config, parallel={role: 1}) for role in ROLES}
        self._paths = {role: str(folder / role) for role in ROLES}
        self._processes: dict[str, EngineProcess] = {}
        self.client: AsyncEngine

    def start(self, role: str) -> None:
        config, path = self._configs[role], self._paths[role]
        environment = None if self._gpus is None else {**os.environ, "CUDA_VISIBLE_DEVICES": self._gpus[role]}
        self._processes[role] = EngineProcess(
            config, socket_path=path, environment=environment, prompts_at=self._listens
        )

    def kill(self, role: str) -> None:
        os.kill(self.pid(role), signal.SIGKILL)
        self._processes[role].stop()

    def pid(self, role: str) -> int:
        return self._processes[role].pid

    def stats(self, role: str) -> Stats:
        return self.client.replicas[ROLES.index(role)].stats

    async def serve(self) -> None:
        """Waits until both do."""
        await until(lambda: all(r.info is not None and r.info.pid in self.pids for r in self.client.replicas))
        await until(lambda: all(replica.failure is None for replica in self.client.replicas))

    @property
    def pids(self) -> set[int]:
        return {process.pid for process in self._processes.values()}

    @asynccontextmanager
    async def used(self) -> AsyncIterator[Engines]:
        for role in ROLES:
            self.start(role)
        try:
            self.client = await AsyncEngine.connect(*self._paths.values(), parallel=ParallelConfig(prefill=1, decode=1))
            try:
                await self.serve()
                yield self
            finally:
                await self.client.close()
        finally:
            for process in self._processes.values():
                process.stop()


def with_engines(engines: Engines, use: Callable[[Engines], Awaitable[T]], timeout_s: float = TIMEOUT_S) -> T:
    async def run() -> T:
        async with engines.used():
            return await use(engines)

    return asyncio.run(asyncio.wait_for(run(), timeout_s))
