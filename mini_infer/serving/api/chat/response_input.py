"""POST /v1/responses, its way in: items and flat tools become messages and tools of a chat request."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from mini_infer.core.errors import RequestError
from mini_infer.serving.api.chat.conversation import joined_text
from mini_infer.serving.api.schema import ChatRequest, GenerationRequest, ResponsesRequest

TEXTS = ("input_text", "output_text", "reasoning_text", "text")
SAME_NAME = (*GenerationRequest.model_fields, "parallel_tool_calls", "include_reasoning", "chat_template_kwargs")


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """Raises RequestError for what has no place in a chat request."""
    fields = body.model_dump(include=set(SAME_NAME), exclude_none=True, by_alias=True, warnings=False)
    fields["messages"] = _messages(body)
    fields["tools"] = [
        {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
        for tool in body.tools or ()
    ]
    fields["tool_choice"] = _tool_choice(body.tool_choice)
    fields["max_tokens"] = body.max_output_tokens
    fields["reasoning_effort"] = body.reasoning.effort if body.reasoning is not None else None
    form = body.text.format if body.text is not None else None
    if form is not None:
        schema = {"name": form.name, "schema": form.schema_, "strict": form.strict}
        fields["response_format"] = {"type": form.type, "json_schema": schema if form.schema_ is not None else None}
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RequestError(f"as a chat request, {where}: {first['msg']}", "input") from error


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if not isinstance(body.input, list):
        raise RequestError("input must be a text or a list of items", "input")
    for index, item in enumerate(body.input):
        if not isinstance(item, dict):
            raise RequestError(f"input[{index}] must be an object", "input")
        _add(messages, item, f"input[{index}]")
    return messages


def _add(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """What a model said, thought and called in one turn is one message."""
    kind = item.get("type") or "message"
    if kind == "function_call_output":
        output = _text(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind == "message" and item.get("role") != "assistant":
        messages.append({"role": item.get("role"), "content": _text(item.get("content"), f"{where}.content")})
    elif kind == "message":
        turn = _turn(messages, unless="content")
        turn["content"] = _text(item.get("content"), f"{where}.content")
    elif kind == "reasoning":
        turn = _turn(messages, unless="reasoning_content")
        turn["reasoning_content"] = _text(item.get("content") or "", f"{where}.content")
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _turn(messages).setdefault("tool_calls", []).append(call)
    else:
        raise RequestError(
            f"{where} is of type {str(kind)[:40]!r}: this server takes message, reasoning, function_call and "
            "function_call_output",
            "input",
        )


def _turn(messages: list[dict[str, Any]], unless: str = "") -> dict[str, Any]:
    """The assistant's message that is being put together; a new one where it has this part already."""
    if not messages or messages[-1]["role"] != "assistant" or unless in messages[-1]:
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: Any, where: str) -> str:
    return "" if content == [] else joined_text(content, where, "input", TEXTS)


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        tools = [{"type": "function", "function": tool} for tool in choice.get("tools") or ()]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return {"type": choice.get("type"), "function": choice}
