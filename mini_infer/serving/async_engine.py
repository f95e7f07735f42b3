"""AsyncEngine: the engine process as seen by an asyncio program."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import MiniInferError, RequestError
from mini_infer.core.request import SamplingParams
from mini_infer.runtime.prompt import Prompt, encode_prompt
from mini_infer.runtime.tokenizer import Tokenizer, load_tokenizer
from mini_infer.serving.launch import EngineProcess
from mini_infer.serving.link import EngineDead, Link
from mini_infer.serving.stream import Stream
from mini_infer.serving.wire import Abort, Add, Outputs, Ready, Refused, Stats, non_default_params

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_QUEUED = 1024
STARTUP_TIMEOUT_S = 1800.0
RATE_WINDOW_S = 30.0
LONGEST_RETRY_S = 60.0


class EngineError(MiniInferError, RuntimeError):
    """A fault of the engine's own that costs one request."""


class QueueFull(MiniInferError, RuntimeError):
    """Too many requests wait. `retry_after`: seconds in which about as many as wait now will have been served."""

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

    def __init__(self, link: Link, info: Ready, tokenizer: Tokenizer, process: EngineProcess | None, max_queued: int):
        self.info = info
        self.tokenizer = tokenizer
        self.stats = Stats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, [])
        self.failure: str | None = None
        self._link = link
        self._process = process
        self._max_queued = max_queued
        self._max_running: int = info.settings["scheduler"]["max_num_seqs"]
        self._streams: dict[int, Stream] = {}
        self._num_submitted = 0
        self._num_unfinished = 0  # completions
        self._finish_times: deque[float] = deque(maxlen=256)
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
            max_queued: completions that may wait beyond those that the engine runs at once.
            startup_timeout: seconds.

        Raises:
            ConfigError, ModelError: as LLMEngine raises them.
            EngineDead: the process ended, or took too long.
        """
        process = EngineProcess(config)
        # Beside the engine's own start: importing and reading a tokenizer takes seconds.
        tokenizer = asyncio.ensure_future(asyncio.to_thread(load_tokenizer, config.model))
        try:
            link, info = await Link.open(process.socket_path, process, startup_timeout)
            return cls(link, info, await tokenizer, process, max_queued)
        except BaseException:
            tokenizer.cancel()
            process.stop()
            raise

    @classmethod
    async def connect(
        cls, socket_path: str, *, max_queued: int = MAX_QUEUED, startup_timeout: float = STARTUP_TIMEOUT_S
    ) -> AsyncEngine:
        """Uses an engine process that another process has started. Arguments and errors: as with `start`."""
        link, info = await Link.open(socket_path, None, startup_timeout)
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, EngineConfig.from_dict(info.settings).model)
        except BaseException:
            link.close()
            raise
        return cls(link, info, tokenizer, None, max_queued)

    @property
    def alive(self) -> bool:
        return self.failure is None and not self._closing

    @property
    def socket_path(self) -> str:
        """For `connect` in other processes."""
        return self._link.socket_path

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
            QueueFull: try again later.
            EngineDead: never.
            RequestError: the prompt is too long, or holds what cannot be sent. Whatever else the engine refuses is
                raised by the stream.
        """
        if not self.alive:
            raise EngineDead(self.failure or "the engine has been closed")
        token_ids = list(token_ids)
        if len(token_ids) >= self.info.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; at most {self.info.max_model_len - 1} are allowed, so that "
                "one can be generated",
                "prompt",
            )
        self._require_room(params.n)
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
        stream = Stream(params.n, len(token_ids), lambda stream: self._abort(number, stream))
        self._streams[number] = stream
        self._num_unfinished += params.n
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

    # --- the queue ------------------------------------------------------------------------------------------------

    def _require_room(self, num_completions: int) -> None:
        # The first counts this process's requests up to the moment; the second knows the other processes', and that
        # the KV memory may hold fewer requests than the batch.
        told = self.stats.waiting + self.stats.swapped
        waiting = max(self._num_unfinished - self._max_running, told, 0)
        # A request for more completions than may ever wait is served when nobody else is there.
        starts_now = not self._num_unfinished or self._num_unfinished + num_completions <= self._max_running
        if waiting + num_completions > self._max_queued and (told or not starts_now):
            raise QueueFull(
                f"{waiting} requests wait, and {self._max_queued} may: try again later", self._retry_after(waiting)
            )

    def _retry_after(self, waiting: int) -> float:
        now = time.perf_counter()
        recent = [moment for moment in self._finish_times if now - moment < RATE_WINDOW_S]
        if not recent:
            return 1.0
        per_second = len(recent) / max(now - recent[0], 0.001)
        return float(min(max(1, math.ceil(waiting / per_second)), LONGEST_RETRY_S))

    def _ended(self, number: int, num_completions: int) -> None:
        self._num_unfinished -= num_completions
        if self._streams.pop(number, None) is not None and not self._streams:
            self._idle.set()

    def _abort(self, number: int, stream: Stream) -> None:
        self._link.send(Abort(number))
        self._ended(number, stream.num_unfinished)

    # --- what the engine says -------------------------------------------------------------------------------------

    def take_outputs(self, outputs: Outputs) -> None:
        streams = self._streams
        for delta in outputs.deltas:
            stream = streams.get(delta.number)
            if stream is None:  # aborted meanwhile
                continue
            stream.put(delta)
            if delta.finish_reason is not None:
                self._finish_times.append(time.perf_counter())
                self._num_unfinished -= 1
                if not stream.num_unfinished:
                    self._ended(delta.number, 0)

    def take_refusal(self, refused: Refused) -> None:
        stream = self._streams.get(refused.number)
        if stream is not None:
            self._ended(refused.number, stream.num_unfinished)
            stream.fail(
                EngineError(refused.message) if refused.internal else RequestError(refused.message, refused.param)
            )

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
        self._num_unfinished = 0
        self._idle.set()
        for callback in self._death_callbacks:
            _call(callback, reason)


def _call(callback: Callable[[T], None], news: T) -> None:
    try:
        callback(news)
    except Exception:  # it is no reason to lose the connection
        logger.exception("a callback failed")
