"""What the server says of itself, and the page that describes it."""

from __future__ import annotations

import re
import runpy
import sys

import pytest
from http_server import ROOT, Server

from mini_infer.serving.api.docs_page import page
from mini_infer.serving.narration import Throughput
from mini_infer.serving.stats import Stats


def test_lines_tell_what_was_done_since_the_line_before() -> None:
    times = iter([0.0, 10.0, 20.0, 30.0, 40.0])
    throughput = Throughput(lambda: next(times))
    assert throughput.line([Stats()]) is None
    busy = Stats(
        num_requests_running=3,
        num_requests_waiting=2,
        prompt_tokens=1000,
        generation_tokens=5000,
        prefix_cache_queries=1000,
        prefix_cache_hits=250,
        kv_used_blocks=5,
        kv_total_blocks=10,
    )
    line = throughput.line([busy, Stats(generation_tokens=1000, kv_total_blocks=10)])
    assert line == (
        "600 tokens/s of answers, 100 of prompts, 25% of prompts cached; 3 running, 2 waiting, 25% of KV memory in use"
    )
    assert throughput.line([busy, Stats(generation_tokens=1000)]) is None, "nothing new"
    again = throughput.line([Stats(prompt_tokens=50, generation_tokens=6010)])  # a replica was started again
    assert again is not None
    assert again.startswith("1 tokens/s of answers, 0 of prompts; ")


def test_the_page_of_paths_needs_nothing_from_elsewhere(shared_server: Server) -> None:
    text = shared_server.http.get("/docs").text
    assert all(target.startswith(("#", "/openapi.json")) for target in re.findall(r'(?:src|href)="([^"]*)"', text))
    assert "<script" not in text
    document = shared_server.http.get("/openapi.json").json()
    for path in document["paths"]:
        assert path in text
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    for name in fields:
        assert f"<th>{name}</th>" in text


def test_a_document_is_escaped_and_each_schema_stands_once() -> None:
    schema = {"properties": {"a<b": {"$ref": "#/components/schemas/S"}, "n": {"type": "integer", "default": 3}}}
    body = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/S"}}}}
    text = page(
        {
            "info": {"title": "<x>", "version": "1"},
            "paths": {"/p": {"post": {"summary": "s", "requestBody": body}}},
            "components": {"schemas": {"S": schema}},
        },
        "/root",
    )
    assert "<x>" not in text
    assert "a&lt;b" in text
    assert text.count('id="S"') == 1
    assert 'href="/root/openapi.json"' in text
    assert "integer = <code>3</code>" in text


def test_the_example_of_a_server_and_its_clients(
    shared_server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["server_and_clients.py", shared_server.url])
    runpy.run_path(str(ROOT / "examples" / "server_and_clients.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert shown.count("first piece after") == 8
    assert "mini_infer:generation_tokens_total" in shown
