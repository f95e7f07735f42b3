"""No field is silently ignored: each one of OpenAI's requests, and of other servers', is honoured or a 400."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_server import Server
from openai.types import completion_create_params, shared_params
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionFunctionToolParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import (
    FunctionToolParam,
    ResponseFormatTextJSONSchemaConfigParam,
    ResponseTextConfigParam,
    response_create_params,
)
from openai.types.shared_params import response_format_json_schema

from mini_infer.serving.api import schema
from mini_infer.serving.api.sampling import SAME_NAME

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PATHS: dict[str, tuple[type[schema.ApiModel], list[Any], dict[str, Any]]] = {
    CHAT: (
        schema.ChatRequest,
        [chat_create_params.CompletionCreateParamsBase, chat_create_params.CompletionCreateParamsStreaming],
        {"messages": [{"role": "user", "content": "hi"}]},
    ),
    TEXT: (
        schema.CompletionRequest,
        [completion_create_params.CompletionCreateParamsBase, completion_create_params.CompletionCreateParamsStreaming],
        {"prompt": "hi"},
    ),
    RESPONSES: (
        schema.ResponsesRequest,
        [response_create_params.ResponseCreateParamsBase, response_create_params.ResponseCreateParamsStreaming],
        {"input": "hi"},
    ),
}
PARTS: list[tuple[type[schema.ApiModel], Any]] = [
    (schema.StreamOptions, ChatCompletionStreamOptionsParam),
    (schema.StreamOptions, response_create_params.StreamOptions),
    (schema.ChatMessage, ChatCompletionAssistantMessageParam),
    (schema.ChatMessage, ChatCompletionSystemMessageParam),
    (schema.ChatMessage, ChatCompletionToolMessageParam),
    (schema.ChatMessage, ChatCompletionUserMessageParam),
    (schema.Tool, ChatCompletionFunctionToolParam),
    (schema.Function, shared_params.FunctionDefinition),
    (schema.ResponseFormat, shared_params.ResponseFormatJSONSchema),
    (schema.JsonSchema, response_format_json_schema.JSONSchema),
    (schema.ResponseReasoning, shared_params.Reasoning),
    (schema.ResponseTool, FunctionToolParam),
    (schema.ResponseText, ResponseTextConfigParam),
    (schema.ResponseTextFormat, ResponseFormatTextJSONSchemaConfigParam),
]
OTHERS = [
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend",
    "guided_whitespace_pattern", "structured_outputs", "structural_tag", "best_of", "use_beam_search", "top_k",
    "min_p", "repetition_penalty", "length_penalty", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "min_tokens", "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens",
    "allowed_token_ids", "bad_words", "prompt_logprobs", "echo", "add_generation_prompt", "continue_final_message",
    "add_special_tokens", "documents", "chat_template", "chat_template_kwargs", "mm_processor_kwargs", "priority",
    "request_id", "logits_processors", "return_tokens_as_token_ids", "return_token_ids", "cache_salt",
    "kv_transfer_params", "vllm_xargs", "include_reasoning", "thinking_token_budget", "regex", "ebnf", "json_schema",
    "stop_regex", "no_stop_trim", "separate_reasoning", "stream_reasoning", "lora_path", "session_params",
    "return_hidden_states", "custom_logit_processor",
]  # fmt: skip
LABELS = {"user", "metadata", "safety_identifier", "prompt_cache_key"}  # they change no answer, at OpenAI's neither
OF_CHAT_ALONE = {"add_generation_prompt", "continue_final_message", "chat_template_kwargs", "include_reasoning"}


def known(model: type[schema.ApiModel]) -> set[str]:
    aliases = {field.alias or name for name, field in model.model_fields.items()}
    return aliases | set(model.refused)


@pytest.mark.parametrize("path", PATHS)
def test_every_field_of_openais_requests(path: str) -> None:
    model, theirs, _ = PATHS[path]
    names = {name for each in theirs for base in each.__mro__ for name in getattr(base, "__annotations__", ())}
    assert len(names) > 15
    assert names - known(model) == set()


@pytest.mark.parametrize(("model", "theirs"), PARTS, ids=lambda each: each.__name__)
def test_every_field_of_their_parts(model: type[schema.ApiModel], theirs: Any) -> None:
    assert set(theirs.__annotations__) - known(model) == set()


def test_fields_of_other_servers() -> None:
    assert set(OTHERS) - known(schema.ChatRequest) == set()
    assert set(OTHERS) - OF_CHAT_ALONE - known(schema.CompletionRequest) == set()


@pytest.mark.parametrize("path", PATHS)
def test_what_is_refused_is_a_400(shared_server: Server, path: str) -> None:
    model, _, body = PATHS[path]
    for name, refused in model.refused.items():
        response = shared_server.post(path, **{**body, name: {"some": "thing"}})
        assert response.status_code == 400, name
        error = response.json()["error"]
        assert error["param"] == name
        assert refused.instead in error["message"]
        for harmless in (None, *refused.harmless):
            assert shared_server.post(path, **{**body, name: harmless, SHORT[path]: 1}).status_code == 200, name


SHORT = {CHAT: "max_completion_tokens", TEXT: "max_tokens", RESPONSES: "max_output_tokens"}


def read_names() -> Iterator[str]:
    """Of attributes that the API's code reads, of texts that name one, and of what SamplingParams has, too."""
    yield from SAME_NAME
    for file in Path(schema.__file__).parent.rglob("*.py"):
        if file.name in ("schema.py", "refused.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                yield node.attr
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"\w+", node.value):
                yield node.value


def test_every_field_that_is_taken_is_read() -> None:
    fields = {name for model, *_ in PATHS.values() for name in model.model_fields}
    assert fields - LABELS - set(read_names()) == set()


# --- what is honoured ---------------------------------------------------------------------------------------------


def said(server: Server, **body: Any) -> str:
    return server.complete(max_tokens=40, **body)["choices"][0]["text"]


def test_all_names_of_a_constraint(shared_server: Server) -> None:
    schema_ = {"enum": ["yes"]}
    for fields, text in [
        ({"guided_choice": ["yes"]}, "yes"),
        ({"guided_choice": ['"é\n']}, '"é\n'),
        ({"guided_regex": "y(e)s"}, "yes"),
        ({"guided_grammar": 'start: "yes"'}, "yes"),
        ({"guided_json": schema_}, '"yes"'),
        ({"guided_json": '{"enum": ["yes"]}'}, '"yes"'),
        ({"structured_outputs": {"choice": ["yes"]}}, "yes"),
        ({"structured_outputs": {"regex": "yes"}}, "yes"),
        ({"structured_outputs": {"grammar": 'start: "yes"'}}, "yes"),
        ({"structured_outputs": {"json": schema_}}, '"yes"'),
    ]:
        assert said(shared_server, **fields) == text, fields
    assert said(shared_server, structured_outputs={"json_object": True}, seed=1).startswith("{")
    response = shared_server.post(TEXT, prompt="x", guided_regex="a", guided_choice=["b"])
    assert "give one" in response.json()["error"]["message"]


def test_words_and_tokens(shared_server: Server) -> None:
    plain = said(shared_server, seed=7, ignore_eos=True)
    without = said(shared_server, seed=7, ignore_eos=True, bad_words=[plain[:2], plain[3:5], "a.b/\n"])
    assert plain[:2] not in without
    assert plain[3:5] not in without
    assert set(said(shared_server, allowed_token_ids=[65, 66])) <= {"A", "B"}
    for fields in ({"bad_words": [""]}, {"allowed_token_ids": [-1]}, {"guided_choice": []}, {"best_of": 3}):
        response = shared_server.post(TEXT, prompt="x", **fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(fields)))


def test_a_prompt_is_truncated(shared_server: Server) -> None:
    for prompt in ("abcdef", list(b"abcdef")):
        answer = shared_server.complete(prompt, max_tokens=4, temperature=0, truncate_prompt_tokens=3)
        assert answer["usage"]["prompt_tokens"] == 3
        assert answer["choices"] == shared_server.complete("def", max_tokens=4, temperature=0)["choices"]
    for prompt in ([5] * 20_000, "x" * 20_000):  # beyond what the model has room for
        long = shared_server.complete(prompt, max_tokens=4, truncate_prompt_tokens=-1)
        assert long["usage"]["prompt_tokens"] == 8192 - 4
    assert shared_server.post(TEXT, prompt="x", truncate_prompt_tokens=0).status_code == 400


def test_usage_of_each_event(shared_server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path in (CHAT, TEXT):
        body = {**PATHS[path][2], "max_tokens": 6, "ignore_eos": True, "stream": True, "stream_options": options}
        lines = shared_server.post(path, **body).text.split("\n\n")
        counts = [int(count) for line in lines for count in re.findall(r'"completion_tokens":(\d+)', line)]
        assert counts == sorted(counts)
        assert counts[-2:] == [6, 6]
        assert len(counts) == len(lines) - 2  # but for [DONE], and the end
    assert shared_server.post(TEXT, prompt="x", stream_options=options).json()["error"]["param"] == "stream_options"


def test_where_a_prompt_ends(shared_server: Server) -> None:
    def num_tokens(**fields: Any) -> int:
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]
        return shared_server.post(CHAT, messages=messages, max_tokens=1, **fields).json()["usage"]["prompt_tokens"]

    turn = len("assistant\n") + 1
    assert num_tokens() == num_tokens(add_generation_prompt=False) + turn
    assert num_tokens(continue_final_message=True) == num_tokens(add_generation_prompt=False) - 2


def test_an_id_that_would_end_a_line_of_the_answers_head_is_refused(shared_server: Server) -> None:
    for odd in ("a\nb", "a\x07b", "a\x7f"):
        answer = shared_server.post("/v1/completions", prompt=[1], max_tokens=1, request_id=odd)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")
    assert shared_server.complete(max_tokens=1, request_id="中é")["id"] == "cmpl-中é"


def test_names(shared_server: Server) -> None:
    answer = shared_server.complete(model="mini-infer", max_tokens=1, request_id="mine")
    assert answer["id"] == "cmpl-mine"


def test_a_long_prompt_is_told_as_clients_look_for_it(shared_server: Server) -> None:
    for prompt in ("x" * 9000, [5] * 9000):
        error = shared_server.post(TEXT, prompt=prompt).json()["error"]
        assert "maximum context length is 8192 tokens" in error["message"]
        assert error["code"] == "context_length_exceeded"
