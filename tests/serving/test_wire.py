"""Messages survive the way, whatever the pieces in which their bytes come."""

from __future__ import annotations

import random
from collections import deque

from mini_infer import SamplingParams
from mini_infer.core.request import TokenLogprob
from mini_infer.serving.link.replica import Replica, Request
from mini_infer.serving.link.stream import Stream
from mini_infer.serving.link.wire import (
    Abort,
    Add,
    Delta,
    Event,
    FrameReader,
    FrameWriter,
    Outputs,
    PromptLogprobs,
    Refused,
    command_decoder,
    event_decoder,
    non_default_params,
)


def test_frames_come_whole_whatever_the_pieces() -> None:
    writer, rng = FrameWriter(), random.Random(0)
    logprob = TokenLogprob(5, -0.5, 1, ((5, -0.5), (6, -1.5)))
    sent: list[Event] = [
        Outputs([Delta(1, 0, "é", [5], [logprob], "stop", "END", 3), Delta(2, 1, "", [6], stop_reason=6)]),
        Refused(7, "no", "prompt"),
        Outputs([Delta(i, 0, "x" * i, list(range(i))) for i in range(300)]),
        Outputs([]),
    ]
    data = b"".join(map(writer.frame, sent))
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(data)), 50))
        reader = FrameReader()
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        frames = [frame for piece in pieces for frame in reader.feed(piece)]
        assert [event_decoder.decode(frame) for frame in frames] == sent


def test_sampling_params_arrive_equal() -> None:
    params = SamplingParams(n=3, temperature=0.5, seed=7, stop=("a", "b"), stop_token_ids=(1,), logprobs=0)
    add = Add(1, b"\1\0\0\0", non_default_params(params), 0, "salt", True, 1.5, None)
    (frame,) = FrameReader().feed(FrameWriter().frame(add))
    arrived = command_decoder.decode(frame)
    assert isinstance(arrived, Add)
    assert (arrived.prompt, SamplingParams(**arrived.params)) == (add.prompt, params)
    assert non_default_params(SamplingParams()) == {}
    (frame,) = FrameReader().feed(FrameWriter().frame(Abort(4)))
    assert command_decoder.decode(frame) == Abort(4)


def test_merged_deltas_say_what_they_said_apart() -> None:
    first, second = (TokenLogprob(token, -1.0, 1) for token in (1, 2))
    delta = Delta(1, 0, "a", [1], [first], prompt_logprobs=PromptLogprobs([b"x"]))
    delta.extend(Delta(1, 0, "b", [2], [second], "stop", "END", 16))
    assert delta == Delta(1, 0, "ab", [1, 2], [first, second], "stop", "END", 16, PromptLogprobs([b"x"]))
    part = Delta(1, 0, "", [], prompt_logprobs=PromptLogprobs([b"v", b"w"], more=True))
    part.extend(delta)
    assert part == Delta(1, 0, "ab", [1, 2], [first, second], "stop", "END", 16, PromptLogprobs([b"v", b"w", b"x"]))


def test_log_probabilities_of_a_prompt_arrive_in_order() -> None:
    entries = [None, *(TokenLogprob(i, -0.5 * i, 1, ((i, -0.5 * i), (6, -1.5))) for i in range(100))]
    left, logprobs = deque(entries), PromptLogprobs()
    assert 100 <= logprobs.take(left, 100) <= 200
    assert 0 < len(left) < 80, "some at a time"
    logprobs.take(left, 1000)
    (frame,) = FrameReader().feed(FrameWriter().frame(Outputs([Delta(1, 0, "", [], None, None, None, 0, logprobs)])))
    arrived = event_decoder.decode(frame)
    assert isinstance(arrived, Outputs)
    assert list(arrived.deltas[0].prompt_logprobs or []) == entries


def test_parts_that_are_put_together_are_held_no_longer() -> None:
    stream, replica = Stream(1, 1, lambda: None), Replica(0, "")
    request = replica.requests[7] = Request(Add(7, [], {}, 0, "", True, 0.0, None), stream, 1, ())
    for part in (b"v", b"w", b""):
        told = PromptLogprobs([part], more=True) if part else PromptLogprobs([b"x"])
        replica.take_outputs(Outputs([Delta(7, 0, "", [], prompt_logprobs=told)]))
        assert request.parts == {b"v": [b"v"], b"w": [b"v", b"w"], b"": []}[part]
    assert stream._pending[0].prompt_logprobs == PromptLogprobs([b"v", b"w", b"x"])
