"""Progress on a terminal, and silence elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def progress_bar(what: str) -> Callable[[Sequence[T]], Iterable[T]]:
    """A function that yields the items it is given and shows on standard error how many are done."""

    def follow(items: Sequence[T]) -> Iterable[T]:
        from rich.console import Console
        from rich.progress import track

        console = Console(stderr=True)
        return track(items, what, console=console, transient=True, disable=not console.is_terminal)

    return follow
