"""POST /v1/chat/completions: a conversation in, the assistant's turn out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import Response

from mini_infer.runtime.text.pieces import Kind
from mini_infer.serving.api.chat.turn import Part, Turn, start_turn
from mini_infer.serving.api.logprobs import TokenTexts, chat_logprobs
from mini_infer.serving.api.schema import ChatRequest
from mini_infer.serving.api.service import Service
from mini_infer.serving.api.sse import DONE, Event, EventStream, EventTemplate, WholeAnswer, joined, new_id
from mini_infer.serving.link.wire import Delta


async def chat(service: Service, body: ChatRequest) -> Response:
    turn = await start_turn(service, body)
    request_id = new_id("chatcmpl", body.request_id)
    render = ChatRenderer(request_id, service, body, turn)
    answer = EventStream if body.stream else WholeAnswer
    return answer(turn.streams, render, service.running, request_id)


class ChatRenderer:
    """Writes chat.completion objects and chat.completion.chunk events."""

    def __init__(self, request_id: str, service: Service, body: ChatRequest, turn: Turn) -> None:
        self._common = {"id": request_id, "created": int(time.time()), "model": service.model_name}
        self._texts: TokenTexts | None = service.texts if body.logprobs else None
        self._readers = turn.readers
        self._template = EventTemplate(
            {**self._common, "object": "chat.completion.chunk"},
            before=_before_text,
            between=b"}",
            num_choices=turn.num_choices,
            options=body.stream_options,
            prompt_tokens=turn.prompt_tokens,
        )

    def event(self, prompt: int, delta: Delta) -> Event:
        is_plain = self._texts is None and delta.finish_reason is None and not self._template.tells_usage
        if self._readers is not None and not (is_plain and self._readers[delta.index].passes):
            return self._events(delta, self._readers[delta.index].read)
        if self._template.tells_usage:
            return self._events(delta, _as_text)
        if is_plain:
            return self._template.text(delta.index, delta.text) if delta.text else b""
        return self._template.full(delta.index, delta.text, self._logprobs(delta), delta)

    def _events(self, delta: Delta, read: Any) -> Event:
        """One for each part of the text. The first has the log-probabilities, the last says how it ended."""
        ended = delta.finish_reason is not None
        said = [_said(part) for part in read(delta.text, last=ended)]
        if not said and (ended or self._texts is not None or self._template.tells_usage):
            said = [{}]
        if said and self._template.begins(delta.index):
            said[0] = {"role": "assistant", **said[0]}
        choices: list[dict[str, Any]] = [
            {"index": delta.index, "delta": each, "logprobs": None, "finish_reason": None} for each in said
        ]
        if choices:
            choices[0]["logprobs"] = self._logprobs(delta)
        if ended:
            choices[-1] |= {"finish_reason": self._finish_reason(delta), "stop_reason": delta.stop_reason}
        self._template.count(delta)
        return joined([self._template.choice(choice, delta) for choice in choices])

    def last_event(self, usage: dict[str, Any]) -> bytes:
        return self._template.usage(usage) + DONE

    def whole(self, prompts: Sequence[Sequence[Delta]], usage: dict[str, Any]) -> dict[str, Any]:
        choices = [
            {
                "index": delta.index,
                "message": {"role": "assistant", **self._message(delta), "refusal": None},
                "logprobs": self._logprobs(delta),
                "finish_reason": self._finish_reason(delta),
                "stop_reason": delta.stop_reason,
            }
            for delta in prompts[0]
        ]
        return {**self._common, "object": "chat.completion", "choices": choices, "usage": usage}

    def _message(self, delta: Delta) -> dict[str, Any]:
        if self._readers is None:
            return {"content": delta.text}
        reader = self._readers[delta.index]
        parts = reader.read(delta.text, last=True)
        text, thought = (
            "".join(part.text for part in parts if part.kind is kind) for kind in (Kind.text, Kind.reasoning)
        )
        calls = [_called(part, "".join(part.call.arguments)) for part in parts if part.kind is Kind.call and part.call]
        return {
            "content": text if text or not calls else None,
            **({"reasoning_content": thought} if thought else {}),
            **({"tool_calls": calls} if calls else {}),
        }

    def _finish_reason(self, delta: Delta) -> str | None:
        called = self._readers is not None and self._readers[delta.index].calls
        return "tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        return None if self._texts is None else chat_logprobs(delta.logprobs or [], self._texts)


def _as_text(text: str, last: bool) -> list[Part]:
    return [Part(Kind.text, text, None)] if text else []


def _said(part: Part) -> dict[str, Any]:
    """The `delta` of an event."""
    if part.call is None:
        return {"content" if part.kind is Kind.text else "reasoning_content": part.text}
    if part.kind is Kind.call:
        return {"tool_calls": [{"index": part.call.index, **_called(part, "")}]}
    return {"tool_calls": [{"index": part.call.index, "function": {"arguments": part.text}}]}


def _called(part: Part, arguments: str) -> dict[str, Any]:
    assert part.call is not None
    return {"id": part.call.id, "type": "function", "function": {"name": part.call.name, "arguments": arguments}}


def _before_text(choice: int, first: bool) -> bytes:
    role = b'"role":"assistant",' if first else b""
    return b'{"index":%d,"delta":{%s"content":' % (choice, role)
