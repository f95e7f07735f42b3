"""What is measured is to who measures it, and how a peer fails."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from experiments.lab.measure.traces import Served
from experiments.lab.workloads import Item
from mini_infer.core.errors import MiniInferError


class PeerAbsent(MiniInferError):
    """A peer cannot be measured on this machine. The message says why: it stands in the report, and is no error."""


class PeerError(MiniInferError):
    """A peer's process has failed. The message holds the last lines of its log."""


def why_lost(lost: PeerAbsent | PeerError) -> str:
    """In a sentence, for the report. A log goes to the terminal."""
    why, _, log = str(lost).partition("\n")
    if isinstance(lost, PeerError):
        print(log, file=sys.stderr)
        why = f"it has failed, and is not asked again: {why}"
    return why


class Subject(Protocol):
    """What can be measured: the engine, or a peer that serves the same requests."""

    @property
    def about(self) -> Mapping[str, Any]:
        """A peer's version and settings, in plain values, which are stored with the results; of an engine on a GPU what
        it chose, fell back to, and took to start."""
        ...

    def serve(self, items: Sequence[Item], concurrency: int) -> Served:
        """Greedy tokens for every item, in the items' order. Requests of the closed loop: at most `concurrency` in
        flight. A token's time is when the process that asks could read it."""
        ...

    def forget(self) -> None:
        """What comes finds nothing of what came before: no cached prefix, and no text to draft from."""
        ...

    def close(self) -> None: ...


class LivingPeer(Subject, Protocol):
    """One that has processes of its own, and stays for later passes."""

    name: str  # for people

    @property
    def alive(self) -> bool: ...
