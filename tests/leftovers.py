"""What killed processes must not leave behind: processes that they had started, shared memory, temporary files."""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

PR_SET_CHILD_SUBREAPER = 36
SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def nothing_left(seconds: float = 20.0) -> Iterator[None]:
    """At the end, or some seconds later, there is nothing that was not there before."""
    with tempfile.TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", temporary)
        patch.setattr(tempfile, "tempdir", temporary)
        before, zombies = _there_is(temporary), _zombies()
        _adopt_orphans(True)
        try:
            yield
            until = time.monotonic() + seconds
            while (new := _there_is(temporary) - before) and (left := new - _shared_by_others()):
                assert time.monotonic() < until, f"left behind: {left}"
                time.sleep(0.02)
        finally:
            _adopt_orphans(False)
            for orphan in _zombies() - zombies:
                with suppress(ChildProcessError):
                    os.waitpid(orphan.pid, 0)


def _adopt_orphans(whether: bool) -> None:
    """Whether what is started below this process stays below it when those in between are killed."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(whether))


def _there_is(temporary: str) -> set[psutil.Process | Path]:
    children = psutil.Process().children(recursive=True)
    shared = (path for path in SHARED_MEMORY.iterdir() if path.is_file())
    return {*filter(_lives, children), *shared, *Path(temporary).iterdir()}


def _zombies() -> set[psutil.Process]:
    return {child for child in psutil.Process().children() if not _lives(child)}


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _shared_by_others() -> set[psutil.Process | Path]:
    """The memory that other processes map, those of other tests too."""
    used = set[psutil.Process | Path]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if maps.parent.name == str(os.getpid()):
            continue
        try:
            lines = maps.read_text().splitlines()
        except OSError:  # it has ended, or is somebody else's
            continue
        used |= {Path(line.split(maxsplit=5)[5]) for line in lines if f" {SHARED_MEMORY}/" in line}
    return used
