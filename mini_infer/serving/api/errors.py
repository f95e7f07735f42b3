"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}} for every answer of 400 and above."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from mini_infer.core.errors import MiniInferError, RequestError
from mini_infer.serving.link.link import EngineDead
from mini_infer.serving.link.replica import EngineError, QueueFull

logger = logging.getLogger(__name__)

INVALID = "invalid_request_error"
API_NAMES = {"grammar": "response_format", "adapter": "model"}  # where a field's name is not that of SamplingParams
NO_OBJECT = 'the body must be a JSON object, such as {"model": ...}'
MODEL = "mini_infer.model"  # in the scope: the name of the model that the request chose
LONGEST_MESSAGE = 2000  # characters: a message may quote what it complains about


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message[:LONGEST_MESSAGE]
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.logged = False

    @property
    def body(self) -> bytes:
        """{"error": {...}} as JSON."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        # Half a surrogate pair can come back from the request that is complained about.
        return msgspec.json.encode({"error": {k: _sayable(v) for k, v in error.items()}})

    def response(self) -> Response:
        return Response(self.body, self.status, headers=self.headers, media_type="application/json")


def try_later(message: str, code: str, seconds: float) -> ApiError:
    headers = {"Retry-After": str(max(1, round(seconds)))}
    return ApiError(429, message, type="rate_limit_error", code=code, headers=headers)


def _sayable(text: str | None) -> str | None:
    return None if text is None else text.encode(errors="replace").decode()


def as_api_error(error: Exception) -> ApiError:
    """What a client is told about an exception. The text of one that nobody foresaw stays here; the reason of whatever
    is the server's fault is logged, once."""
    told = _told(error)
    if told.status >= 500 and not told.logged:
        told.logged = True
        unforeseen = error if told.code == "internal" else None
        logger.error("%d %s: %s", told.status, told.code, told.message, exc_info=unforeseen)
    return told


def _told(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=API_NAMES.get(error.param or "", error.param))
    if isinstance(error, QueueFull):
        return try_later(str(error), "queue_full", error.retry_after)
    if isinstance(error, (EngineDead, EngineError)):
        status, code = (503, "engine_dead") if isinstance(error, EngineDead) else (500, "engine_error")
        return ApiError(status, str(error), type="server_error", code=code)
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, HTTPException):
        return _http_error(error)
    return ApiError(
        500,
        "the server failed at this request; its log tells why",
        type="server_error",
        code="internal",
        headers={"Connection": "close"},  # uvicorn closes it, and its next request would be lost
    )


def _validation_error(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong: ('body', 'messages', 0, 'role') is reported as messages[0].role."""
    first: dict[str, Any] = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first['ctx']['error']}", code="invalid_json")
    location = first["loc"][1:]
    if first["type"] == "refused":
        location = (*location, first["ctx"]["field"])
    if not location:
        return ApiError(400, NO_OBJECT)
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    return ApiError(400, f"{path}: {first['msg'].removeprefix('Value error, ')}", param=str(location[0]))


def _http_error(error: HTTPException) -> ApiError:
    message = str(error.detail)
    if error.status_code == 404:
        message = "there is nothing at this path; /docs lists what there is"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"this path does not take the method; it takes {allowed}"
    return ApiError(error.status_code, message, headers=error.headers)


def install(app: FastAPI) -> None:
    """Gives every error of the app this shape."""

    async def answer(request: Request, error: Exception) -> Response:
        told = as_api_error(error)
        request.app.state.gateway.count(f"refused {told.code or told.status}", request.scope.get(MODEL))
        return told.response()

    for kind in (ApiError, MiniInferError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
