"""The order in which requests begin, and long answers are written."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from mini_infer.serving.api.sse import BLOCK, EventStream, Running
from mini_infer.serving.http.connections import Connections
from mini_infer.serving.http.turns import AT_ONCE, Turns
from mini_infer.serving.link.stream import Stream
from mini_infer.serving.link.wire import Delta


def test_a_few_begin_in_a_pass_of_the_event_loop_and_clients_take_turns() -> None:
    async def main() -> None:
        turns, begun, seen = Turns(), list[str](), list[int]()
        for number in range(50):
            turns.take("many", partial(begun.append, f"many {number}"))
        turns.take("one", partial(begun.append, "one 0"))
        while len(begun) < 51:
            await asyncio.sleep(0)  # a pass of the event loop
            seen.append(len(begun))
        assert seen == [*range(0, 51, AT_ONCE), 51], "as fast as the loop can"
        assert begun.index("one 0") == 1
        assert [name for name in begun if name != "one 0"] == [f"many {number}" for number in range(50)]
        turns.take("many", partial(begun.append, "last"))
        for _ in range(2):
            await asyncio.sleep(0)
        assert begun[-1] == "last"

    asyncio.run(main())


def test_one_that_fails_takes_none_of_those_that_wait_with_it() -> None:
    def fail() -> None:
        raise OSError("its client has gone")

    async def main() -> None:
        turns, begun, told = Turns(), list[int](), list[object]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
        for number in range(3 * AT_ONCE):
            turns.take("one", fail if number % 4 == 1 else partial(begun.append, number))
        for _ in range(6):
            await asyncio.sleep(0)
        assert begun == [number for number in range(3 * AT_ONCE) if number % 4 != 1]
        assert len(told) == 3 * AT_ONCE // 4

    asyncio.run(main())


def test_long_answers_are_written_a_block_at_a_time_whosever_they_are() -> None:
    async def main() -> None:
        running, made, sent = Running(), list[str](), list[bytes]()
        unread = asyncio.Event()

        def blocks(name: str) -> Iterator[bytes]:
            for number in range(3):
                made.append(name)
                yield f"{name}{number}".encode()

        writing = [
            asyncio.ensure_future(running.write(blocks("a"), lambda block: sent.append(block))),
            asyncio.ensure_future(running.write(blocks("b"), lambda block: unread.wait())),  # type: ignore[arg-type,return-value]
        ]
        await writing[0]
        assert sent == [b"a0", b"a1", b"a2"]
        assert made.count("b") == 1, "nobody waits for who does not read, and no more is made for him"
        unread.set()
        await writing[1]
        assert made.count("b") == 3

    asyncio.run(main())


def begin(streams: list[Stream], render: Any) -> tuple[asyncio.Future[None], list[bytes]]:
    """An answer that is being written, and what has been written of it."""
    sent: list[bytes] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    answer = EventStream(streams, render, Running(), "id")  # type: ignore[arg-type]
    return asyncio.ensure_future(answer({}, receive, send)), sent


def test_no_event_of_a_batch_begins_within_another_one() -> None:
    """Prompts of one request share an answer, and a long event is written in blocks."""
    num_long, num_blocks = 2, 5

    class Render:
        def event(self, prompt: int, delta: Delta) -> bytes | Iterator[bytes]:
            if prompt >= num_long:
                return b"<short>"
            return iter([b"<", *[str(prompt).encode() * BLOCK] * num_blocks, b">"])

        def last_event(self, usage: Any) -> bytes:
            return b"<last>"

    async def main() -> bytes:
        streams = [Stream(1, 1, lambda: None) for _ in range(num_long + 1)]
        writing, sent = begin(streams, Render())
        for stream in streams[:num_long]:
            stream.put(Delta(0, 0, "", [1], finish_reason="length"))
        for number in range(20):
            streams[-1].put(Delta(0, 0, "", [1], finish_reason="length" if number == 19 else None))
            streams[-1].wake()
            await asyncio.sleep(0.001)
        await writing
        return b"".join(sent)

    events = re.findall(rb"<[^<>]*>", asyncio.run(main()))
    assert sorted(len(event) for event in events if len(event) > 7) == [num_blocks * BLOCK + 2] * num_long
    assert events[-1] == b"<last>"
    assert b"<short>" in events


@pytest.mark.parametrize(("prompts", "ending"), [(1, None), (2, None), (1, "length")])
def test_a_deadline_within_a_long_event_comes_behind_it(prompts: int, ending: str | None) -> None:
    """Of two prompts the other one is told of it while the event is written. And it is none where that is the last."""
    num_blocks = 20

    class Render:
        def event(self, prompt: int, delta: Delta) -> bytes | Iterator[bytes]:
            return iter([b"<", *[b"x" * BLOCK] * num_blocks, b">"]) if prompt == 0 else b"<short>"

        def last_event(self, usage: Any) -> bytes:
            return b"last"

    async def main() -> bytes:
        streams = [Stream(1, 1, lambda: None) for _ in range(prompts)]
        streams[0].deadline = asyncio.get_running_loop().time() + 0.003
        writing, sent = begin(streams, Render())
        streams[0].put(Delta(0, 0, "", [1], finish_reason=ending))
        await writing
        return b"".join(sent)

    event, rest = asyncio.run(main()).split(b">")
    assert len(event) == 1 + num_blocks * BLOCK
    if ending is not None:
        assert rest == b"last", "the request had ended in time"
        return
    assert rest.startswith(b'data: {"error"')
    assert b"deadline_exceeded" in rest


@pytest.mark.parametrize("silent", [0, 1])
def test_who_comes_last_is_not_closed_to_make_room(silent: int) -> None:
    async def main() -> None:
        ended: list[tuple[str, str]] = []

        def connection(name: str) -> Any:
            made = Mock()
            made.transport.abort = lambda: ended.append((name, "closed"))
            made.refuse = lambda error: ended.append((name, "refused"))
            return made

        connections = Connections(2, 10, 10, lambda status: None)
        for number in range(2):
            connections.opened(held := connection(f"held {number}"))
            connections.await_nothing(held)
            if number < silent:
                connections.await_next(held)
        connections.opened(connection("new"))
        assert ended == ([("held 0", "closed")] if silent else [("new", "refused")])

    asyncio.run(main())
