"""Code that imports the package and the lab anew, where other packages are not installed."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterable

OURS = ("mini_infer", "experiments")


def reimported(code: str, without: Iterable[str]) -> int:
    """The exit code of a child process in which `code` runs, without the modules `without`. It is forked, since a new
    interpreter would take seconds to import what others wrote, which is there already."""
    child = multiprocessing.get_context("fork").Process(target=_run, args=(code, tuple(without)))
    child.start()
    child.join(60)
    assert child.exitcode is not None
    return child.exitcode


def _run(code: str, without: tuple[str, ...]) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in (*OURS, *without):
            del sys.modules[name]
    sys.modules.update(dict.fromkeys(without))  # type: ignore[arg-type]
    exec(code, {"__name__": "__main__"})
