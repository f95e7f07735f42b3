"""Modules that `make compiled` has made of their sources (ops/compile.py): Python takes them instead."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
LIST = ".compiled"  # file of the package: a line for each source, with what it said when it was compiled


def record(sources: Sequence[str], package: Path = PACKAGE) -> str:
    """What LIST is to hold of sources such as `core/plan.py`."""
    return "".join(f"{_digest(package / source)} {source}\n" for source in sources)


def require_current(package: Path = PACKAGE) -> None:
    """Raises ImportError where a source reads otherwise now: what it says would not be what runs."""
    if not os.path.exists(package / LIST):
        return
    known = [line.split() for line in (package / LIST).read_text(encoding="utf-8").splitlines()]
    changed = [source for digest, source in known if _digest(package / source) != digest]
    if changed:
        raise ImportError(
            f"mini_infer was compiled before {', '.join(changed)} changed: `make compiled` does it anew, and "
            "`make interpreted` takes compiled modules away"
        )


def in_use() -> bool:
    """Whether they are what runs: those of another version of Python are passed over."""
    from mini_infer.core import plan  # one of them

    return not str(plan.__file__).endswith(".py")


def _digest(source: Path) -> str:
    import hashlib  # half of the time of `import mini_infer`, for what is seldom there

    return hashlib.sha256(source.read_bytes()).hexdigest() if source.exists() else "gone"
