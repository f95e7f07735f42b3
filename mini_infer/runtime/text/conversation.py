"""A conversation, as a chat template takes it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mini_infer.core.errors import RequestError

ROLES_TEXT = ("role", "content", "name", "tool_call_id", "reasoning_content")
MESSAGE_KEYS = (*ROLES_TEXT, "tool_calls")
# What the code around templates is told by these names is none of a request's business.
OWN_ARGUMENTS = {"tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "max_length"}
OWN_ARGUMENTS |= {"messages", "conversation", "tokenize", "padding", "truncation", "return_tensors", "return_dict"}
OWN_ARGUMENTS |= {"return_assistant_tokens_mask", "tokenizer_kwargs"}


@dataclass(frozen=True)
class Conversation:
    """
    Args:
        messages: {"role": str, "content": str} each; also `name`, `tool_call_id`, `reasoning_content` and, with
            {"function": {"name": str, "arguments": {...}}} in it, `tool_calls`.
        tools: {"type": "function", "function": {"name", "description", "parameters"}} each.
        add_generation_prompt: the prompt ends where the model's answer begins.
        continue_final_message: the prompt ends with the last message, which the model goes on with.
        variables: further ones that the template asks for, such as `enable_thinking`.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Conversation | Sequence[Mapping[str, Any]]) -> Conversation:
        return given if isinstance(given, cls) else cls(given)  # type: ignore[arg-type]

    def require_template(self, template: str) -> None:
        """Raises RequestError where it holds what the template would leave out."""
        for name in self.variables:
            if name in OWN_ARGUMENTS:
                raise RequestError(f"chat_template_kwargs cannot set {name!r}", "chat_template_kwargs")
            _require_word(name, template, "chat_template_kwargs")
        if self.tools:
            _require_word("tools", template, "tools")
        if any(message.get("tool_calls") for message in self.messages):
            _require_word("tool_calls", template, "messages")


def _require_word(name: str, template: str, param: str) -> None:
    if not re.search(rf"\b{re.escape(name)}\b", template):
        message = f"the model's chat template knows no {name!r}: leave it out, or serve a --chat-template that does"
        raise RequestError(message, param)


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Raises RequestError where they are none, or one is not of the shape that Conversation wants."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a list of at least one {'role': ..., 'content': ...}", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"message {index} must be a mapping, got {type(message).__name__}", "messages")
        unknown = [key for key in message if key not in MESSAGE_KEYS]
        if unknown:
            raise RequestError(
                f"message {index} has {unknown[0]!r}: only {', '.join(MESSAGE_KEYS)} are understood", "messages"
            )
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise RequestError(f"message {index} needs {key!r} as a string, got {message.get(key)!r}", "messages")
        for key in ROLES_TEXT:
            if key in message:
                checked_text(message[key], "messages")
        _check_calls(index, message.get("tool_calls", ()))
    return [dict(message) for message in messages]


def _check_calls(index: int, calls: Any) -> None:
    functions: list[Any] = [call.get("function") for call in calls] if _all_mappings(calls) else [None]
    if not _all_mappings(functions) or not all(isinstance(function.get("name"), str) for function in functions):
        raise RequestError(
            f"message {index} needs 'tool_calls' as a list of {{'function': {{'name': ..., 'arguments': ...}}}}",
            "messages",
        )


def _all_mappings(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(value, Mapping) for value in values)


def checked_text(text: str, param: str = "prompt") -> str:
    """Raises RequestError where the text is none, or holds half a surrogate pair, which UTF-8 cannot say."""
    if not isinstance(text, str):
        raise RequestError(f"a text must be a string, got {type(text).__name__}", param)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise RequestError(
            f"character {error.start} of the text is U+{code:04X}, half a surrogate pair: send whole characters", param
        ) from None
    return text
