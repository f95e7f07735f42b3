"""Prefixes below the device: in host memory, and in files below that.

    device --save--> host memory --write--> files
           <--load--             <--load--          (through host memory)

Blocks are copied when they are filled, not when they are evicted: then nobody waits for a block. What swapped requests
leave of host memory holds the copies, by the hashes that they have on the device. They stay when the device's block is
given to somebody else, and come back when a prompt asks for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from mini_infer.cache.block_pool import BlockPool
from mini_infer.cache.under_way import Transfers, UnderWay
from mini_infer.core.plan import Transfer
from mini_infer.core.request import Request

SAVED_AT_ONCE = 32  # blocks: a copy of few takes the host as long as one of many
WRITTEN_AT_ONCE = 0.5  # of host memory, at most: until they are written these blocks cannot be given to others


class PrefixFiles(Protocol):
    """Hashes of prefixes that lie in files: cache/block_files.py."""

    def __contains__(self, block_hash: object) -> bool: ...

    def touch(self, hashes: Iterable[bytes]) -> None: ...


class Saved(NamedTuple):
    """A block of a prefix that the device does not hold."""

    block_hash: bytes
    block: int | None  # of host memory; None: in a file alone


class PrefixTiers:
    """
    Args:
        files: hashes of prefixes that lie in files, and where more can be written.

    Attributes:
        saves: prefixes are kept in host memory at all; else nothing happens here.
        writing: id of the one transfer to files that the next one waits for.
    """

    def __init__(
        self,
        device: BlockPool,
        host: BlockPool,
        transfers: Transfers,
        block_size: int,
        saves: bool,
        files: PrefixFiles | None,
    ) -> None:
        self._device, self._host, self._transfers, self._block_size = device, host, transfers, block_size
        self.saves, self._files = saves, files
        self._unsaved: dict[bytes, None] = {}  # filled since the last `save`, in that order
        self._saves_now = False  # somebody has ended whose next turn may ask for its blocks
        self._unwritten: dict[bytes, None] = {}  # saved and in no file, in that order
        self.writing: int | None = None

    def filled(self, hashes: Iterable[bytes]) -> None:
        """Steps have filled blocks of the device."""
        if self.saves:
            self._unsaved.update(dict.fromkeys(hashes))

    def freed(self, request: Request) -> None:
        """What the request has used is the last to be overwritten in host memory and in files, its beginning last of
        all."""
        if self.saves:
            used = request.block_hashes[: request.num_committed_blocks]
            saved = self._host.find(used)
            self._host.share(saved)
            self._host.release(saved)
            if self._files is not None:
                self._files.touch(used)
            self._saves_now = bool(self._unsaved)

    def save(self) -> Transfer | None:
        """Starts to copy prefixes that steps have filled to host memory, once there are enough, or one of them may be
        evicted. The device's blocks stay as they are until the transfer has ended."""
        if not self._unsaved or not (self._saves_now or len(self._unsaved) >= SAVED_AT_ONCE):
            return None
        absent = [block_hash for block_hash in self._unsaved if self._host.block_of(block_hash) is None]
        self._unsaved.clear()
        self._saves_now = False
        held = [(block, h) for h in absent if (block := self._device.block_of(h)) is not None][: self._host.num_free]
        host = self._host.allocate(len(held))
        if not host:
            return None
        table, hashes = [block for block, _ in held], [block_hash for _, block_hash in held]
        self._device.share(table)
        parked = UnderWay(None, table, len(table) * self._block_size, host, dict(zip(host, hashes, strict=True)))
        return Transfer(self._transfers.add(parked), True, list(zip(table, host, strict=True)), of_prefixes=True)

    def find(self, request: Request) -> list[Saved]:
        """What lies in host memory or in files of what comes behind the blocks that an admitted request shares."""
        found: list[Saved] = []
        if self.saves:
            last = request.num_reusable_tokens // self._block_size
            for block_hash in request.block_hashes[request.num_committed_blocks : last]:
                block = self._host.block_of(block_hash)
                if block is None and (self._files is None or block_hash not in self._files):
                    break
                found.append(Saved(block_hash, block))
        return found

    def load(self, request: Request, saved: Sequence[Saved]) -> Transfer | None:
        """Starts to fill an admitted request's table with what `find` has found, or as much of it as host memory has
        room for. None: for nothing."""
        self._host.share([one.block for one in saved if one.block is not None])
        room = self._host.num_free
        for count, one in enumerate(saved):
            room -= one.block is None
            if room < 0:
                self._host.release([other.block for other in saved[count:] if other.block is not None])
                saved = saved[:count]
                break
        if not saved:
            return None
        to_read = [one.block_hash for one in saved if one.block is None]
        fresh = self._host.allocate(len(to_read))
        assert fresh is not None
        files = list(zip(fresh, to_read, strict=True))
        rest = iter(fresh)
        host = [next(rest) if one.block is None else one.block for one in saved]
        first = request.num_committed_blocks
        pairs = list(zip(host, request.block_table[first : first + len(host)], strict=True))
        number = self._transfers.add(UnderWay(request, host=host, brings=dict(files)))
        return Transfer(number, False, pairs, of_prefixes=True, files=files)

    def write(self) -> Transfer | None:
        """Starts to write to files what has been saved since; their blocks in host memory stay as they are until then.
        What is evicted there before its turn comes is lost. Whether a file is there already its writer finds out: here
        thousands of blocks would be looked for in a file system while a step is planned."""
        if self._files is None or self.writing is not None or not self._unwritten:
            return None
        files: list[tuple[int, bytes]] = []
        most = max(1, int(WRITTEN_AT_ONCE * self._host.num_blocks))
        while self._unwritten and len(files) < most:
            block_hash = next(iter(self._unwritten))
            del self._unwritten[block_hash]
            block = self._host.block_of(block_hash)
            if block is not None:
                files.append((block, block_hash))
        if not files:
            return None
        host = [block for block, _ in files]
        self._host.share(host)
        self.writing = self._transfers.add(UnderWay(None, host=host, to_files=True))
        return Transfer(self.writing, True, [], of_prefixes=True, files=files)

    def ended(self, transfer_id: int, request: Request | None, brought: Collection[bytes]) -> None:
        """The copies of a transfer have ended, which has brought these prefixes to host memory."""
        if transfer_id == self.writing:
            self.writing = None
        elif request is None and self._files is not None:
            self._unwritten.update(dict.fromkeys(brought))
            while len(self._unwritten) > self._host.num_blocks:  # the oldest are there no more
                del self._unwritten[next(iter(self._unwritten))]
