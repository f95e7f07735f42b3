"""mini-infer-serve with a variant's settings, in processes of its own: what runs in the process that holds them."""

from __future__ import annotations

import contextlib
import json
import os
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import psutil

from mini_infer.cli.arguments import REFUSED
from mini_infer.cli.server_process import discard, read_address, start_server
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError
from mini_infer.serving.settings import PREFIX, table

OWN = ("--host=127.0.0.1", "--port=0", "--max-queued=1000000", "--log-level=warning")


class Server:
    def __init__(self, config: EngineConfig, threads: int, api_processes: int = 1) -> None:
        """
        Args:
            threads: of torch in the engine process.

        Raises:
            ConfigError: the server refuses the settings.
            RuntimeError: it has ended otherwise; its log says why.
        """
        environment = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
        arguments = [*OWN, f"--api-processes={api_processes}", *flags(config)]
        self._process = start_server(arguments, {**environment, "OMP_NUM_THREADS": str(threads)})
        assert self._process.stdout is not None
        url = read_address(self._process.stdout)
        if url is None:
            code = self._process.wait()
            if code == REFUSED:
                raise ConfigError("mini-infer-serve refuses these settings; the log above says which")
            raise RuntimeError(f"mini-infer-serve ended with code {code} before it served")
        discard(self._process.stdout)
        with urllib.request.urlopen(f"{url}/healthz") as answer:
            health = json.load(answer)
        self.about: Mapping[str, Any] = {
            "url": url,
            "model": health["model"],
            "api_pid": self._process.pid,
            "engine_pids": [replica["engine_pid"] for replica in health["replicas"]],
            "startup": health["startup"],
        }

    def check(self) -> None:
        """Raises RuntimeError where it does not run any more."""
        if self._process.poll() is not None:
            raise RuntimeError(f"mini-infer-serve ended with code {self._process.returncode}")


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
                yield f"{rows[key].flags[0]}={_text(value)}"

    return list(walk(config.to_dict(), {} if other is None else other.to_dict(), ""))


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def open_peer(config: EngineConfig, settings: Mapping[str, Any]) -> Server:
    return Server(config, settings["threads"], settings["api_processes"])
