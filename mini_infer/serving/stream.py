"""One request as the API process sees it: an asynchronous iterator of deltas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from mini_infer.serving.wire import Delta


@dataclass(frozen=True)
class Usage:
    """In tokens; completions together."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache; known when a completion has ended
    completion_tokens: int


class Stream:
    """The deltas of a request's n completions, as they come.

        async for delta in stream: ...

    Whoever leaves the loop early calls `abort` (or uses `async with`); a task that is cancelled in it has done so.
    Deltas that nobody has fetched are merged: at most one a completion is kept, however slow the reader.

    Raises (while it is read):
        RequestError: the engine refuses the request.
        EngineDead: the engine process is gone.
        EngineError: the engine could not take the request.
    """

    def __init__(self, num_completions: int, num_prompt_tokens: int, on_abort: Callable[[Stream], None]) -> None:
        self.num_unfinished = num_completions
        self._num_prompt_tokens = num_prompt_tokens
        self._num_cached_tokens = 0
        self._num_tokens = 0
        self._on_abort = on_abort
        self._pending: dict[int, Delta] = {}  # by completion
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def usage(self) -> Usage:
        return Usage(self._num_prompt_tokens, self._num_cached_tokens, self._num_tokens)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        if not self._pending:
            await self.ready()
            if not self._pending:
                raise StopAsyncIteration
        index = next(iter(self._pending))
        return self._pending.pop(index)

    async def ready(self) -> None:
        """Waits until there is a delta to fetch, or the stream has ended. Raises what reading would raise."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self.num_unfinished:
                return
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.abort()
                raise

    def abort(self) -> None:
        """Frees what the request holds within a step. Nothing more comes; one that has ended stays as it is."""
        if self.num_unfinished:
            self._on_abort(self)
            self.num_unfinished = 0
            self._wake()

    async def aclose(self) -> None:
        self.abort()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.abort()

    # --- the engine's side ----------------------------------------------------------------------------------------

    def put(self, delta: Delta) -> None:
        self._num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.num_unfinished -= 1
            self._num_cached_tokens = max(self._num_cached_tokens, delta.cached_tokens)
        earlier = self._pending.setdefault(delta.index, delta)
        if earlier is not delta:
            earlier.extend(delta)
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        """Raised to the reader once he has fetched what has come."""
        self._error = error
        self.num_unfinished = 0
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._waiter = None
