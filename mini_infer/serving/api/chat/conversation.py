"""The messages of a chat request, as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from mini_infer.core.errors import RequestError
from mini_infer.runtime.text.conversation import Conversation
from mini_infer.serving.api.schema import ChatMessage, ChatRequest, ToolCall

MAX_PARTS = 16_384  # of all messages together


def conversation(body: ChatRequest, tools: Sequence[dict[str, Any]], template: str) -> Conversation:
    """
    Args:
        tools: as the template takes them.
        template: the model's, for what it asks for by a name of its own.
    """
    continued = bool(body.continue_final_message)
    if continued and body.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt exclude each other"
        raise RequestError(message, "continue_final_message")
    return Conversation(
        as_messages(body.messages),
        tools=tools,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=continued,
        variables={**_effort(body.reasoning_effort, template), **(body.chat_template_kwargs or {})},
    )


def _effort(effort: str | None, template: str) -> dict[str, Any]:
    """As the template asks for it: some know a degree, some only whether to think."""
    if effort is None:
        return {}
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    if effort == "none" and "enable_thinking" in template:
        return {"enable_thinking": False}
    message = "the model's chat template knows no reasoning_effort: leave it out, or use chat_template_kwargs"
    raise RequestError(message, "reasoning_effort")


def as_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Each content as one string."""
    if not messages:
        raise RequestError("messages is empty: at least one is needed", "messages")
    num_parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    if num_parts > MAX_PARTS:
        raise RequestError(f"messages holds {num_parts} text parts; at most {MAX_PARTS} are allowed", "messages")
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: ChatMessage) -> dict[str, Any]:
    # OpenAI renamed the system role for its newer models.
    role = "system" if message.role == "developer" else message.role
    needs_none = message.content is None and (message.tool_calls or message.reasoning_content is not None)
    content = "" if needs_none else joined_text(message.content, f"messages[{index}].content", "messages", ("text",))
    rest = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
        "tool_calls": [_call(call) for call in message.tool_calls or ()] or None,
    }
    return {"role": role, "content": content, **{key: value for key, value in rest.items() if value is not None}}


def _call(call: ToolCall) -> dict[str, Any]:
    """Templates write the arguments as JSON themselves. What a model once wrote and is none goes back as it is."""
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = call.function.arguments
    function = {"name": call.function.name, "arguments": arguments or {}}
    return {"type": "function", "function": function, **({"id": call.id} if call.id else {})}


def joined_text(content: Any, where: str, param: str, types: Collection[str]) -> str:
    """Of a content that is a text, or a list of parts of these types."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError(f"{where} must be a string or a list of text parts", param)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in types:
            named = f"of type {kind[:40]!r}" if isinstance(kind, str) else "without a type"
            raise RequestError(f"{where} has a part {named}: this server understands text parts alone", param)
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where} has a text part whose `text` is no string", param)
        texts.append(part["text"])
    return "\n".join(texts)
