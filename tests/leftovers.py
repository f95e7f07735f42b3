"""What killed processes must not leave behind: processes that they had started, shared memory, folders of sockets."""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from mini_infer.serving.processes.launch import PREFIX

PR_SET_CHILD_SUBREAPER = 36
SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def nothing_left(seconds: float = 20.0) -> Iterator[None]:
    """Some seconds after the end there is nothing that was not there before."""
    before = _there_is()
    _adopt_orphans(True)
    try:
        yield
        until = time.monotonic() + seconds
        while (new := _there_is() - before) and (left := new - _others_use()):
            assert time.monotonic() < until, f"left behind: {left}"
            time.sleep(0.02)
    finally:
        _adopt_orphans(False)


def _adopt_orphans(whether: bool) -> None:
    """Whether what is started below this process stays below it when those in between are killed."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(whether))


def _there_is() -> set[psutil.Process | Path]:
    """Processes below this one, pieces of shared memory, folders."""
    children = psutil.Process().children(recursive=True)
    folders = Path(tempfile.gettempdir()).glob(f"{PREFIX}*")
    return {*filter(_lives, children), *filter(Path.is_file, SHARED_MEMORY.iterdir()), *folders}


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _others_use() -> set[psutil.Process | Path]:
    """What processes have, of other tests too: the memory that they map, the folders of their sockets."""
    used = {Path(line.split()[-1]).parent for line in Path("/proc/net/unix").read_text().splitlines() if PREFIX in line}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:  # it has ended, or is somebody else's
            continue
        used |= {Path(line.split(maxsplit=5)[5]) for line in lines if f" {SHARED_MEMORY}/" in line}
    return {*used}
