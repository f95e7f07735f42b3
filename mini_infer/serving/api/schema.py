"""The types of the OpenAI API, as far as mini-infer speaks it. Types, and how many there may be: which values are
allowed is checked where they are used (SamplingParams, the prompt), so that the HTTP API and the Python API refuse the
same things.

Unknown fields are ignored, as OpenAI's server does. Known ones that cannot be served are refused (`Unsupported`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema


def _refuse(value: object) -> object:
    if value not in (None, [], {}, "", "none"):
        raise ValueError("this server does not support it: leave it out")
    return value


MAX_ENTRIES = {
    "stop": 64,  # the engine looks for each of them at every token, and its steps are everybody's
    "stop_token_ids": 64,
    "logit_bias": 1024,  # added at every token, too; OpenAI's server takes 300
    "messages": 16_384,
}
LONG_FIELDS = ("prompt", "messages", "tokens")  # as long as a body may be


def _few(name: str) -> BeforeValidator:
    """Looked at before the entries are, each of which could be wrong."""
    limit = MAX_ENTRIES[name]

    def check(value: object) -> object:
        if isinstance(value, (list, dict)) and len(value) > limit:
            raise ValueError(f"it has {len(value)} entries; at most {limit} are allowed")
        return value

    return BeforeValidator(check)


Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # what the engine's wire carries
Unsupported = Annotated[Any, AfterValidator(_refuse), WithJsonSchema({"type": "null"})]
# Their forms are told apart by the code that uses them, with one clear message instead of one for each form.
PromptField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]
ContentField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "object", "properties": {"type": {"const": "text"}, "text": {}}}},
                {"type": "null"},
            ]
        }
    ),
]
StopField = Annotated[
    Any,
    _few("stop"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "maxItems": MAX_ENTRIES["stop"]},
            ]
        }
    ),
]


class ApiModel(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())


class StreamOptions(ApiModel):
    include_usage: bool | None = None


class JsonSchema(ApiModel):
    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(ApiModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationRequest(ApiModel):
    """What both ways to ask for text have in common."""

    model: str | None = Field(None, description="The served model, or its alias; left out, it is the served one.")
    n: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Integer | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: Integer | None = None
    stop: StopField = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Annotated[dict[str, float] | None, _few("logit_bias")] = Field(
        None,
        description="Token id -> what is added to its logit.",
        json_schema_extra={"maxProperties": MAX_ENTRIES["logit_bias"]},
    )
    response_format: ResponseFormat | None = None
    # Beyond OpenAI's API.
    top_k: Integer | None = Field(None, description="0 or -1: all tokens.")
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Integer | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Integer] | None, _few("stop_token_ids")] = Field(
        None, json_schema_extra={"maxItems": MAX_ENTRIES["stop_token_ids"]}
    )
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Integer | None = Field(None, description="Smaller goes first, with scheduler.policy=priority.")
    cache_salt: str | None = Field(None, description="Cached prefixes are shared only under the same salt.")
    timeout: float | None = Field(None, description="Seconds after which the request ends with an error.")


class ChatMessage(ApiModel):
    role: str
    content: ContentField = None
    name: str | None = None
    tool_calls: Unsupported = None
    function_call: Unsupported = None


# One wrong entry is enough to refuse all.
Messages = Annotated[list[ChatMessage], Field(fail_fast=True), _few("messages")]


class ChatRequest(GenerationRequest):
    messages: Messages = Field(json_schema_extra={"maxItems": MAX_ENTRIES["messages"]})
    max_completion_tokens: Integer | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    tools: Unsupported = None
    functions: Unsupported = None
    audio: Unsupported = None


class CompletionRequest(GenerationRequest):
    prompt: PromptField
    echo: bool | None = None
    logprobs: Integer | None = None
    best_of: Integer | None = Field(None, description="Only as many as n.")
    return_token_ids: bool | None = Field(None, description="Choices also say their token_ids; beyond OpenAI's API.")
    suffix: Unsupported = None


class TokenizeRequest(ApiModel):
    """A text (`prompt`) or a conversation (`messages`)."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = Field(None, json_schema_extra={"maxItems": MAX_ENTRIES["messages"]})


class TokenizeResponse(ApiModel):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(ApiModel):
    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


class DetokenizeResponse(ApiModel):
    prompt: str


# What is answered. These document the answers; the answers themselves are plain dicts.


class ErrorDetail(ApiModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ApiModel):
    error: ErrorDetail


class PromptTokensDetails(ApiModel):
    cached_tokens: int


class Usage(ApiModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(ApiModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ApiModel):
    content: list[ChatTokenLogprob]
    refusal: None = None


class AssistantMessage(ApiModel):
    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(ApiModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = Field(description="The stop token or string that ended it.")


class ChatCompletion(ApiModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionLogprobs(ApiModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(ApiModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    token_ids: list[int] | None = Field(None, description="Where return_token_ids asks for them.")


class Completion(ApiModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(ApiModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mini-infer"
    root: str
    max_model_len: int


class ModelList(ApiModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
