"""The tools of a request: who may be called, who must be, and what that makes of the prompt and of the grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mini_infer.core.errors import RequestError
from mini_infer.core.sampling_params import Grammar, GrammarKind
from mini_infer.runtime.text.tools.formats import ToolFormat
from mini_infer.serving.api.sampling import constraint
from mini_infer.serving.api.schema import ChatRequest, Tool

LARK = GrammarKind.lark.value


@dataclass(frozen=True)
class ToolUse:
    """
    Attributes:
        format: how the model writes calls.
        tools: what the chat template is told.
        grammar: SamplingParams.grammar; None where the model's answer is free.
        forced: a call has to be made, and the prompt ends with how it begins.
        several: more than one call may be made.
    """

    format: ToolFormat
    tools: list[dict[str, Any]]
    grammar: tuple[str, str] | None
    forced: bool
    several: bool


def tool_use(body: ChatRequest, tool_format: ToolFormat | None) -> ToolUse | None:
    """None where the model may call nobody.

    Args:
        tool_format: the served model's.

    Raises:
        RequestError: tools or their choice cannot be.
    """
    if not body.tools:
        if body.tool_choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools to choose from", "tool_choice")
        return None
    names = [tool.function.name for tool in body.tools]
    if len(set(names)) < len(names):
        raise RequestError("two tools have one name", "tools")
    forced, allowed = _choice(body.tool_choice, names)
    if not allowed:
        return None
    if tool_format is None:
        message = (
            "it cannot be told how this model writes calls: start the server with --tool-format, or leave tools out"
        )
        raise RequestError(message, "tools")
    tools = [tool for tool in body.tools if tool.function.name in allowed]
    one = body.parallel_tool_calls is False or (isinstance(body.tool_choice, dict) and "function" in body.tool_choice)
    grammar = _grammar(body, tools, tool_format, forced, not one)
    return ToolUse(tool_format, [_shown(tool) for tool in body.tools], grammar, forced, not one)


def _choice(choice: Any, names: list[str]) -> tuple[bool, list[str]]:
    """Whether a call has to be made, and of whom."""
    if choice in (None, "auto", "required", "none"):
        return choice == "required", [] if choice == "none" else names
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools" and isinstance(allowed := choice.get("allowed_tools"), dict):
        return allowed.get("mode") == "required", [_known(tool, names) for tool in allowed.get("tools") or ()]
    if kind == "function":
        return True, [_known(choice, names)]
    raise RequestError(
        'tool_choice is "none", "auto", "required", {"type": "function", "function": {"name": ...}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
        "tool_choice",
    )


def _known(choice: Any, names: list[str]) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name not in names:
        raise RequestError(f"tool_choice names {str(name)[:100]!r}, which is none of the tools", "tool_choice")
    return name


def _shown(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "function": tool.function.model_dump(exclude={"strict"}, exclude_none=True)}


def _grammar(
    body: ChatRequest, tools: list[Tool], tool_format: ToolFormat, forced: bool, several: bool
) -> tuple[str, str] | None:
    functions = [tool.function.model_dump() for tool in tools]
    other = constraint(body)
    if forced and body.response_format is not None:
        other = None  # of a text that is not going to be
    strict = any(tool.function.strict for tool in tools)
    if forced and other is None:
        return LARK, tool_format.forced(functions, several)
    if other is None:
        return (LARK, tool_format.free(functions, several)) if strict else None
    if forced:
        raise RequestError("a call has to be made, and so no other text can be asked for", "tool_choice")
    kind, text = Grammar.of(other)
    if kind not in (GrammarKind.json_object, GrammarKind.json_schema):
        return other  # of the whole text, with its calls
    return LARK, tool_format.or_json(functions, several, text or '{"type": "object"}')
