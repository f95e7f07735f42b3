"""What clients do who mean harm, each at a size: small ones for every test run, large ones for `pytest -m attack`."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
from http_server import Server, http_client

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
STREAM = {"prompt": "hello", "max_tokens": 100_000, "ignore_eos": True, "stream": True}


@contextmanager
def opened(server: Server, count: int) -> Iterator[list[socket.socket]]:
    """Connections that have said nothing."""
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 30)) for _ in range(count)]


def said(sock: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while more := sock.recv(2**16):
            answer += more
    return answer


def huge_answers(server: Server, size: int) -> None:
    """All the log-probabilities that the server gives, of prompts and of what follows them."""
    if size:
        httpx_post(server, TEXT, {"prompt": "x", "n": 8, "max_tokens": 200, "logprobs": 64, "ignore_eos": True})
    per_prompt = 2**20 // 65 // 1000
    for streamed in (False, True)[:size]:
        body = {"prompt": [[5] * 1000] * per_prompt, "max_tokens": 1, "echo": True, "logprobs": 64, "stream": streamed}
        httpx_post(server, TEXT, body)


def endless_grammars(server: Server, size: int) -> None:
    """Clients who leave after a moment, and others who stay."""
    for i in range(size):
        schema = {"type": "integer", "multipleOf": 10_000_019 + i}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with contextlib.suppress(httpx.TimeoutException):
            httpx_post(server, TEXT, {"prompt": "x", "response_format": form}, timeout=10 if i % 4 == 3 else 0.3)


def long_texts(server: Server, size: int) -> None:
    for _ in range(size):
        assert httpx_post(server, TEXT, {"prompt": "abc " * (2**20)}).status_code in (400, 408)


def endless_heads(server: Server, size: int) -> None:
    with opened(server, size) as sockets:
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.sendall(HEAD + b"X: ")
                for _ in range(256):
                    sock.sendall(b"x" * 2**14)


def silent_connections(server: Server, size: int) -> None:
    with opened(server, size) as sockets:
        for sock in sockets[::2]:
            with contextlib.suppress(OSError):
                sock.sendall(HEAD + b"Content-Length: 1000000\r\n\r\n{")
        time.sleep(1)


def many_completions(server: Server, size: int) -> None:
    for _ in range(size):
        body = {"prompt": ["x"] * 500, "n": 256, "max_tokens": 4000}
        response = httpx_post(server, TEXT, body)
        assert response.status_code == 400, response.text


def httpx_post(server: Server, path: str, body: dict[str, Any], timeout: float = 60) -> httpx.Response:
    with http_client(server.url, timeout) as client:
        return client.post(path, json=body)


ATTACKS: dict[str, tuple[Callable[[Server, int], None], int, int]] = {  # with a small size and a large one
    "huge answers": (huge_answers, 0, 2),
    "endless grammars": (endless_grammars, 1, 12),
    "long texts": (long_texts, 1, 8),
    "endless heads": (endless_heads, 2, 32),
    "silent connections": (silent_connections, 20, 500),
    "many completions": (many_completions, 1, 8),
}


def request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data
