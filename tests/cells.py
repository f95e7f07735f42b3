"""Tables of tests of which most cells run on demand."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def cells(every: Iterable[tuple[Any, ...]], always: Container[tuple[Any, ...]]) -> list[Any]:
    """Parameters of a test: `every` cell of its table, those that do not `always` run with -m soak."""
    return [
        pytest.param(*cell, id="-".join(map(str, cell)), marks=() if cell in always else pytest.mark.soak)
        for cell in every
    ]
