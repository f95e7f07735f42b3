"""Which code made a number: commit, whether the tree was clean, versions."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import mini_infer
from mini_infer.core import compiled

PACKAGES = ("torch", "transformers", "numpy")
WRITTEN = ("results", "reports", "conf/hardware", "conf/costs", "README.md")  # by runs


@dataclass(frozen=True)
class ProcessInfo:
    """A process of a result. What the GPU says of itself is the median over timed passes; None where nobody says it."""

    index: int
    seed: int  # what prompts, lengths, sampling and random weights of this process are drawn from
    started: str  # ISO 8601, UTC
    seconds: float
    clock_mhz: float | None = None  # of the GPU's multiprocessors
    power_w: float | None = None
    temperature_c: float | None = None
    busy_others: int | None = None  # other GPUs of the machine that computed for somebody else, the most at a time
    complete: bool | None = None  # None in results older than this: as the run as a whole
    commit: str | None = None  # where it was not measured at the run's: a stored run had it, see resume.py


def commit(root: Path) -> str | None:
    """The commit's full hash; None outside a git repository or before its first commit."""
    found = git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    return found and found.strip()


def is_clean(root: Path) -> bool | None:
    """Whether the tree equals the commit. What runs themselves write, results, reports and ceilings, is left aside."""
    changes = git(root, "status", "--porcelain", "--", ".", *(f":(exclude){folder}" for folder in WRITTEN))
    return None if changes is None else not changes


def versions() -> dict[str, str]:
    own = {"python": platform.python_version(), "mini-infer": mini_infer.__version__}
    if compiled.in_use():
        own["compiled by"] = "mypyc"
    return own | {package: importlib.metadata.version(package) for package in PACKAGES}


def git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None where there is no git, no repository, or where it fails."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
