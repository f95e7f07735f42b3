"""AsyncEngine: the engine process as seen by an asyncio program."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import MiniInferError, RequestError
from mini_infer.core.request import SamplingParams
from mini_infer.runtime.text.prompt import Prompt, encode_prompt, require_fit
from mini_infer.runtime.text.tokenizer import Tokenizer, load_tokenizer
from mini_infer.serving.api.stream import Stream
from mini_infer.serving.processes.launch import MAX_QUEUED, EngineProcess
from mini_infer.serving.processes.link import EngineDead, Link
from mini_infer.serving.processes.wire import Abort, Add, Count, Outputs, Ready, Refused, Stats, non_default_params

logger = logging.getLogger(__name__)
T = TypeVar("T")

STARTUP_TIMEOUT_S = 1800.0


class EngineError(MiniInferError, RuntimeError):
    """A fault of the engine's own that costs one request."""


class QueueFull(MiniInferError, RuntimeError):
    """Too many requests wait; `retry_after`: for how many seconds, about."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class AsyncEngine:
    """A connection to an engine process. `start` makes the process too; `connect` uses another one's.

    Attributes:
        info: what the engine turned out to be.
        tokenizer: the model's, for prompts that are text.
        stats: the latest; they come every 0.1 s while the engine works, and when it has nothing left to do.
        failure: why the engine is gone; None while it is there.
    """

    def __init__(self, link: Link, info: Ready, tokenizer: Tokenizer, process: EngineProcess | None) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.stats = Stats()
        self.failure: str | None = None
        self._link = link
        self._process = process
        self._streams: dict[int, Stream] = {}
        self._to_wake: list[Stream] = []
        self._num_submitted = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self._stats_callbacks: list[Callable[[Stats], None]] = []
        self._death_callbacks: list[Callable[[str], None]] = []
        link.attach(self)

    @classmethod
    async def start(
        cls, config: EngineConfig, *, max_queued: int = MAX_QUEUED, startup_timeout: float = STARTUP_TIMEOUT_S
    ) -> AsyncEngine:
        """Starts an engine process, which ends with this one.

        Args:
            max_queued: completions that may wait beyond those that the engine runs at once, whoever has sent them.
            startup_timeout: seconds.

        Raises:
            ConfigError, ModelError: as LLMEngine raises them.
            EngineDead: the process ended, or took too long.
        """
        process = EngineProcess(config, max_queued)
        # Beside the engine's own start: importing and reading a tokenizer takes seconds.
        tokenizer = asyncio.ensure_future(asyncio.to_thread(load_tokenizer, config.model))
        try:
            link, info = await Link.open(process.socket_path, process, startup_timeout)
            return cls(link, info, await tokenizer, process)
        except BaseException:
            tokenizer.cancel()
            process.stop()
            raise

    @classmethod
    async def connect(cls, socket_path: str, *, startup_timeout: float = STARTUP_TIMEOUT_S) -> AsyncEngine:
        """Uses an engine process that another process has started. Arguments and errors: as with `start`."""
        link, info = await Link.open(socket_path, None, startup_timeout)
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, EngineConfig.from_dict(info.settings).model)
        except BaseException:
            link.close()
            raise
        return cls(link, info, tokenizer, None)

    @property
    def alive(self) -> bool:
        return self.failure is None and not self._closing

    @property
    def socket_path(self) -> str:
        """For `connect` in other processes."""
        return self._link.socket_path

    @property
    def silence_s(self) -> float:
        """Seconds since the engine last said something; one that lives does so every second."""
        return time.monotonic() - self._link.heard

    def count(self, counts: dict[str, int]) -> None:
        """Adds to `Stats.counted`."""
        self._link.send(Count(counts))

    def on_stats(self, callback: Callable[[Stats], None]) -> None:
        """Calls it with all Stats to come."""
        self._stats_callbacks.append(callback)

    def on_death(self, callback: Callable[[str], None]) -> None:
        """Calls it with the failure if the engine process dies; not at `close`."""
        self._death_callbacks.append(callback)

    def encode(self, prompt: Prompt) -> list[int]:
        """A prompt's token ids. Raises RequestError."""
        return encode_prompt(prompt, self.tokenizer, self.info.vocab_size)[1]

    def submit(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        streaming: bool = True,
        deadline_s: float | None = None,
    ) -> Stream:
        """Sends a request to the engine.

        Args:
            priority, cache_salt: as with LLMEngine.add_request.
            streaming: deltas as they come; else one a completion, at the end, which costs less.
            deadline_s: seconds from now; a request that takes longer ends with the finish reason "deadline".

        Raises:
            EngineDead: never.
            RequestError: the prompt is too long, or holds what cannot be sent. Whatever else the engine refuses, and
                QueueFull, is raised by the stream.
        """
        if not self.alive:
            raise EngineDead(self.failure or "the engine has been closed")
        token_ids = list(token_ids)
        require_fit(len(token_ids), self.info.max_model_len)
        now = time.perf_counter()
        number = self._num_submitted
        self._num_submitted += 1
        add = Add(
            number=number,
            prompt=token_ids,
            params=non_default_params(params),
            priority=priority,
            cache_salt=cache_salt,
            streaming=streaming,
            arrival_time=now,
            deadline_time=None if deadline_s is None else now + deadline_s,
        )
        try:
            self._link.send(add)
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestError(f"the request holds what cannot be sent to the engine: {error}") from error
        stream = Stream(params.n, len(token_ids), lambda: self._abort(number))
        self._streams[number] = stream
        self._idle.clear()
        return stream

    async def drain(self, timeout: float | None = None) -> bool:
        """Waits until all that was submitted has ended; False if `timeout` seconds were not enough."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except asyncio.TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Aborts what runs, and ends the process that `start` started."""
        if self._closing:
            return
        self._closing = True
        for stream in list(self._streams.values()):
            stream.abort()
        self._link.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)

    def _ended(self, number: int) -> None:
        if self._streams.pop(number, None) is not None and not self._streams:
            self._idle.set()

    def _abort(self, number: int) -> None:
        self._link.send(Abort(number))
        self._ended(number)

    # --- what the engine says -------------------------------------------------------------------------------------

    def take_outputs(self, outputs: Outputs) -> None:
        streams = self._streams
        for delta in outputs.deltas:
            stream = streams.get(delta.number)
            if stream is None:  # aborted meanwhile
                continue
            if stream.put(delta):
                self._to_wake.append(stream)
            if not stream.num_unfinished:
                self._ended(delta.number)

    def take_pause(self) -> None:
        # Not before: behind a loop that is late there are several steps' outputs, which go out as one.
        woken, self._to_wake = self._to_wake, []
        for stream in woken:
            stream.wake()

    def take_refusal(self, refused: Refused) -> None:
        stream = self._streams.get(refused.number)
        if stream is not None:
            self._ended(refused.number)
            stream.fail(_error(refused))

    def take_stats(self, stats: Stats) -> None:
        self.stats = stats
        for callback in self._stats_callbacks:
            _call(callback, stats)

    def take_death(self, reason: str) -> None:
        if self._closing or self.failure is not None:
            return
        self.failure = reason
        for stream in self._streams.values():
            stream.fail(EngineDead(reason))
        self._streams.clear()
        self._idle.set()
        for callback in self._death_callbacks:
            _call(callback, reason)


def _error(refused: Refused) -> Exception:
    if refused.retry_after is not None:
        return QueueFull(refused.message, refused.retry_after)
    return EngineError(refused.message) if refused.internal else RequestError(refused.message, refused.param)


def _call(callback: Callable[[T], None], news: T) -> None:
    try:
        callback(news)
    except Exception:  # it is no reason to lose the connection
        logger.exception("a callback failed")
