"""Prompts become token ids, within the model's length, and long ones in threads: streams go on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeGuard, TypeVar

from mini_infer.core.errors import RequestError
from mini_infer.runtime.text.conversation import Conversation
from mini_infer.runtime.text.prompt import Prompt, require_fit
from mini_infer.serving.api.errors import ApiError
from mini_infer.serving.link.replica import QueueFull
from mini_infer.serving.processes.async_engine import AsyncEngine

T = TypeVar("T")

LONG = 16_384  # characters to encode, or tokens to decode: some milliseconds
VERY_LONG = 2**18  # characters: some tenths of a second
MOST_WAITING = 64  # behind a thread
RETRY_S = 5.0
BEFORE = 64  # tokens of a text that is cut, before those that are kept
IDS_PER_CHARACTER = 4  # a token id need only be looked at


class Prompts:
    """The way from what requests hold to token ids, and back."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._max_model_len = engine.info.max_model_len
        self._encode = engine.encode
        self._tokenizer = engine.tokenizer
        self._aside = Aside()

    def close(self) -> None:
        self._aside.close()

    def room(self, wanted: int | None, max_tokens: int | None) -> int | None:
        """How many of a prompt's last tokens a request keeps by its `truncate_prompt_tokens`; None: all of them.

        Raises:
            RequestError: the wish cannot be.
        """
        if wanted == -1:
            return max(1, self._max_model_len - (max_tokens or 1))
        if wanted is not None and wanted < 1:
            raise RequestError(
                f"truncate_prompt_tokens must be -1, or 1 or more; got {wanted}", "truncate_prompt_tokens"
            )
        return wanted

    async def encode(self, prompts: Sequence[Prompt], param: str, room: int | None = None) -> list[list[int]]:
        """Each prompt's token ids, known to fit into the model.

        Args:
            param: the field that they came in, for messages.
            room: how many tokens are kept of each, the last ones.

        Raises:
            RequestError: one is none, or holds what cannot be encoded.
            ApiError: one is too long.
        """
        if room is not None:
            prompts = [self._end(prompt, room) for prompt in prompts]
        for prompt in prompts:
            self._require_possible(prompt, param)
        cost = sum(map(_cost, prompts))
        return await self._aside.do(cost, lambda: [self._fitting(prompt, param, room) for prompt in prompts])

    async def tokens(self, prompt: Prompt, param: str) -> list[int]:
        """A prompt's token ids, however many."""
        return await self._aside.do(_cost(prompt), lambda: self._tokens(prompt, param))

    async def decode(self, prompts: Sequence[Sequence[int]], param: str) -> list[str]:
        """What each prompt's token ids stand for, special tokens too. Raises RequestError where one is none."""

        def text(token_ids: Sequence[int]) -> str:
            return self._tokenizer.decode(self._tokens(token_ids, param), skip_special_tokens=False)

        return await self._aside.do(sum(map(len, prompts)), lambda: [text(token_ids) for token_ids in prompts])

    def _end(self, prompt: Prompt, room: int) -> Prompt:
        """Where so many of its last tokens are: of a text, some more, which tell the tokenizer how to begin."""
        if _is_token_ids(prompt):
            return prompt[-room:]
        longest = self._tokenizer.longest_token
        if isinstance(prompt, str) and longest:
            return prompt[-min(room + BEFORE, self._max_model_len) * longest :]
        return prompt

    def _require_possible(self, prompt: Prompt, param: str) -> None:
        """Before it is encoded, or each of its token ids looked at."""
        if _is_token_ids(prompt):
            self._require_fit(len(prompt), param)
            return
        longest = self._tokenizer.longest_token
        length = _num_characters(prompt)
        most = self._max_model_len * longest
        if longest and length > most:
            raise ApiError(
                400,
                f"the prompt has {length} characters: this model's maximum context length is "
                f"{self._max_model_len} tokens, and none of them is longer than {longest} characters",
                param=param,
                code="context_length_exceeded",
            )

    def _fitting(self, prompt: Prompt, param: str, room: int | None) -> list[int]:
        token_ids = self._tokens(prompt, param)
        token_ids = token_ids if room is None else token_ids[-room:]
        self._require_fit(len(token_ids), param)
        return token_ids

    def _require_fit(self, num_tokens: int, param: str) -> None:
        try:
            require_fit(num_tokens, self._max_model_len)
        except RequestError as error:
            raise ApiError(400, str(error), param=param, code="context_length_exceeded") from error

    def _tokens(self, prompt: Prompt, param: str) -> list[int]:
        try:
            return self._encode(prompt)
        except RequestError as error:
            raise RequestError(str(error), param if error.param in (None, "prompt") else error.param) from error


def _cost(prompt: Prompt) -> int:
    """Of encoding it, in characters of text."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, Conversation):
        return _cost(prompt.messages) + len(str(prompt.tools)) + len(str(prompt.variables))
    if prompt and isinstance(prompt[0], Mapping):
        return sum(len(str(value)) for message in prompt if isinstance(message, Mapping) for value in message.values())
    return len(prompt) // IDS_PER_CHARACTER


def _num_characters(prompt: Prompt) -> int:
    """That are sure to be encoded: a template may leave out thoughts, names and tools."""
    if isinstance(prompt, Conversation):
        return sum(len(message["content"]) for message in prompt.messages)
    return len(prompt) if isinstance(prompt, str) else 0


def _is_token_ids(prompt: Prompt) -> TypeGuard[list[int]]:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)


class Aside:
    """Work that would hold the event loop up. Each thread has a queue of its own, so that nobody waits for what takes
    much longer than his own work."""

    def __init__(self) -> None:
        self._threads = {cost: ThreadPoolExecutor(1, "texts") for cost in (LONG, VERY_LONG)}
        self._waiting = dict.fromkeys(self._threads, 0)

    async def do(self, cost: int, work: Callable[[], T]) -> T:
        """
        Args:
            cost: in characters to encode. What costs little is done at once.

        Raises:
            QueueFull: too much waits already.
        """
        if cost <= LONG:
            return _sheltered(work)
        queue = VERY_LONG if cost > VERY_LONG else LONG
        if self._waiting[queue] >= MOST_WAITING:
            raise QueueFull(f"{MOST_WAITING} long texts wait to be encoded: try again later", RETRY_S)
        self._waiting[queue] += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads[queue], _sheltered, work)
        finally:
            self._waiting[queue] -= 1

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)


def _sheltered(work: Callable[[], T]) -> T:
    """A panic of Rust's, as of a tokenizer, becomes an error like any other."""
    try:
        return work()
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as panic:  # pyo3's PanicException is no Exception
        raise RuntimeError(f"a library panicked: {panic}") from panic
