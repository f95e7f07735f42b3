"""What the API processes and the engine process say to each other: length-prefixed MessagePack over a Unix socket.

    API process      Add, Abort, Count, ChangeAdapter        ->  engine process
    supervisor       Drain                                   ->  engine process
    API process  <-  Ready, then Outputs, Refused, Done, Stats   engine process

A prompt is bytes, four a token. Times are seconds on time.perf_counter, which all processes of a machine share.
"""

from __future__ import annotations

import dataclasses
import struct
from collections import deque
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from mini_infer.core.request import SamplingParams, TokenLogprob
from mini_infer.serving.stats import Stats

DEADLINE = "deadline"  # a finish reason beside those of FinishReason
K = TypeVar("K")
ENTRIES_A_PART = 32
_entries_decoder = msgspec.msgpack.Decoder(list[TokenLogprob | None])
_LENGTH = struct.Struct("<I")


class Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Fields travel by position: both sides run the same version."""


class Add(Message):
    """A request. `number` is its name on this connection, never used twice.

    What a caller may have got wrong has no type here: the engine refuses it, which costs that request alone.
    """

    number: int
    prompt: bytes | list[Any]  # token ids: packed (core/token_ids.py); a list where one of them is none
    params: dict[str, Any]  # the SamplingParams that are not the defaults
    priority: Any  # int
    cache_salt: Any  # str
    streaming: bool  # deltas as they come; else one a completion, at the end
    arrival_time: float
    deadline_time: float | None
    prefill_at: str | None = None  # the address of an engine that may compute the prompt
    adapter: Any = None  # its name, a str


class ChangeAdapter(Message):
    """To be loaded from a folder, or unloaded where it is there. The answer is Done or Refused; the next Stats have the
    names."""

    number: int  # as of an Add
    name: str
    path: str | None  # None: it is unloaded


class Count(Message):
    """What an API process has counted since it last said so, by the names of `Stats.counted`."""

    counts: dict[str, int]


class Abort(Message):
    """Whoever reads the answer has left. The request ends, and its last Deltas say what it came to; one that is not in
    the engine yet is Refused."""

    number: int


class Drain(Message):
    """No further requests are taken, and the engine process ends when those that it has have ended.

    seconds: that they get.
    """

    seconds: float


class PromptLogprobs(msgspec.Struct, array_like=True, gc=False):
    """A prompt's entries, each a TokenLogprob or None. There may be a million log-probabilities in them: nobody puts
    all of them together, or takes them apart, at once, and they are sent a part at a time, since nothing else gets past
    what a connection has not taken yet.

    more: others come behind these, and before anything else of the request.
    """

    parts: list[bytes] = []
    more: bool = False

    def take(self, entries: deque[TokenLogprob | None], most: int) -> int:
        """Moves entries here, with about `most` log-probabilities, and returns how many they hold."""
        taken = 0
        while entries and taken < most:
            part = [entries.popleft() for _ in range(min(ENTRIES_A_PART, len(entries)))]
            self.parts.append(msgspec.msgpack.encode(part))
            taken += sum(1 + len(entry.top) for entry in part if entry is not None)
        return taken

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.parts))

    def __iter__(self) -> Iterator[TokenLogprob | None]:
        for part in self.parts:
            yield from _entries_decoder.decode(part)


class Delta(msgspec.Struct, array_like=True, gc=False):
    """What is new of one completion.

    finish_reason: a FinishReason's value, or "deadline"; None while it goes on.
    stop_reason: the stop token or stop string that ended it; None for end-of-sequence.
    """

    number: int  # the request's
    index: int  # of its n completions
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None  # one a token, where the request asked for them
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0  # of the prompt, found in the prefix cache; told with the finish reason
    prompt_logprobs: PromptLogprobs | None = None  # with the first delta, where the request asked for them
    spans: dict[str, float] | None = None  # as RequestMetrics.spans; told with the finish reason

    def extend(self, newer: Delta) -> None:
        """Takes in the delta behind it, so that a reader who comes late finds one."""
        self.text += newer.text
        self.token_ids += newer.token_ids
        if self.logprobs is None:
            self.logprobs = newer.logprobs
        elif newer.logprobs is not None:
            self.logprobs += newer.logprobs
        if self.prompt_logprobs is None:
            self.prompt_logprobs = newer.prompt_logprobs
        elif newer.prompt_logprobs is not None:
            self.prompt_logprobs.parts += newer.prompt_logprobs.parts
            self.prompt_logprobs.more = newer.prompt_logprobs.more
        self.finish_reason, self.stop_reason = newer.finish_reason, newer.stop_reason
        self.cached_tokens, self.spans = newer.cached_tokens, newer.spans


def merge(pending: dict[K, Delta], completion: K, delta: Delta) -> None:
    """Keeps a delta until it is fetched: behind the one that its completion has there already, if there is one."""
    earlier = pending.setdefault(completion, delta)
    if earlier is not delta:
        earlier.extend(delta)


class Ready(Message):
    """The engine serves. First on every connection, but for a Failed."""

    model: str
    max_model_len: int  # tokens of prompt and output
    vocab_size: int
    settings: dict[str, Any]  # EngineConfig.to_dict()
    startup: dict[str, Any]  # StartupReport.to_dict()
    pid: int
    machine: str = ""  # core/clock.py
    now: float = 0.0  # on the engine's clock
    prompts_at: str | None = None  # the address at which others ask it for prompts


class Outputs(Message):
    """One step's deltas for one connection."""

    deltas: list[Delta]


class Refused(Message):
    """The request was never in the engine: because of a RequestError; because of a fault of the engine's own, where
    `internal`; or because too many wait, where `retry_after` says in how many seconds to come again."""

    number: int
    message: str
    param: str | None = None
    internal: bool = False
    retry_after: float | None = None


class Done(Message):
    """What was asked under that number."""

    number: int
    had: str | None = None  # the folder that the adapter's name stood for before


class Failed(Message):
    """The last word of an engine process that cannot start or go on."""

    error: str  # the exception's class
    message: str


Command = Add | Abort | Count | Drain | ChangeAdapter
Event = Ready | Outputs | Refused | Done | Failed | Stats


def non_default_params(params: SamplingParams) -> dict[str, Any]:
    """What SamplingParams(**...) needs to make an equal one."""
    return {
        field.name: value
        for field in dataclasses.fields(params)
        if (value := getattr(params, field.name)) != field.default
    }


class FrameWriter:
    """Messages to bytes, each behind its length."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()

    def frame(self, message: Message | Stats) -> bytes:
        """Raises TypeError, ValueError or OverflowError where MessagePack has no word for something."""
        self._encoder.encode_into(message, self._buffer, _LENGTH.size)
        _LENGTH.pack_into(self._buffer, 0, len(self._buffer) - _LENGTH.size)
        return bytes(self._buffer)


class FrameReader:
    """Bytes as they come to whole frames, which a decoder takes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that are complete now."""
        self._buffer += data
        frames = []
        start, size = 0, len(self._buffer)
        while size - start >= _LENGTH.size:
            end = start + _LENGTH.size + _LENGTH.unpack_from(self._buffer, start)[0]
            if end > size:
                break
            frames.append(bytes(memoryview(self._buffer)[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return frames


command_decoder = msgspec.msgpack.Decoder(Command)
event_decoder = msgspec.msgpack.Decoder(Event)
