"""The types of what is answered. They document the answers; the answers themselves are plain dicts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mini_infer.serving.api.schema import ApiModel


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
    spans: dict[str, float] | None = Field(None, description="Where return_spans asks for them.")


class TopLogprob(ApiModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ApiModel):
    content: list[ChatTokenLogprob]
    refusal: None = None


class AnsweredFunction(ApiModel):
    name: str
    arguments: str


class AnsweredCall(ApiModel):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AssistantMessage(ApiModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = Field(None, description="Where the model thinks before it speaks.")
    tool_calls: list[AnsweredCall] | None = Field(None, description="Where the model calls functions.")


class ChatChoice(ApiModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None = Field(description="The stop token or string that ended it.")


class ChatCompletion(ApiModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ResponseAnswer(ApiModel):
    """The items of `output` are of the types message, function_call and reasoning."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


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
    parent: str | None = None  # of an adapter: the model that it adapts
    max_model_len: int | None = None  # None: the model is being loaded


class ModelList(ApiModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(ApiModel):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeResponse(ApiModel):
    prompt: str
