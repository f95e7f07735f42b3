"""POST /v1/responses: OpenAI's newer API for the same turn. Nothing is stored: each request brings all it needs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import Response

from mini_infer.runtime.text.pieces import Kind
from mini_infer.serving.api.chat.response_input import as_chat
from mini_infer.serving.api.chat.turn import Part, Turn, start_turn
from mini_infer.serving.api.schema import ResponsesRequest
from mini_infer.serving.api.service import Service
from mini_infer.serving.api.sse import EventStream, WholeAnswer, encode
from mini_infer.serving.link.wire import Delta


async def respond(service: Service, body: ResponsesRequest) -> Response:
    turn = await start_turn(service, as_chat(body))
    response_id = f"resp_{body.request_id or uuid.uuid4().hex}"
    render = ResponseRenderer(response_id, service, body, turn)
    answer = EventStream if body.stream else WholeAnswer
    return answer(turn.streams, render, service.running, response_id)


class ResponseRenderer:
    """Writes response objects, and the events of a stream.

    The answer is a list of items, one after the other: what is thought, what is said, each call. One at a time is
    open; `_events` has what there is to tell of it.
    """

    def __init__(self, response_id: str, service: Service, body: ResponsesRequest, turn: Turn) -> None:
        self._response = _response(response_id, service.told_name(body.model), body)
        self._encode = service.tokenizer.encode_within
        self._reader = turn.readers[0] if turn.readers is not None else None
        self._items: list[dict[str, Any]] = []
        self._open: Kind | None = None
        self._text: list[str] = []  # of the open item
        self._events: list[dict[str, Any]] = []
        self._num_events = 0

    def event(self, prompt: int, delta: Delta) -> bytes:
        if not self._num_events:
            for name in ("created", "in_progress"):
                self._tell(name, response=dict(self._response))
        self._take(delta)
        return self._told()

    def last_event(self, usage: dict[str, Any]) -> bytes:
        self._finish(usage)
        self._tell(self._response["status"], response=self._response)
        return self._told()

    def whole(self, prompts: Sequence[Sequence[Delta]], usage: dict[str, Any]) -> dict[str, Any]:
        self._take(prompts[0][0])
        self._finish(usage)
        return self._response

    def _finish(self, usage: dict[str, Any]) -> None:
        thoughts = [item["content"][0]["text"] for item in self._items if item["type"] == "reasoning"]
        self._response |= {
            "output": self._items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": sum(len(self._encode(text)) for text in thoughts)},
                "total_tokens": usage["total_tokens"],
            },
        }

    def _take(self, delta: Delta) -> None:
        ended = delta.finish_reason is not None
        if self._reader is not None:
            parts = self._reader.read(delta.text, last=ended)
        else:
            parts = [Part(Kind.text, delta.text, None)] if delta.text else []
        for part in parts:
            self._add(part)
        if ended:
            cut = delta.finish_reason == "length"
            self._close("incomplete" if cut else "completed")
            self._response["status"] = "incomplete" if cut else "completed"
            self._response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None

    def _add(self, part: Part) -> None:
        if part.kind is Kind.call or (part.kind is not self._open and part.kind is not Kind.arguments):
            self._close("completed")
            self._begin(part)
        if part.kind is Kind.call:
            return
        self._text.append(part.text)
        extra: dict[str, Any] = {"content_index": 0} if part.call is None else {}
        if part.kind is Kind.text:
            extra["logprobs"] = []
        self._tell(f"{NAMES[part.kind]}.delta", delta=part.text, **self._place(), **extra)

    def _begin(self, part: Part) -> None:
        self._open = part.kind
        item: dict[str, Any] = {"id": f"{PREFIXES[part.kind]}_{uuid.uuid4().hex}", "status": "in_progress"}
        if part.call is not None:
            item |= {"type": "function_call", "call_id": part.call.id, "name": part.call.name, "arguments": ""}
        elif part.kind is Kind.reasoning:
            item |= {"type": "reasoning", "summary": [], "content": []}
        else:
            item |= {"type": "message", "role": "assistant", "content": []}
        self._items.append(item)
        self._tell("output_item.added", output_index=len(self._items) - 1, item=dict(item))
        if part.call is None:
            self._tell("content_part.added", content_index=0, part=_content(part.kind, ""), **self._place())

    def _close(self, status: str) -> None:
        kind, text = self._open, "".join(self._text)
        if kind is None:
            return
        item = self._items[-1]
        item["status"] = status
        self._open, self._text = None, []
        if kind is Kind.call:
            item["arguments"] = text
            self._tell(f"{NAMES[kind]}.done", arguments=text, name=item["name"], **self._place())
        else:
            item["content"] = [_content(kind, text)]
            extra: dict[str, Any] = {"logprobs": []} if kind is Kind.text else {}
            self._tell(f"{NAMES[kind]}.done", text=text, content_index=0, **self._place(), **extra)
            self._tell("content_part.done", content_index=0, part=item["content"][0], **self._place())
        self._tell("output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self._items) - 1, "item_id": self._items[-1]["id"]}

    def _tell(self, event: str, /, **fields: Any) -> None:
        self._events.append({"type": f"response.{event}", "sequence_number": self._num_events, **fields})
        self._num_events += 1

    def _told(self) -> bytes:
        events, self._events = self._events, []
        return b"".join([b"event: %s\ndata: %s\n\n" % (each["type"].encode(), encode(each)) for each in events])


NAMES = {
    Kind.text: "output_text",
    Kind.reasoning: "reasoning_text",
    Kind.call: "function_call_arguments",
    Kind.arguments: "function_call_arguments",
}
PREFIXES = {Kind.text: "msg", Kind.reasoning: "rs", Kind.call: "fc"}


def _content(kind: Kind, text: str) -> dict[str, Any]:
    if kind is Kind.reasoning:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _response(response_id: str, model: str, body: ResponsesRequest) -> dict[str, Any]:
    """As it is before anything has come: what was asked is told again."""
    asked = body.model_dump(by_alias=True, exclude_none=True)
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": asked.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"strict": None, "parameters": None, **tool} for tool in asked.get("tools") or ()],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }
