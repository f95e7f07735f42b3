"""`return_token_ids`: what a choice and an event of a stream then say."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from mini_infer.serving.api.completions import CompletionRenderer
from mini_infer.serving.api.schema import CompletionRequest
from mini_infer.serving.link.wire import Delta


def renderer(**body: Any) -> CompletionRenderer:
    service: Any = SimpleNamespace(told_name=lambda name: "m", texts=None)
    request = CompletionRequest(prompt=[5, 6], **body)
    return CompletionRenderer("id", service, request, 1, [[5, 6]], ["<>"] if body.get("echo") else None, False)


def choice(event: bytes) -> dict[str, Any]:
    (found,) = json.loads(event.removeprefix(b"data: "))["choices"]
    return found


@pytest.mark.parametrize("usage", [None, {"include_usage": True}])
def test_an_event_says_its_tokens_even_without_a_text(usage: Any) -> None:
    render = renderer(stream=True, stream_options=usage, return_token_ids=True)
    first = choice(render.event(0, Delta(0, 0, "", [7])))
    assert (first["text"], first["token_ids"], first["finish_reason"]) == ("", [7], None)
    assert choice(render.event(0, Delta(0, 0, "ab", [8, 9])))["token_ids"] == [8, 9]
    last = choice(render.event(0, Delta(0, 0, "c", [10], finish_reason="length")))
    assert (last["token_ids"], last["finish_reason"]) == ([10], "length")


@pytest.mark.parametrize("options", [None, {"include_usage": True, "continuous_usage_stats": True}])
def test_the_last_usage_says_how_long_the_parts_of_a_request_took(options: Any) -> None:
    spans = {"queue": 0.5, "prefill": 0.25}
    ended = Delta(0, 0, "a", [7], finish_reason="length", spans=spans)
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    for asked in (True, False):
        render = renderer(stream=True, stream_options=options or {"include_usage": True}, return_spans=asked)
        render.event(0, ended)
        said = json.loads(render.last_event(usage).removeprefix(b"data: ").partition(b"\n")[0])["usage"]
        assert said == (usage | {"spans": spans} if asked else usage)
        assert renderer(return_spans=asked).whole([[ended]], usage)["usage"] == said


def test_nobody_gets_them_unasked() -> None:
    render = renderer(stream=True)
    assert render.event(0, Delta(0, 0, "", [7])) == b""
    assert "token_ids" not in choice(render.event(0, Delta(0, 0, "a", [8])))
    assert "token_ids" not in choice(render.event(0, Delta(0, 0, "b", [9], finish_reason="length")))


def test_a_whole_answer_says_them_without_its_prompt() -> None:
    delta = Delta(0, 0, "ab", [7, 8], finish_reason="length")
    (found,) = renderer(return_token_ids=True, echo=True).whole([[delta]], {})["choices"]
    assert (found["text"], found["token_ids"]) == ("<>ab", [7, 8])
