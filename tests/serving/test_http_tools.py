"""Tools and reasoning over HTTP, by OpenAI's own client. The dry model says what a test wants it to, by a grammar."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
import pytest
from http_server import Server
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": "How is the weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
ASK: dict[str, Any] = {
    "model": "mini-infer",
    "messages": MESSAGES,
    "tools": [WEATHER, NOW],
    "max_tokens": 3000,
    "seed": 1,
}
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'


def says(text: str) -> dict[str, Any]:
    return {"extra_body": {"guided_choice": [text]}}


def check_call(call: Any) -> None:
    assert call.type == "function"
    assert call.id.startswith("call_")
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert arguments["city"] in ("Paris", "Oslo")
        assert 1 <= arguments["days"] <= 9
    else:
        assert (call.function.name, arguments) == ("now", {})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_has_to_be_made(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(**ASK, tool_choice=choice, n=2)
    for found in answer.choices:
        assert found.finish_reason == "tool_calls"
        assert found.message.content is None
        assert found.message.tool_calls
        for call in found.message.tool_calls:
            check_call(call)
            assert choice == "required" or call.function.name == "weather"
        assert choice == "required" or len(found.message.tool_calls) == 1


def test_one_call_where_no_more_are_wanted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASK, tool_choice="required", parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1
    twice = client.chat.completions.create(**ASK, parallel_tool_calls=False, **says(f"{CALLED}\n{CALLED}"))
    assert len(twice.choices[0].message.tool_calls) == 1


def test_only_allowed_tools(client: openai.OpenAI) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    answer = client.chat.completions.create(**ASK, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert {call.function.name for call in answer.choices[0].message.tool_calls} == {"now"}


def test_calls_that_the_model_decides_on(client: openai.OpenAI) -> None:
    text = f"Let me see.\n{CALLED}\n{CALLED}"
    (choice,) = client.chat.completions.create(**ASK, **says(text)).choices
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    assert [call.function.name for call in choice.message.tool_calls] == ["weather", "weather"]
    (plain,) = client.chat.completions.create(**ASK, **says("It rains.")).choices
    assert (plain.message.content, plain.message.tool_calls, plain.finish_reason) == ("It rains.", None, "stop")
    (none,) = client.chat.completions.create(**ASK, tool_choice="none", **says(text)).choices
    assert (none.message.content, none.message.tool_calls) == (text, None)


def test_a_stream_adds_up(client: openai.OpenAI) -> None:
    ask = {**ASK, **says(f"<think>\nHm.\n</think>\n\nLet me see.\n{CALLED}\n{CALLED}")}
    (whole,) = client.chat.completions.create(**ask).choices
    with client.chat.completions.stream(**ask) as stream:
        events = list(stream)
        (streamed,) = stream.get_final_completion().choices
    assert streamed.message.content == whole.message.content == "Let me see."
    assert streamed.finish_reason == whole.finish_reason == "tool_calls"
    assert [call.function.model_dump(include={"name", "arguments"}) for call in streamed.message.tool_calls] == [
        call.function.model_dump(include={"name", "arguments"}) for call in whole.message.tool_calls
    ]
    assert whole.message.reasoning_content == "Hm."
    thought = [
        event.chunk.choices[0].delta.reasoning_content
        for event in events
        if event.type == "chunk" and getattr(event.chunk.choices[0].delta, "reasoning_content", None)
    ]
    assert "".join(thought) == "Hm."
    # One a call at least: tokens that come while a client is slow share an event.
    assert len([event for event in events if event.type == "tool_calls.function.arguments.delta"]) >= 2
    assert len([event for event in events if event.type == "tool_calls.function.arguments.done"]) == 2


class Weather(BaseModel):
    """Of a city."""

    city: Literal["Paris", "Oslo"]
    days: Literal[1, 2]


def test_openais_helpers(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Weather)]
    ask = {**ASK, "tools": tools}
    (choice,) = client.chat.completions.parse(**ask, tool_choice="required", parallel_tool_calls=False).choices
    assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Weather)
    (choice,) = client.chat.completions.parse(**{**ask, "tools": []}, response_format=Weather).choices
    assert isinstance(choice.message.parsed, Weather)
    # A call or an answer, each of which follows its schema.
    (choice,) = client.chat.completions.parse(**ask, response_format=Weather, logit_bias={str(ord("<")): 100}).choices
    assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Weather)
    (choice,) = client.chat.completions.parse(**ask, response_format=Weather, logit_bias={str(ord("{")): 100}).choices
    assert isinstance(choice.message.parsed, Weather)


def test_what_was_called_goes_back(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(**ASK, tool_choice="required").choices[0].message
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in first.tool_calls]
    history = [*MESSAGES, first, *answers]
    answer = client.chat.completions.create(**{**ASK, "messages": history, "max_tokens": 4})
    plain = [message if isinstance(message, dict) else message.model_dump() for message in history]
    without = client.chat.completions.create(
        **{
            **ASK,
            "messages": [{**message, "tool_calls": None, "content": message["content"] or ""} for message in plain],
        }
        | {"max_tokens": 4}
    )
    assert answer.usage.prompt_tokens > without.usage.prompt_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        ({"tools": [NOW, NOW]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"functions": [{"name": "x"}]}, "functions"),
        ({"chat_template_kwargs": {"colour": "red"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
    ],
)
def test_what_cannot_be(shared_server: Server, fields: dict[str, Any], param: str) -> None:
    response = shared_server.post("/v1/chat/completions", **{**ASK, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_reasoning_may_be_left_out(shared_server: Server) -> None:
    body = {"messages": MESSAGES, "max_tokens": 50, "guided_choice": ["<think>\nHm.\n</think>\n\nYes"]}
    for more, said in [({}, {"reasoning_content": "Hm."}), ({"include_reasoning": False}, {})]:
        message = shared_server.post("/v1/chat/completions", **body, **more).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "Yes", "refusal": None, **said}


def test_logprobs_beside_parts(client: openai.OpenAI) -> None:
    ask = {**ASK, **says(f"Hm.\n{CALLED}"), "logprobs": True}
    whole = client.chat.completions.create(**ask).choices[0].logprobs.content
    streamed = []
    for chunk in client.chat.completions.create(**ask, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content
    assert [token.token for token in streamed] == [token.token for token in whole]
    assert re.sub(r"\W", "", "".join(token.token for token in whole)).startswith("Hmtool_call")
