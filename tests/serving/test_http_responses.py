"""/v1/responses, by OpenAI's own client."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pytest
from http_server import Server
from pydantic import BaseModel

TEXT = 'Hm.\n<tool_call>\n{"name": "now", "arguments": {"x": 1}}\n</tool_call>'
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "now",
    "parameters": {
        "type": "object",
        "properties": {"x": {"enum": [1, 2]}},
        "required": ["x"],
        "additionalProperties": False,
    },
    "strict": True,
}
ASK: dict[str, Any] = {"model": "mini-infer", "input": "hi", "max_output_tokens": 200}


def says(text: str) -> dict[str, Any]:
    return {"extra_body": {"guided_choice": [text]}}


def test_text(client: openai.OpenAI) -> None:
    answer = client.responses.create(**ASK, instructions="Be brief.", metadata={"a": "b"}, **says("Hello"))
    assert (answer.output_text, answer.status, answer.metadata) == ("Hello", "completed", {"a": "b"})
    assert answer.usage.output_tokens == 5
    assert answer.usage.total_tokens == answer.usage.input_tokens + 5
    short = client.responses.create(**{**ASK, "max_output_tokens": 3}, **says("Hello"))
    assert (short.status, short.incomplete_details.reason, short.output_text) == (
        "incomplete",
        "max_output_tokens",
        "Hel",
    )


def test_a_stream_adds_up(client: openai.OpenAI) -> None:
    ask = {**ASK, "tools": [TOOL], **says(f"<think>\nWell\n</think>\n\n{TEXT}")}
    whole = client.responses.create(**ask)
    with client.responses.stream(**ask) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for answer in (whole, final):
        thought, message, call = answer.output
        assert thought.content[0].text == "Well"
        assert message.content[0].text == "Hm."
        assert (call.name, call.arguments) == ("now", '{"x": 1}')
        assert answer.usage.output_tokens_details.reasoning_tokens == 4
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert deltas == '{"x": 1}'


def test_a_call_and_its_result(client: openai.OpenAI) -> None:
    ask = {**ASK, "tools": [TOOL], "tool_choice": {"type": "function", "name": "now"}}
    first = client.responses.create(**ask)
    (call,) = first.output
    assert call.type == "function_call"
    history = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, *first.output]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "noon"})
    second = client.responses.create(**{**ask, "input": history, "tool_choice": "none"}, **says("At noon."))
    assert second.output_text == "At noon."
    assert second.usage.input_tokens > client.responses.create(**ASK, **says("Hm")).usage.input_tokens + len("noon")


class Answer(BaseModel):
    size: Literal[1, 2]


def test_a_schema(client: openai.OpenAI) -> None:
    assert isinstance(client.responses.parse(**ASK, text_format=Answer).output_parsed, Answer)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"store": True}, "store", "nothing is stored"),
        ({"background": True}, "background", "nothing is stored"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools", "function"),
        ({"input": 5}, "input", "text or a list"),
        ({"input": [5]}, "input", "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input_image"),
        ({"input": [{"role": 5, "content": "x"}]}, "input", "role"),
        ({"input": [{"type": "function_call"}]}, "input", "name"),
        ({"reasoning": {"summary": "auto"}}, "reasoning", "leave it out"),
        ({"temperature": -1}, "temperature", "temperature"),
    ],
)
def test_what_cannot_be(shared_server: Server, fields: dict[str, Any], param: str, said: str) -> None:
    response = shared_server.post("/v1/responses", **{**ASK, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert said in error["message"]
    assert error["param"] == param


def test_nothing_is_stored(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nothing is stored"):
        client.responses.retrieve("resp_1")
