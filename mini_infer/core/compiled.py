"""Modules that `make compiled` has made of their sources (ops/compile.py): Python takes them instead."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
LIST = ".compiled"  # file of the package with the names of their sources, written after them


def require_current(package: Path = PACKAGE) -> None:
    """Raises ImportError where a source has changed since: what it says now would not be what runs."""
    made = package / LIST
    if not os.path.exists(made):
        return
    when = made.stat().st_mtime
    newer = [name for name in sources(package) if (package / name).stat().st_mtime > when]
    if newer:
        raise ImportError(
            f"mini_infer was compiled before {', '.join(newer)} changed: `make compiled` does it anew, and "
            "`make interpreted` takes compiled modules away"
        )


def sources(package: Path = PACKAGE) -> list[str]:
    """Of the compiled modules, as `core/plan.py`. Empty where all are interpreted."""
    made = package / LIST
    return made.read_text(encoding="utf-8").split() if made.exists() else []
