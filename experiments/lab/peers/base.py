"""What a peer is to the process that holds it, and how it fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from experiments.lab.measure.traces import Served
from experiments.lab.workloads import Item
from mini_infer.core.errors import MiniInferError


class PeerAbsent(MiniInferError):
    """A peer cannot be measured on this machine. The message says why: it stands in the report, and is no error."""


class PeerError(MiniInferError):
    """A peer's process has failed. The message holds the last lines of its log."""


class Peer(Protocol):
    @property
    def about(self) -> Mapping[str, Any]:
        """Version and settings, in plain values: they are stored with the results."""
        ...

    def serve(self, items: Sequence[Item], concurrency: int) -> Served:
        """As Subject.serve. A token's time is when this process, which is the peer's client, could read it."""
        ...

    def forget(self) -> None:
        """Drops what earlier passes have left in a prefix cache."""
        ...

    def close(self) -> None: ...


class LivingPeer(Peer, Protocol):
    """One that has processes of its own, and stays for later passes."""

    name: str  # for people

    @property
    def alive(self) -> bool: ...
