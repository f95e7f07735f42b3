"""POST /v1/chat/completions: a conversation in, the assistant's turn out."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import Response

from mini_infer.core.errors import RequestError
from mini_infer.serving.api.logprobs import TokenTexts, chat_logprobs
from mini_infer.serving.api.sampling import sampling_params
from mini_infer.serving.api.schema import ChatMessage, ChatRequest
from mini_infer.serving.api.service import Service
from mini_infer.serving.api.sse import EventStream, EventTemplate, WholeAnswer
from mini_infer.serving.processes.wire import Delta

MAX_PARTS = 16_384  # of all messages together


async def chat(service: Service, body: ChatRequest) -> Response:
    service.require_model(body.model)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = sampling_params(body, limit, _alternatives(body))
    streams = service.submit(await service.encode([conversation(body.messages)], "messages"), params, body)
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    render = ChatRenderer(request_id, service, body, params.n)
    answer = EventStream if body.stream else WholeAnswer
    return answer(streams, render, service.running, request_id)


def conversation(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """As chat templates take it: each content one string."""
    if not messages:
        raise RequestError("messages is empty: at least one is needed", "messages")
    num_parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    if num_parts > MAX_PARTS:
        raise RequestError(f"messages holds {num_parts} text parts; at most {MAX_PARTS} are allowed", "messages")
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: ChatMessage) -> dict[str, str]:
    # OpenAI renamed the system role for its newer models.
    role = "system" if message.role == "developer" else message.role
    plain = {"role": role, "content": _text(message.content, f"messages[{index}].content")}
    return plain if message.name is None else {**plain, "name": message.name}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError(f"{where} must be a string or a list of text parts", "messages")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            named = f"of type {kind[:40]!r}" if isinstance(kind, str) else "without a type"
            raise RequestError(f"{where} has a part {named}: this server understands text parts alone", "messages")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where} has a text part whose `text` is no string", "messages")
        texts.append(part["text"])
    return "\n".join(texts)


def _alternatives(body: ChatRequest) -> int | None:
    """SamplingParams.logprobs."""
    if not body.logprobs:
        if body.top_logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        return None
    count = body.top_logprobs or 0
    if not 0 <= count <= 20:
        raise RequestError(f"top_logprobs must be from 0 to 20, got {count}", "top_logprobs")
    return count


class ChatRenderer:
    """Writes chat.completion objects and chat.completion.chunk events."""

    def __init__(self, request_id: str, service: Service, body: ChatRequest, num_choices: int) -> None:
        self._common = {"id": request_id, "created": int(time.time()), "model": service.model_name}
        self._texts: TokenTexts | None = service.texts if body.logprobs else None
        self._template: EventTemplate | None = None
        if body.stream:
            options = body.stream_options
            self._template = EventTemplate(
                {**self._common, "object": "chat.completion.chunk"},
                before=_before_text,
                between=b"}",
                num_choices=num_choices,
                with_usage=bool(options and options.include_usage),
            )

    def event(self, prompt: int, delta: Delta) -> bytes:
        assert self._template is not None
        if self._texts is None and delta.finish_reason is None:
            return self._template.text(delta.index, delta.text) if delta.text else b""
        return self._template.full(delta.index, delta.text, self._logprobs(delta), delta)

    def last_event(self, usage: dict[str, Any]) -> bytes:
        assert self._template is not None
        return self._template.usage(usage)

    def whole(self, prompts: Sequence[Sequence[Delta]], usage: dict[str, Any]) -> dict[str, Any]:
        choices = [
            {
                "index": delta.index,
                "message": {"role": "assistant", "content": delta.text, "refusal": None},
                "logprobs": self._logprobs(delta),
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
            }
            for delta in prompts[0]
        ]
        return {**self._common, "object": "chat.completion", "choices": choices, "usage": usage}

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        return None if self._texts is None else chat_logprobs(delta.logprobs or [], self._texts)


def _before_text(choice: int, first: bool) -> bytes:
    role = b'"role":"assistant",' if first else b""
    return b'{"index":%d,"delta":{%s"content":' % (choice, role)
