"""Block bookkeeping: reference counts, free blocks, and which block holds which prefix. Counts blocks, holds no tensor.
One pool is the device's memory, another the host's.

A block is in exactly one of three states:

    referenced   ref_count > 0; in some request's block table. It may also be hashed, so that others can share it.
    cached       ref_count = 0, hashed: nobody uses it now, but a prompt with the same prefix may. LRU order.
                 (Of a lone run, below, the hashes are still to be made.)
    blank        ref_count = 0, no hash: nothing worth keeping.

    blank --allocate--> referenced --release--> cached (if hashed) or blank
    cached --share--> referenced            a prefix hit
    cached --allocate--> referenced         eviction, least recently used first, once no blank block is left
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence


class Run:
    """Blocks in the order of their table: the last one is evicted first.

    A *lone* run is all that the pool holds of chains that begin with its first block. Only that block's hash has been
    made: the others are made when somebody comes whose chain begins alike, and mostly nobody does.

    Attributes:
        hashes: of a lone run: of its blocks, as far as they are known.
        tokens: of a lone run: what its blocks hold, and perhaps more behind that. None: it is not, or no more, lone.
        held: by the table of whoever fills it; else nobody refers to its blocks.
    """

    __slots__ = ("blocks", "hashes", "held", "tokens")

    def __init__(
        self,
        blocks: list[int],
        hashes: list[bytes] | None = None,
        tokens: Sequence[int] | None = None,
        held: bool = False,
    ) -> None:
        self.blocks = blocks
        self.hashes = [] if hashes is None else hashes
        self.tokens = tokens
        self.held = held


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self.num_cached = 0
        self._ref_counts = [1] * num_blocks  # of what is in a table, or cached and has a hash; else they are 1, too
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 is taken first
        # Cached blocks, least recently used first. Who takes one back does not look for its place: the first entries of
        # a block are void, as many as `_void` says.
        self._lru: deque[Run] = deque()
        self._void: Counter[int] = Counter()
        self._num_void = 0
        self.lone: dict[bytes, Run] = {}  # by the first block's hash
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._firsts: list[bytes | None] = [None] * num_blocks  # of what has a hash: that of its chain's first block
        self._block_of_hash: dict[bytes, int] = {}
        self._known_firsts: set[bytes | None] = set()  # all of them, and some of blocks that have been evicted since

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out: blank and cached."""
        return len(self._blank) + self.num_cached

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` blocks with one reference each; None, and nothing taken, when there are not enough."""
        if count > self.num_free:
            return None
        blank = self._blank
        taken = blank[: -count - 1 : -1]
        del blank[len(blank) - len(taken) :]
        if len(taken) < count:
            self._evict(count - len(taken), taken)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to blocks that are cached or already referenced, and in no lone run."""
        ref_counts = self._ref_counts
        for block in blocks:
            if ref_counts[block] == 0:
                self._void[block] += 1
                self._num_void += 1
                self.num_cached -= 1
            ref_counts[block] += 1
        if self._num_void > self.num_blocks:
            for run in self._lru:
                if run.tokens is None:
                    run.blocks = [block for block in reversed(run.blocks) if not self._takes_void(block)][::-1]
            self._lru = deque([run for run in self._lru if run.blocks])

    def cached(self) -> list[int]:
        """Cached blocks, least recently used first."""
        void, found = self._void.copy(), []
        for run in self._lru:
            for block in reversed(run.blocks):
                if void[block]:
                    void[block] -= 1
                else:
                    found.append(block)
        return found

    def release(self, blocks: list[int]) -> None:
        """Gives back one reference of each block of a table, the last first: so a chain is evicted from its end, and
        what remains of it can still be hit."""
        ref_counts, hashes, blank = self._ref_counts, self._hashes, self._blank
        cached = []
        for block in reversed(blocks):
            if ref_counts[block] > 1:
                ref_counts[block] -= 1
            elif hashes[block] is None:
                blank.append(block)
            else:
                ref_counts[block] = 0
                cached.append(block)
        if cached:
            self.num_cached += len(cached)
            self._lru.append(Run(cached[::-1]))

    def register(self, blocks: Iterable[int], block_hashes: Iterable[bytes], first: bytes | None = None) -> None:
        """Makes referenced blocks findable. The first block of equal content stays the one that is found.

        Args:
            first: hash of the first block of their chain, of which there is no lone run.
        """
        hashes, firsts, block_of_hash = self._hashes, self._firsts, self._block_of_hash
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            if hashes[block] is None and block_of_hash.setdefault(block_hash, block) == block:
                hashes[block], firsts[block] = block_hash, first
        self._known_firsts.add(first)
        if len(self._known_firsts) > self.num_blocks:
            self._known_firsts = {firsts[block] for block in block_of_hash.values()}

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

    # --- chains that nobody else's are like ---------------------------------------------------------------------

    def holds_alike(self, first: bytes) -> bool:
        """Whether there may be blocks with hashes in chains whose first block has this one. Not where there are none
        for sure."""
        return first in self._known_firsts

    def begin(self, blocks: list[int], hashes: list[bytes], tokens: Sequence[int]) -> None:
        """A table's leading blocks, which are filled, are a lone run from here on: nothing is there that begins alike.
        The run takes what its maker adds to the two lists, and to its blocks."""
        self.lone[hashes[0]] = Run(blocks, hashes, tokens, held=True)

    def retire(self, run: Run, table: list[int]) -> None:
        """Gives back the table of a lone run, as `release`."""
        assert run.tokens is not None
        run.tokens = array("I", run.tokens)  # 4 bytes each, and the garbage collector does not look into it
        run.held = False
        self.num_cached += len(run.blocks)
        self._lru.append(run)
        self._blank += table[: len(run.blocks) - 1 : -1]

    def end_lone(self, run: Run) -> None:
        """It is a run like any other: its hashes are made."""
        del self.lone[run.hashes[0]]
        for block in run.blocks if not run.held else ():
            self._ref_counts[block] = 0
        self.register(run.blocks, run.hashes[: len(run.blocks)], run.hashes[0])
        run.tokens = None

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
        lru, hashes, ref_counts, block_of_hash = self._lru, self._hashes, self._ref_counts, self._block_of_hash
        self.num_evictions += count
        self.num_cached -= count
        while count:
            run = lru[0]
            taken = run.blocks[: -count - 1 : -1]
            del run.blocks[len(run.blocks) - len(taken) :]
            if run.tokens is None:
                if self._num_void:
                    taken = [block for block in taken if not self._takes_void(block)]
                for block in taken:
                    del block_of_hash[hashes[block]]  # type: ignore[arg-type]  # what is cached has one
                    hashes[block], ref_counts[block] = None, 1
            elif not run.blocks:
                del self.lone[run.hashes[0]]
            if not run.blocks:
                lru.popleft()
            evicted += taken
            count -= len(taken)

    def _takes_void(self, block: int) -> bool:
        """Whether an entry that has left the line was void."""
        if block not in self._void:
            return False
        self._num_void -= 1
        self._void[block] -= 1
        if not self._void[block]:
            del self._void[block]
        return True
