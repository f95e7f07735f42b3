"""The API as its users meet it: OpenAI's own Python client."""

from __future__ import annotations

import asyncio
import json
import runpy
import sys
from collections.abc import Iterator

import openai
import pytest
from http_server import ROOT, Server, running

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--served-model-name", "alias") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "alias"
    assert client.models.retrieve("dry").id == "alias"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other")
    assert error.value.code == "model_not_found"


@pytest.mark.parametrize("name", ["dry", "alias"])
def test_chat(client: openai.OpenAI, name: str) -> None:
    answer = client.chat.completions.create(model=name, messages=MESSAGES, max_completion_tokens=7, temperature=0)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (7, answer.usage.prompt_tokens + 7)
    assert answer._request_id == answer.id


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    ask = {"model": "dry", "messages": MESSAGES, "max_tokens": 50, "temperature": 0, "n": 2, "seed": 3}
    whole = client.chat.completions.create(**ask)
    texts, reasons, roles = ["", ""], {}, []
    stream = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    *chunks, last = stream
    for chunk in chunks:
        (choice,) = chunk.choices
        roles.append((choice.index, choice.delta.role))
        texts[choice.index] += choice.delta.content
        reasons[choice.index] = choice.finish_reason
        assert chunk.usage is None
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert [role for role in roles if role[1]] == [(0, "assistant"), (1, "assistant")]
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


def test_without_stream_options_no_chunk_tells_the_usage(client: openai.OpenAI) -> None:
    for chunk in client.chat.completions.create(model="dry", messages=MESSAGES, max_tokens=3, stream=True):
        assert chunk.choices
        assert "usage" not in chunk.model_fields_set


def test_async_client_and_many_at_once(server: Server) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model="dry", messages=MESSAGES, max_tokens=30, seed=seed, stream=True
        )
        return "".join([chunk.choices[0].delta.content async for chunk in stream])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, seed % 10) for seed in range(40)))

    texts = asyncio.run(main())
    assert texts[:10] == texts[10:20] == texts[30:]
    assert len(set(texts)) == 10


def test_leaving_a_stream_early_frees_the_request(server: Server, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="dry", messages=MESSAGES, max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    server.wait_until_idle()


def test_completions_of_a_batch(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="dry", prompt=["ab", "cd"], n=2, max_tokens=4, temperature=0, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:2] for choice in answer.choices] == ["ab", "ab", "cd", "cd"]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 16)
    texts = [""] * 4
    for chunk in client.completions.create(
        model="dry", prompt=[[97, 98], [99, 100]], n=2, max_tokens=4, temperature=0, echo=True, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]


def test_logprobs_of_chat(client: openai.OpenAI) -> None:
    ask = {"model": "dry", "messages": MESSAGES, "max_tokens": 6, "seed": 5, "logprobs": True, "top_logprobs": 3}
    (choice,) = client.chat.completions.create(**ask).choices
    tokens = choice.logprobs.content
    assert len(tokens) == 6
    assert b"".join(bytes(token.bytes) for token in tokens).decode(errors="replace") == choice.message.content
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in tokens)
    streamed = []
    for chunk in client.chat.completions.create(**ask, stream=True):
        streamed += chunk.choices[0].logprobs.content
    assert streamed == tokens


def test_logprobs_of_an_echoed_prompt(client: openai.OpenAI) -> None:
    ask = {"model": "dry", "prompt": "hello", "seed": 1, "echo": True, "logprobs": 2, "n": 2}
    answer = client.completions.create(**ask, max_tokens=3)
    for choice in answer.choices:
        found = choice.logprobs
        assert found.tokens[:5] == list("hello")
        assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 8
        assert found.token_logprobs[0] is None
        assert all(logprob <= 0 for logprob in found.token_logprobs[1:])
        assert all(2 <= len(top) <= 3 for top in found.top_logprobs[1:])
        assert found.text_offset[:6] == [0, 1, 2, 3, 4, 5]
    scored = client.completions.create(**ask, max_tokens=0)
    assert [choice.text for choice in scored.choices] == ["hello", "hello"]
    assert scored.choices[0].logprobs.token_logprobs == answer.choices[0].logprobs.token_logprobs[:5]
    assert scored.usage.completion_tokens == 0


def test_stop_strings_and_tokens(client: openai.OpenAI) -> None:
    ask = {"model": "dry", "prompt": "abc", "temperature": 0, "max_tokens": 20}
    text = client.completions.create(**ask).choices[0].text
    (choice,) = client.completions.create(**ask, stop=text[5:7]).choices
    assert (choice.text, choice.finish_reason) == (text[: text.index(text[5:7])], "stop")
    assert choice.stop_reason == text[5:7]


def test_what_goes_beyond_openai(client: openai.OpenAI) -> None:
    extra = {"ignore_eos": True, "min_tokens": 3, "top_k": 1, "min_p": 0.1, "repetition_penalty": 1.1, "priority": 2}
    answer = client.completions.create(
        model="dry", prompt=[5, 6, 7], max_tokens=9, presence_penalty=1, logit_bias={"65": 100}, extra_body=extra
    )
    assert answer.usage.completion_tokens == 9
    assert "A" in answer.choices[0].text
    greedy = client.completions.create(model="dry", prompt=[5, 6, 7], max_tokens=9, temperature=0)
    only_best = client.completions.create(model="dry", prompt=[5, 6, 7], max_tokens=9, extra_body={"top_k": 1})
    assert only_best.choices[0].text == greedy.choices[0].text


def test_json_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 9}}, "required": ["age"]}
    schema |= {"additionalProperties": False}
    answer = client.chat.completions.create(
        model="dry",
        messages=MESSAGES,
        max_tokens=200,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}},
    )
    assert isinstance(json.loads(answer.choices[0].message.content)["age"], int)
    assert answer.choices[0].finish_reason == "stop"


def test_text_parts_are_one_text(client: openai.OpenAI) -> None:
    ask = {"model": "dry", "max_tokens": 8, "temperature": 0}
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    split = client.chat.completions.create(**ask, messages=[{"role": "user", "content": parts}])
    plain = client.chat.completions.create(**ask, messages=[{"role": "user", "content": "one\ntwo"}])
    assert split.choices[0].message == plain.choices[0].message


def test_an_answer_can_be_sent_back(client: openai.OpenAI) -> None:
    ask = {"model": "dry", "max_tokens": 4}
    first = client.chat.completions.create(**ask, messages=MESSAGES).choices[0].message
    history = [*MESSAGES, first.model_dump(), {"role": "user", "content": "and?"}]
    assert client.chat.completions.create(**ask, messages=history).choices


def test_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="dry", messages=MESSAGES, temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="dry", messages=[{"role": "user", "content": "x" * 9000}])
    assert error.value.code == "context_length_exceeded"


def test_the_example_runs(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["openai_client.py", "--url", server.url])
    runpy.run_path(str(ROOT / "examples" / "openai_client.py"), run_name="__main__")
    assert "tokens" in capsys.readouterr().out
