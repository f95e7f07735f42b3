"""The server with speculation on: what clients get is what they get without."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from http_server import Server, running

PROMPT = "for item in items:\n    print(item)\nfor item in items:\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--speculation.method", "ngram", "--speculation.adaptive", "false") as server:
        yield server


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 0, "max_tokens": 40, "ignore_eos": True},
        {"temperature": 0.9, "seed": 7, "max_tokens": 40, "n": 2},
        {"temperature": 0, "max_tokens": 40, "stop": ["a", "e"], "logprobs": 2},
        {"temperature": 0, "max_tokens": 20, "logit_bias": {"32": 12.0}},  # blanks, which come again
    ],
)
def test_clients_get_the_same(server: Server, shared_server: Server, body: dict) -> None:
    assert server.complete(PROMPT, **body)["choices"] == shared_server.complete(PROMPT, **body)["choices"]


def test_a_stream_brings_every_token_once(server: Server, shared_server: Server) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 40, "ignore_eos": True, "logit_bias": {"32": 12.0}}
    whole = shared_server.complete(**body)
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]

    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines) == whole["choices"][0]["text"]
    assert server.metrics()["spec_decode_num_accepted_tokens_total"] > 0
