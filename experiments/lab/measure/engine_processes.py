"""Engines side by side: processes as behind mini-infer-serve, asked in one event loop without HTTP; and those of a
peer, each in a process and on GPUs of its own, that take requests in turns."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch

from experiments.lab.measure.kinds import Kind, PeerAbsent, PeerError, ProcessSettings, why_lost
from experiments.lab.measure.traces import RequestTrace, Served, first_scheduled, joined
from experiments.lab.peers.pool import require_device, settled
from experiments.lab.peers.process import PeerProcess, ask_all
from experiments.lab.workloads import Item
from mini_infer import SamplingParams
from mini_infer.core.config import EngineConfig
from mini_infer.serving.link.link import EngineDead
from mini_infer.serving.processes.async_engine import AsyncEngine
from mini_infer.serving.processes.engines import ways_to_make
from mini_infer.serving.processes.gpus import count_gpus, engines_asked, environments
from mini_infer.serving.processes.launch import EngineProcess

STARTUP_S = 600.0
T = TypeVar("T")


class EngineProcesses:
    """Engine processes of one config at a time; or of several side by side, which are kept to the end."""

    asked: AsyncEngine

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._loop = asyncio.new_event_loop()
        self._there: list[tuple[EngineConfig, AsyncEngine]] = []
        self._open = ExitStack()

    def __enter__(self) -> EngineProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()
        left = asyncio.all_tasks(self._loop)  # those that would connect again
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left))
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def use(self, config: EngineConfig) -> None:
        """It is the one that is `asked` from here on."""
        if config not in [known for known, _ in self._there]:
            if not self._keep:
                self._open.close()
                self._there = []
            self.start([config])
        (self.asked,) = (engine for known, engine in self._there if known == config)

    def start(self, configs: Sequence[EngineConfig]) -> None:
        begun = []
        for config in configs:
            folder = self._open.enter_context(tempfile.TemporaryDirectory())
            processes: dict[str, EngineProcess] = {}  # by where they listen
            for number, make in enumerate(ways_to_make(config, max_queued=2**20)):
                path = os.path.join(folder, f"engine-{number}")
                processes[path] = make(path)
                self._open.callback(processes[path].stop)
            begun.append((config, processes))
        for config, processes in begun:
            engine = self.run(self._serving(config, processes))
            self._open.callback(lambda engine: self.run(engine.close()), engine)
            self._there.append((config, engine))

    async def _serving(self, config: EngineConfig, processes: Mapping[str, EngineProcess]) -> AsyncEngine:
        """When all of them do. Raises EngineDead where one ends instead."""
        connect = AsyncEngine.connect(*processes, parallel=config.parallel, startup_timeout=STARTUP_S)
        engine = asyncio.ensure_future(connect)
        while not engine.done() or any(replica.failure is not None for replica in engine.result().replicas):
            for ending in filter(None, [process.ending() for process in processes.values()]):
                engine.cancel()
                raise EngineDead(f"an engine of {engines_asked(config)} {ending} before it served")
            await asyncio.sleep(0.1)
        return engine.result()


async def ask(
    engine: AsyncEngine,
    prompt: list[int],
    output_tokens: int,
    due: float | None = None,
    times: list[float] | None = None,
    **params: Any,
) -> RequestTrace:
    """At once, or when it is due. When tokens came is in `times` even of an answer that is cancelled."""
    if due is not None:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
    sent = time.perf_counter()
    given = {"temperature": 0.0, **params}
    stream = engine.submit(prompt, SamplingParams(max_tokens=output_tokens, ignore_eos=True, **given))
    times = [] if times is None else times
    tokens: list[int] = []
    spans: dict[str, float] = {}
    async for delta in stream:
        times += [time.perf_counter()] * len(delta.token_ids)
        tokens += delta.token_ids
        spans = delta.spans or spans
    return RequestTrace(
        prompt_tokens=len(prompt),
        asked_tokens=output_tokens,
        arrival=sent if due is None else due,
        token_times=tuple(times),
        token_ids=tuple(tokens),
        sent=None if due is None else sent,
        first_scheduled=first_scheduled(times, spans),
        spans=spans,
    )


def as_served(answers: Sequence[RequestTrace]) -> Served:
    start = min(answer.arrival for answer in answers)
    named = (replace(answer, request_id=f"request {number}") for number, answer in enumerate(answers, 1))
    return Served(tuple(named), start, max(answer.token_times[-1] for answer in answers))


class PeerReplicas:
    """As many as the config's parallel.replicas. They start while others work, and `ready` waits. One that is lost
    takes the others with it."""

    def __init__(self, kind: Kind, config: EngineConfig, settings: ProcessSettings) -> None:
        """Raises ConfigError where there are too few GPUs."""
        self.about: Mapping[str, Any] = {}  # version and settings, once they are ready
        self.absent = ""  # why they are not asked, or not any more; empty while they are
        self._each: list[PeerProcess] = []
        options: dict[str, Any] = {"wait": False, "threads": torch.get_num_threads()}
        with self._asked():
            require_device(kind, config.model.device)
            each = zip(config.parallel.of_engines, environments(config, os.environ, count_gpus), strict=True)
            for parallel, environment in each:
                own, of = settled(replace(config, parallel=parallel)), (kind.label, kind.can.module)
                self._each.append(PeerProcess(*of, own, settings, environment=environment, **options))

    def ready(self) -> None:
        """Raises ConfigError where they cannot work with these settings."""
        with self._asked():
            for process in self._each:
                process.ready()
                self.about = {**process.about, "engines": len(self._each)}

    def serve(self, items: Sequence[Item], concurrency: int) -> Served | None:
        """One item after the other goes to the next engine, each of which begins when all of its items are there: some
        tens of milliseconds apart. All times are of one clock. `concurrency` is of each; no item may follow another.
        None where they are absent."""
        number, found = len(self._each), list[Served]()
        hands = [range(first, len(items), number) for first in range(number)]
        with self._asked():
            asked = [{"items": tuple(items[at] for at in own), "concurrency": concurrency} for own in hands]
            found = ask_all(self._each, "serve", "serve", asked)
        return joined(found, hands) if found else None

    def close(self) -> None:
        while self._each:
            self._each.pop().close()

    @contextmanager
    def _asked(self) -> Iterator[None]:
        try:
            yield
        except BaseException as lost:
            self.close()
            if not isinstance(lost, PeerAbsent | PeerError):
                raise
            self.absent = why_lost(lost)
