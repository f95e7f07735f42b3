"""Bodies that have not come to their end: their bytes have a limit together, whoever sends them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from mini_infer.serving.api.errors import ApiError
from mini_infer.serving.api.large_body import LARGE


class UnfinishedBodies:
    """
    Args:
        limit: bytes of all together. What a body has below LARGE is not counted: small requests always come through.
    """

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
