"""POST /v1/completions: prompts in, their continuations out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import Response

from mini_infer.core.errors import RequestError
from mini_infer.core.request import TokenLogprob
from mini_infer.serving.api.logprobs import completion_logprobs
from mini_infer.serving.api.sampling import sampling_params
from mini_infer.serving.api.schema import CompletionRequest
from mini_infer.serving.api.service import Service
from mini_infer.serving.api.sse import DONE, Event, EventStream, EventTemplate, WholeAnswer, new_id
from mini_infer.serving.link.wire import Delta, PromptLogprobs

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def complete(service: Service, body: CompletionRequest) -> Response:
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    more: dict[str, Any] = {}
    if body.echo and body.logprobs is not None:
        more["prompt_logprobs"] = body.logprobs
    scoring = bool(body.echo) and max_tokens == 0
    params = sampling_params(body, max_tokens + scoring, body.logprobs, **more)
    prompts = as_prompts(body.prompt, service.max_requests)
    room = service.prompts.room(body.truncate_prompt_tokens, max_tokens)
    encoded = await service.prompts.encode(prompts, "prompt", room)
    texts = await _echoes(prompts if room is None else encoded, service) if body.echo else None
    streams = service.submit(encoded, params, body)  # behind all that waits: nobody would end them if the client left
    request_id = new_id("cmpl", body.request_id)
    render = CompletionRenderer(request_id, service, body, params.n, encoded, texts, scoring)
    answer = EventStream if body.stream else WholeAnswer
    return answer(streams, render, service.running, request_id)


def as_prompts(prompt: Any, limit: int) -> list[str | list[int]]:
    """One prompt, or a list of at most `limit` of them, as a list."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int)):
        return [prompt]
    if isinstance(prompt, list) and len(prompt) > limit:
        raise RequestError(f"prompt holds {len(prompt)} prompts: at most {limit} are taken", "prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(each, str) or _holds_ids(each) for each in prompt):
        return prompt
    raise RequestError("prompt must be a string, a list of token ids, or a list of those", "prompt")


def _holds_ids(prompt: Any) -> bool:
    """As far as its first entry tells: whoever encodes it looks at all."""
    return isinstance(prompt, list) and not isinstance(next(iter(prompt), 0), dict)


async def _echoes(prompts: Sequence[str | list[int]], service: Service) -> list[str]:
    """Each prompt's text: as it was sent, or what its token ids stand for."""
    token_ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
    decoded = iter(await service.prompts.decode(token_ids, "prompt"))
    return [prompt if isinstance(prompt, str) else next(decoded) for prompt in prompts]


class CompletionRenderer:
    """Writes text_completion objects, whole ones and those of a stream.

    Args:
        num_choices: of each prompt; choice i of prompt p has the index p * num_choices + i.
        prompts: their token ids.
        echo: the prompts' texts, where each choice begins with its prompt.
        scoring: the prompt alone was wanted; the engine computes a token, which is left out.
    """

    def __init__(
        self,
        request_id: str,
        service: Service,
        body: CompletionRequest,
        num_choices: int,
        prompts: list[list[int]],
        echo: list[str] | None,
        scoring: bool,
    ) -> None:
        self._common = {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.told_name(body.model),
        }
        self._texts = service.texts
        self._alternatives = body.logprobs
        self._num_choices = num_choices
        self._prompts = prompts
        self._echo = echo
        self._scoring = scoring
        self._plain = body.logprobs is None and not scoring
        self._with_token_ids = bool(body.return_token_ids)
        self._with_spans = bool(body.return_spans)
        self._spans: dict[str, float] | None = None  # of the completion that ended last
        self._unsaid = set(range(len(prompts) * num_choices)) if echo else set()  # choices that lack their echo
        self._offsets = [0] * (len(prompts) * num_choices)  # characters that each choice has got
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._template = EventTemplate(
            self._common,
            before=lambda choice, first: b'{"index":%d,"text":' % choice,
            between=b"",
            num_choices=len(prompts) * num_choices,
            options=body.stream_options,
            prompt_tokens=sum(map(len, prompts)),
        )

    def event(self, prompt: int, delta: Delta) -> Event:
        choice = prompt * self._num_choices + delta.index
        echoes = choice in self._unsaid
        if self._template.tells_usage:
            told = self._choice(prompt, delta)
            self._template.count(delta)
            return self._template.choice(told, delta, echoes=echoes)
        if self._plain and delta.finish_reason is None and not echoes:
            if self._with_token_ids:
                return self._template.tokens(choice, delta.text, delta.token_ids)
            return self._template.text(choice, delta.text) if delta.text else b""
        text, logprobs = self._said(prompt, choice, delta)
        token_ids = delta.token_ids if self._with_token_ids else None
        return self._template.full(choice, text, logprobs, delta, token_ids, echoes=echoes)

    def last_event(self, usage: dict[str, Any]) -> bytes:
        return self._template.usage(self._usage(usage)) + DONE

    def whole(self, prompts: Sequence[Sequence[Delta]], usage: dict[str, Any]) -> dict[str, Any]:
        choices = [self._choice(prompt, delta) for prompt, deltas in enumerate(prompts) for delta in deltas]
        return {**self._common, "choices": choices, "usage": self._usage(usage)}

    def _choice(self, prompt: int, delta: Delta) -> dict[str, Any]:
        choice = prompt * self._num_choices + delta.index
        text, logprobs = self._said(prompt, choice, delta)
        return {
            "index": choice,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            **({"token_ids": delta.token_ids} if self._with_token_ids else {}),
        }

    def _said(self, prompt: int, choice: int, delta: Delta) -> tuple[str, dict[str, Any] | None]:
        """A choice's text and logprobs of this delta, behind its echo where that is due."""
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = delta.prompt_logprobs
        self._spans = delta.spans or self._spans
        if self._scoring:
            delta.text, delta.token_ids, delta.logprobs = "", [], []
            delta.finish_reason, delta.stop_reason = "length", None
        text, token_ids = delta.text, delta.token_ids
        tokens: list[Iterable[TokenLogprob | None]] = [delta.logprobs or []]
        if choice in self._unsaid and self._echo is not None:
            self._unsaid.discard(choice)
            token_ids = self._prompts[prompt] + token_ids
            tokens = [self._prompt_logprobs.get(prompt, []), *tokens]
            text = self._echo[prompt] + text
        offset = self._offsets[choice]
        self._offsets[choice] += len(text)
        if self._alternatives is None:
            return text, None
        return text, completion_logprobs(tokens, token_ids, self._texts, self._alternatives, offset)

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        if self._with_spans and self._spans is not None:
            usage = {**usage, "spans": self._spans}
        if not self._scoring:
            return usage
        return {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
