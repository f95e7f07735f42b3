"""What is checked of every API request before its fields are: the key, the body's size and type, and its JSON."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from mini_infer.serving.api.errors import ApiError
from mini_infer.serving.api.large_body import LARGE, LargeBodies, parse_json
from mini_infer.serving.api.service import Service


class CheckedRoute(APIRoute):
    """A route whose handler gets a JSON body that has been read within the limits."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        large_bodies = None if self.body_field is None else LargeBodies(_field_names(self.body_field))

        async def handle(request: Request) -> Response:
            service: Service = request.app.state.service
            service.callers.enter(request)
            if large_bodies is None:
                return await handler(request)
            _require_json(request)
            with service.arriving(), service.unfinished.body() as grow:
                body = await _read(request, service.settings.max_body_bytes, grow)
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


def _require_json(request: Request) -> None:
    """Also so that a web page elsewhere cannot post here from a visitor's browser without asking it first."""
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, f'send the header "Content-Type: application/json"; this request has {given[:100]!r}')


async def _read(request: Request, limit: int, grow: Callable[[int], None]) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > limit:
        raise _too_large(limit)
    parts = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            grow(size)
            parts.append(part)
    except ClientDisconnect:
        raise ApiError(400, "the client left before its request was complete") from None  # nobody reads it
    return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes, the server's --max-body-bytes"
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
