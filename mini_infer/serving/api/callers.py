"""The client of a request: known by its key, held to the key's limits, counted under the key's name."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple

from fastapi import Request
from starlette.datastructures import Headers

from mini_infer.serving.api.errors import ApiError, try_later
from mini_infer.serving.keys import Accounts, Exceeded, Key
from mini_infer.serving.settings import ServerSettings


class Caller(NamedTuple):
    """
    Attributes:
        name: of its key; empty, with no limits, where the server has no keys.
        headers: of its request.
    """

    name: str
    limits: Key | None
    headers: Headers


_caller: ContextVar[Caller] = ContextVar("caller")  # whom this task serves
current = _caller.get
Count = Callable[[str, int], None]
GiveBack = Callable[[int, int], None]  # told the generated tokens and the completions that have ended


class Callers:
    """`accounts` as `Accounts` takes it."""

    def __init__(self, settings: ServerSettings, accounts: int | None) -> None:
        self._keys = settings.keys
        self._isolate = settings.isolate_keys
        self._accounts = Accounts(accounts, settings.api_processes)

    def enter(self, request: Request) -> None:
        """The request's task serves this client from here on. Raises ApiError where its key is nobody's."""
        found = self._keys.find(request.headers.get("authorization", "")) if self._keys else ("", None)
        if found is None:
            raise ApiError(
                401,
                'the API key is wrong or missing: send the header "Authorization: Bearer KEY"',
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        name, limits = found
        _caller.set(Caller(name, limits, request.headers))

    def salt(self, wanted: str) -> str:
        """Of the request's cached prefixes: what one key has sent, no other can find out where keys are isolated."""
        return f"{current().name} {wanted}" if self._isolate else wanted

    def take(self, prompt_tokens: int, completions: int, count: Count) -> GiveBack:
        """Counts the client's request.

        Args:
            count: called with what the metrics count, and how much more of it there is.

        Returns:
            What is to be called until all completions have ended.

        Raises:
            ApiError: the key's limits are reached.
        """
        name, limits, _ = current()
        if limits is None:
            return lambda generated_tokens, completions: None
        if limits.is_limited:
            try:
                self._accounts.take(name, limits, prompt_tokens, completions)
            except Exceeded as error:
                count(f"key_refusals {name}", 1)
                message = f"the key {name!r} has reached its limit: {error}"
                raise try_later(message, "rate_limit_exceeded", error.retry_after + 0.5) from None
        count(f"key_requests {name}", 1)
        count(f"key_prompt_tokens {name}", prompt_tokens)

        def give_back(generated_tokens: int, completions: int) -> None:
            count(f"key_generation_tokens {name}", generated_tokens)
            if limits.is_limited:
                self._accounts.give_back(name, limits, generated_tokens, completions)

        return give_back
