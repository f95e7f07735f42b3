"""Progress of long work on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from experiments.lab import interrupts

TOLD_S = 5.0  # from one word about a pass under way to the next


class Steps:
    """`with Steps("quickstart") as steps: steps.plan(20); steps.next("engine, batch 8")` before each step. `pace` tells
    how far the one under way has come, and how long all take like that; it is empty before that is known."""

    pace = ""
    _told = 0.0  # when the step that is under way was last spoken of

    def __init__(self, title: str) -> None:
        console = Console(stderr=True)
        self._drawn = console.is_terminal
        # Drawn between measurements only: a thread that redraws would take its time from what is measured.
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bar = Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not self._drawn)
        self._task = self._bar.add_task(title, total=None)
        self._title = self._text = title  # the text is of the step that is under way,
        self._started = self._begun = time.monotonic()  # which began then
        self._total = self._done = self._process = 0
        self._processes = 1

    def __enter__(self) -> Steps:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._bar.stop()
        if kind is None:
            count = f"{self._done} of {self._total}" if self._done < self._total else f"{self._total}"
            took = f"{time.monotonic() - self._started:.0f} s"
            print(f"{self._title}: {count} measurements in {took}", file=sys.stderr)

    def begin_process(self, index: int, count: int) -> None:
        """What is planned from here on is planned in each of the processes that are left."""
        self._process, self._processes = index, count

    def plan(self, total: int) -> None:
        self._total = self._done + total * (self._processes - self._process)
        self._bar.update(self._task, total=self._total)

    def next(self, what: str) -> None:
        """A step begins; the one before it is done."""
        interrupts.keep()
        now, left = time.monotonic(), ""
        if self._done:  # of the whole run, by the steps that are done
            seconds = (now - self._started) / self._done * (self._total - self._done)
            left = f", {seconds / 60:.0f} min left" if seconds >= 90 else f", {seconds:.0f} s left"
        process = f"process {self._process + 1} of {self._processes}, " if self._processes > 1 else ""
        self._bar.update(self._task, completed=self._done)
        self._done += 1
        self._begun = self._told = now
        self._text, self.pace = f"{self._title}: {process}{what}{left}", ""
        self._say(self._text, f"[{self._done}/{self._total}] ")

    def within(self, done: int, total: int) -> None:
        """Requests that have ended. Told at most every TOLD_S, between steps: what is measured hardly feels it."""
        if time.monotonic() - self._told >= TOLD_S:
            self._told = time.monotonic()
            self.tell(done, total)

    def tell(self, done: int, total: int) -> None:
        if done:
            seconds = time.monotonic() - self._begun
            whole = f"{self._total} passes take about {seconds * total / done * self._total / 60:.0f} min"
            answered = f"{done} of {total} requests were answered after {seconds:.0f} s"
            self.pace = f"{answered}: at that pace the run's {whole}"
        self._say(f"{self._text}: {done} of {total} requests", "    ")

    def note(self, what: str) -> None:
        """Of what is done beside the steps: again, because ...; gates, which take a while before the first step."""
        self._say(f"{self._title}: {what}")

    def _say(self, text: str, before: str = "") -> None:
        if self._drawn:
            self._bar.update(self._task, description=text, refresh=True)
        else:
            print(before + text, file=sys.stderr, flush=True)
