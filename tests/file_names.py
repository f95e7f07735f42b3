"""Block files of which there are only the names."""

from __future__ import annotations

from collections.abc import Iterable


class FileNames(set[bytes]):
    def __init__(self) -> None:
        super().__init__()
        self.touched: list[bytes] = []

    def touch(self, hashes: Iterable[bytes]) -> None:
        self.touched += hashes
