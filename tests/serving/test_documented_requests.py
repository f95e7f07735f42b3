"""What the documents send with curl is answered, by a server with the dry model."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest
from documented import Command, commands
from http_server import Server, running

from mini_infer.assets.adapters import random_adapter, write_adapter
from mini_infer.core.model_config import ModelConfig

SENT = [command for command in commands() if command.words[0] == "curl"]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> str:
    tensors = random_adapter(ModelConfig(path="tiny-draft"), rank=4, seed=0)
    return write_adapter(tmp_path_factory.mktemp("adapter"), tensors, rank=4, alpha=4)


@pytest.fixture(scope="module")
def server(adapter: str) -> Iterator[Server]:
    with running("--lora.max_adapters", "2", "--lora", f"mine={adapter}", "--lora-loading") as server:
        yield server


def test_there_are_some() -> None:
    assert len(SENT) > 3


@pytest.mark.parametrize("command", SENT, ids=str)
def test_it_is_answered(command: Command, server: Server, adapter: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("-H", action="append", default=[])
    parser.add_argument("-d")
    asked = parser.parse_args(command.words[1:])
    path = asked.url.removeprefix("localhost:8000")
    headers = dict(header.split(": ") for header in asked.H)
    body = None if asked.d is None else asked.d.replace("/adapters/new", adapter)
    answer = server.http.request("GET" if body is None else "POST", path, content=body, headers=headers)
    assert answer.status_code == 200, answer.text
