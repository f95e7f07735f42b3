"""Large bodies: parsed in a thread, so that streams go on meanwhile.

Python runs one thread at a time, and a parser lets no other one run before it returns. So it is given nothing that the
request has no use for, and token ids a piece at a time. Texts and messages go in one piece: ten million characters take
a few milliseconds, and only a body made for it, of millions of empty messages, makes streams wait half a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pydantic_core

from mini_infer.serving.api.errors import NO_OBJECT, ApiError
from mini_infer.serving.api.schema import LONG_FIELDS, MAX_ENTRIES

LARGE = 2**16  # bytes; what is smaller is parsed in a few milliseconds at most
PIECE = 2**15  # bytes: a millisecond, about
MAX_FIELD = 2**19  # bytes of a list or an object that holds no prompt

# One: however many large bodies come at once, streams share Python with one of them.
_thread = ThreadPoolExecutor(1, "large-body")


def not_json(reason: object) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")


def parse_json(data: bytes) -> Any:
    """Strict JSON: no NaN, no half surrogate pairs, no nesting that exhausts the stack. Raises ApiError."""
    try:
        return pydantic_core.from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise not_json(error) from error


class LargeBodies:
    """
    Args:
        names: the fields that a request may have; others are not looked at.
    """

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
            raise not_json(error) from error
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
