"""What browsers, proxies and probes expect: CORS, TLS, a root path, HEAD, and names that other servers use."""

from __future__ import annotations

import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from http_server import Server, http_client, refusal, running


def test_probes(shared_server: Server) -> None:
    for path in ("/health", "/healthz", "/ping", "/readyz", "/version"):
        answer = shared_server.http.get(path)
        head = shared_server.http.head(path)
        assert (answer.status_code, head.status_code, head.content) == (200, 200, b""), path
    assert set(shared_server.http.get("/version").json()) == {"version"}


def test_what_is_elsewhere(shared_server: Server) -> None:
    error = shared_server.post("/v1/embeddings", input="x").json()["error"]
    assert error["code"] == "not_supported"
    assert "embedding model" in error["message"]


def test_a_browser_and_a_proxy() -> None:
    with running("--allowed-origins", "https://a.example, https://b.example", "--root-path", "/llm") as server:
        ask = {"origin": "https://b.example", "access-control-request-method": "POST"}
        asked = server.http.options("/v1/chat/completions", headers=ask)
        assert asked.headers["access-control-allow-origin"] == "https://b.example"
        body = {"prompt": "x", "max_tokens": 2, "stream": True}
        answer = server.http.post("/v1/completions", json=body, headers={"origin": "https://a.example"})
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert answer.text.endswith("data: [DONE]\n\n")
        other = server.http.post("/v1/completions", json=body, headers={"origin": "https://c.example"})
        assert "access-control-allow-origin" not in other.headers
        assert server.http.get("/llm/v1/models").json() == server.http.get("/v1/models").json()
        assert "/llm/openapi.json" in server.http.get("/docs").text


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    path = tmp_path / "both.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run([*command.split(), "-keyout", "key.pem", "-out", "cert.pem"], cwd=tmp_path, check=True, stderr=-3)
    path.write_text((tmp_path / "cert.pem").read_text() + (tmp_path / "key.pem").read_text())
    return path


@pytest.mark.parametrize("processes", ["1", "2"])
def test_https(certificate: Path, processes: str) -> None:
    flags = ("--ssl-certfile", str(certificate), "--header-timeout", "0.5")
    with running(*flags, "--api-processes", processes) as server:
        assert server.url.startswith("https://")
        body = {"prompt": "x", "max_tokens": 50, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=server.url, verify=ssl.create_default_context(cafile=str(certificate))) as trusted:
            assert trusted.post("/v1/completions", json=body).text.count("data: ") > 2
        with http_client(server.url.replace("https", "http")) as plain, pytest.raises(httpx.TransportError):
            plain.get("/healthz")
        with socket.create_connection(("127.0.0.1", server.port), 10) as silent:
            assert not silent.recv(1), "a handshake has as long as a head"


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for flag in ("--ssl-certfile", "--chat-template"):
        code, said = refusal("--dry-run", flag, str(tmp_path / "none"))
        assert (code, "names no file" in said) == (2, True)
    assert "ssl_certfile" in refusal("--dry-run", "--ssl-keyfile", __file__)[1]


def test_the_dry_model_has_no_template() -> None:
    code, said = refusal("--dry-run", "--port", "0", "--chat-template", __file__)
    assert (code, "of its own" in said) == (2, True)
