"""Block bookkeeping: reference counts, free blocks, and which block holds which prefix. Counts blocks, holds no tensor.
One pool is the device's memory, another the host's.

A block is in exactly one of three states:

    referenced   ref_count > 0; in some request's block table. It may also be hashed, so that others can share it.
    cached       ref_count = 0, hashed: nobody uses it now, but a prompt with the same prefix may. LRU order.
    blank        ref_count = 0, no hash: nothing worth keeping.

    blank --allocate--> referenced --release--> cached (if hashed) or blank
    cached --share--> referenced            a prefix hit
    cached --allocate--> referenced         eviction, least recently used first, once no blank block is left
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self._ref_counts = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 is taken first
        # Cached blocks, least recently used first. Who takes one back does not look for its place: the first entries of
        # a block are void, as many as `_void` says.
        self._lru: deque[int] = deque()
        self._void: Counter[int] = Counter()
        self._num_void = 0
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of_hash: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out: blank and cached."""
        return len(self._blank) + len(self._lru) - self._num_void

    @property
    def num_cached(self) -> int:
        return len(self._lru) - self._num_void

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` blocks with one reference each; None, and nothing taken, when there are not enough."""
        if count > self.num_free:
            return None
        blank, ref_counts = self._blank, self._ref_counts
        taken = [blank.pop() for _ in range(min(count, len(blank)))] if blank else []
        if len(taken) < count:
            self._evict(count - len(taken), taken)
        for block in taken:
            ref_counts[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to blocks that are cached or already referenced."""
        ref_counts = self._ref_counts
        for block in blocks:
            if ref_counts[block] == 0:
                self._void[block] += 1
                self._num_void += 1
            ref_counts[block] += 1
        if self._num_void > self.num_blocks:
            self._lru = deque(self.cached())
            self._void.clear()
            self._num_void = 0

    def cached(self) -> list[int]:
        """Cached blocks, least recently used first."""
        void, found = self._void.copy(), []
        for block in self._lru:
            if void[block]:
                void[block] -= 1
            else:
                found.append(block)
        return found

    def release(self, blocks: list[int]) -> None:
        """Gives back one reference of each block of a table, the last first: so a chain is evicted from its end, and
        what remains of it can still be hit."""
        ref_counts, hashes, blank, lru = self._ref_counts, self._hashes, self._blank, self._lru
        for block in reversed(blocks):
            count = ref_counts[block] = ref_counts[block] - 1
            if count == 0:
                if hashes[block] is None:
                    blank.append(block)
                else:
                    lru.append(block)

    def register(self, blocks: Iterable[int], block_hashes: Iterable[bytes]) -> None:
        """Makes referenced blocks findable. The first block of equal content stays the one that is found."""
        hashes, block_of_hash = self._hashes, self._block_of_hash
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            if hashes[block] is None and block_of_hash.setdefault(block_hash, block) == block:
                hashes[block] = block_hash

    def block_of(self, block_hash: bytes) -> int | None:
        """The block that is found by this hash."""
        return self._block_of_hash.get(block_hash)

    def holds_any(self, hashes: Iterable[bytes]) -> bool:
        return not self._block_of_hash.keys().isdisjoint(hashes)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest leading run of `hashes` that the pool still holds."""
        found = []
        get = self._block_of_hash.get
        for block_hash in hashes:
            block = get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_after(self, released: Collection[list[int]], shared: Iterable[int]) -> int:
        """How many blocks `allocate` could hand out once one reference of each block of these tables were given back,
        and then the blocks of `shared` taken. A block is gained where its last reference goes."""
        ref_counts, gained = self._ref_counts, set()
        if released:
            given_back = Counter(block for table in released for block in table)
            gained = {block for block, count in given_back.items() if count == ref_counts[block]}
        lost = sum([ref_counts[block] == 0 or block in gained for block in shared])
        return self.num_free + len(gained) - lost

    def _evict(self, count: int, evicted: list[int]) -> None:
        """Adds so many to `evicted`."""
        lru, hashes, block_of_hash = self._lru, self._hashes, self._block_of_hash
        for _ in range(count):
            block = lru.popleft()
            while self._num_void and self._takes_void(block):
                block = lru.popleft()
            del block_of_hash[hashes[block]]  # type: ignore[arg-type]  # what is cached has one
            hashes[block] = None
            evicted.append(block)
        self.num_evictions += count

    def _takes_void(self, block: int) -> bool:
        """Whether an entry that has left the line was void."""
        if block not in self._void:
            return False
        self._num_void -= 1
        self._void[block] -= 1
        if not self._void[block]:
            del self._void[block]
        return True
