"""One request as the API process sees it: an asynchronous iterator of deltas."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from mini_infer.serving.link.wire import Delta, merge

T = TypeVar("T")
Blocked = Awaitable[None] | None  # what a writer has to wait for, if anything, before it can write on
Write = Callable[[Collection[Delta]], Blocked]


@dataclass(frozen=True)
class Usage:
    """In tokens; completions together."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache; known when a completion has ended
    completion_tokens: int


class Stream:
    """The deltas of a request's n completions, as they come.

        async for delta in stream: ...

    or, at less cost a delta, `await stream.forward(write)`. Whoever leaves the loop early calls `abort`; a
    task that is cancelled in it has done so. Deltas that nobody has fetched are merged: at most one a completion is
    kept, however slow the reader.

    Raises (while it is read):
        RequestError: the engine refuses the request.
        EngineDead: the engine process is gone.
        EngineError: the engine could not take the request.
        QueueFull: too many requests wait.
    """

    def __init__(self, num_completions: int, num_prompt_tokens: int, on_abort: Callable[[], None]) -> None:
        self.num_unfinished = num_completions  # that the engine has not ended
        self.aborted = False  # by the reader, who is told nothing more; the engine's last word is still to come
        self._num_completions = num_completions
        self._num_prompt_tokens = num_prompt_tokens
        self._num_cached_tokens = 0
        self._num_tokens = 0
        self._on_abort = on_abort
        self.on_end: Callable[[], None] | None = None  # called once, when no completion is left, however it ended
        self._pending: dict[int, Delta] = {}  # by completion
        self.error: Exception | None = None  # what ended it
        self.spans: dict[str, float] | None = None  # as Delta's, of the completion that ended last
        self.deadline: float | None = None  # on the event loop's clock: then whoever reads it gives up
        self._on_news: Callable[[], None] | None = None  # called from `wake`

    @property
    def usage(self) -> Usage:
        return Usage(self._num_prompt_tokens, self._num_cached_tokens, self._num_tokens)

    @property
    def is_over(self) -> bool:
        """Nothing more comes."""
        return self.aborted or not self.num_unfinished

    @property
    def has_begun(self) -> bool:
        """Whether anything of it has come."""
        return self._num_tokens > 0 or self.num_unfinished < self._num_completions

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
            if self.error is not None:
                raise self.error
            if self.is_over:
                return
            await self._news()

    async def forward(self, write: Write) -> None:
        """Calls `write` with what has come, a delta a completion, until the stream has ended. Most calls are made in
        the very pass that takes in the engine's message: no task is woken for them."""
        while True:
            blocked = self._fetch(write)
            while blocked is None and not self.is_over:
                blocked = await self._forward_news(write)
            if blocked is not None:
                await self._or_abort(blocked)
            elif not self._pending:
                await self.ready()  # raises what ended it
                return

    async def _forward_news(self, write: Write) -> Blocked:
        """Writes news as they come, until `write` has to wait, for what this returns, or the stream has ended: None."""
        future: asyncio.Future[Blocked] = asyncio.get_running_loop().create_future()

        def on_news() -> None:
            if future.done():
                return
            try:
                blocked = self._fetch(write)
                if blocked is not None or self.is_over:
                    future.set_result(blocked)
            except Exception as error:
                future.set_exception(error)

        return await self._told(on_news, future)

    def _fetch(self, write: Write) -> Blocked:
        if not self._pending:
            return None
        pending, self._pending = self._pending, {}
        return write(pending.values())

    async def _news(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._told(lambda: None if future.done() else future.set_result(None), future)

    async def _told(self, on_news: Callable[[], None], future: asyncio.Future[T]) -> T:
        """Waits for the future, and calls `on_news` for all that comes until then."""
        self._on_news = on_news
        try:
            return await self._or_abort(future)
        finally:
            self._on_news = None

    async def _or_abort(self, awaited: Awaitable[T]) -> T:
        try:
            return await awaited
        except asyncio.CancelledError:
            self.abort()
            raise

    def abort(self) -> None:
        """Frees what the request holds within a step. Nothing more comes; one that has ended stays as it is."""
        if not self.is_over:
            self.aborted = True
            self._on_abort()
            self.wake()

    # --- the engine's side ----------------------------------------------------------------------------------------

    def put(self, delta: Delta) -> bool:
        """Whether the reader has to be told, by `wake`; else he has not fetched what came before."""
        self._num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.num_unfinished -= 1
            self.spans = delta.spans
            self._num_cached_tokens = max(self._num_cached_tokens, delta.cached_tokens)
            if not self.num_unfinished:
                self._end()
        pending = self._pending
        if self.aborted:
            return False
        if not pending:
            pending[delta.index] = delta
            return True
        merge(pending, delta.index, delta)
        return False

    def fail(self, error: Exception) -> None:
        """Raised to the reader once he has fetched what has come."""
        if not self.aborted:
            self.error = error
        self.num_unfinished = 0
        self._end()
        self.wake()

    def _end(self) -> None:
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()

    def wake(self) -> None:
        if self._on_news is not None:
            self._on_news()
