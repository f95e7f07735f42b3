"""Clients that leave, queues that fill, deadlines, signals, and an engine that dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from forking import forks
from http_server import ROOT, Server, http_client, running, wait_for

from mini_infer.serving.http.server import _pass_signals_to

TEXT = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 8000, "ignore_eos": True}  # 80 s with steps of 10 ms


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Slow steps, a small batch and a short queue."""
    flags = ["--model.dry.step_ms", "10", "--scheduler.max_num_seqs", "2", "--max-queued", "2"]
    with running(*flags, "--model.dry.max_model_len", "20000") as server:
        yield server


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").wait_until_idle()


@contextmanager
def stream(server: Server, **body: Any) -> Iterator[Iterator[str]]:
    """The data of each event, after the first one has come."""
    with server.http.stream("POST", TEXT, json={**LONG, "stream": True, **body}) as response:
        assert response.status_code == 200, response.read()
        yield (line.removeprefix("data: ") for line in response.iter_lines() if line)


def events(lines: Iterator[str]) -> list[Any]:
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def running_requests(server: Server) -> float:
    return server.metrics()["num_requests_running"]


# --- clients that leave -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_goes_away_frees_its_request(server: Server, streamed: bool) -> None:
    body = json.dumps({**LONG, "stream": streamed}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(head.encode() + body)
        wait_for(lambda: running_requests(server) == 1)
    # The gauge is at most 0.1 s old; the request itself would take minutes.
    wait_for(lambda: running_requests(server) == 0, timeout=1.0)


def test_a_client_that_leaves_the_queue(server: Server) -> None:
    with stream(server) as first, stream(server) as second:
        next(first), next(second)
        with pytest.raises(httpx.ReadTimeout):
            server.http.post(TEXT, json=LONG, timeout=0.3)
        wait_for(lambda: server.metrics()["num_requests_waiting"] == 0)


@pytest.mark.slow
def test_a_slow_client_gets_fewer_and_larger_events(shared_server: Server) -> None:
    ask = {**LONG, "n": 64, "max_tokens": 600, "stream": True, "temperature": 0}
    body = json.dumps(ask).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    before = shared_server.metrics()["request_success_total"]
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", shared_server.port))
        sock.sendall(head.encode() + body)
        wait_for(lambda: shared_server.metrics()["request_success_total"] == before + 64, timeout=60)
        received = b""
        while b"[DONE]" not in received[-100:]:
            received += sock.recv(2**20)
    whole = shared_server.complete(**{**ask, "n": 1, "stream": False})["choices"][0]["text"]
    chunks = [json.loads(line[6:]) for line in received.splitlines() if line.startswith(b"data: {")]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert len(choices) < 64 * 600 * 0.9
    assert "".join(choice["text"] for choice in choices if choice["index"] == 5) == whole
    assert sum(choice["finish_reason"] == "length" for choice in choices) == 64


# --- queue and deadline -------------------------------------------------------------------------------------------


def test_a_full_queue(server: Server) -> None:
    def wait_in_line() -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + TEXT, json={**LONG, "n": 2}, timeout=1.5)

    def stands(running: int, waiting: int) -> bool:
        seen = server.metrics()
        return (seen["num_requests_running"], seen["num_requests_waiting"]) == (running, waiting)

    with stream(server, n=2) as lines:
        next(lines)
        wait_for(lambda: stands(2, 0))
        in_line = threading.Thread(target=wait_in_line)
        in_line.start()
        try:
            wait_for(lambda: stands(2, 2))
            response = server.post(TEXT, **LONG)
        finally:
            in_line.join()
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")


def test_a_batch_that_does_not_fit_into_the_queue_leaves_nothing(server: Server) -> None:
    with stream(server, n=2) as lines:
        next(lines)
        response = server.post(TEXT, **{**LONG, "prompt": ["a", "b"], "n": 2})
        assert response.status_code == 429
    server.wait_until_idle()
    response = server.post(TEXT, **{**LONG, "prompt": ["a", "b", "c"], "n": 2})
    assert response.status_code == 400, "it would never fit"


def test_a_deadline(server: Server) -> None:
    started = time.monotonic()
    response = server.post(TEXT, **LONG, timeout=0.2)
    assert time.monotonic() - started < 2
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    with stream(server, timeout=0.2) as lines:
        *chunks, last = events(lines)
    assert chunks
    assert last["error"]["code"] == "deadline_exceeded"


# --- signals ------------------------------------------------------------------------------------------------------


def test_sigterm_lets_a_request_finish() -> None:
    with running("--model.dry.step_ms", "10") as server:
        with stream(server, max_tokens=80) as lines:
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{server.url}/healthz")
            *chunks, last = events(lines)
        assert last == "[DONE]"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0


def test_sigterm_ends_what_takes_too_long_and_what_never_arrives() -> None:
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    flags = ["--model.dry.step_ms", "10", "--shutdown-timeout", "0.3"]
    with running(*flags) as server, socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(head.encode() + b'{"prompt"')
        server.http.get("/readyz")  # it has been read
        with stream(server) as lines:
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            last = events(lines)[-1]
        assert last["error"]["code"] == "shutting_down"
        sock.settimeout(10)
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"shutting_down" in answer
        assert server.wait(4) == 0  # and not only when the HTTP server loses patience
        assert "Traceback" not in "".join(server.log)


def test_a_signal_before_the_http_server_listens_for_it_is_not_lost() -> None:
    taken: list[int] = []

    class Stub:
        should_exit = False

        def handle_exit(self, number: int, frame: Any) -> None:
            self.should_exit = True
            taken.append(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        _pass_signals_to(Stub())  # type: ignore[arg-type]
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # as the HTTP server does when it has ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert taken == [signal.SIGTERM]


def test_sigterm_while_the_engine_starts() -> None:
    command = [sys.executable, "-m", "mini_infer.cli.serve", "--dry-run", "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
    time.sleep(1.0)
    process.terminate()
    _, said = process.communicate(timeout=15)
    assert process.returncode in (0, -signal.SIGTERM)  # before or after it had begun to listen for signals
    assert b"Traceback" not in said


# --- an engine that dies ------------------------------------------------------------------------------------------


def test_a_dead_engine() -> None:
    with running("--model.dry.step_ms", "10") as server:
        health = server.http.get("/healthz").json()
        assert (health["status"], health["model"]) == ("ok", "dry")
        assert server.http.get("/readyz").json() == {"status": "ready"}
        whole: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: whole.append(httpx.post(server.url + TEXT, json=LONG, timeout=30)))
        asking.start()
        with stream(server) as lines:
            next(lines)
            wait_for(lambda: running_requests(server) == 2)
            os.kill(health["engine_pid"], signal.SIGKILL)
            last = events(lines)[-1]
        asking.join()
        assert last["error"]["code"] == "engine_dead"
        assert "SIGKILL" in last["error"]["message"]
        assert (whole[0].status_code, whole[0].json()["error"]["code"]) == (503, "engine_dead")
        health = server.http.get("/healthz")
        assert (health.status_code, health.json()["status"]) == (503, "dead")
        assert server.http.get("/readyz").status_code == 503
        assert server.post(TEXT, **LONG).status_code == 503
        assert server.wait() == 1


def test_a_server_that_is_killed_leaves_no_engine() -> None:
    with running() as server:
        pid = server.http.get("/healthz").json()["engine_pid"]
        server.process.kill()
        wait_for(lambda: not os.path.exists(f"/proc/{pid}"))


# --- the key, and a limit -----------------------------------------------------------------------------------------


def test_the_api_key_and_the_servers_own_limit_which_cannot_be_exceeded() -> None:
    flags = ["--model.dry.step_ms", "10", "--request-timeout", "0.2"]
    with running(*flags, environ={"MINI_INFER_API_KEY": "secret"}) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            response = server.http.post(TEXT, json=LONG, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        assert server.http.get("/v1/models").status_code == 401
        key = {"Authorization": "Bearer secret"}
        assert server.http.get("/v1/models", headers=key).status_code == 200
        for path in ("/healthz", "/readyz", "/metrics"):
            response = server.http.get(path)
            assert response.status_code == 200
            assert "secret" not in response.text
        assert server.post(TEXT, **LONG, timeout=60).status_code == 401
        assert server.http.post(TEXT, json={**LONG, "timeout": 60}, headers=key).status_code == 504


# --- other ways to start it ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_uvicorn_reads_the_environment() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"MINI_INFER_DRY_RUN": "true", "MINI_INFER_CACHE__BLOCK_SIZE": "32", "MINI_INFER_SERVED_MODEL_NAME": "mine"}
    arguments = ["uvicorn", "mini_infer.serving.api.app:app", "--port", str(port)]
    with open(os.devnull, "w") as nowhere:
        process = forks().start(arguments, {**os.environ, **own}, {1: nowhere.fileno(), 2: nowhere.fileno()})
    try:
        with http_client(f"http://127.0.0.1:{port}") as client:
            wait_for(lambda: _answers(client), timeout=30)
            health = client.get("/healthz").json()
        assert health["model"] == "mine"
        assert health["settings"]["cache"]["block_size"] == 32
        os.kill(health["engine_pid"], signal.SIGKILL)
        assert process.wait(15) != 0
    finally:
        process.kill()
        process.wait()


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx.ConnectError:
        return False


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(server: Server) -> None:
    health = subprocess.run(["curl", "-s", f"{server.url}/healthz"], capture_output=True, check=True).stdout
    assert json.loads(health)["status"] == "ok"
    body = json.dumps({"prompt": "hello", "max_tokens": 3, "ignore_eos": True, "stream": True})
    command = ["curl", "-sN", server.url + TEXT, "-H", "Content-Type: application/json", "-d", body]
    said = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert said.startswith("data: {")
    assert said.endswith("data: [DONE]\n\n")
