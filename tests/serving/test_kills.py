"""kill -9 of every process of a server, in every phase: the others end, or serve on, and nothing is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from cells import cells
from forking import forks
from http_server import PLAIN, Server, http_client, running, wait_for
from leftovers import nothing_left

from mini_infer.assets import shipped_path

TEXT = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "def f(", "max_tokens": 1900, "ignore_eos": True, "temperature": 0}
MODEL = (
    "--model.device",
    "cpu",
    "--model.threads",
    "1",
    "--model.tokenizer",
    "tiny-draft",
    "--cache.num_blocks",
    "256",
)
ONE_AT_A_TIME = ("--scheduler.max_num_seqs", "1")
TENSOR = ("--parallel.tensor", "2")
KINDS = {"ranks": TENSOR, "replicas": ("--parallel.replicas", "2")}
VICTIMS = {
    "ranks": ("supervisor", "API process", "engine", "rank"),
    "replicas": ("supervisor", "API process", "engine"),
}


@pytest.fixture(scope="module", autouse=True)
def _imported(engines_are_forked_here: None) -> None:
    forks().imports("transformers.models.qwen2.tokenization_qwen2")  # seconds, for each of the engines


def processes(kind: str, pid: int) -> dict[str, list[psutil.Process]]:
    """Of a server none of whose processes has been replaced."""
    supervisor = psutil.Process(pid)
    children = sorted(supervisor.children(), key=lambda child: child.pid)
    engines, api = (children[:1], children[1:]) if kind == "ranks" else (children[:2], children[2:])
    ranks = [rank for engine in engines for rank in engine.children()]
    return {"supervisor": [supervisor], "API process": api, "engine": engines, "rank": ranks}


def stream(server: Server, stack: ExitStack) -> Iterator[str]:
    """The lines of a stream that has begun."""
    client = stack.enter_context(http_client(server.url))
    response = stack.enter_context(client.stream("POST", TEXT, json={**LONG, "stream": True}))
    assert response.status_code == 200, response.read()
    lines = (line for line in response.iter_lines() if line)
    next(lines)
    return lines


def ask(server: Server, **body: Any) -> int | None:
    """The status of an answer; None where there came none."""
    with suppress(httpx.TransportError), http_client(server.url) as client:
        return client.post(TEXT, json={**LONG, "max_tokens": 2, **body}).status_code
    return None


def wait_until_it_serves(server: Server) -> None:
    wait_for(lambda: ask(server) == 200, timeout=30)


def wait_until_logged(server: Server, text: str) -> None:
    wait_for(lambda: text in "".join(server.log))


@pytest.mark.parametrize(
    ("kind", "victim", "phase"),
    cells(
        (
            (kind, victim, phase)
            for kind, victims in VICTIMS.items()
            for victim in victims
            for phase in ("starting", "queued", "streaming")
        ),
        [("ranks", "supervisor", "streaming")],
    ),
)
def test_a_process_that_is_killed(kind: str, victim: str, phase: str) -> None:
    flags = (*KINDS[kind], *ONE_AT_A_TIME, *MODEL, "--model", "tiny-draft")
    with nothing_left():
        if phase == "starting":
            kill_while_it_starts(kind, victim, flags)
        else:
            kill_while_it_serves(kind, victim, phase, flags)


def kill_while_it_starts(kind: str, victim: str, flags: tuple[str, ...]) -> None:
    process = forks().server([*PLAIN, *flags], os.environ)
    try:
        wait_for(lambda: bool(processes(kind, process.pid)["rank" if kind == "ranks" else "engine"]))
        engines = processes(kind, process.pid)["engine"]
        for engine in engines:
            engine.suspend()  # so that none serves
        wait_for(lambda: bool(processes(kind, process.pid)["API process"]))
        processes(kind, process.pid)[victim][0].kill()
        for engine in engines:
            with suppress(psutil.NoSuchProcess):
                engine.resume()
        assert process.stdout is not None
        with process.stdout:
            said = process.stdout.read()
        code = process.wait(15)
    finally:
        process.kill()
    assert "http://" not in said, "it had started"
    if victim == "supervisor":
        assert code == -signal.SIGKILL
    else:
        assert code == (1 if victim == "API process" else 2)
        assert {"rank": "RankError: rank 1 (process"}.get(victim, f"{victim} ") in said
        assert "was killed by SIGKILL" in said


def kill_while_it_serves(kind: str, victim: str, phase: str, flags: tuple[str, ...]) -> None:
    with running(*flags, dry=False) as server, ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor())
        before = processes(kind, server.process.pid)
        held = [stream(server, stack) for _ in before["engine"]]
        waiting = []
        if phase == "queued":
            waiting.append(threads.submit(ask, server))
            wait_for(lambda: server.metrics()["num_requests_waiting"] == 1)
        before[victim][0].kill()
        last = []
        for lines in held:
            with suppress(httpx.TransportError):
                last += list(lines)[-1:]
        if victim in ("engine", "rank"):
            errors = [line for line in last if "engine_dead" in line]
            assert len(errors) == 1, last
            assert victim == "engine" or "RankError: rank 1 (process" in errors[0]
            assert [each.result() for each in waiting] == [503 if kind == "ranks" else 200] * len(waiting)
        else:
            assert not any("[DONE]" in line for line in last)
            assert [each.result() for each in waiting] in ([], [None], [503])
        if victim == "supervisor":
            assert server.wait() == -signal.SIGKILL
        else:
            wait_until_it_serves(server)
            assert server.stop() == 0


def test_an_engine_that_loses_a_rank_is_started_anew() -> None:
    """While nobody asks it for anything, and while it streams; and where the rank hangs."""
    flags = (*TENSOR, *MODEL, "--model", "tiny-draft", "--parallel.timeout_s", "1")
    with nothing_left(), running(*flags, dry=False) as server:
        for phase in ("idle", "streaming", "hanging"):
            with http_client(server.url) as client, ExitStack() as stack:
                engine = psutil.Process(client.get("/healthz").json()["engine_pid"])
                (rank,) = engine.children()
                named = f"rank 1 (process {rank.pid}) {'hangs' if phase == 'hanging' else 'was killed by SIGKILL'}"
                held = [stream(server, stack)] if phase != "idle" else []
                rank.send_signal(signal.SIGSTOP if phase == "hanging" else signal.SIGKILL)
                for lines in held:
                    error = json.loads(list(lines)[-1].removeprefix("data: "))["error"]
                    assert error["code"] == "engine_dead"
                    assert named in error["message"]
                wait_until_logged(server, named)
                answer = client.post(TEXT, json={**LONG, "max_tokens": 2})
                if answer.status_code != 200:  # it is not back yet
                    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
                    assert named in answer.json()["error"]["message"]
            wait_until_it_serves(server)
            assert not psutil.wait_procs([engine, rank], timeout=0)[1]
        assert server.stop() == 0


@pytest.mark.soak
def test_an_engine_whose_own_process_hangs_is_started_anew() -> None:
    """Later than it would have said that a rank hangs."""
    flags = (*TENSOR, *MODEL, "--model", "tiny-draft", "--parallel.timeout_s", "1", "--hang-timeout", "2")
    with nothing_left(), running(*flags, dry=False) as server:
        before = processes("ranks", server.process.pid)
        before["engine"][0].suspend()
        wait_until_logged(server, "the engine has not said anything for")
        wait_until_it_serves(server)
        assert not psutil.wait_procs([*before["engine"], *before["rank"]], timeout=0)[1]
        assert server.stop() == 0


def test_an_engine_that_cannot_be_started_anew_ends_the_server(tmp_path: Path) -> None:
    source = shipped_path("tiny-draft")
    assert source is not None
    folder = shutil.copytree(source, tmp_path / "model")
    with nothing_left(), running(*TENSOR, *MODEL, "--model", str(folder), dry=False) as server:
        wait_until_it_serves(server)
        shutil.rmtree(folder)
        started = time.monotonic()
        processes("ranks", server.process.pid)["rank"][0].kill()
        assert server.wait() == 1
        assert time.monotonic() - started < 15
        assert "".join(server.log).count("it could not be started again") == 3
