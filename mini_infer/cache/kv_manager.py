"""KVManager: all that the scheduler sees of KV memory. It counts blocks and tokens and holds no tensor.

A request's block table, block_size = 4, after a prefix hit of two blocks and two steps of its own:

    token_ids     [ t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9 ta tb | tc td .. .. ]
    block_table   [     17      |      3      |      42     |     8      ]
                    \\---- shared with other requests ----/   \\-- own --/
    block_hashes  [     h0      |      h1     |      h2     ]               full blocks only; h1 = H(h0, t4..t7)

Of a chain that begins as no other does h0 is all that is made (block_pool.Run): it says that nobody can share it.

Host memory, where there is any, is a second block pool. A swapped request holds blocks there; all others hold copies
of prefixes (prefix_tiers.py).

With the contiguous layout (a baseline) a request takes one region of max_model_len slots for its whole life: the
pool then counts regions, and a table is the region's run of consecutive blocks.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from mini_infer.cache.block_pool import BlockPool, Run
from mini_infer.cache.prefix_tiers import PrefixFiles, PrefixTiers
from mini_infer.cache.under_way import Transfers, UnderWay
from mini_infer.core.config import CacheConfig, Layout
from mini_infer.core.limits import Limits
from mini_infer.core.plan import KVUsage, Transfer
from mini_infer.core.request import Request


def chained_sha256(parent: bytes | str, tokens: Sequence[int], size: int) -> list[bytes]:
    """Hashes of blocks of `size` tokens, each of all that is before it, too.

    Args:
        parent: hash of the block before them; of the first blocks the request's salt.
    """
    data, width, sha256 = array("I", tokens).tobytes(), size * array("I").itemsize, hashlib.sha256
    if isinstance(parent, str):
        parent = sha256(parent.encode()).digest()
    hashes = []
    for start in range(0, len(data), width):
        parent = sha256(parent + data[start : start + width]).digest()
        hashes.append(parent)
    return hashes


class PrefixMatch(NamedTuple):
    """Leading blocks of a prompt whose KV is there already. They hold no reference until `admit` takes them."""

    blocks: list[int]
    num_tokens: int


NO_MATCH = PrefixMatch([], 0)
BlockHasher = Callable[[Any, Sequence[int], int], list[Any]]  # see `chained_sha256`
_block_table, _num_computed_tokens = attrgetter("block_table"), attrgetter("num_computed_tokens")


class KVManager:
    """Every verb either happens whole or answers "no room" (None) and changes nothing."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        *,
        layout: Layout = Layout.paged,
        prefix_caching: bool = True,
        num_host_blocks: int = 0,
        host_prefixes: bool = False,  # what swapped requests leave of host memory is for prefixes
        files: PrefixFiles | None = None,  # hashes of prefixes that lie in files, and where more can be written
        hash_blocks: BlockHasher = chained_sha256,
    ) -> None:
        self._hash_blocks = hash_blocks
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching and layout is Layout.paged
        # Blocks that are always taken together: one, or with the contiguous layout all that a request will ever have.
        self.least_blocks = 1 if layout is Layout.paged else -(-max_model_len // block_size)
        self._pool = BlockPool(num_blocks // self.least_blocks)
        self._host = BlockPool(num_host_blocks)
        self._host_tables: dict[Request, list[int]] = {}  # host blocks of swapped requests
        self.num_host_blocks = num_host_blocks
        self.transfers = Transfers()
        saves = host_prefixes and self.prefix_caching
        self.tiers = PrefixTiers(self._pool, self._host, self.transfers, block_size, saves, files)

    @classmethod
    def of(
        cls,
        cache: CacheConfig,
        limits: Limits,
        files: PrefixFiles | None = None,
        hash_blocks: BlockHasher = chained_sha256,
    ) -> KVManager:
        """Of an engine's settings."""
        return cls(
            limits.num_blocks,
            cache.block_size,
            limits.max_model_len,
            layout=cache.layout,
            prefix_caching=cache.prefix_caching,
            num_host_blocks=limits.num_host_blocks,
            host_prefixes=cache.host_prefix_gib is not None,
            files=files,
            hash_blocks=hash_blocks,
        )

    @property
    def num_evictions(self) -> int:
        return self._pool.num_evictions

    @property
    def num_free(self) -> int:
        """Blocks that nobody refers to, those among them that still hold a prefix."""
        return self._pool.num_free * self.least_blocks

    def num_free_without(self, requests: Iterable[Request]) -> int:
        """`num_free` if these requests had no blocks, and all transfers had ended."""
        return self._pool.num_free_after(self._released(requests), ()) * self.least_blocks

    def _released(self, requests: Iterable[Request]) -> list[list[int]]:
        tables = [request.block_table for request in requests] + [parked.table for parked in self.transfers.values()]
        return [self._units(table) for table in tables]

    # --- prefix cache -------------------------------------------------------------------------------------------

    def match_prefix(self, request: Request) -> PrefixMatch:
        """The longest cached prefix of the request's tokens, in whole blocks, but for what it needs logits of. A
        sibling (n > 1) takes its leader's prompt blocks directly, with the prefix cache on or off."""
        limit = request.num_reusable_tokens // self.block_size
        blocks: list[int] = []
        if self.prefix_caching and limit and self._has_alike(request):
            self._extend_hashes(request, limit)
            blocks = self._pool.find(request.block_hashes[:limit])
        leader = request.fork_of
        if leader is not None and self.least_blocks == 1:
            self._end_lone(self._lone_run(leader))
            shareable = min(leader.num_committed_blocks, (leader.prompt_len - 1) // self.block_size)
            if shareable > len(blocks):
                blocks = leader.block_table[:shareable]
        return PrefixMatch(blocks, len(blocks) * self.block_size)

    def commit(self, request: Request, num_computed_tokens: int) -> None:
        """Lets others share the request's blocks that the steps so far have filled."""
        full, done = num_computed_tokens // self.block_size, request.num_committed_blocks
        if full <= done:
            return
        if self.prefix_caching:
            blocks = request.block_table[done:full]
            if (run := self._lone_run(request)) is not None:
                run.blocks += blocks
            elif self._has_alike(request) or done:  # a lone run begins with a table's first block
                self._extend_hashes(request, full)
                hashes = request.block_hashes[done:full]
                self._pool.register(blocks, hashes, request.block_hashes[0])
                self.tiers.filled(hashes)
            else:
                self._pool.begin(blocks, request.block_hashes, request.token_ids)
        request.num_committed_blocks = full

    def fills_alike(self, requests: Iterable[Request]) -> bool:
        """Whether blocks that `commit` is to let others share, once these requests' tokens but for the last are
        computed, are like some that are there, or like each other."""
        new: list[bytes] = []
        firsts: list[bytes] = []  # of those whose chains begin as nothing that is there
        for request in requests if self.prefix_caching else ():
            full = (request.num_tokens - 1) // self.block_size
            if full > request.num_committed_blocks and self._lone_run(request) is None:
                if self._has_alike(request):
                    self._extend_hashes(request, full)
                    new += request.block_hashes[request.num_committed_blocks : full]
                else:
                    firsts.append(request.block_hashes[0])
        return len({*new, *firsts}) < len(new) + len(firsts) or self._pool.holds_any(new)

    def _lone_run(self, request: Request) -> Run | None:
        """That of its table, if its committed blocks are one."""
        hashes = request.block_hashes
        run = self._pool.lone.get(hashes[0]) if hashes else None
        return run if run is not None and run.held and run.hashes is hashes else None

    def _has_alike(self, request: Request) -> bool:
        """Whether the request's hashes matter: the pool holds blocks, all with theirs by now, of chains whose first
        block is like its own; or other memory may."""
        self._extend_hashes(request, 1)
        first = request.block_hashes[0]
        self._end_lone(self._pool.lone.get(first))
        return self.tiers.saves or self._pool.holds_alike(first)

    def _end_lone(self, run: Run | None) -> None:
        if run is not None:
            assert run.tokens is not None
            self._extend(run.hashes, run.tokens, len(run.blocks), "")
            self._pool.end_lone(run)

    def _extend_hashes(self, request: Request, num_blocks: int) -> None:
        """Of the first `num_blocks` blocks: equal hashes mean equal tokens from the start on, and an equal salt."""
        self._extend(request.block_hashes, request.token_ids, num_blocks, request.cache_salt)

    def _extend(self, hashes: list[bytes], token_ids: Sequence[int], num_blocks: int, salt: str) -> None:
        size, first = self.block_size, len(hashes)
        if first < num_blocks:
            tokens = token_ids[first * size : num_blocks * size]
            assert len(tokens) == (num_blocks - first) * size, "a hash needs a full block"
            hashes += self._hash_blocks(hashes[-1] if hashes else salt, tokens, size)

    # --- a request's blocks -------------------------------------------------------------------------------------

    def room_for(
        self, request: Request, keep_free: int = 0, without: Collection[Request] | None = None
    ) -> PrefixMatch | None:
        """Whether a request without blocks can have them for all of its tokens: the prefix that it would share, or
        None where that would leave fewer than `keep_free` blocks. `without`: what would be if these had none, and all
        transfers had ended."""
        match = NO_MATCH if request in self._host_tables else self.match_prefix(request)
        released = [] if without is None else self._released(without)
        spare = self._pool.num_free_after(released, match.blocks) - self._num_missing(request, match)
        return match if spare * self.least_blocks >= keep_free else None

    def admit(self, request: Request, match: PrefixMatch = NO_MATCH) -> None:
        """Gives a request, for which there is room, its table: the matched blocks, and new ones for the rest of its
        `num_tokens`."""
        self._pool.share(match.blocks)
        units = self._pool.allocate(self._num_missing(request, match))
        assert units is not None, f"no room for {request}: ask `room_for` first"
        request.block_table = match.blocks + self._expand(units)
        request.num_committed_blocks = len(match.blocks)

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Extends the table to `num_tokens` tokens. The new blocks (often none), or None when there is no room."""
        missing = -(-num_tokens // self.block_size) - len(request.block_table)
        if missing <= 0:
            return []
        blocks = self._pool.allocate(missing)
        if blocks is not None:
            request.block_table += blocks
        return blocks

    def free(self, request: Request) -> None:
        """Gives back everything the request holds, on the device and in swap space; what a transfer still reads or
        writes, when that has ended."""
        host = self._host_tables.pop(request, [])
        parked = self.transfers.of(request)
        if parked is None:
            if (run := self._lone_run(request)) is not None:
                self._pool.retire(run, request.block_table)
            else:
                self._pool.release(self._units(request.block_table))
            self._host.release(host)
        else:
            self._give_table(parked, request)
            parked.host += host
            parked.request = None
        self.tiers.freed(request)
        request.block_table = []
        request.num_committed_blocks = 0

    # --- swap space, and other engines ----------------------------------------------------------------------------

    def is_under_way(self, request: Request) -> bool:
        return self.transfers.of(request) is not None

    def distrust(self, transfers: Iterable[Transfer]) -> list[Request]:
        """These may never be made. Nobody is to find what they would have copied for the prefix cache; the requests
        whose blocks they move are returned."""
        ids = [one.transfer_id for one in transfers]
        if self.tiers.writing in ids:
            self.tiers.writing = None  # or nothing would be written any more; its blocks stay taken until it has ended
        known = [parked for number in ids if (parked := self.transfers.get(number)) is not None]
        for parked in known:
            parked.brings = {}
        return [parked.request for parked in known if parked.request is not None]

    def is_swapped(self, request: Request) -> bool:
        """Whether host memory holds what it has computed."""
        return request in self._host_tables

    def swap_out(self, request: Request) -> Transfer | None:
        """Starts to move the request's computed tokens to host blocks. Its device blocks stay taken until the transfer
        has ended. None when the swap space is too small."""
        host = self._host.allocate(-(-request.num_computed_tokens // self.block_size))
        if host is None:
            return None
        self._host_tables[request] = host
        parked = UnderWay(request)
        transfer = Transfer(self.transfers.add(parked), True, list(zip(request.block_table, host, strict=False)))
        self._give_table(parked, request)
        return transfer

    def swap_in(self, request: Request) -> Transfer:
        """Gives a swapped request, for which there is room, a table again, and starts to fill it. Its host blocks stay
        taken until the transfer has ended."""
        self.admit(request)
        pairs = list(zip(self._host_tables[request], request.block_table, strict=False))
        return Transfer(self.transfers.add(UnderWay(request)), False, pairs)

    def undo_swap_in(self, request: Request) -> None:
        """The request stays in swap space after all. Its device blocks stay taken until the transfer has ended."""
        parked = self.transfers.of(request)
        assert parked is not None
        self._give_table(parked, request)

    def _give_table(self, parked: UnderWay, request: Request) -> None:
        self._end_lone(self._lone_run(request))
        parked.take_table(request)

    def end_transfer(self, transfer_id: int, failed: Collection[int] = ()) -> Request | None:
        """The copies have ended, or were never made: the request, whose blocks can be used now; None where it was freed
        meanwhile, there is none, or nobody knows of the transfer. `failed` are host blocks that files did not fill:
        nothing from the first of them on has arrived."""
        parked = self.transfers.pop(transfer_id, None)
        if parked is None:
            return None
        self._pool.release(self._units(parked.table))
        brings = {block: block_hash for block, block_hash in parked.brings.items() if block not in failed}
        self._host.register(brings, brings.values())
        self._host.release(parked.host)
        request = parked.request
        self.tiers.ended(transfer_id, request, brings.values())
        if request is not None and request.block_table:
            if request in self._host_tables:
                self._host.release(self._host_tables.pop(request))
            else:
                arrived = next((i for i, block in enumerate(parked.host) if block in failed), len(parked.host))
                self.commit(request, (request.num_committed_blocks + arrived) * self.block_size)
        return request

    def start_receiving(self, request: Request) -> int:
        """Another engine may write to the request's blocks from here on, until `end_transfer` of the id that this
        returns."""
        return self.transfers.add(UnderWay(request, remote=True))

    # --- units ----------------------------------------------------------------------------------------------------

    def _num_missing(self, request: Request, match: PrefixMatch) -> int:
        """Units to allocate for all of the request's tokens, besides the matched blocks."""
        return -(-request.num_tokens // (self.block_size * self.least_blocks)) - len(match.blocks)

    def _units(self, table: list[int]) -> list[int]:
        unit = self.least_blocks
        return table if unit == 1 else [block // unit for block in table[::unit]]

    def _expand(self, units: list[int]) -> list[int]:
        unit = self.least_blocks
        return units if unit == 1 else [block for first in units for block in range(first * unit, (first + 1) * unit)]

    # --- observation --------------------------------------------------------------------------------------------

    def usage(self, holders: Collection[Request]) -> KVUsage:
        """`holders` are the requests that have a block table now."""
        used = (self._pool.num_blocks - self._pool.num_free) * self.least_blocks
        reserved = used * self.block_size
        # A shared block is full, so the unused slots are at the ends of the tables, each its request's own.
        num_blocks = sum(map(len, map(_block_table, holders)))
        num_tokens = sum(map(_num_computed_tokens, holders))
        for parked in self.transfers.values():
            num_blocks += len(parked.table)
            num_tokens += parked.num_tokens
        unused = num_blocks * self.block_size - num_tokens
        return KVUsage(
            total_blocks=self.num_blocks,
            used_blocks=used,
            cached_blocks=self._pool.num_cached,
            used_slots=reserved - unused,
            reserved_slots=reserved,
            host_blocks_used=self.num_host_blocks - self._host.num_free,
            host_cached_blocks=self._host.num_cached,
        )
