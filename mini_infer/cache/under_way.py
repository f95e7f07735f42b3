"""Copies of blocks that have been started and have not ended: whose blocks they move, and what only they still hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from mini_infer.core.request import Request


@dataclass
class UnderWay:
    """A transfer whose copies have not ended, and blocks that nobody else owns but they still read or write."""

    request: Request | None  # whose blocks move; None: it has been freed, or none's do
    table: list[int] = field(default_factory=list)  # of the device
    num_tokens: int = 0  # that lie in it
    host: list[int] = field(default_factory=list)
    brings: dict[int, bytes] = field(default_factory=dict)  # host block -> what it holds when the copies have ended
    remote: bool = False  # another engine writes
    to_files: bool = False  # threads read `host`

    def take_table(self, request: Request) -> None:
        """The request gives up its device blocks, but the transfer does not."""
        if request.block_table:
            self.table, self.num_tokens = request.block_table, request.num_computed_tokens
        request.block_table = []
        request.num_committed_blocks = 0


class Transfers(dict[int, UnderWay]):
    """Those under way, by id."""

    num_started = 0  # the last one's id

    def add(self, parked: UnderWay) -> int:
        """Returns the id that its Transfer gets."""
        self.num_started += 1
        self[self.num_started] = parked
        return self.num_started

    def of(self, request: Request) -> UnderWay | None:
        for parked in self.values():
            if parked.request is request:
                return parked
        return None

    def ended_by_waiting(self, last: int) -> list[int]:
        """Ids, up to `last`, of local ones that will not go on once a step without rows is collected: it has waited for
        all that were made, but beside others not for what is written to files. A write that nobody trusts any more may
        go on like any other: what its blocks got meanwhile would be in the files of their old hashes."""
        local = self.local
        alone = all(self[number].to_files for number in local)
        return [number for number in local if number <= last and (alone or not self[number].to_files)]

    @property
    def local(self) -> list[int]:
        """Ids of those between the device and the host."""
        return [number for number, parked in self.items() if not parked.remote]
