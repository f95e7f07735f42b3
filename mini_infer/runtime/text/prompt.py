"""The three forms of a prompt, turned into token ids or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mini_infer.core.errors import RequestError
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.core.token_ids import pack
from mini_infer.runtime.text.conversation import Conversation
from mini_infer.runtime.text.tokenizer import Tokenizer

ChatMessage = Mapping[str, Any]  # {"role": ..., "content": ...}
Params = SamplingParams | Mapping[str, Any]  # a mapping holds arguments of SamplingParams
Prompt = str | Sequence[int] | Sequence[ChatMessage] | Conversation


def pair_prompts(
    prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] | None
) -> list[tuple[Prompt, Params | None]]:
    """Each prompt, of one or a list of them, with its parameters, which are one for all or a list."""
    if not isinstance(prompts, (str, Sequence)):
        raise RequestError(f"prompts are one prompt or a list of them, not {type(prompts).__name__}", "prompt")
    single = isinstance(prompts, str) or (prompts and isinstance(prompts[0], (int, Mapping)))
    batch: list[Prompt] = [prompts] if single else list(prompts)  # type: ignore[list-item, arg-type]
    each = [params] * len(batch) if params is None or isinstance(params, (SamplingParams, Mapping)) else params
    if not isinstance(each, Sequence) or isinstance(each, (str, bytes)):
        raise RequestError(f"sampling parameters are SamplingParams or a mapping, not {type(each).__name__}")
    if len(each) != len(batch):
        raise RequestError(f"{len(batch)} prompts but {len(each)} sampling parameters: give one, or one each")
    return list(zip(batch, each, strict=True))


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> tuple[str | None, list[int]]:
    """The prompt's text, where it was given as text, and its token ids. Raises RequestError where it is empty, of
    another type, or has a token id outside [0, vocab_size)."""
    if isinstance(prompt, str):
        return prompt, _checked(tokenizer.encode(prompt), vocab_size)
    if isinstance(prompt, Conversation):
        return None, _checked(tokenizer.apply_chat_template(prompt), vocab_size)
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Sequence):
        raise RequestError(
            f"a prompt is a string, a list of token ids or a list of chat messages, not {type(prompt).__name__}",
            "prompt",
        )
    if prompt and isinstance(prompt[0], Mapping):
        return None, _checked(tokenizer.apply_chat_template(list(prompt)), vocab_size)  # type: ignore[arg-type]
    return None, _checked(prompt, vocab_size)  # type: ignore[arg-type]


def require_fit(num_tokens: int, max_model_len: int, why: str = "") -> None:
    """Raises RequestError where a prompt leaves no room for an output token; `why`: what makes max_model_len."""
    if num_tokens >= max_model_len:
        reason = f" ({why})" if why else ""
        raise RequestError(
            f"the prompt has {num_tokens} tokens; at most {max_model_len - 1} are allowed, so that one can be "
            f"generated: this model's maximum context length is {max_model_len} tokens{reason}",
            "prompt",
        )


def require_known_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError where a stop token or a biased one is none of the vocabulary."""
    named = [("stop token", token, "stop_token_ids") for token in params.stop_token_ids]
    named += [("biased token", token, "logit_bias") for token, _ in params.biases]
    for name, token, param in named:
        if not 0 <= token < vocab_size:
            raise RequestError(f"{name} id {token} is out of range: 0 to {vocab_size - 1} are allowed", param)


def _checked(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    if not token_ids:
        raise RequestError("the prompt is empty: at least one token is needed", "prompt")
    # At C speed for the usual case; the slow search only to name the culprit.
    packed = pack(token_ids)
    if packed is not None and np.asarray(packed).max() < vocab_size:
        return list(token_ids)
    for index, token in enumerate(token_ids):
        if isinstance(token, bool) or not hasattr(token, "__index__"):  # numpy's integers have it too
            raise RequestError(f"prompt token {index} is {token!r}: token ids are integers", "prompt")
        if not 0 <= token < vocab_size:
            allowed = f"ids from 0 to {vocab_size - 1} are allowed"
            raise RequestError(f"prompt token {index} has id {token}: {allowed}", "prompt")
    return [int(token) for token in token_ids]
