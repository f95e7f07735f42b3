"""A server and the clients that load it, as a peer that takes its turn beside others; and what runs in the process that
holds mini-infer-serve with a variant's settings."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from experiments.lab.load.client import Clients, Target
from experiments.lab.measure.kinds import HTTPSettings, Kind, PeerAbsent, PeerSettings, Subject
from experiments.lab.measure.traces import Served
from experiments.lab.peers.process import PeerProcess
from experiments.lab.workloads import Item
from mini_infer.cli.arguments import REFUSED
from mini_infer.cli.server_process import discard, read_address, start_server
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError
from mini_infer.serving.settings import PREFIX, table

OWN = ("--host=127.0.0.1", "--port=0", "--max-queued=1000000", "--log-level=warning")  # of mini-infer-serve
BENCH = "experiments.lab.load.bench"
ANSWERS_S = 10.0  # a server that takes longer to name its model is not there


@dataclass
class OverHTTP(Subject):
    name: str
    target: Target
    about: Mapping[str, Any]
    _clients: Clients
    _server: PeerProcess | None  # the process that holds it, where this run has started it
    _closed: bool = False
    salt: str = field(init=False)  # of prefixes: a server may have lived before, and live on

    def __post_init__(self) -> None:
        self.forget()

    def serve(self, items: Sequence[Item], concurrency: int) -> Served:
        try:
            if self._server is None:
                return self._clients.serve(items, concurrency, self.salt)
            before = cpu_seconds(self._server.about)
            served = self._clients.serve(items, concurrency, self.salt)
            self._server.call("serve", "check")
            after = cpu_seconds(self._server.about)
        except BaseException:
            self.close()
            raise
        assert served.host is not None
        api_s, engine_s = after[0] - before[0], after[1] - before[1]
        # Of prompts of which it found nothing vLLM's says nothing.
        return replace(served, host=replace(served.host, api_s=api_s, engine_s=engine_s, tells_cached=True))

    def forget(self) -> None:
        """Another salt: prefixes that were cached under the last one cannot be hit."""
        self.salt = uuid.uuid4().hex[:10]

    @property
    def alive(self) -> bool:
        return not self._closed and (self._server is None or self._server.alive)

    def close(self) -> None:
        self._closed = True
        self._clients.close()
        if self._server is not None:
            self._server.close()


class Bench(Subject):
    """The load of `vllm bench serve` on a server that lives."""

    def __init__(self, server: OverHTTP, process: PeerProcess) -> None:
        self._server, self._process = server, process
        self.about = {**server.about, **process.about}

    def serve(self, items: Sequence[Item], concurrency: int) -> Served:
        """Raises ConfigError where it cannot ask for the items."""
        lengths = {item.output_tokens for item in items}
        if len(lengths) > 1:
            raise ConfigError("`vllm bench serve` asks for one output length: choose workload=fixed")
        asked = {"prompts": [list(item.prompt) for item in items], "output_tokens": lengths.pop()}
        how = {"target": self._server.target, "salt": self._server.salt, "concurrency": concurrency}
        return self._process.call("serve", "bench", **asked, **how)

    def forget(self) -> None:
        self._server.forget()

    @property
    def alive(self) -> bool:
        return self._server.alive and self._process.alive


def require_client() -> None:
    """Raises ConfigError where what the load client needs is not installed."""
    if importlib.util.find_spec("httptools") is None:
        raise ConfigError("load over HTTP needs httptools: pip install -e '.[serve]'")


def open_subject(kind: Kind, settings: PeerSettings, server: PeerProcess | None) -> OverHTTP:
    """`server` is ready; None: it is elsewhere. Raises PeerAbsent where none answers at peers.http.url, and ConfigError
    where that is no URL."""
    if server is None:
        target = find(settings.http)
        found = {"url": settings.http.url, "model": target.model}
        return OverHTTP(kind.label, target, found, Clients(target, settings.client), None)
    target = replace(_target(server.about["url"], server.about["model"]), ours=kind.can.ours)
    return OverHTTP(kind.label, target, server.about["settings"], Clients(target, settings.client), server)


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


@dataclass
class Server:
    command: str
    process: subprocess.Popen[Any]
    about: dict[str, Any] = field(default_factory=dict)  # url, model, api_pid, engine_pids, settings for the report

    def check(self) -> None:
        """Raises RuntimeError where it does not run any more."""
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.command} ended with code {self.process.returncode}")


def cpu_seconds(about: Mapping[str, Any]) -> tuple[float, float]:
    """What HTTP has used so far, and what the engine processes have, by a Server's `about`. HTTP is the server's own
    process and, where that supervises several API processes, all that it has now: their work is one server's."""
    seconds = {}
    with contextlib.suppress(psutil.NoSuchProcess):  # `check` tells how it ended
        server = psutil.Process(about["api_pid"])
        for process in (server, *server.children()):
            with contextlib.suppress(psutil.NoSuchProcess):  # an API process that another one replaces
                seconds[process.pid] = sum(process.cpu_times()[:2])
    engine_s = sum(seconds.pop(pid, 0.0) for pid in about["engine_pids"])
    return sum(seconds.values()), engine_s


def flags(config: EngineConfig, other: EngineConfig | None = None) -> list[str]:
    """The engine's settings as the server's flags: all of them, or those that another one does not have, too."""
    rows = {row.key: row for row in table()}

    def walk(values: Mapping[str, Any], known: Mapping[str, Any], prefix: str) -> Iterator[str]:
        for name, value in values.items():
            key = prefix + name
            if key not in rows:
                yield from walk(value, known.get(name, {}), f"{key}.")
            elif name not in known or value != known[name]:
                text = value if isinstance(value, str) else json.dumps(value)
                yield f"{rows[key].flags[0]}={'none' if value is None else text}"

    return list(walk(config.to_dict(), {} if other is None else other.to_dict(), ""))


def open_peer(config: EngineConfig, settings: Mapping[str, Any]) -> Server:
    """mini-infer-serve. Raises ConfigError where it refuses the settings, and RuntimeError where it ends otherwise."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
    arguments = [*OWN, f"--api-processes={settings['api_processes']}", *flags(config)]
    process = start_server(arguments, {**environment, "OMP_NUM_THREADS": str(settings["threads"])})
    assert process.stdout is not None
    url = read_address(process.stdout)
    if url is None and process.wait() == REFUSED:
        raise ConfigError("mini-infer-serve refuses these settings; the log above says which")
    if url is None:
        raise RuntimeError(f"mini-infer-serve ended with code {process.returncode} before it served")
    discard(process.stdout)
    with urllib.request.urlopen(f"{url}/healthz") as answer:
        health = json.load(answer)
    startup, number = health["startup"], settings["api_processes"]
    processes = "an API process" if number == 1 else f"{number} API processes"
    told = {"server": f"mini-infer-serve: {processes} and an engine process", "cpu_threads": settings["threads"]}
    if startup["device"] != "cpu":
        told["started in"] = f"{startup['seconds']:.1f} s"
    pids = {"api_pid": process.pid, "engine_pids": [replica["engine_pid"] for replica in health["replicas"]]}
    return Server("mini-infer-serve", process, {"url": url, "model": health["model"], **pids, "settings": told})
