"""Progress of long work on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Steps:
    """`with Steps("quickstart") as steps: steps.plan(20); steps.next("engine, batch 8")` before each step."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._started = time.monotonic()
        self._total = 0
        self._done = 0
        self._process, self._processes = 0, 1

    def __enter__(self) -> Steps:
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            # Drawn between measurements only: a thread that redraws would take its time from what is measured.
            self._bar = Progress(*columns, console=self._console, transient=True, auto_refresh=False)
            self._task = self._bar.add_task(self._title, total=None)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        if kind is None:
            seconds = time.monotonic() - self._started
            count = f"{self._done} of {self._total}" if self._done < self._total else f"{self._total}"
            print(f"{self._title}: {count} measurements in {seconds:.0f} s", file=sys.stderr)

    def begin_process(self, index: int, count: int) -> None:
        """What is planned from here on is planned in each of the processes that are left."""
        self._process, self._processes = index, count

    def plan(self, total: int) -> None:
        self._total = self._done + total * (self._processes - self._process)
        if self._bar is not None:
            self._bar.update(self._task, total=self._total)

    def next(self, what: str) -> None:
        """A step begins; the one before it is done."""
        keep_interrupts()
        if self._processes > 1:
            what = f"process {self._process + 1} of {self._processes}, {what}"
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=f"{self._title}: {what}", refresh=True)
        else:
            print(f"[{self._done + 1}/{self._total}] {self._title}: {what}", file=sys.stderr, flush=True)
        self._done += 1

    def again(self, why: str) -> None:
        """The step is done once more."""
        text = f"{self._title}: again, because {why}"
        if self._bar is not None:
            self._bar.update(self._task, description=text, refresh=True)
        else:
            print(text, file=sys.stderr, flush=True)


def keep_interrupts() -> None:
    """Sees to it that Ctrl-C and SIGTERM still raise KeyboardInterrupt, after which what was measured is kept, where
    they do so for Python. A compiler's library (LLVM, in Triton) takes them for itself when it first compiles, and from
    then on they would just end the process."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is signal.default_int_handler:
                signal.signal(number, signal.default_int_handler)
