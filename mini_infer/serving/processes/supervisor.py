"""Several API processes behind one port, and models' engine processes: who starts them, and what happens when one ends.

The supervisor alone accepts connections, and hands each to the API process that has the fewest open. Were the listening
socket shared, whoever happens to be awake would take what has come, up to the whole backlog at once; with SO_REUSEPORT
the kernel deals by a hash, so that of 256 streams on 8 processes the busiest has about 40, and a second server started
on the same port by mistake would take half the clients and no error. Streams live long: who got too many keeps them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable
from typing import TypeVar

from mini_infer.core.errors import MiniInferError
from mini_infer.serving.http.acceptor import Acceptor
from mini_infer.serving.processes.api_process import ApiProcess
from mini_infer.serving.processes.engines import engines_of
from mini_infer.serving.processes.kept_engine import KeptEngine
from mini_infer.serving.processes.launch import PREFIX
from mini_infer.serving.router import make_homes
from mini_infer.serving.settings import ModelSettings, ServerSettings

logger = logging.getLogger(__name__)
T = TypeVar("T")

FAILED_STARTS = 3  # in a row, of processes that shall take another's place; then the next would fare no better
ENDING_S = 5.0  # for a process that has closed its channel
SETTLE_S = 0.5  # from a replica that serves again to the next one's restart: until every API process knows
BACKSTOP_S = 15.0  # beyond shutdown_timeout, until a process that does not end is killed


class Supervisor:
    """
    Args:
        listener: bound, and not listening yet: nobody can connect before there is somebody to answer.
        on_ready: called when it listens.
    """

    def __init__(self, settings: ServerSettings, listener: socket.socket, on_ready: Callable[[], None]) -> None:
        self._settings = settings
        self._acceptor = Acceptor(listener, self._place, lambda: None)
        self._on_ready = on_ready
        self._workers: list[ApiProcess] = []  # who got a connection last comes last
        self._replacing: set[asyncio.Task[None]] = set()
        self._failed_starts = 0
        self._all_serve = asyncio.Event()
        self._end = asyncio.Event()
        self._failure: str | None = None
        self._engines: list[KeptEngine] = []
        self._replicas: list[KeptEngine] = []  # the engines that have others of the same model beside them
        self._rolling: asyncio.Task[None] | None = None
        self._engine_died = False
        self._accounts = tempfile.TemporaryFile()  # noqa: SIM115 closed by `run`
        self._homes = open(make_homes(len(settings.models)))  # noqa: SIM115 closed by `run`

    async def run(self) -> int:
        """Starts everything, and serves until a signal or a failure.

        Returns:
            The exit code: 0 after SIGTERM or SIGINT, 1 when an engine died that nobody starts again, when none could be
            started again, or when an API process could not start.

        Raises:
            ConfigError, ModelError, EngineDead: the engine cannot start.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._take_signal)
        if any(model.engine.parallel.engines > 1 for model in self._settings.models):
            loop.add_signal_handler(signal.SIGHUP, self._restart_all)
        with tempfile.TemporaryDirectory(prefix=PREFIX) as folder, self._accounts, self._homes:
            try:
                opening = await self._make_engines(folder)
                # They import while the engines are made, and hear what to serve when that is done.
                for _ in range(self._settings.api_processes):
                    self._spawn()
                if await self._unless_ended(asyncio.gather(*opening)) is not None:
                    for worker in self._workers:
                        worker.begin(self._settings)
                    if await self._unless_ended(self._all_serve.wait()):
                        self._acceptor.listen()
                        self._on_ready()
                        await self._end.wait()
                await self._wind_up()
            finally:
                for worker in self._workers:
                    worker.kill()
                await asyncio.gather(*(engine.stop() for engine in self._engines))
        return 1 if self._failure else 0

    async def _unless_ended(self, work: Awaitable[T]) -> T | None:
        """Its result; None, and the work is given up, where the end comes first."""
        task, end = asyncio.ensure_future(work), asyncio.ensure_future(self._end.wait())
        await asyncio.wait({task, end}, return_when=asyncio.FIRST_COMPLETED)
        end.cancel()
        if task.done():
            return task.result()
        task.cancel()
        return None

    async def _wind_up(self) -> None:
        patience = self._settings.shutdown_timeout + BACKSTOP_S
        if not self._engine_died:  # else they end by themselves, when they have told those who ask
            self._acceptor.stop()
            for worker in self._workers:
                worker.terminate()
        await asyncio.gather(*(worker.ended(patience) for worker in self._workers))
        self._acceptor.stop()

    def _take_signal(self) -> None:
        if self._end.is_set():  # the second one is from somebody who does not want to wait
            for worker in self._workers:
                worker.kill()
        self._end.set()

    def _fail(self, reason: str) -> None:
        self._failure = reason
        logger.error("%s", reason)
        self._end.set()

    # --- API processes --------------------------------------------------------------------------------------------

    def _spawn(self) -> ApiProcess:
        paths = [engine.socket_path for engine in self._engines]
        shared = self._accounts.fileno(), self._homes.fileno()
        worker = ApiProcess(paths, *shared, self._serves, self._leave)
        self._workers.append(worker)
        return worker

    def _serves(self) -> None:
        self._failed_starts = 0
        if all(worker.channel.serves for worker in self._workers):
            self._all_serve.set()

    def _leave(self, worker: ApiProcess) -> None:
        if not self._end.is_set():
            task = asyncio.ensure_future(self._replace(worker))
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)

    async def _replace(self, worker: ApiProcess) -> None:
        how = await worker.ended(ENDING_S)
        if self._end.is_set():
            return
        if worker.has_served:
            logger.error("an API process %s: its streams are lost, and another takes its place", how)
        else:
            self._failed_starts += 1
            if not self._acceptor.listening or self._failed_starts == FAILED_STARTS:
                self._fail(f"an API process {how} before it served")
                return
            logger.error("an API process %s before it served, and another takes its place", how)
        self._workers.remove(worker)
        self._spawn().begin(self._settings)

    # --- connections ----------------------------------------------------------------------------------------------

    def _place(self, connection: socket.socket) -> bool:
        """Gives it to the process with the fewest; among equals, to the one that has waited longest."""
        for worker in sorted(self._workers, key=lambda worker: worker.channel.num_open):
            if worker.channel.serves and worker.channel.give(connection):
                connection.close()
                self._workers.remove(worker)
                self._workers.append(worker)
                return True
        return False

    # --- the engines ----------------------------------------------------------------------------------------------

    async def _make_engines(self, folder: str) -> list[asyncio.Task[None]]:
        """What waits until each serves."""
        models, opening = self._settings.models, []
        makes = await asyncio.to_thread(engines_of, models)
        for model, of_model in zip(models, makes, strict=True):
            for replica, make in enumerate(of_model):
                among_models = [f"model {model.model_name!r}"] if len(models) > 1 else []
                among_replicas = [f"replica {replica}"] if len(of_model) > 1 else []
                engine = KeptEngine(
                    ", ".join(among_models + among_replicas) or "the engine",
                    make,
                    os.path.join(folder, f"engine-{len(self._engines)}"),
                    model.startup_timeout,
                    _patience(model) if self._settings.keeps_engines else math.inf,
                    self._take_end,
                )
                self._engines.append(engine)
                self._replicas += [engine] if among_replicas else []
                opening.append(asyncio.ensure_future(self._open(engine)))
                await asyncio.sleep(0)  # it connects: an engine that cannot start tells who listens
        return opening

    async def _open(self, engine: KeptEngine) -> None:
        try:
            await engine.open()
        except MiniInferError as error:
            if len(self._settings.models) == 1:
                raise
            raise type(error)(f"{engine.name}: {error}") from error

    def _take_end(self, engine: KeptEngine, reason: str) -> None:
        if not self._settings.keeps_engines:
            self._engine_died = True
            self._fail(reason)
            return
        reason = f"{engine.name}: {reason}"
        if engine.failed_starts < FAILED_STARTS or any(each.serves.is_set() for each in self._engines):
            logger.error("%s", reason)
            engine.start_again()
        else:
            self._fail(reason)

    def _restart_all(self) -> None:
        if self._rolling is None or self._rolling.done():
            self._rolling = asyncio.ensure_future(self._roll())
        else:
            logger.warning("the replicas are being restarted already")

    async def _roll(self) -> None:
        """One replica after the other; one that does not come back keeps the others as they are."""
        for engine in self._replicas:
            logger.warning("%s is being restarted", engine.name)
            await engine.restart(self._settings.shutdown_timeout)
            await asyncio.sleep(SETTLE_S)
        logger.warning("all replicas have been restarted")


def _patience(model: ModelSettings) -> float:
    """Seconds without a sign of life after which an engine is ended. One with ranks says before which of them hangs."""
    parallel = model.engine.parallel
    return model.hang_timeout + (parallel.timeout_s if parallel.has_ranks else 0.0)
