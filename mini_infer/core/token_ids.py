"""Token ids on their way from process to process: four bytes each, in the machine's order. Lists of integers would be
written and read one by one, which takes a long prompt more time than all the rest of its way."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any


def pack(token_ids: Sequence[Any]) -> array[int] | None:
    """What `array("I", bytes)` makes again of its bytes. None where one is no int from 0 to 2**32 - 1; True is none."""
    if not isinstance(token_ids, array) and not set(map(type, token_ids)) <= {int}:
        return None
    try:
        return array("I", token_ids)
    except (TypeError, OverflowError):
        return None
