"""A stream without an engine: who is told when, and what is merged."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest

from mini_infer.core.errors import RequestError
from mini_infer.serving.link.stream import Blocked, Stream
from mini_infer.serving.link.wire import Delta


class Written:
    """A reader that takes deltas at once, until it is told to block."""

    def __init__(self) -> None:
        self.batches: list[list[Delta]] = []
        self.free = asyncio.Event()
        self.free.set()

    def write(self, deltas: Collection[Delta]) -> Blocked:
        self.batches.append(list(deltas))
        return None if self.free.is_set() else self._until_free()

    async def _until_free(self) -> None:
        await self.free.wait()

    @property
    def texts(self) -> list[list[str]]:
        return [[delta.text for delta in batch] for batch in self.batches]


def say(stream: Stream, text: str, index: int = 0, finish_reason: str | None = None) -> None:
    if stream.put(Delta(0, index, text, [1], None, finish_reason)):
        stream.wake()


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_forward_writes_at_once_and_merges_while_it_must_wait() -> None:
    async def main() -> None:
        written, aborted = Written(), []
        stream = Stream(2, 1, lambda: aborted.append(True))
        task = asyncio.ensure_future(stream.forward(written.write))
        await turn()
        say(stream, "a")
        assert written.texts == [["a"]], "no other task had to run for it"
        written.free.clear()
        say(stream, "b")
        say(stream, "c")
        await turn()
        say(stream, "d")
        say(stream, "x", index=1)
        assert written.texts == [["a"], ["b"]]
        written.free.set()
        await turn()
        assert written.texts[2:] == [["cd", "x"]]
        say(stream, "e", finish_reason="length")
        say(stream, "y", index=1, finish_reason="stop")
        await task
        assert written.texts[3:] == [["e"], ["y"]]
        assert not aborted
        assert stream.usage.completion_tokens == 7

    asyncio.run(main())


def test_several_steps_at_once_are_one_batch() -> None:
    async def main() -> None:
        written = Written()
        stream = Stream(1, 1, lambda: None)
        task = asyncio.ensure_future(stream.forward(written.write))
        await turn()
        told = [stream.put(Delta(0, 0, text, [1])) for text in "abc"]
        assert told == [True, False, False]
        stream.wake()
        assert written.texts == [["abc"]]
        stream.abort()
        await task

    asyncio.run(main())


def test_how_forward_ends() -> None:
    def broken(deltas: Collection[Delta]) -> None:
        raise ValueError("planted")

    async def main() -> None:
        for cause in ("refused", "broken", "cancelled", "cancelled while blocked"):
            written, aborted = Written(), []
            stream = Stream(1, 1, lambda to=aborted: to.append(True))
            task = asyncio.ensure_future(stream.forward(broken if cause == "broken" else written.write))
            await turn()
            if cause == "refused":
                say(stream, "a")
                stream.fail(RequestError("no"))
                with pytest.raises(RequestError, match="no"):
                    await task
                assert written.texts == [["a"]]
            elif cause == "broken":
                say(stream, "a")
                with pytest.raises(ValueError, match="planted"):
                    await task
            else:
                if "blocked" in cause:
                    written.free.clear()
                    say(stream, "a")
                    await turn()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert aborted

    asyncio.run(main())
