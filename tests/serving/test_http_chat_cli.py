"""mini-infer-chat, with a server and with one of its own."""

from __future__ import annotations

import io

import pytest
from http_server import Server

from mini_infer.cli.chat import main


def talk(monkeypatch: pytest.MonkeyPatch, said: str, *flags: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    return main([*flags, "--temperature", "0", "--max-tokens", "12"])


def test_a_conversation_is_kept_until_reset(
    shared_server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = shared_server.metrics()["request_prompt_tokens_sum"]
    assert talk(monkeypatch, "hello\nhello\n\n/reset\nhello\n/quit\nnever\n", "--url", shared_server.url) == 0
    shown = capsys.readouterr()
    first, second, third = [text for text in shown.out.split("> ") if text.strip()]
    assert first == third
    assert first != second
    assert "dry at" in shown.err
    shared_server.wait_until_idle()
    turns = shared_server.metrics()["request_prompt_tokens_sum"] - before
    assert turns > 3 * 24  # the second turn carried the first one and its answer


def test_a_refusal_does_not_end_the_conversation(
    shared_server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, f"{'x' * 9000}\nhello\n", "--url", shared_server.url, "--system", "be brief") == 0
    shown = capsys.readouterr()
    assert "tokens" in shown.err
    assert len(shown.out) > 12


def test_no_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert talk(monkeypatch, "", "--url", "http://127.0.0.1:9") == 2
    assert "no server answers" in capsys.readouterr().err
    assert talk(monkeypatch, "", "--url", "http://127.0.0.1:9", "--dry-run") == 2
    assert "'--dry-run'" in capsys.readouterr().err


def test_a_server_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert talk(monkeypatch, "hello\n", "--dry-run") == 0
    assert len(capsys.readouterr().out) > 12


def test_a_server_that_does_not_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert talk(monkeypatch, "", "--dry-run", "--cache.block_size", "0") == 2
    assert "cache.block_size must be at least 1" in capsys.readouterr().err
