"""The small trained checkpoints that ship with the package."""

from __future__ import annotations

from pathlib import Path

SHIPPED = ("tiny-target", "tiny-draft", "tiny-moe")


def shipped_path(name: str) -> Path | None:
    """The folder of a shipped model, or None if `name` is not one's name."""
    return Path(__file__).parent / name if name in SHIPPED else None
