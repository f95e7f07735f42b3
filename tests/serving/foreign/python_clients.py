"""instructor, langchain and litellm against a server, whose address is the argument. Run by test_foreign_clients.py in
an environment of its own: none of the three is installed where the tests are."""

from __future__ import annotations

import os
import sys
from typing import Any, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would look for one on the network

import instructor
import litellm
import openai
import pydantic
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

URL = f"{sys.argv[1]}/v1"
MESSAGES: list[Any] = [{"role": "user", "content": "How is the weather?"}]


class Weather(pydantic.BaseModel):
    """Of a city."""

    city: Literal["Paris", "Oslo"]
    days: Literal[1, 2]


@tool
def weather(city: Literal["Paris", "Oslo"]) -> str:
    """Of a city."""
    return f"rain in {city}"


def with_instructor() -> None:
    client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
    ask: dict[str, Any] = {"model": "mini-infer", "response_model": Weather, "max_retries": 0}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        found = instructor.from_openai(client, mode=mode).chat.completions.create(messages=MESSAGES, **ask)
        assert isinstance(found, Weather), mode
    partial = instructor.from_openai(client).chat.completions.create_partial(messages=MESSAGES, **ask)
    assert Weather.model_validate(list(partial)[-1].model_dump())
    found = instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS).responses.create(input="hi", **ask)
    assert isinstance(found, Weather)


def with_langchain(**options: Any) -> None:
    model = ChatOpenAI(base_url=URL, api_key="none", model="mini-infer", max_retries=0, **options)
    assert model.bind_tools([weather], tool_choice="any").invoke("hi").tool_calls[0]["name"] == "weather"
    assert isinstance(model.with_structured_output(Weather).invoke("hi"), Weather)
    whole: Any = None
    for chunk in model.bind_tools([weather], tool_choice="weather").stream("hi"):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"]["city"] in ("Paris", "Oslo")


def with_an_agent() -> None:
    """Of langchain, whose model calls the tool until it happens to answer."""
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    for text, said in ((call, "rain in Oslo"), ("It rains.", "It rains.")):
        model = ChatOpenAI(base_url=URL, api_key="none", model="mini-infer", extra_body={"guided_choice": [text]})
        steps = create_agent(model, [weather]).stream({"messages": [("user", "hi")]}, {"recursion_limit": 5})
        told = [
            message.content
            for step in _until_the_limit(steps)
            for part in step.values()
            for message in part["messages"]
        ]
        assert said in told


def _until_the_limit(steps: Any) -> Any:
    from langgraph.errors import GraphRecursionError

    try:
        yield from steps
    except GraphRecursionError:
        return


def with_litellm() -> None:
    """Falls back to another model where a prompt is too long: here to the same one, which then takes its end alone."""
    here = {"model": "openai/mini-infer", "api_base": URL, "api_key": "none", "max_tokens": 4}
    cuts = {**here, "extra_body": {"truncate_prompt_tokens": -1}}
    router = litellm.Router(
        [{"model_name": "small", "litellm_params": here}, {"model_name": "large", "litellm_params": cuts}],
        context_window_fallbacks=[{"small": ["large"]}],
    )
    long: list[Any] = [{"role": "user", "content": "é" * 5000}]  # two tokens each
    assert router.completion("small", long).usage.prompt_tokens == 8192 - 4
    try:
        litellm.completion(messages=long, **here)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("the error was not understood")


with_instructor()
with_langchain()
with_langchain(use_responses_api=True)
with_an_agent()
with_litellm()
