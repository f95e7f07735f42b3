"""A server and the clients that load it, as a peer that takes its turn beside others."""

from __future__ import annotations

import importlib.util
import json
import urllib.parse
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments.lab.load.clients import Clients, Target
from experiments.lab.load.server import cpu_seconds
from experiments.lab.measure.kinds import Kind
from experiments.lab.measure.traces import Served
from experiments.lab.peers.base import PeerAbsent
from experiments.lab.peers.process import PeerProcess
from experiments.lab.peers.settings import ClientSettings, HTTPSettings, PeerSettings
from experiments.lab.workloads import Item
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError

NEEDS = ("httptools", "msgspec")
SERVER = "experiments.lab.load.server"
VLLM_SERVER = "experiments.lab.load.vllm_server"
BENCH = "experiments.lab.load.bench"
ANSWERS_S = 10.0  # a server that takes longer to name its model is not there


class OverHTTP:
    """`server` is the process that holds it, where this run has started it."""

    def __init__(
        self, name: str, target: Target, about: Mapping[str, Any], clients: ClientSettings, server: PeerProcess | None
    ) -> None:
        self.name = name
        self.about = about
        self.target = target
        self._clients = Clients(target, clients)
        self._server = server
        self._closed = False
        self._run = uuid.uuid4().hex[:8]  # a server may have lived before, and live on
        self._forgot = 0  # times

    def serve(self, items: Sequence[Item], concurrency: int) -> Served:
        try:
            before = self._cpu()
            served = self._clients.serve(items, concurrency, self.salt)
            if self._server is None:
                return served
            self._server.call("serve", "check")
            api_s, engine_s = (after - first for after, first in zip(self._cpu(), before, strict=True))
        except BaseException:
            self.close()
            raise
        assert served.host is not None
        # Of prompts of which it found nothing vLLM's says nothing.
        return replace(served, host=replace(served.host, api_s=api_s, engine_s=engine_s, tells_cached=True))

    def forget(self) -> None:
        """Another salt: prefixes that were cached under the last one cannot be hit."""
        self._forgot += 1

    @property
    def salt(self) -> str:
        return f"{self._run}-{self._forgot}"

    @property
    def alive(self) -> bool:
        return not self._closed and (self._server is None or self._server.alive)

    def close(self) -> None:
        self._closed = True
        self._clients.close()
        if self._server is not None:
            self._server.close()

    def _cpu(self) -> tuple[float, ...]:
        """Seconds that the API processes and the engine process have used so far."""
        return () if self._server is None else cpu_seconds(self._server.about)


class Bench:
    """The load of `vllm bench serve` on a server that lives."""

    def __init__(self, name: str, server: OverHTTP, process: PeerProcess) -> None:
        self.name = name
        self._server = server
        self._process = process
        self.about: Mapping[str, Any] = {**server.about, **process.about}

    def serve(self, items: Sequence[Item], concurrency: int) -> Served:
        """Raises ConfigError where it cannot ask for the items."""
        lengths = {item.output_tokens for item in items}
        if len(lengths) > 1:
            raise ConfigError("`vllm bench serve` asks for one output length: choose workload=fixed")
        found: Served = self._process.call(
            "serve",
            "bench",
            target=self._server.target,
            prompts=[list(item.prompt) for item in items],
            output_tokens=lengths.pop(),
            concurrency=concurrency,
            salt=self._server.salt,
        )
        return found

    def forget(self) -> None:
        self._server.forget()

    @property
    def alive(self) -> bool:
        return self._server.alive and self._process.alive

    def close(self) -> None:
        """Others use both."""


def start(kind: Kind, config: EngineConfig, settings: PeerSettings, threads: int, wait: bool = True) -> PeerProcess:
    """The process that holds a server of ours or of vLLM's; `wait` and what it raises as PeerProcess."""
    if kind is Kind.vllm_served:
        return PeerProcess(kind.label, VLLM_SERVER, config, settings.vllm, wait=wait)
    return PeerProcess(kind.label, SERVER, config, settings.served, wait=wait, threads=threads)


def open_subject(
    kind: Kind, config: EngineConfig, settings: PeerSettings, threads: int, server: PeerProcess | None = None
) -> OverHTTP:
    """`server`: where it has been started before, and is ready.

    Raises:
        PeerAbsent: no server answers at peers.http.url.
        ConfigError: settings that cannot work.
        PeerError: the server could not start.
    """
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"load over HTTP needs {' and '.join(missing)}: pip install -e '.[serve]'")
    if kind.can.elsewhere:
        target = find(settings.http)
        found = {"url": settings.http.url, "model": target.model}
        return OverHTTP(kind.label, target, found, settings.client, None)
    server = server or start(kind, config, settings, threads)
    target = replace(_target(server.about["url"], server.about["model"]), ours=kind.can.ours)
    if kind is Kind.vllm_served:
        return OverHTTP(kind.label, target, server.about["settings"], settings.client, server)
    startup = server.about["startup"]
    number = settings.served.api_processes
    processes = "an API process" if number == 1 else f"{number} API processes"
    about: dict[str, Any] = {"server": f"mini-infer-serve: {processes} and an engine process", "cpu_threads": threads}
    if startup["device"] != "cpu":
        about |= {"started in": f"{startup['seconds']:.1f} s"}
    return OverHTTP(kind.label, target, about, settings.client, server)


def find(settings: HTTPSettings) -> Target:
    """The server at peers.http.url, and the model that it names first."""
    if settings.url is None:
        raise ConfigError("the variant kind `http` needs peers.http.url, such as http://localhost:8000")
    if settings.model is not None:
        return _target(settings.url, settings.model)
    base = settings.url.rstrip("/").removesuffix("/v1")
    try:
        with urllib.request.urlopen(f"{base}/v1/models", timeout=ANSWERS_S) as answer:
            return _target(settings.url, json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, LookupError) as error:
        raise PeerAbsent(f"no OpenAI server answers at peers.http.url={settings.url}: {error}") from error


def _target(url: str, model: str) -> Target:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(f"peers.http.url must begin with http:// and name a host, got {url!r}")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Target(parts.hostname, parts.port or 80, f"{path}/v1/completions", model)
