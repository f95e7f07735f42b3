"""Crowds, clients that break off in every way, large bodies, a full disk, odd texts: the server stays as it was."""

from __future__ import annotations

import json
import os
import resource
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from forking import Child, forks
from http_server import DRY, Server, http_client, running, wait_for

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 8000, "ignore_eos": True}
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() answers with a reset
MIB = 2**20
FILES = 2048
FEW_FILES = 256
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Started with few open files allowed, as many systems start programs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (-1, resource.RLIM_INFINITY) and hard < FILES:
        pytest.skip(f"needs {FILES} open files, and {hard} are allowed")
    parent = forks().process.pid
    resource.prlimit(parent, resource.RLIMIT_NOFILE, (FEW_FILES, hard))
    try:
        with running("--model.dry.step_ms", "2", "--header-timeout", "4") as server:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FILES), hard))  # its clients need as many
            yield server
    finally:
        for pid in (0, parent):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(autouse=True)
def _as_before(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").check_unharmed()


def message(body: dict[str, Any] | bytes, length: int | None = None) -> bytes:
    """A request as it goes over the wire. `length`: what it says of its body, if not the truth."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = len(data) if length is None else length
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    return head.encode() + data


@contextmanager
def connections(server: Server, count: int, receive_buffer: int | None = None) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        opened = []
        for _ in range(count):
            sock = stack.enter_context(socket.socket())
            if receive_buffer is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            sock.settimeout(30)
            sock.connect(("127.0.0.1", server.port))
            opened.append(sock)
        yield opened


def answers(sockets: Sequence[socket.socket], end: bytes) -> list[bytes]:
    """What each receives, up to `end`."""
    received = dict.fromkeys(sockets, b"")
    with selectors.DefaultSelector() as selector:
        for sock in sockets:
            selector.register(sock, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(30)
            assert ready, "no answer came in 30 s"
            for key, _ in ready:
                data = key.fileobj.recv(65536)  # type: ignore[union-attr]
                received[key.fileobj] += data  # type: ignore[index]
                if not data or received[key.fileobj].endswith(end):  # type: ignore[index]
                    selector.unregister(key.fileobj)
    return list(received.values())


def num_running(server: Server) -> float:
    return server.metrics()["num_requests_running"]


# --- many at once, and clients that break off ---------------------------------------------------------------------


def test_a_thousand_connections_at_once(server: Server) -> None:
    ask = message({"prompt": "hello", "max_tokens": 2, "ignore_eos": True})
    with connections(server, 1000) as sockets:
        assert server.http.get("/healthz").status_code == 200
        for sock in sockets:
            sock.sendall(ask)
        said = answers(sockets, b"}}}")
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in said)
    assert all(b'"completion_tokens":2' in answer for answer in said)


@pytest.mark.parametrize("storms", [1, pytest.param(25, marks=pytest.mark.soak)])  # of both: 10,000 clients
@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
def test_a_storm_of_clients_that_leave_their_streams(server: Server, reset: bool, storms: int) -> None:
    ask = message({**LONG, "stream": True})
    for _ in range(storms):
        with connections(server, 200) as sockets:
            for sock in sockets:
                sock.sendall(ask)
            wait_for(lambda: num_running(server) == 200)
            for sock in sockets:
                if reset:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                sock.close()
        wait_for(lambda: num_running(server) == 0, timeout=3)  # the requests themselves would take 16 s


def test_clients_that_come_and_go_at_once(server: Server) -> None:
    """Some leave before their request has been read, some in its queue, some in a step."""
    ask = message({**LONG, "stream": True})
    for wait in (0, 0, 0.001, 0.003, 0.01) * 10:
        with connections(server, 4) as sockets:
            for sock, part in zip(sockets, (len(ask), len(ask), len(ask) - 5, 30), strict=True):
                sock.sendall(ask[:part])
            time.sleep(wait)


def test_readers_who_do_not_read_hold_nobody_up(server: Server) -> None:
    ask = message({**LONG, "stream": True})
    with connections(server, 40, receive_buffer=4096) as sockets:
        for sock in sockets:
            sock.sendall(ask)
        wait_for(lambda: num_running(server) == 40)
        until = server.metrics()["generation_tokens_total"] + 40 * 100
        wait_for(lambda: server.metrics()["generation_tokens_total"] > until, timeout=30)
        assert server.complete(max_tokens=20, ignore_eos=True)["usage"]["completion_tokens"] == 20
        wait_for(lambda: num_running(server) == 40)


def test_half_closed_connections(server: Server) -> None:
    """Who says that nothing more will come is taken for gone, as a closed connection cannot be told from it."""
    whole, partial = message({**LONG, "stream": True}), message(b'{"prompt": ', length=500)
    with connections(server, 30) as sockets:
        for sock, ask in zip(sockets, (whole, partial, partial[:40]) * 10, strict=True):
            sock.sendall(ask)
            sock.shutdown(socket.SHUT_WR)
        said = answers(sockets, b"[DONE]\n\n")
    assert not any(answer.startswith(b"HTTP/1.1 5") for answer in said)


def test_connections_that_never_say_anything(server: Server) -> None:
    with connections(server, 200) as sockets:
        for sock in sockets[:100]:
            sock.sendall(b"POST /v1/comp")
        assert server.complete(max_tokens=2)["usage"]["completion_tokens"] == 2
        # They were open after 240 s.
        assert all(answer.startswith(b"HTTP/1.1 408") for answer in answers(sockets, b"}}"))


# --- large bodies -------------------------------------------------------------------------------------------------


def test_bodies_of_ten_megabytes(server: Server) -> None:
    text = server.post(TEXT, prompt="x" * 10 * MIB)
    ids = server.http.post(TEXT, content=b'{"prompt": [' + b"5," * (5 * MIB) + b"5]}", headers=JSON)
    for response in (text, ids):
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
    server.complete(max_tokens=2, unknown="x" * 10 * MIB)
    assert server.post(CHAT, messages=[{"role": "user", "content": "é" * 5 * MIB}]).status_code == 400
    response = server.post(TEXT, prompt="x", model="x" * 10 * MIB)
    assert response.status_code == 404
    assert len(response.content) < 10_000, "an error quotes little of what it complains about"


LARGE_LISTS = {
    "logit_bias": (TEXT, '{"prompt": "x", "logit_bias": {%s}}', '"17": 1'),
    "stop": (TEXT, '{"prompt": "x", "stop": [%s]}', "5"),
    "stop_token_ids": (TEXT, '{"prompt": "x", "stop_token_ids": [%s]}', '"a"'),
    "prompt": (TEXT, '{"prompt": [%s]}', "[]"),
    "messages": (CHAT, '{"messages": [%s]}', "{}"),
    "tokens": ("/detokenize", '{"tokens": [%s]}', '"a"'),
}


@pytest.mark.parametrize("field", LARGE_LISTS)
def test_a_list_of_ten_megabytes_is_refused_in_no_time(server: Server, field: str) -> None:
    """Naming all that is wrong in it took half a minute, in which nobody else was served."""
    path, body, entry = LARGE_LISTS[field]
    entries = ",".join([entry] * (10 * MIB // (len(entry) + 1)))
    started = time.monotonic()
    response = server.http.post(path, content=(body % entries).encode(), headers=JSON)
    assert time.monotonic() - started < 10
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


def test_streams_go_on_while_a_large_body_is_read(server: Server) -> None:
    ids = message(b'{"prompt": [' + b"5," * (5 * MIB) + b"5]}")
    with connections(server, 2) as (stream, large):
        stream.sendall(message({**LONG, "stream": True}))
        stream.recv(65536)
        large.sendall(ids[:-1])
        events = 0
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            selector.register(large, selectors.EVENT_READ)
            for _ in range(20):  # meanwhile the server takes in what has been sent
                stream.recv(65536)
            large.sendall(ids[-1:])
            while large not in (ready := [key.fileobj for key, _ in selector.select(30)]):
                assert ready, "nothing came in 30 s"
                events += stream.recv(65536).count(b"data: ")
        assert b"context_length_exceeded" in answers([large], b"}}")[0]
    # A token every 2 ms, for the 0.3 s or more that it takes; without its turns the stream would have one or two.
    assert events >= 6


def test_a_stop_string_of_a_megabyte_is_refused(server: Server) -> None:
    for stop in ("x" * MIB, ["x" * (MIB // 8)]):
        refused = server.post(TEXT, prompt="a", max_tokens=2, stop=stop)
        assert refused.status_code == 400
        assert "at most 1024 are allowed" in refused.json()["error"]["message"]
    server.complete(max_tokens=2, stop=["x" * 1024])


def test_a_body_that_comes_slowly_and_one_that_breaks_off(server: Server) -> None:
    ask = message({"prompt": "x" * 100, "max_tokens": 2})
    with connections(server, 2) as (slow, broken):
        broken.sendall(message(b'{"prompt": "' + b"x" * MIB, length=10 * MIB))
        broken.close()
        for byte in ask:
            slow.sendall(bytes([byte]))
        assert slow.recv(4096).startswith(b"HTTP/1.1 200")


# --- a full disk under the log ------------------------------------------------------------------------------------


@contextmanager
def logging_to(path: Path | str) -> Iterator[tuple[Child, httpx.Client]]:
    """A server all of whose output goes into a file, at a port that is known without reading it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [*DRY, "--port", str(port), "--access-log", "--log-level", "debug"]
    with open(path, "ab") as log:
        process = forks().start(["mini_infer.cli.serve", *flags], os.environ, {1: log.fileno(), 2: log.fileno()})
    try:
        with http_client(f"http://127.0.0.1:{port}") as client:
            wait_for(lambda: process.poll() is not None or _answers(client), timeout=30)
            yield process, client
    finally:
        process.kill()
        process.wait()


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def serves(client: httpx.Client) -> None:
    for _ in range(10):
        assert client.post(TEXT, json={"prompt": "x", "max_tokens": 2}).status_code == 200
        assert client.post(TEXT, json={"prompt": "x", "max_tokens": 0}).status_code == 400
        assert client.get("/nope").status_code == 404


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_log_that_takes_nothing_from_the_start() -> None:
    with logging_to("/dev/full") as (process, client):
        serves(client)
        process.terminate()
        assert process.wait(15) == 0


def test_a_disk_that_fills_up_while_it_serves(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with logging_to(log) as (process, client):
        serves(client)
        size = log.stat().st_size
        for pid in (process.pid, client.get("/healthz").json()["engine_pid"]):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size + 200, resource.RLIM_INFINITY))
        serves(client)
        assert log.stat().st_size == size + 200
        process.terminate()
        assert process.wait(15) == 0


# --- texts and numbers --------------------------------------------------------------------------------------------

ODD_TEXTS = {
    "joined emoji": "👩‍👩‍👧‍👦🏳️‍🌈",
    "combining": "e\u0301 Z" + "\u0300" * 200,
    "right to left": "\u202eabc\u202c العربية עברית",
    "byte order marks": "\ufeffa\ufeff",
    "noncharacters": "\uffff\ufdd0\U0010ffff",
    "private use": "\ue000\U000f0000",
    "controls": "\x00\x01\x1b[2J\x7f\x85",
    "line ends": "a\r\nb\rc\u2028d\u2029e\x0bf\x0cg",
    "spaces": "\u00a0\u2003\u200b\u3000",
    "replacement": "\ufffd\ufffc",
    "tags": "\U000e0041\U000e007f",
    "normal forms": "ﬁ Å Å ẛ̣ 한 한",
    "case": "ßẞİıſ",
    "special tokens": "<|im_start|><|endoftext|><|im_end|></s>",
    "quotes": "\"'\\\\u0041\\ud800 data: [DONE]\n\n",
}


@pytest.mark.parametrize("name", ODD_TEXTS)
def test_every_text_goes_in_and_comes_back(server: Server, name: str) -> None:
    text = ODD_TEXTS[name]
    tokens = server.post("/tokenize", prompt=text).json()["tokens"]
    assert server.post("/detokenize", tokens=tokens).json() == {"prompt": text}
    ask: dict[str, Any] = {"prompt": text, "max_tokens": 3, "temperature": 0, "ignore_eos": True, "echo": True}
    whole = server.complete(**ask, stop=[text[:40]], cache_salt=text, user=text)["choices"][0]["text"]
    assert whole.startswith(text)
    with server.http.stream("POST", TEXT, json={**ask, "stream": True}) as response:
        lines = "".join(response.iter_text()).split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(event["choices"][0]["text"] for event in events) == whole
    messages = [{"role": role, "content": text, "name": text} for role in ("system", "user")]
    assert server.post(CHAT, messages=messages, max_tokens=2).status_code == 200


def test_an_answer_may_be_cut_inside_a_character(server: Server) -> None:
    """The dry model's bytes are forced to be half a character by a bias, so that each event carries none or a mark."""
    first_byte = "é".encode()[0]
    forced = {"logit_bias": {str(first_byte): 100}, "temperature": 0, "max_tokens": 5, "ignore_eos": True}
    whole = server.complete(**forced)["choices"][0]["text"]
    assert set(whole) == {"\ufffd"}
    response = server.post(TEXT, prompt="hello", **forced, stream=True)
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n")]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-2]) == whole


@pytest.mark.parametrize("value", [0, -1, -(2**63)])
def test_nothing_or_less_is_no_length(server: Server, value: int) -> None:
    messages = [{"role": "user", "content": "x"}]
    for field in ("max_tokens", "max_completion_tokens"):
        for stream in (False, True):
            response = server.post(CHAT, messages=messages, stream=stream, **{field: value})
            assert response.status_code == 400
            assert response.json()["error"]["param"] in (field, "max_tokens")
    for more in ({}, {"echo": True}, {"stream": True}):
        response = server.post(TEXT, prompt="x", max_tokens=value, **more)
        scores = value == 0 and "echo" in more
        assert response.status_code == (200 if scores else 400)
    assert server.post(TEXT, prompt="x", min_tokens=value or -2).status_code == 400
