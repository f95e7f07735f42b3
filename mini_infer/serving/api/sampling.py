"""From the fields of an API request to SamplingParams, which judges their values."""

from __future__ import annotations

import math
from typing import Any

from mini_infer.core.errors import RequestError
from mini_infer.core.sampling_params import GrammarKind, SamplingParams
from mini_infer.serving.api.schema import GenerationRequest, ResponseFormat

SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


def sampling_params(
    body: GenerationRequest, max_tokens: int | None, logprobs: int | None, **more: Any
) -> SamplingParams:
    """Args:
        more: fields that only one kind of request has.

    Raises:
        RequestError: a value that is not allowed.
    """
    given = {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
    if body.logit_bias:
        given["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    grammar = _grammar(body.response_format)
    if grammar is not None:
        given["grammar"] = grammar
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given, **more)


def deadline_s(body: GenerationRequest, limit: float | None) -> float | None:
    """Seconds that the request may take: its own wish, within the server's limit."""
    wish = body.timeout
    if wish is not None and not 0 < wish < math.inf:
        raise RequestError(f"timeout must be a number of seconds above 0, got {wish!r}", "timeout")
    return min((seconds for seconds in (wish, limit) if seconds is not None), default=None)


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 12):
        raise RequestError(f"logit_bias has the key {key[:40]!r}: its keys are token ids, such as '42'", "logit_bias")
    return int(key)


def _grammar(wanted: ResponseFormat | None) -> Any:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return GrammarKind.json_object.value
    if wanted.json_schema is None:
        raise RequestError(
            'response_format of type json_schema needs the schema: {"type": "json_schema", "json_schema": '
            '{"name": ..., "schema": {...}}}',
            "response_format",
        )
    return GrammarKind.json_schema.value, wanted.json_schema.schema_
