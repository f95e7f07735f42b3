"""What a long run does beside measuring."""

from __future__ import annotations

import ctypes
import signal
import sys

import pytest

from experiments.lab import interrupts


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_an_interrupt_is_one_even_when_a_library_has_taken_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_last", float("-inf"))
    before = signal.signal(signal.SIGTERM, interrupts.stop)
    try:
        ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(1))  # SIG_IGN: behind Python's back
        signal.raise_signal(signal.SIGTERM)
        interrupts.keep()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # of the same stop
        monkeypatch.setattr(interrupts, "_last", float("-inf"))
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        interrupts.keep()
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
