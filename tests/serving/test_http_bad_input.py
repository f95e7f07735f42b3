"""Whatever is sent, the answer is an error in OpenAI's shape, and the server is as it was."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from http_server import Server, running

JSON = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HUGE = "9" * 400


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--max-body-bytes", "300000") as server:
        yield server


@pytest.fixture(autouse=True)
def _as_before(server: Server) -> Iterator[None]:
    yield
    server.check_unharmed()


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


NO_JSON = [
    b"",
    b"{",
    b'{"prompt": }',
    b"\xff\xfe",
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',  # half a surrogate pair
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": -Infinity}',
    b'{"prompt": "a\x00b"}',
    b"[" * 100_000,
    b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}",
    b"prompt=hello",
]


def test_no_json(server: Server) -> None:
    for body in NO_JSON:
        error = error_of(server.http.post(TEXT, content=body, headers=JSON), 400)
        assert error["code"] == "invalid_json", body[:50]


@pytest.mark.parametrize("body", ["[]", "null", '"text"', "5", "true"])
def test_json_that_is_no_object(server: Server, body: str) -> None:
    assert "JSON object" in error_of(server.http.post(TEXT, content=body, headers=JSON), 400)["message"]


WRONG_FIELDS = [
    ("temperature", '"hot"'),
    ("temperature", "-1"),
    ("temperature", "1e400"),
    ("temperature", HUGE),
    ("n", "0"),
    ("n", "2.5"),
    ("n", "true"),
    ("n", '"2"'),
    ("n", HUGE),
    ("max_tokens", "0"),
    ("max_tokens", HUGE),
    ("min_tokens", "99"),
    ("seed", "-1"),
    ("seed", HUGE),
    ("top_p", "0"),
    ("top_k", "-2"),
    ("top_k", HUGE),
    ("min_p", "2"),
    ("repetition_penalty", "0"),
    ("presence_penalty", "9"),
    ("priority", HUGE),
    ("priority", "1.5"),
    ("cache_salt", "5"),
    ("timeout", "0"),
    ("timeout", '"soon"'),
    ("stop", "5"),
    ("stop", '[""]'),
    ("stop", "[5]"),
    ("stop", '{"a": 1}'),
    ("stop", "[" + ", ".join(['"a"'] * 65) + "]"),
    ("stop_token_ids", "[99999]"),
    ("stop_token_ids", f"[{HUGE}]"),
    ("logit_bias", '{"a": 1}'),
    ("logit_bias", '{"1": 101}'),
    ("logit_bias", '{"99999": 1}'),
    ("logit_bias", "[1]"),
    ("logit_bias", "{" + ", ".join(f'"{i}": 1' for i in range(1025)) + "}"),
    ("logit_bias", "{" + ", ".join(f'"{i}": 1' for i in range(20_000)) + "}"),
    ("logprobs", "65"),
    ("best_of", "3"),
    ("suffix", '"end"'),
    ("stream", '"yes"'),
    ("stream_options", "5"),
    ("echo", "1"),
    ("response_format", '{"type": "zebra"}'),
    ("response_format", '{"type": "json_schema"}'),
    ("response_format", '{"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}'),
    ("model", "5"),
    ("prompt", "null"),
    ("prompt", '""'),
    ("prompt", "[]"),
    ("prompt", "[[]]"),
    ("prompt", "[1, -1]"),
    ("prompt", "[1, 2.5]"),
    ("prompt", '["a", 1]'),
    ("prompt", "[true]"),
    ("prompt", f"[{HUGE}]"),
    ("prompt", '{"a": 1}'),
    ("prompt", "[" + ", ".join(["[1]"] * 2000) + "]"),
]


def test_wrong_fields_are_named(server: Server) -> None:
    for name, value in WRONG_FIELDS:
        prompt = "" if name == "prompt" else ', "prompt": "x"'
        length = "" if name == "max_tokens" else ', "max_tokens": 2'
        body = f'{{"{name}": {value}{prompt}{length}}}'
        error = error_of(server.http.post(TEXT, content=body, headers=JSON), 400)
        assert error["param"] == name, body[:80]
        assert error["type"] == "invalid_request_error"


WRONG_MESSAGES = [
    ("[]", "empty"),
    ('"hi"', "list"),
    ("[5]", "messages[0]"),
    ("[" + "{}," * 16_384 + "{}]", "16385 entries; at most 16384 are allowed"),
    ('[{"role": "user", "content": [' + '{"type":"text"},' * 16_384 + "{}]}]", "16385 text parts; at most 16384"),
    ("[{}]", "messages[0].role"),
    ('[{"role": "user"}]', "messages[0].content"),
    ('[{"role": "user", "content": null}]', "messages[0].content"),
    ('[{"role": "user", "content": 5}]', "messages[0].content"),
    ('[{"role": "user", "content": [5]}]', "text parts"),
    ('[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]', "image_url"),
    ('[{"role": "user", "content": [{"type": "text", "text": 5}]}]', "no string"),
    ('[{"role": 5, "content": "x"}]', "messages[0].role"),
    ('[{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]', "tool_calls[0].function"),
    ('[{"role": "assistant", "content": null, "function_call": {"name": "f"}}]', "use `tool_calls`"),
]


def test_wrong_messages(server: Server) -> None:
    for messages, said in WRONG_MESSAGES:
        response = server.http.post(CHAT, content=f'{{"messages": {messages}}}', headers=JSON)
        error = error_of(response, 400)
        assert said in error["message"]
        assert error["param"] == "messages"


@pytest.mark.parametrize(
    ("field", "value"), [("tools", [{"type": "function"}]), ("top_logprobs", 2), ("logprobs", 5), ("functions", [{}])]
)
def test_wrong_fields_of_chat(server: Server, field: str, value: Any) -> None:
    messages = [{"role": "user", "content": "x"}]
    assert error_of(server.post(CHAT, messages=messages, **{field: value}), 400)["param"] == field


def test_what_is_unusual_and_allowed(server: Server) -> None:
    for more in [
        {"prompt": "a\x00b"},
        {"unknown": {"deep": [1]}, "user": "me"},
        {"top_k": 2**63 - 1},
        {"top_k": -1},
        {"max_tokens": 2**62, "stop": ["e", "a", " "]},
        {"priority": -(2**63)},
        {"timeout": 1e308},
        {"temperature": 1e-300},
        {"seed": 2**63 - 1},
        {"stop": None, "n": None, "temperature": None, "logit_bias": None, "response_format": None},
        {"response_format": {"type": "text"}},
        {"model": None},
    ]:
        server.complete(**{"max_tokens": 2, **more})


def test_a_long_prompt_is_told_from_a_large_body(server: Server) -> None:
    assert error_of(server.post(TEXT, prompt="x" * 9000), 400)["code"] == "context_length_exceeded"
    assert error_of(server.post(TEXT, prompt=[5] * 20_000), 400)["code"] == "context_length_exceeded"
    response = server.post(TEXT, prompt="x" * 400_000)
    assert error_of(response, 413)["code"] == "body_too_large"
    assert response.headers["connection"] == "close"
    pieces = (b"x" * 50_000 for _ in range(7))  # of a length that no header tells
    assert error_of(server.http.post(TEXT, content=pieces, headers=JSON), 413)["code"] == "body_too_large"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "nonsense", ""])
def test_another_content_type(server: Server, kind: str) -> None:
    response = server.http.post(TEXT, content=b'{"prompt": "x"}', headers={"content-type": kind})
    assert "application/json" in error_of(response, 415)["message"]


def test_a_charset_is_no_other_content_type(server: Server) -> None:
    kind = {"content-type": "Application/JSON; charset=utf-8"}
    assert server.http.post(TEXT, content=b'{"prompt": "x"}', headers=kind).status_code == 200


def test_paths_and_methods(server: Server) -> None:
    error_of(server.http.get("/nope"), 404)
    error_of(server.http.post("/v1/nope", json={}), 404)
    assert "POST" in error_of(server.http.get(TEXT), 405)["message"]
    assert server.http.put("/v1/models", json={}).headers["allow"] == "GET"
    error = error_of(server.post(TEXT, prompt="x", model="other"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_one_bad_prompt_of_a_batch_ends_the_batch(server: Server) -> None:
    assert error_of(server.post(TEXT, prompt=["fine", [5, 99999]], max_tokens=2000), 400)["param"] == "prompt"
    # The engine process refuses this one when the first of the batch may be running.
    error_of(server.post(TEXT, prompt=["fine", "fine"], max_tokens=2000, stop_token_ids=[99999], stream=True), 400)


def test_tokens_there_and_back(server: Server) -> None:
    found = server.post("/tokenize", prompt="héllo").json()
    assert found == {"count": 6, "max_model_len": 8192, "tokens": list("héllo".encode())}
    assert server.post("/detokenize", tokens=found["tokens"]).json() == {"prompt": "héllo"}
    chat = server.post("/tokenize", messages=[{"role": "user", "content": "hi"}]).json()["tokens"]
    answer = server.post(CHAT, messages=[{"role": "user", "content": "hi"}], max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == len(chat)
    error_of(server.post("/tokenize"), 400)
    error_of(server.post("/tokenize", prompt="a", messages=[]), 400)
    error_of(server.post("/detokenize", tokens=[-1]), 400)
    error_of(server.post("/detokenize", tokens=["a"]), 400)


def test_broken_http(server: Server) -> None:
    for request in (b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\n"):
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(request)
            sock.shutdown(socket.SHUT_WR)
            assert not sock.recv(4096).startswith(b"HTTP/1.1 5")


def test_the_openapi_document_describes_the_requests(server: Server) -> None:
    document = server.http.get("/openapi.json").json()
    assert {CHAT, TEXT, "/v1/models", "/tokenize", "/detokenize", "/healthz", "/metrics"} <= set(document["paths"])
    schemas = document["components"]["schemas"]
    assert {"messages", "temperature", "response_format", "top_k"} <= set(schemas["ChatRequest"]["properties"])
    assert "error" in schemas["ErrorResponse"]["properties"]
    content = document["paths"][CHAT]["post"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "text/event-stream"}


def test_the_openapi_document_tells_the_type_of_metrics(server: Server) -> None:
    documented = server.http.get("/openapi.json").json()["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert documented == {"text/plain; version=0.0.4; charset=utf-8": {"schema": {"type": "string"}}}
    assert [server.http.get("/metrics").headers["content-type"]] == list(documented)
