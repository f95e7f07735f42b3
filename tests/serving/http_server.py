"""A server process for tests: `mini-infer-serve` on a free port, asked over HTTP and stopped by SIGTERM."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from forking import Child, forks

from mini_infer.cli.server_process import read_address, start_server

ROOT = Path(__file__).resolve().parents[2]
PLAIN = ("--port", "0", "--shutdown-timeout", "5")
DRY = ("--dry-run", *PLAIN)
SAMPLE = re.compile(r"^(?:mini_infer:)?(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


class Sample(NamedTuple):
    """`name`: without the prefix."""

    name: str
    labels: dict[str, str]
    value: float


class Server:
    def __init__(self, flags: tuple[str, ...], environ: dict[str, str] | None = None, forked: bool = True) -> None:
        environment = {**os.environ, **(environ or {})}
        self.process: Child | subprocess.Popen[str]
        if forked:
            self.process = forks().server(flags, environment)
        else:
            self.process = start_server(flags, environment, cwd=ROOT, stderr=subprocess.STDOUT)
        self.log: list[str] = []
        lines = self._logged()
        url = read_address(lines)
        if url is None:
            raise RuntimeError("the server did not start:\n" + "".join(self.log))
        self.url = url
        self.http = http_client(url)
        # As it comes: a server would stand still when the pipe is full.
        self._reader = threading.Thread(target=deque, args=[lines, 0], daemon=True)
        self._reader.start()

    def _logged(self) -> Iterator[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            yield line

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt: Any = "hello", **body: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        response = self.post("/v1/completions", prompt=prompt, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def metrics(self) -> dict[str, float]:
        """Samples by name, without the prefix; those of one name are added up."""
        found: dict[str, float] = {}
        for name, _, value in SAMPLE.findall(self.http.get("/metrics").text):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def wait_until_idle(self) -> None:
        """No request in the engine, and no KV block in use."""
        busy = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        wait_for(lambda: not any(self.metrics()[name] for name in busy))

    def check_unharmed(self) -> None:
        """Whatever a test has sent is over and forgotten, and a request is served."""
        self.wait_until_idle()
        assert self.complete(max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2
        assert self.process.poll() is None

    def stop(self, sig: int = signal.SIGTERM, timeout: float = 15) -> int:
        """The exit code."""
        self.process.send_signal(sig)
        return self.wait(timeout)

    def wait(self, timeout: float = 15) -> int:
        code = self.process.wait(timeout)
        self.read_log(timeout)
        return code

    def read_log(self, timeout: float = 15) -> None:
        """To its end, which comes with that of the last process that writes it."""
        self._reader.join(timeout)
        assert not self._reader.is_alive(), "a process of the server's still runs"


def refusal(*flags: str) -> tuple[int, str]:
    """The exit code of a server that does not start, and what it says."""
    process = forks().server(flags, os.environ)
    assert process.stdout is not None
    with process.stdout:
        said = process.stdout.read()
    return process.wait(15), said


def http_client(url: str, timeout: float = 30) -> httpx.Client:
    """Without the authorities' certificates, which take longer to load than most requests."""
    return httpx.Client(base_url=url, timeout=timeout, verify=False)


def samples(text: str, *names: str) -> list[Sample]:
    """Those of these names in an answer of /metrics, in a tenth of the time that Prometheus' own parser takes."""
    found = [each for each in SAMPLE.findall(text) if each[0] in names]
    return [Sample(name, dict(LABEL.findall(labels)), float(value)) for name, labels, value in found]


def wait_for(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    until = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < until, "it did not come true in time"
        time.sleep(0.04)


@contextmanager
def running(
    *flags: str, environ: dict[str, str] | None = None, forked: bool = True, dry: bool = True
) -> Iterator[Server]:
    """A server with these flags; whatever the test did with it, it is gone at the end.

    Args:
        forked: from a process that has imported everything, and not in a new interpreter.
        dry: with the dry model; else the flags say which.
    """
    server = Server((*(DRY if dry else PLAIN), *flags), environ, forked)
    try:
        yield server
    finally:
        server.http.close()
        if server.process.poll() is None:
            server.process.terminate()
            try:
                server.process.wait(10)
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.process.wait()
        server.read_log()
        assert server.process.stdout is not None
        server.process.stdout.close()
