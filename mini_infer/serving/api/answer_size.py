"""How large an answer may become, judged before the engine works for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mini_infer.core.errors import RequestError
from mini_infer.core.sampling_params import SamplingParams

LOGPROB = 8  # a log-probability with its token takes as much memory as this many tokens of text


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
