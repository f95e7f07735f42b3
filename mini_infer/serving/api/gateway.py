"""What all requests of an API process share, whichever model they ask: who may ask, how much of them may be unfinished,
what is counted; and the models, by the names that requests choose them by."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import fcntl
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from mini_infer.core.logs import Complaint
from mini_infer.serving.api.answers import ModelCard
from mini_infer.serving.api.callers import Callers
from mini_infer.serving.api.errors import ApiError
from mini_infer.serving.api.service import Service
from mini_infer.serving.api.sse import Running
from mini_infer.serving.http.bodies import UnfinishedBodies
from mini_infer.serving.keys import ADAPTERS, locked
from mini_infer.serving.link.link import EngineDead
from mini_infer.serving.link.replica import Replica, why_none
from mini_infer.serving.metrics import Metrics
from mini_infer.serving.processes.async_engine import AsyncEngine
from mini_infer.serving.router import Homes
from mini_infer.serving.settings import ModelSettings, ServerSettings

logger = logging.getLogger(__name__)

ALIAS = "mini-infer"  # names the model where there is one
COUNT_S = 0.1  # between two reports to an engine of what was counted here
LOCK_S = 0.01  # between two looks whether another API process has changed its adapter
UNFINISHED_BODIES = 16  # of the largest size, together


class Model:
    """One of the models.

    Attributes:
        replicas: its engines.
        service: once one of them has served; then for good, whatever becomes of them.
    """

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        self.name = settings.model_name
        self.replicas: Sequence[Replica] = ()
        self.service: Service | None = None

    @property
    def adapters(self) -> Mapping[str, str]:
        """Name -> folder; before an engine has told its own, those that it is to have."""
        return self.settings.engine.lora.adapters if self.service is None else self.service.adapters

    @property
    def trouble(self) -> dict[str, str]:
        """What a probe says of its engines; nothing where one of them can be asked."""
        return {"status": "loading", "reason": self._why_loading} if self.service is None else self.service.trouble

    @property
    def _why_loading(self) -> str:
        served = any(replica.info is not None for replica in self.replicas)
        return "its tokenizer is being read" if served else why_none(self.replicas)

    def require(self) -> Service:
        """Raises ApiError where none of its engines can be asked."""
        if self.service is None:
            reason = f"the model {self.name!r} is being loaded: {self._why_loading}"
            raise ApiError(503, reason, type="server_error", code="model_loading", headers={"Retry-After": "5"})
        if (failure := self.service.engine.failure) is not None:
            reason = f"the model {self.name!r} cannot be asked: {failure}"
            raise ApiError(503, reason, type="server_error", code="engine_dead")
        return self.service

    def about(self) -> dict[str, Any]:
        """For /healthz."""
        info = None if self.service is None else self.service.engine.info
        replicas = [_about(replica) for replica in self.replicas]
        return {
            "model": self.name,
            "max_model_len": None if info is None else info.max_model_len,
            "engine_pid": replicas[0]["engine_pid"],
            "replicas": replicas,
            "settings": None if info is None else info.settings,
            "startup": None if info is None else info.startup,
        }


def _about(replica: Replica) -> dict[str, Any]:
    status = "draining" if replica.stats.draining else "ok"
    return {
        "replica": replica.number,
        "engine_pid": None if replica.info is None else replica.info.pid,
        "status": status if replica.failure is None else "down",
        "reason": replica.failure,
    }


class Gateway:
    """`accounts` as with `Accounts`, and `homes_file` as with Homes; None: this process is the only one."""

    def __init__(self, settings: ServerSettings, accounts: int | None = None, homes_file: int | None = None) -> None:
        self.settings = settings
        self.models = [Model(model) for model in settings.models]
        self.unfinished = UnfinishedBodies(UNFINISHED_BODIES * settings.max_body_bytes)
        self.callers = Callers(settings, accounts)
        self._accounts, self._homes_file = accounts, homes_file if settings.api_processes > 1 else None
        self._changes = asyncio.Lock()
        self.running = Running()
        self.complaint = Complaint(logger)  # of probes that are told that all is not well
        self.started = int(time.time())
        self.stopping = False
        self.over: ApiError | None = None  # what ends all that is not ready when the server stops
        self.metrics = Metrics(self.models, own_process=settings.api_processes == 1)
        self._arriving: set[asyncio.Task[Any]] = set()
        self._counts: Counter[str] = Counter()
        self._opening: list[asyncio.Task[None]] = []
        self._by_name = {name: model for model in self.models for name in model.settings.names}
        paths = Counter(model.settings.model for model in self.models)
        for model in self.models:
            if paths[model.settings.model] == 1:
                self._by_name.setdefault(model.settings.model, model)
        if len(self.models) == 1:
            self._by_name.setdefault(ALIAS, self.models[0])

    @classmethod
    async def start(
        cls,
        settings: ServerSettings,
        engine_paths: Sequence[str] = (),
        accounts: int | None = None,
        homes_file: int | None = None,
    ) -> Gateway:
        """
        Args:
            engine_paths: of engine processes that a Supervisor keeps, one model's after the other's; without any, one
                is started.
            accounts, homes_file: as with Gateway.

        Raises:
            ConfigError, ModelError, EngineDead: the only engine cannot start, or a model be served as it is asked for.
        """
        gateway = cls(settings, accounts, homes_file)
        try:
            if engine_paths:
                await gateway._connect(engine_paths)
            else:
                (model,) = gateway.models
                asked = model.settings
                patience = asked.startup_timeout
                engine = await AsyncEngine.start(asked.engine, max_queued=asked.max_queued, startup_timeout=patience)
                await gateway._serve(model, engine)
        except BaseException:
            await gateway.close()
            raise
        return gateway

    async def _connect(self, engine_paths: Sequence[str]) -> None:
        """Returns when one model can be asked, and all others that have an engine; the rest follow when they can."""
        paths = iter(engine_paths)
        kept = self.settings.keeps_engines
        for model in self.models:
            own = list(islice(paths, model.settings.engine.parallel.engines))
            self._opening.append(asyncio.create_task(self._open(model, own, kept)))
        await asyncio.wait(self._opening, return_when=asyncio.FIRST_COMPLETED)
        serving = [
            task
            for model, task in zip(self.models, self._opening, strict=True)
            if task.done() or any(replica.info is not None for replica in model.replicas)
        ]
        await asyncio.gather(*serving)

    async def _open(self, model: Model, paths: Sequence[str], kept: bool) -> None:
        asked = model.settings
        while True:
            model.replicas = [Replica(number, path) for number, path in enumerate(paths)]
            homes = None if self._homes_file is None else Homes(self._homes_file, self.models.index(model))
            try:
                engine = await AsyncEngine.over(
                    model.replicas, asked.engine.parallel, homes, asked.startup_timeout, kept
                )
                return await self._serve(model, engine)
            except EngineDead:
                if len(self.models) == 1:
                    raise

    async def _serve(self, model: Model, engine: AsyncEngine) -> None:
        model.replicas = engine.replicas
        try:
            model.service = Service(model.settings, engine, self)
        except BaseException:
            await engine.close()
            raise

    async def close(self) -> None:
        self.stop()
        for task in self._opening:
            task.cancel()
        for model in self.models:
            if model.service is not None:
                await model.service.close()

    def stop(self) -> None:
        """From here on /readyz says no, and what still runs ends with an error when the time for it is over."""
        self.stopping = True

    def end_running(self) -> ApiError:
        """Ends what has come; the error is for who has not said yet what he wants."""
        seconds = f"{self.settings.shutdown_timeout:g} s"
        message = f"the server shuts down, and the request did not finish within the {seconds} left to it"
        self.over = ApiError(503, message, type="server_error", code="shutting_down")
        for answer in list(self.running.answers):
            answer.end(self.over)
        for task in self._arriving:
            task.cancel()
        return self.over

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """Around the wait for the rest of a request, which ends with an error, too, when the time is over."""
        task = asyncio.current_task()
        assert task is not None
        self._arriving.add(task)
        try:
            yield
        except asyncio.CancelledError:
            raise self.over or asyncio.CancelledError from None
        finally:
            self._arriving.discard(task)

    @contextlib.asynccontextmanager
    async def changing_adapters(self) -> AsyncIterator[None]:
        """Nobody else does, in whichever API process: each would tell the engines in turn, and some of them would hear
        the one last, some the other."""
        async with self._changes:  # the kernel's lock is the process's, whichever of its tasks has it
            if self._accounts is None:
                yield
                return
            while not locked(self._accounts, ADAPTERS):
                await asyncio.sleep(LOCK_S)
            try:
                yield
            finally:
                fcntl.lockf(self._accounts, fcntl.LOCK_UN, 1, ADAPTERS)

    # --- the models -----------------------------------------------------------------------------------------------

    def names_model(self, name: str) -> bool:
        """Whether it is a model's, and no adapter's."""
        return name in self._by_name

    def card(self, model: Model, **others: Any) -> dict[str, Any]:
        """What lists say of it."""
        service = model.service
        about: dict[str, Any] = {"id": model.name, "root": model.settings.model, "created": self.started}
        length = None if service is None else service.engine.info.max_model_len
        return ModelCard(**{**about, **others}, max_model_len=length).model_dump()

    def find(self, name: str | None) -> Model:
        """Which one a request means, by its name or by one of its adapters'. Raises ApiError where there is none, or
        several and no name."""
        if name is None and len(self.models) == 1:
            return self.models[0]
        if name in self._by_name:
            return self._by_name[name]
        known = dict(self._by_name)
        for model in self.models:
            known |= dict.fromkeys(model.adapters, model)
        if name in known:
            return known[name]
        names = " or ".join(map(repr, known))
        if name is None:
            raise ApiError(400, f"model is missing: this server has {names}", param="model")
        close = difflib.get_close_matches(name[:200], known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        message = f"the model {name[:200]!r} does not exist{hint}; this server has {names}"
        raise ApiError(404, message, param="model", code="model_not_found")

    @property
    def trouble(self) -> dict[str, Any]:
        """What a probe says; nothing where a model can be asked."""
        found = [model.trouble for model in self.models]
        return {} if not all(found) else found[0] if len(found) == 1 else {"status": "dead"}

    def about(self) -> dict[str, Any]:
        """For /healthz."""
        processes = {"api_pid": os.getpid(), "api_processes": self.settings.api_processes}
        if len(self.models) == 1:
            return {**self.models[0].about(), **processes}
        models = []
        for model in self.models:
            about = model.about()
            models.append({**about, **(model.trouble or {"status": _status(about)})})
        return {"models": models, **processes}

    def status(self) -> str:
        """Where there is no trouble: "degraded" where an engine is down, or a whole model."""
        down = any(model.trouble or _status(model.about()) == "degraded" for model in self.models)
        return "degraded" if down else "ok"

    @property
    def failure(self) -> str | None:
        """Why no model can be asked any more; None while one can."""
        failures = [model.service.engine.failure for model in self.models if model.service is not None]
        return failures[0] if failures and all(failures) else None

    def on_engine_death(self, call: Callable[[str], None]) -> None:
        """`call` is told why, where nobody starts another one."""
        for model in self.models:
            if model.service is not None:
                model.service.engine.on_death = call

    # --- counts ---------------------------------------------------------------------------------------------------

    def count(self, name: str, model: str | None = None, by: int = 1) -> None:
        """
        Args:
            name: as of `metrics.COUNTED`, with its labels behind it.
            model: whose request it was; None: it did not come so far as to choose one of several.
        """
        if model is None:
            model = self.models[0].name if len(self.models) == 1 else ""
        if not self._counts:
            asyncio.get_running_loop().call_later(COUNT_S, self._report_counts)
        self._counts[f"{name} {model}"] += by

    def _report_counts(self) -> None:
        """To an engine, whosever: it keeps them for all API processes."""
        for model in self.models:
            if model.service is not None and model.service.engine.count(dict(self._counts)):
                break
        self._counts.clear()


def _status(about: dict[str, Any]) -> str:
    return "degraded" if any(replica["status"] == "down" for replica in about["replicas"]) else "ok"
