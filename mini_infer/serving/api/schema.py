"""The types of the OpenAI API, as far as mini-infer speaks it. Types, and how many there may be: which values are
allowed is checked where they are used (SamplingParams, the prompt), so that the HTTP API and the Python API refuse the
same things.

Known fields that cannot be served are refused (refused.py); those that nobody knows are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SkipValidation,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from mini_infer.serving.api.refused import (
    OF_CHAT,
    OF_COMPLETIONS,
    OF_OPENAI,
    OF_OTHER_SERVERS,
    OF_RESPONSES,
    Refused,
    check,
)

MAX_ENTRIES = {
    "stop": 64,  # the engine looks for each of them at every token, and its steps are everybody's
    "stop_token_ids": 64,
    "logit_bias": 1024,  # added at every token, too; OpenAI's server takes 300
    "messages": 16_384,
    "input": 16_384,
    "tools": 128,  # OpenAI's limit
    "bad_words": 64,
    "allowed_token_ids": 1024,
    "guided_choice": 1024,
}
LONG_FIELDS = ("prompt", "messages", "input", "tokens")  # as long as a body may be


class _Few(NamedTuple):
    """A field of at most as many entries as MAX_ENTRIES says. It is looked at before they are, each of which could be
    wrong."""

    name: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        limit = MAX_ENTRIES[self.name]
        return {**handler(schema), "maxItems": limit, "maxProperties": limit}  # each is for its own type

    def _check(self, value: object) -> object:
        limit = MAX_ENTRIES[self.name]
        if isinstance(value, (list, dict)) and len(value) > limit:
            raise ValueError(f"it has {len(value)} entries; at most {limit} are allowed")
        return value


Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # what the engine's wire carries
# The forms of what is not validated here are told apart by the code that uses them, with one clear message instead of
# one for each form.
PromptField = SkipValidation[str | list[int] | list[str] | list[list[int]]]
ContentField = SkipValidation[str | list[dict[str, Any]] | None]
StopField = Annotated[SkipValidation[str | list[str] | None], _Few("stop")]
InputField = Annotated[SkipValidation[str | list[dict[str, Any]]], _Few("input")]
ToolChoice = SkipValidation[Literal["none", "auto", "required"] | dict[str, Any] | None]


class ApiModel(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())

    refused: ClassVar[Mapping[str, Refused]] = {}

    @model_validator(mode="before")
    @classmethod
    def _check_refused(cls, fields: Any) -> Any:
        if cls.refused and isinstance(fields, dict):
            check(fields, cls.refused)
        return fields


class StreamOptions(ApiModel):
    refused = {"include_obfuscation": Refused("no padding is sent: leave it out", (False,))}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="Each event says the usage so far.")


class JsonSchema(ApiModel):
    name: str | None = None
    description: str | None = Field(
        None, description="A label: the model is told of the schema by its constraint alone."
    )
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(ApiModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(ApiModel):
    """vLLM's: what the text must match. One of them, and no other constraint."""

    refused = {
        "structural_tag": Refused("use `json`, `regex`, `choice` or `grammar`"),
        "whitespace_pattern": Refused('put it into the schema: "x-guidance": {"whitespace_pattern": ...}'),
        "disable_any_whitespace": Refused(
            "put it into the schema: {'x-guidance': {'whitespace_flexible': false}}", (False,)
        ),
        "disable_additional_properties": Refused("put additionalProperties: false into the schema", (False,)),
        "disable_fallback": Refused("there is none: leave it out", (True, False)),
    }

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema, or its text.")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(None, description="In Lark.")
    json_object: bool | None = None


class GenerationRequest(ApiModel):
    """What all ways to ask for text have in common."""

    refused = {**OF_OPENAI, **OF_OTHER_SERVERS}

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
    logit_bias: Annotated[dict[str, float] | None, _Few("logit_bias")] = Field(
        None, description="Token id -> what is added to its logit."
    )
    response_format: ResponseFormat | None = None
    user: str | None = Field(None, description="A label, which changes no answer; so are the next ones.")
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Beyond OpenAI's API.
    request_id: str | None = Field(  # and of a header, in which a line must not end
        None,
        description="Becomes a part of the answer's id; without control characters.",
        max_length=128,
        pattern=r"^[^\x00-\x1f\x7f]*$",
    )
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = Field(None, description="As structured_outputs.json.")
    guided_regex: str | None = None
    guided_choice: Annotated[list[str] | None, _Few("guided_choice")] = None
    guided_grammar: str | None = Field(None, description="In Lark.")
    bad_words: Annotated[list[str] | None, _Few("bad_words")] = Field(
        None, description="Texts that the answer does not contain; not together with another constraint."
    )
    allowed_token_ids: Annotated[list[Integer] | None, _Few("allowed_token_ids")] = Field(
        None, description="No other tokens; not together with another constraint."
    )
    truncate_prompt_tokens: Integer | None = Field(
        None, description="Only the prompt's last ones; -1: as many as leave room for max_tokens."
    )
    best_of: Integer | None = Field(None, description="Only as many as n.")
    top_k: Integer | None = Field(None, description="0 or -1: all tokens.")
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Integer | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Integer] | None, _Few("stop_token_ids")] = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Integer | None = Field(
        None, description="Smaller goes first, with scheduler.policy=priority or patience."
    )
    cache_salt: str | None = Field(None, description="Cached prefixes are shared only under the same salt.")
    timeout: float | None = Field(None, description="Seconds after which the request ends with an error.")


class FunctionCall(ApiModel):
    name: str
    arguments: str | dict[str, Any] | None = Field(None, description="JSON.")


class ToolCall(ApiModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(ApiModel):
    refused = {
        "function_call": Refused("use `tool_calls`, its successor"),
        "refusal": Refused("send it as `content`"),
        "audio": Refused("send its transcript as `content`"),
    }

    role: str
    content: ContentField = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = Field(None, description="Of the call that a message with the role tool answers.")
    reasoning_content: str | None = None


# One wrong entry is enough to refuse all.
Messages = Annotated[list[ChatMessage], Field(fail_fast=True), _Few("messages")]


class Function(ApiModel):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of an object; none: no parameters.")
    strict: bool | None = Field(None, description="The arguments follow the schema also where tool_choice is auto.")


class _Typed(ApiModel):
    type: Literal["function"]


class Tool(_Typed):
    function: Function


class ChatRequest(GenerationRequest):
    refused = {**GenerationRequest.refused, **OF_CHAT}

    messages: Messages
    max_completion_tokens: Integer | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    tools: Annotated[list[Tool] | None, _Few("tools")] = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call.")
    reasoning_effort: str | None = Field(None, description="Where the model's chat template asks for it.")
    # Beyond OpenAI's API.
    include_reasoning: bool | None = Field(None, description="false: reasoning_content is left out.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the model's chat template.")
    add_generation_prompt: bool | None = Field(None, description="false: the prompt ends with the last message.")
    continue_final_message: bool | None = Field(None, description="The answer goes on with the last message.")


class CompletionRequest(GenerationRequest):
    refused = {**GenerationRequest.refused, **OF_COMPLETIONS}

    prompt: PromptField
    echo: bool | None = None
    logprobs: Integer | None = None
    # Beyond OpenAI's API.
    return_token_ids: bool | None = Field(None, description="Choices also say their token_ids.")
    return_spans: bool | None = Field(None, description="`usage` also says the seconds in the queue, in prefill, ...")


class ResponseTool(Function, _Typed):
    """As Tool, but flat."""

    refused = {
        "defer_loading": Refused("the model is told of all tools: leave it out", (False,)),
        "allowed_callers": Refused("the model calls, and nobody else: leave it out", (["direct"],)),
        "async": Refused("leave it out", (False,)),
        "output_schema": Refused("describe it in `description`"),
    }


class ResponseReasoning(ApiModel):
    refused = {
        "summary": Refused("the reasoning itself is in the answer: leave it out"),
        "generate_summary": Refused("the reasoning itself is in the answer: leave it out"),
        "context": Refused("send the reasoning items that the model should see: leave it out", ("auto",)),
        "mode": Refused("leave it out", ("standard",)),
    }

    effort: str | None = None


class ResponseTextFormat(ApiModel):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = Field(None, description="As with response_format.")
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseText(ApiModel):
    refused = {"verbosity": OF_OPENAI["verbosity"]}

    format: ResponseTextFormat | None = None


class ResponsesRequest(GenerationRequest):
    """Of the fields beyond OpenAI's API, those of /v1/chat/completions are taken."""

    refused = {**GenerationRequest.refused, **OF_RESPONSES}

    input: InputField
    instructions: str | None = None
    max_output_tokens: Integer | None = None
    tools: Annotated[list[ResponseTool] | None, _Few("tools")] = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(ApiModel):
    """A text (`prompt`) or a conversation (`messages`)."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None


class DetokenizeRequest(ApiModel):
    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]
