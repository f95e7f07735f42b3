"""A piece of an answer on its way to the connection: the short way writes what the server's own `send` would."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

from starlette.types import Message
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from mini_infer.serving.http.writing import body_writer

BEGIN: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
PIECES = [b"data: 1\n\n", b"x" * 5000, "data: \u00e9\n\n".encode()]


class Answer:
    """uvicorn's, on a connection that keeps what is written to it."""

    def __init__(self) -> None:
        self.written = b""
        transport = Mock()
        transport.write = self._write
        self.flow = FlowControl(transport)
        self.cycle = RequestResponseCycle(
            scope={"type": "http", "method": "POST"},  # type: ignore[arg-type]  # all that it looks at
            transport=transport,
            flow=self.flow,
            logger=Mock(),
            access_logger=Mock(),
            access_log=False,
            default_headers=[],
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=True,
            on_response=lambda: None,
        )

    def _write(self, data: bytes) -> None:
        self.written += data


def test_the_short_way_writes_the_same_bytes() -> None:
    async def main() -> None:
        long, short = Answer(), Answer()
        for answer in (long, short):
            await answer.cycle.send(BEGIN)  # type: ignore[arg-type]
        assert b"transfer-encoding: chunked" in short.written
        write = body_writer(short.cycle.send)  # type: ignore[arg-type]
        for piece in PIECES:
            await long.cycle.send({"type": "http.response.body", "body": piece, "more_body": True})
            assert write(piece) is None
        assert short.written == long.written

    asyncio.run(main())


def test_a_reader_that_is_behind_is_waited_for() -> None:
    async def main() -> None:
        answer = Answer()
        await answer.cycle.send(BEGIN)  # type: ignore[arg-type]
        write, begun = body_writer(answer.cycle.send), answer.written  # type: ignore[arg-type]
        answer.flow.pause_writing()
        blocked = write(PIECES[0])
        assert blocked is not None
        assert answer.written == begun
        answer.flow.resume_writing()
        await blocked
        assert answer.written == begun + b"9\r\ndata: 1\n\n\r\n"
        assert write(PIECES[0]) is None

    asyncio.run(main())


def test_nothing_is_written_to_a_client_that_has_left() -> None:
    async def main() -> None:
        answer = Answer()
        await answer.cycle.send(BEGIN)  # type: ignore[arg-type]
        write, begun = body_writer(answer.cycle.send), answer.written  # type: ignore[arg-type]
        answer.cycle.disconnected = True
        assert write(PIECES[0]) is None
        assert answer.written == begun

    asyncio.run(main())


def test_another_server_gets_messages() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def main() -> None:
        blocked = body_writer(send)(b"piece")
        assert blocked is not None
        await blocked

    asyncio.run(main())
    assert sent == [{"type": "http.response.body", "body": b"piece", "more_body": True}]
