"""A request's body, before its fields are looked at: its type and size, how much all unfinished ones may hold together,
and its JSON.

Large bodies are parsed in a thread, so that streams go on meanwhile. Python runs one thread at a time, and a parser
lets no other one run before it returns. So it is given nothing that the request has no use for, and token ids a piece
at a time. Texts and messages go in one piece: ten million characters take a few milliseconds, and only a body made for
it, of millions of empty messages, makes streams wait half a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import pydantic_core
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from mini_infer.serving.api.errors import NO_OBJECT, ApiError
from mini_infer.serving.api.schema import LONG_FIELDS, MAX_ENTRIES

if TYPE_CHECKING:
    from mini_infer.serving.api.gateway import Gateway

LARGE = 2**16  # bytes; what is smaller is parsed in a few milliseconds at most
PIECE = 2**15  # bytes: a millisecond, about
MAX_FIELD = 2**19  # bytes of a list or an object that holds no prompt

# One: however many large bodies come at once, streams share Python with one of them.
_thread = ThreadPoolExecutor(1, "large-body")


class CheckedRoute(APIRoute):
    """A route whose handler gets the request of a known client, with a JSON body that has been read within the
    limits."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        large_bodies = None if self.body_field is None else LargeBodies(_field_names(self.body_field))

        async def handle(request: Request) -> Response:
            gateway: Gateway = request.app.state.gateway
            gateway.callers.enter(request)
            if large_bodies is None:
                return await handler(request)
            _require_json(request)
            with gateway.arriving(), gateway.unfinished.body() as grow:
                body = await _read(request, gateway.settings.max_body_bytes, grow)
            content = parse_json(body) if len(body) <= LARGE else await large_bodies.parse(body)
            return await handler(_Parsed(request, body, content))

        return handle


class _Parsed(Request):
    """A request whose body is known; FastAPI asks for it by these two."""

    def __init__(self, request: Request, body: bytes, content: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._body = body
        self._json = content


def _field_names(body_field: Any) -> list[str]:
    """Of the request's model, which FastAPI keeps in a field of its own; also those that it refuses."""
    model = body_field.field_info.annotation
    return [*{*model.model_fields, *model.refused}]


# --- reading ------------------------------------------------------------------------------------------------------


def _require_json(request: Request) -> None:
    """Also so that a web page elsewhere cannot post here from a visitor's browser without asking it first."""
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, f'send the header "Content-Type: application/json"; this request has {given[:100]!r}')


async def _read(request: Request, limit: int, grow: Callable[[int], None]) -> bytes:
    too_large = ApiError(
        413,
        f"the body is larger than {limit} bytes, the server's --max-body-bytes",
        code="body_too_large",
        headers={"Connection": "close"},
    )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > limit:
        raise too_large
    parts = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise too_large
            grow(size)
            parts.append(part)
    except ClientDisconnect:
        raise ApiError(400, "the client left before its request was complete") from None  # nobody reads it
    return b"".join(parts)


class UnfinishedBodies:
    """Bodies that have not come to their end: their bytes have a `limit` together, whoever sends them. What a body has
    below LARGE is not counted: small requests always come through."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0

    @contextlib.contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """Gives what takes in how long the body is so far. That raises ApiError where it is too much."""
        held = 0

        def grow(size: int) -> None:
            nonlocal held
            more = max(size - LARGE, 0) - held
            if self._held + more > self._limit:
                raise ApiError(
                    503,
                    f"unfinished requests hold {self._limit} bytes already: try again later",
                    type="server_error",
                    code="too_many_bodies",
                    headers={"Retry-After": "5", "Connection": "close"},
                )
            held += more
            self._held += more

        try:
            yield grow
        finally:
            self._held -= held


# --- parsing ------------------------------------------------------------------------------------------------------


def _not_json(reason: object) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")


def parse_json(data: bytes) -> Any:
    """Strict JSON: no NaN, no half surrogate pairs, no nesting that exhausts the stack. Raises ApiError."""
    try:
        return pydantic_core.from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise _not_json(error) from error


class LargeBodies:
    """`names` are the fields that a request may have; others are not looked at."""

    def __init__(self, names: Collection[str]) -> None:
        fields = [(name, msgspec.Raw, None) for name in names]
        self._decode = msgspec.json.Decoder(msgspec.defstruct("Body", fields)).decode

    async def parse(self, body: bytes) -> dict[str, Any]:
        """The fields by name. Raises ApiError where it is no JSON object, or a field is longer than any can be."""
        return await asyncio.get_running_loop().run_in_executor(_thread, self._parse, body)

    def _parse(self, body: bytes) -> dict[str, Any]:
        try:
            fields = self._fields(body)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise _not_json(error) from error
        return {name: _value(name, bytes(raw)) for name, raw in fields.items() if raw is not None}

    def _fields(self, body: bytes) -> dict[str, msgspec.Raw | None]:
        """Each field's own JSON; None where it is not there."""
        try:
            return msgspec.structs.asdict(self._decode(body))
        except msgspec.ValidationError:
            msgspec.json.decode(body, type=msgspec.Raw)  # raises where it is no JSON at all
            raise ApiError(400, NO_OBJECT) from None


def _value(name: str, raw: bytes) -> Any:
    holds_many = raw[:1] in (b"[", b"{")
    if holds_many and name not in LONG_FIELDS and len(raw) > MAX_FIELD:
        entries = f" ({MAX_ENTRIES[name]} entries)" if name in MAX_ENTRIES else ""
        message = f"{name} is {len(raw)} bytes long; at most {MAX_FIELD} are allowed{entries}"
        raise ApiError(400, message, param=name)
    if raw[:1] == b"[" and b'"' not in raw and b"{" not in raw:
        numbers = _numbers(raw)
        if numbers is not None:
            return numbers
    return parse_json(raw)


def _numbers(raw: bytes) -> list[Any] | None:
    """A list of numbers, or one of lists of numbers; None where lists are nested deeper, and so not cut by this."""
    end_of_entry = b"]," if b"[" in raw[1:] else b","
    found: list[Any] = []
    start, end = 1, len(raw) - 1
    while start < end:
        cut = raw.find(end_of_entry, start + PIECE)
        stop = end if cut < 0 else cut + len(end_of_entry) - 1
        try:
            found += pydantic_core.from_json(b"[" + raw[start:stop] + b"]", allow_inf_nan=False)
        except ValueError:
            return None
        start = stop + 1
        time.sleep(0)  # whoever waits for a turn gets it
    return found
