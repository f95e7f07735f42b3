"""Ctrl-C, SIGTERM and a time limit's signal as KeyboardInterrupt, after which what was measured is kept."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

STOPS = signal.SIGINT, signal.SIGTERM
SAME_S = 1.0  # within which a second signal is the same stop
_last = float("-inf")


def stop(number: int, frame: FrameType | None) -> None:
    """A handler. `timeout` signals a process, then its group: the second signal would end what keeps the findings."""
    global _last
    if time.monotonic() - _last > SAME_S:
        _last = time.monotonic()
        raise KeyboardInterrupt


def listen(*also: signal.Signals) -> None:
    """Has signals that would raise KeyboardInterrupt handled by `stop`, and those in `also`. Others that are ignored,
    as in a shell's background jobs, stay so."""
    for number in STOPS:
        if number in also or signal.getsignal(number) is signal.default_int_handler:
            signal.signal(number, stop)


def keep() -> None:
    """LLVM, in Triton, takes signals for itself when it first compiles. Then they would just end the process."""
    if threading.current_thread() is threading.main_thread():
        for number in STOPS:
            if signal.getsignal(number) is stop:
                signal.signal(number, stop)
