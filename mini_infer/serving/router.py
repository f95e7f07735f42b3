"""Which of several replicas of an engine gets a request. Decides from what it has sent, and asks nobody.

What a replica holds is a guess: hashes of the beginnings of the prompts that went there, a chunk of tokens each, the
least recently used forgotten first, as in the replica's own cache. Two things keep the guess honest. It never holds
more than the replica's KV memory could. And a finished request says how much of its prompt was really cached: where
that is less than was expected, the chunk that was missing has been evicted, and so has all that was last used before
it.

A beginning that nobody holds goes to the less loaded of two replicas that its hash names. Each of several API processes
has a router, which knows nothing of what the others send but where such beginnings went (Homes). Without that, as in
simulated fleets, a beginning goes to the one replica that its hash names, so that routers agree while no replica is
overloaded. That deals prefixes less evenly, and an overloaded replica's are then computed elsewhere, too. The price is
memory and time (a prefix that stands in two caches), never a wrong answer.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Collection, Sequence, Set
from typing import TypeAlias

from mini_infer.core.config import CacheConfig, RouterPolicy

CHUNK_TOKENS = 64  # about: in whole blocks of the cache
MOST_CHUNKS = 65_536  # that are remembered of a replica: 4 million tokens
# A replica with more requests than this, against the one with the fewest, gets none for the sake of its cache. Requests
# end in waves, so that one of two equal replicas has for a moment half of what the other has.
OVERLOAD_RATIO, OVERLOAD_REQUESTS = 3.0, 8

HOMES = 2**16  # beginnings that are remembered in common; two that want one place take it from each other

Chain: TypeAlias = Sequence[int]  # of a prompt's whole chunks: each hash stands for all tokens up to its chunk's end


class Route:
    """Where a request went, until it has ended."""

    __slots__ = ("completions", "ended", "expected_since", "expected_tokens", "replica", "time")

    def __init__(self, replica: int, completions: int, time: int, expected_tokens: int, expected_since: int) -> None:
        self.replica = replica
        self.completions = completions
        self.ended = False
        self.time = time  # routes are counted
        self.expected_tokens = expected_tokens  # of the prompt, in the replica's cache
        self.expected_since = expected_since  # the time of the route that left the last of them there


class Homes:
    """Where beginnings went that a router knew nobody to hold: for all routers of a machine, in a file that they map. A
    place holds 48 bits of a chunk's hash and a replica's number + 1, and is written in one go.

    Args:
        file: descriptor of what `make_homes` has made.
        table: the number of these routers' table in it; those of another model have another.
    """

    def __init__(self, file: int, table: int = 0) -> None:
        self._places = memoryview(mmap.mmap(file, 8 * HOMES, offset=8 * HOMES * table)).cast("Q")

    def __getitem__(self, chunk: int) -> int:
        """A replica's number; -1 where none is known."""
        place = self._places[chunk % HOMES]
        return (place & 0xFFFF) - 1 if place >> 16 == _mark(chunk) else -1

    def __setitem__(self, chunk: int, number: int) -> None:
        self._places[chunk % HOMES] = _mark(chunk) << 16 | number + 1


def make_homes(tables: int = 1) -> int:
    """Descriptor of a file in memory for the Homes of so many models."""
    file = os.memfd_create("mini-infer-homes")
    os.ftruncate(file, 8 * HOMES * tables)
    return file


def _mark(chunk: int) -> int:
    return chunk >> 16 & 2**48 - 1


class _Replica:
    """What one replica is thought to hold. `holders` has the numbers of those that hold a chunk which begins prompts:
    of a thousand replicas these are but a few."""

    def __init__(self, number: int, holders: dict[int, set[int]]) -> None:
        self.capacity = MOST_CHUNKS
        # By whom last used. Of a chain that begins as no other only the first chunk is here, as long as nobody asks
        # for the others, and `_lone` has all of them.
        self.chunks: dict[int, Route] = {}
        self._lone: dict[int, list[int]] = {}
        self._num_absent = 0  # chunks that only `_lone` has
        # Who has used which, the oldest first. Of a chain the end is forgotten first. What somebody else has used since
        # stands here in vain.
        self._uses: deque[tuple[Route, list[int]]] = deque()
        self._num_used = 0  # chunks in it
        self.ours = 0  # completions under way
        self._number, self._holders = number, holders

    @property
    def num_chunks(self) -> int:
        return len(self.chunks) + self._num_absent

    def depth(self, chain: Chain) -> int:
        """How many of the chunks it holds: with one all before it, which whoever used it has used a moment later."""
        low, high = 0, len(chain)
        if not chain:
            return 0
        chunks = self.beside(chain[0])
        if chain[0] not in chunks:
            return 0
        if chain[-1] in chunks:
            return high
        while low < high:
            middle = (low + high) // 2
            if chain[middle] in chunks:
                low = middle + 1
            else:
                high = middle
        return low

    def beside(self, first: int) -> dict[int, Route]:
        """`chunks`, with all of the chains that begin with this one."""
        if (lone := self._lone.pop(first, None)) is not None:
            self.chunks.update(dict.fromkeys(lone, self.chunks[first]))
            self._num_absent -= len(lone) - 1
        return self.chunks

    def use(self, chain: Chain, route: Route) -> None:
        chunks = self.chunks
        if chain:
            first, used = chain[0], list(chain)
            if first in chunks:
                self.beside(first).update(dict.fromkeys(used, route))
            else:
                chunks[first], self._lone[first] = route, used
                self._num_absent += len(used) - 1
            self._uses.append((route, used))
            self._num_used += len(used)
            self._holders.setdefault(first, set()).add(self._number)
        while (excess := self.num_chunks - self.capacity) > 0:
            self._forget_oldest(excess)
        if self._num_used > 2 * self.capacity:
            self._uses = deque([use for use in map(self._still_used, self._uses) if use[1]])
            self._num_used = self.num_chunks

    def _still_used(self, use: tuple[Route, list[int]]) -> tuple[Route, list[int]]:
        route, chain = use
        if self._lone.get(chain[0]) is chain:
            return use
        return route, [chunk for chunk in chain if self.chunks[chunk] is route]

    def forget_until(self, time: int) -> None:
        while self._uses and self._uses[0][0].time <= time:
            self._forget_oldest()

    def forget_all(self) -> None:
        while self._uses:
            self._forget_oldest()

    def _forget_oldest(self, most: int = MOST_CHUNKS) -> None:
        """Of the oldest use the last chunk, whether anybody has used it since or not; at most so many of a lone chain,
        but for its first."""
        route, chain = self._uses[0]
        if len(chain) > 1 and self._lone.get(chain[0]) is chain:
            count = min(most, len(chain) - 1)
            del chain[-count:]
            self._num_absent -= count
            self._num_used -= count
            return
        chunk = chain.pop()
        self._num_used -= 1
        if not chain:
            self._uses.popleft()
        if self.chunks[chunk] is not route:
            return
        del self.chunks[chunk]
        self._lone.pop(chunk, None)
        if chunk in self._holders:
            self._holders[chunk].discard(self._number)
            if not self._holders[chunk]:
                del self._holders[chunk]


class Router:
    """
    Args:
        cache: the engines'.
        alone: no other router sends to these replicas.
        homes: what is known in common to those that do; None: nothing.
    """

    def __init__(
        self,
        routing: RouterPolicy,
        num_replicas: int,
        cache: CacheConfig,
        alone: bool = True,
        homes: Homes | None = None,
    ) -> None:
        # Where nothing is cached all prompts are equal.
        prefix_aware = routing is RouterPolicy.prefix_aware and cache.prefix_caching
        self._round_robin = routing is RouterPolicy.round_robin
        self._looks_at_prompts = prefix_aware and num_replicas > 1
        self._homes = homes
        self._num_named = 2 if alone or homes is not None else 1
        self._block_size = cache.block_size
        self._chunk_tokens = self._block_size * max(1, CHUNK_TOKENS // self._block_size)
        self._holders: dict[int, set[int]] = {}
        self._replicas = [_Replica(number, self._holders) for number in range(num_replicas)]
        self.loads = [0] * num_replicas  # completions under way, ours and, when it last told, those of other processes
        self._num_routes = 0
        self._turns = [0] * num_replicas  # of those among which a replica is the first, since roles take turns apart

    def chain(self, token_ids: Sequence[int], salt: str = "") -> Chain:
        """A prompt's chunks, but for the last token, which is always computed; none where the policy looks at none."""
        if not self._looks_at_prompts:
            return ()
        size, tokens, chain = self._chunk_tokens, tuple(token_ids), []
        parent = hash(tuple(salt.encode(errors="replace")))  # that of a text differs from process to process
        for end in range(size, len(tokens), size):
            parent = hash((parent, tokens[end - size : end]))  # of integers: the same in all processes
            chain.append(parent)
        return chain

    def route(self, chain: Chain, completions: int, among: Collection[int], role: int = 0) -> Route:
        """Chooses a replica `among` those that take requests (one at least), and counts it there until `end`. A
        beginning has a home among those of each role."""
        self._num_routes += 1
        number, depth = self._choose(chain, among, role)
        replica = self._replicas[number]
        last = replica.chunks[chain[depth - 1]] if depth else None
        expected, since = (0, 0) if last is None or not last.ended else (depth * self._chunk_tokens, last.time)
        route = Route(number, completions, self._num_routes, expected, since)
        replica.use(chain, route)
        replica.ours += completions
        self.loads[number] += completions
        return route

    def end(self, route: Route, cached_tokens: int | None = None) -> None:
        """`cached_tokens` were found in the replica's cache; None where it did not get so far as to tell."""
        replica = self._replicas[route.replica]
        replica.ours -= route.completions
        self.loads[route.replica] -= route.completions
        route.ended = True
        if cached_tokens is not None and cached_tokens < route.expected_tokens:
            replica.forget_until(route.expected_since)

    def told(self, number: int, unfinished: int, num_blocks: int) -> None:
        """What a replica says of itself.

        Args:
            unfinished: completions, whoever sent them.
            num_blocks: of its KV memory.
        """
        replica = self._replicas[number]
        self.loads[number] = max(unfinished, replica.ours)
        replica.capacity = min(num_blocks * self._block_size // self._chunk_tokens, MOST_CHUNKS)

    def restarted(self, number: int) -> None:
        """It holds nothing any more."""
        replica = self._replicas[number]
        replica.forget_all()
        self.loads[number] = replica.ours

    def _choose(self, chain: Chain, among: Collection[int], role: int) -> tuple[int, int]:
        """A replica, and how many chunks it holds."""
        loads = self.loads
        if not chain or self._round_robin or len(among) == 1:
            number = self._in_turn(sorted(among))
            return number, 0 if len(among) > 1 else self._replicas[number].depth(chain)
        theirs = [loads[number] for number in among]
        most = min(theirs) * OVERLOAD_RATIO + OVERLOAD_REQUESTS
        free = set(among) if max(theirs) <= most else {number for number in among if loads[number] <= most}
        equal, deepest = self._holding(chain, free)
        homes = None if equal else self._homes
        if homes is not None and (home := homes[chain[0] ^ role]) in free:
            return home, 0
        if len(equal) != 1:
            chunk = chain[min(deepest, len(chain) - 1)]  # the first that nobody holds
            equal = self._named(chunk, set(equal) or free)
        number = min(equal, key=loads.__getitem__)
        if homes is not None:
            homes[chain[0] ^ role] = number
        return number, deepest

    def _in_turn(self, among: Sequence[int]) -> int:
        """The next one, or the next one that has least to do."""
        self._turns[among[0]] += 1
        turn = self._turns[among[0]] % len(among)
        if self._round_robin:
            return among[turn]
        return min((*among[turn:], *among[:turn]), key=self.loads.__getitem__)

    def _holding(self, chain: Chain, among: Set[int]) -> tuple[list[int], int]:
        """Who of them holds most of a prompt, and how many chunks."""
        equal, deepest = list[int](), 0
        for number in sorted(among & self._holders.get(chain[0], frozenset())):
            chunks = self._replicas[number].beside(chain[0])
            # Hundreds may hold a beginning that is asked for often: so their depths are not looked for.
            if deepest < len(chain) and chain[deepest] in chunks:
                equal, deepest = [number], self._replicas[number].depth(chain)
            elif chain[deepest - 1] in chunks:
                equal.append(number)
        return equal, deepest

    def _named(self, chunk: int, among: Collection[int]) -> list[int]:
        """The first few of these replicas in an order that the chunk's hash gives to all of them: where some are
        missing the others keep their places."""
        found: list[int] = []
        turn, wanted = 0, min(self._num_named, len(among))
        while len(found) < wanted:
            number = hash((chunk, turn)) % len(self._replicas)
            turn += 1
            if number in among and number not in found:
                found.append(number)
        return found
