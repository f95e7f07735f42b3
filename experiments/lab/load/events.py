"""What a completion's server-sent events say, read after the clock has stopped: tokens, and when each could be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

DONE = b"[DONE]"
Read = tuple[float, bytes]  # when a piece of the body was read, and the piece


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct):
    message: str = "an error without a message"


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass
class Answer:
    # One a token; tokens of one event share the time at which its end was read.
    token_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # empty where the server does not tell them
    cached_tokens: int | None = None  # of the prompt, found in a prefix cache; None where the server does not tell
    error: str = ""  # why it is not complete


def read_answer(reads: Sequence[Read]) -> Answer:
    """How many tokens an event has is told by its `token_ids`, else by its `usage`, else it is one. Where that does not
    add up to what the server counted in the end, the answer is an error: times would be guesses."""
    answer = Answer()
    done = False
    rest = b""
    for at, piece in reads:
        *events, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
            if data == DONE:
                done = True
            elif data:
                _take(answer, data, at)
    if not answer.error and not done:
        answer.error = "the stream ended before its last event"
    return answer


def _take(answer: Answer, data: bytes, at: float) -> None:
    try:
        event = _decode(data)
    except msgspec.DecodeError as error:
        answer.error = answer.error or f"an event is none of the completions API: {error}"
        return
    if event.error is not None:
        answer.error = event.error.message
    usage = event.usage
    if usage is not None and usage.prompt_tokens_details is not None:
        answer.cached_tokens = usage.prompt_tokens_details.cached_tokens
    if event.choices:
        choice = event.choices[0]
        if choice.token_ids is not None:
            answer.token_ids += choice.token_ids
            count = len(choice.token_ids)
        elif usage is not None:
            count = usage.completion_tokens - len(answer.token_times)
        else:
            count = 1 if choice.text else 0
        answer.token_times += [at] * count
    elif usage is not None and usage.completion_tokens != len(answer.token_times):
        answer.error = answer.error or (
            f"the server generated {usage.completion_tokens} tokens and its events account for "
            f"{len(answer.token_times)}: it must know `return_token_ids`, or `continuous_usage_stats`"
        )
