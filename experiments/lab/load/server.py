"""mini-infer-serve with a variant's settings, in processes of its own: what runs in the process that holds them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from typing import IO, Any

from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError
from mini_infer.serving.settings import PREFIX, table

SERVES = "mini-infer serves "  # begins the line that ends with the URL
OWN = ("--host=127.0.0.1", "--port=0", "--max-queued=1000000", "--log-level=warning")
REFUSED = 2  # exit code of settings that cannot work


class Server:
    def __init__(self, config: EngineConfig, threads: int) -> None:
        """
        Args:
            threads: of torch in the engine process.

        Raises:
            ConfigError: the server refuses the settings.
            RuntimeError: it has ended otherwise; its log says why.
        """
        environment = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mini_infer.cli.serve", *OWN, *flags(config)],
            stdout=subprocess.PIPE,
            env={**environment, "OMP_NUM_THREADS": str(threads)},
            text=True,
        )
        assert self._process.stdout is not None
        url = _url(self._process.stdout)
        if url is None:
            code = self._process.wait()
            if code == REFUSED:
                raise ConfigError("mini-infer-serve refuses these settings; the log above says which")
            raise RuntimeError(f"mini-infer-serve ended with code {code} before it served")
        threading.Thread(target=self._process.stdout.read, daemon=True).start()  # so that it is never full
        with urllib.request.urlopen(f"{url}/healthz") as answer:
            health = json.load(answer)
        self.about: Mapping[str, Any] = {
            "url": url,
            "model": health["model"],
            "api_pid": self._process.pid,
            "engine_pid": health["engine_pid"],
            "startup": health["startup"],
        }

    def check(self) -> None:
        """Raises RuntimeError where it does not run any more."""
        if self._process.poll() is not None:
            raise RuntimeError(f"mini-infer-serve ended with code {self._process.returncode}")


def _url(lines: IO[str]) -> str | None:
    return next((line.split()[-1] for line in lines if line.startswith(SERVES)), None)


def flags(config: EngineConfig) -> list[str]:
    """The engine's settings as the server's flags, all of them."""
    rows = {row.key: row for row in table()}

    def walk(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
        for name, value in values.items():
            key = prefix + name
            if key in rows:
                yield f"{rows[key].flags[0]}={_text(value)}"
            else:
                yield from walk(value, f"{key}.")

    return list(walk(config.to_dict(), ""))


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def open_peer(config: EngineConfig, settings: Mapping[str, Any]) -> Server:
    return Server(config, settings["threads"])
