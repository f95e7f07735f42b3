"""From the fields of an API request to SamplingParams, which judges their values; and how large its answer may become,
judged before the engine works for it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from mini_infer.core.errors import RequestError
from mini_infer.core.sampling_params import GrammarKind, SamplingParams
from mini_infer.serving.api.schema import GenerationRequest, ResponseFormat, StructuredOutputs

SAME_NAME = {field.name for field in dataclasses.fields(SamplingParams)} & set(GenerationRequest.model_fields)
SAME_NAME -= {"max_tokens", "logit_bias"}
LOGPROB = 8  # a log-probability with its token takes as much memory as this many tokens of text


def sampling_params(
    body: GenerationRequest, max_tokens: int | None, logprobs: int | None, **more: Any
) -> SamplingParams:
    """Args:
        more: what only one kind of request has; a `grammar` there goes before the request's own.

    Raises:
        RequestError: a value that is not allowed.
    """
    given = {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
    if body.logit_bias:
        given["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    if body.best_of not in (None, body.n or 1):
        raise RequestError("best_of is not supported beyond n: ask for n, with logprobs, and choose", "best_of")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true", "stream_options")
    grammar = constraint(body)
    if grammar is not None:
        given["grammar"] = grammar
    return SamplingParams(**{"max_tokens": max_tokens, "logprobs": logprobs, **given, **more})


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


def constraint(body: GenerationRequest) -> Any:
    """SamplingParams.grammar, by whichever of its names is used; None without any. Raises RequestError for two."""
    own = body.structured_outputs or StructuredOutputs.model_validate({})
    wanted = {
        "response_format": _response_format(body.response_format),
        "guided_json": _pair(GrammarKind.json_schema, body.guided_json),
        "guided_regex": _pair(GrammarKind.regex, body.guided_regex),
        "guided_choice": _choice("guided_choice", body.guided_choice),
        "guided_grammar": _pair(GrammarKind.lark, body.guided_grammar),
        "structured_outputs.json": _pair(GrammarKind.json_schema, own.json_),
        "structured_outputs.regex": _pair(GrammarKind.regex, own.regex),
        "structured_outputs.choice": _choice("structured_outputs", own.choice),
        "structured_outputs.grammar": _pair(GrammarKind.lark, own.grammar),
        "structured_outputs.json_object": GrammarKind.json_object.value if own.json_object else None,
        "bad_words": _without(body.bad_words),
        "allowed_token_ids": _of_tokens(body.allowed_token_ids),
    }
    asked = {name: grammar for name, grammar in wanted.items() if grammar is not None}
    if len(asked) > 1:
        first, second, *_ = asked
        raise RequestError(f"{first} and {second} both say what the text must be: give one", second.partition(".")[0])
    return next(iter(asked.values()), None)


def _pair(kind: GrammarKind, text: Any) -> Any:
    return None if text is None else (kind.value, text)


def _response_format(wanted: ResponseFormat | None) -> Any:
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
    return _pair(GrammarKind.json_schema, wanted.json_schema.schema_)


def _choice(name: str, texts: list[str] | None) -> Any:
    if texts is None:
        return None
    if not texts or not all(texts):
        raise RequestError(f"{name} must be a list of texts, none of them empty", name)
    return _pair(GrammarKind.lark, "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))


def _without(words: list[str] | None) -> Any:
    """Any text but one that contains a word."""
    if not words:
        return None
    if not all(words):
        raise RequestError("bad_words must be texts, none of them empty", "bad_words")
    any_word = "|".join(re.escape(word).replace("/", r"\/").replace("\n", "n") for word in words)
    return _pair(GrammarKind.lark, f"start: TEXT\nTEXT: /(?s:.*)/ & ~/(?s:.*({any_word}).*)/")


def _of_tokens(token_ids: list[int] | None) -> Any:
    if not token_ids:
        return None
    if min(token_ids) < 0:
        raise RequestError("allowed_token_ids holds a negative number", "allowed_token_ids")
    return _pair(GrammarKind.lark, f"start: token+\ntoken: <[{','.join(map(str, sorted(set(token_ids))))}]>")


# --- how large an answer may become ----------------------------------------------------------------------------------


def bounded(
    params: SamplingParams, prompt_lengths: Sequence[int], max_model_len: int, echo: bool, limit: int
) -> SamplingParams:
    """The parameters, where the answer to these prompts stays within the limit. Where `max_tokens` was left open, it is
    what the limit leaves.

    Args:
        prompt_lengths: in tokens.
        echo: each completion begins with its prompt.
        limit: a token counts 1, a log-probability LOGPROB.

    Raises:
        RequestError: it names the product and the limit.
    """
    n = params.n
    rooms = [max_model_len - length for length in prompt_lengths]
    if params.max_tokens is not None:
        rooms = [min(room, params.max_tokens) for room in rooms]
    per_token = _weight(params.logprobs)
    echoed = n * sum(prompt_lengths) * _weight(params.prompt_logprobs) if echo else 0
    size = echoed + n * sum(rooms) * per_token
    if size <= limit:
        return params
    num_completions = n * len(rooms)
    left = (limit - echoed) // (num_completions * per_token)
    if params.max_tokens is None and left >= max(params.min_tokens, 1):
        return dataclasses.replace(params, max_tokens=left)
    factors = [f"{len(rooms)} prompts" if len(rooms) > 1 else "", f"n = {n}" if n > 1 else ""]
    factors.append(f"{max(rooms) + (max(prompt_lengths) if echo else 0)} tokens")
    if params.logprobs is not None:
        factors.append(f"{params.logprobs + 1} log-probabilities that count {LOGPROB} each")
    raise RequestError(
        f"the answer is too large: {' x '.join(filter(None, factors))} make up to {size}; at most {limit} are allowed "
        "(--max-answer-size). Ask for fewer at a time",
        "n" if params.logprobs is None else "logprobs",
    )


def _weight(logprobs: int | None) -> int:
    """Of a token, with its own log-probability and those of its alternatives."""
    return 1 if logprobs is None else 1 + LOGPROB * (1 + logprobs)
