"""The router alone: whom it chooses, what it thinks that replicas hold, and what that is worth with block pools."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest

from mini_infer.cache.block_pool import BlockPool
from mini_infer.core.config import CacheConfig, RouterPolicy
from mini_infer.serving import router as module
from mini_infer.serving.router import Homes, Route, Router, make_homes

BLOCK = 16
ROLES = range(3, 8), range(3)  # those that decode, and those that compute prompts for them
Prompt = list[int]


def make(
    num_replicas: int = 2, routing: RouterPolicy = RouterPolicy.prefix_aware, num_blocks: int = 1000, **options: Any
):
    caching = options.pop("prefix_caching", True)
    router = Router(routing, num_replicas, CacheConfig(block_size=BLOCK, prefix_caching=caching), **options)
    for number in range(num_replicas):
        router.told(number, 0, num_blocks)
    return router


def prompt(seed: int, length: int = 512, head: Sequence[int] = ()) -> Prompt:
    rng = random.Random(seed)
    return [*head, *(rng.randrange(50_000) for _ in range(length - len(head)))]


def send(router: Router, token_ids: Prompt, among: Sequence[int] | None = None, salt: str = "", role: int = 0) -> Route:
    numbers = range(len(router._replicas)) if among is None else among
    return router.route(router.chain(token_ids, salt), 1, numbers, role)


# --- whom it chooses ----------------------------------------------------------------------------------------------


def test_round_robin_takes_turns_among_those_that_are_there() -> None:
    router = make(3, RouterPolicy.round_robin)
    assert [send(router, prompt(0)).replica for _ in range(6)] == [1, 2, 0, 1, 2, 0]
    assert Counter(send(router, prompt(0), [0, 2]).replica for _ in range(6)) == {0: 3, 2: 3}


def test_each_role_takes_its_own_turns() -> None:
    """A request is routed twice: to who computes its prompt, and to who decodes it."""
    router = make(5, RouterPolicy.round_robin)
    routes = [send(router, prompt(0), among).replica for _ in range(6) for among in ([0, 1], [2, 3, 4])]
    assert Counter(routes) == {0: 3, 1: 3, 2: 2, 3: 2, 4: 2}


def test_least_loaded_counts_completions_of_its_own_and_of_others() -> None:
    router = make(2, RouterPolicy.least_loaded)
    first = router.route((), 5, [0, 1])
    other = 1 - first.replica
    assert [send(router, prompt(0)).replica for _ in range(5)] == [other] * 5
    router.end(first)
    assert send(router, prompt(0)).replica == first.replica
    router.told(first.replica, 1 + 20, 1000)  # of which one is ours
    assert [send(router, prompt(0)).replica for _ in range(10)] == [other] * 10


@pytest.mark.parametrize("options", [{"routing": RouterPolicy.least_loaded}, {"prefix_caching": False}])
def test_where_no_prompt_is_looked_at_equal_ones_are_spread(options: dict) -> None:
    router = make(4, **options)
    assert router.chain(prompt(0)) == ()
    routes = [send(router, prompt(0)) for _ in range(40)]
    assert Counter(route.replica for route in routes) == dict.fromkeys(range(4), 10)


def test_a_conversation_stays_where_its_beginning_is() -> None:
    router = make(4)
    said = {seed: prompt(seed) for seed in range(20)}
    homes = {}
    for turn in range(5):
        for seed, token_ids in said.items():
            route = send(router, token_ids)
            assert homes.setdefault(seed, route.replica) == route.replica
            router.end(route, len(token_ids) - 150 if turn else 0)
            said[seed] = prompt(turn * 100 + seed, len(token_ids) + 150, token_ids)
    assert set(homes.values()) == set(range(4))


def test_a_salt_makes_another_prompt() -> None:
    router = make()
    chains = [router.chain(prompt(0), salt) for salt in ("", "a", "\ud800")]
    assert len({chain[0] for chain in chains}) == 3
    assert router.chain(prompt(0), "a") == chains[1]


def test_an_overloaded_replica_gives_its_prefixes_away() -> None:
    router = make()
    head = prompt(1, 256)
    routes = [send(router, prompt(seed, 512, head)) for seed in range(60)]
    replicas = [route.replica for route in routes]
    home = replicas[0]
    assert replicas[: module.OVERLOAD_REQUESTS] == [home] * module.OVERLOAD_REQUESTS
    assert 25 <= replicas.count(1 - home) <= 30, "both hold it from then on"


def test_a_prompt_of_less_than_a_chunk_goes_to_the_least_loaded() -> None:
    router = make()
    assert router.chain(prompt(0, module.CHUNK_TOKENS)) == [], "the last token is always computed"
    assert Counter(send(router, prompt(0, 20)).replica for _ in range(10)) == {0: 5, 1: 5}


def test_prefixes_are_spread_evenly() -> None:
    router = make(8)
    for seed in range(64):
        send(router, prompt(seed))
    assert max(replica.ours for replica in router._replicas) <= 10


def test_routers_that_know_nothing_of_each_other_agree() -> None:
    routers = [make(8, alone=False) for _ in range(3)]
    homes = [[send(router, prompt(seed)).replica for seed in order] for router, order in zip(
        routers, (range(20), range(20), range(20)), strict=True)]  # fmt: skip
    assert homes[0] == homes[1] == homes[2]
    assert len(set(homes[0])) > 4
    code = (
        "from mini_infer.core.config import CacheConfig, RouterPolicy; from mini_infer.serving.router import Router\n"
        "import random, sys\n"
        "router = Router(RouterPolicy.prefix_aware, 8, CacheConfig(), alone=False)\n"
        "chain = router.chain([random.Random(3).randrange(50000) for _ in range(512)], 'salt')\n"
        "print(chain[-1], router.route(chain, 1, range(8)).replica, 'torch' in sys.modules)"
    )
    said = {
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
                       capture_output=True, text=True, check=True).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(said) == 1, "hashes are those of any process"
    assert said.pop().endswith("False\n")


@pytest.fixture
def file() -> Iterator[int]:
    made = make_homes(2)
    yield made
    os.close(made)


def test_routers_of_a_machine_know_where_beginnings_went(file: int) -> None:
    """Whatever each of them has sent elsewhere meanwhile."""
    routers = [make(8, alone=False, homes=Homes(file)) for _ in range(3)]
    for seed, router in enumerate(routers):
        for other in range(10 * seed):
            send(router, prompt(1000 * seed + other))
    homes = [[send(router, prompt(seed)).replica for seed in range(20)] for router in routers]
    assert homes[0] == homes[1] == homes[2]
    assert len(set(homes[0])) > 4
    others = [number for number in range(8) if number != homes[0][0]]
    moved = send(routers[0], prompt(0), others).replica
    assert send(routers[2], prompt(0), others).replica == moved, "where its home takes no requests, another is found"


def test_a_beginning_has_a_home_in_each_role(file: int) -> None:
    routers = [make(8, alone=False, homes=Homes(file)) for _ in range(2)]
    found = [
        {
            (seed, role): send(router, prompt(seed), among, role=role).replica
            for seed in range(20)
            for role, among in enumerate(ROLES)
        }
        for router in routers
    ]
    assert found[0] == found[1]
    assert all(replica in ROLES[role] for (_, role), replica in found[0].items())
    assert len(set(found[0].values())) == 8


def test_homes_of_other_routers_are_in_a_table_of_their_own(file: int) -> None:
    first, second = Homes(file), Homes(file, 1)
    first[-(2**61) + 5], second[7 + module.HOMES] = 3, 65_000
    assert (first[-(2**61) + 5], second[7 + module.HOMES]) == (3, 65_000)
    assert first[7 + module.HOMES] == second[-(2**61) + 5] == first[7] == -1
    assert Homes(file)[-(2**61) + 5] == 3
    first[7] = first[7 + module.HOMES] = 1
    assert first[7] == -1, "two that want one place take it from each other"


# --- what it thinks that they hold --------------------------------------------------------------------------------


def test_chunks_are_remembered_and_forgotten_one_by_one() -> None:
    """As if all were in one line, the least recently used first, and of a use its end before its beginning."""
    for seed in range(50):
        rng, line, holders = random.Random(seed), OrderedDict[int, int](), dict[int, set[int]]()
        replica = module._Replica(3, holders)
        replica.capacity = rng.randint(1, 30)
        for turn in range(1, 200):
            first = rng.randint(1, 4) if rng.random() < 0.5 else 10 + turn
            chain = [first, *(1000 * first + place for place in range(rng.randrange(6)))]
            chain += [1000 * turn + 500 + place for place in range(rng.randrange(4))]
            if rng.random() < 0.1:
                until = turn - rng.randrange(20)
                replica.forget_until(until)
                while line and next(iter(line.values())) <= until:
                    line.popitem(last=False)
            elif rng.random() < 0.7:
                replica.use(chain, Route(0, 1, turn, 0, 0))
                for chunk in reversed(chain):
                    line[chunk] = turn
                    line.move_to_end(chunk)
                while len(line) > replica.capacity:
                    line.popitem(last=False)
            assert replica.depth(chain) == next((i for i, chunk in enumerate(chain) if chunk not in line), len(chain))
            assert replica.num_chunks == len(line)
            assert replica._num_used <= max(2 * replica.capacity, len(line))
            assert {chunk for chunk, numbers in holders.items() if numbers} == {c for c in line if c < 1000}
        replica.forget_all()
        assert (replica.num_chunks, replica._num_used, holders) == (0, 0, {})


def test_what_is_remembered_is_bounded_by_the_replicas_memory() -> None:
    router = make(2, num_blocks=40)  # 10 chunks
    for seed in range(50):
        router.end(send(router, prompt(seed)))
    assert [replica.num_chunks for replica in router._replicas] == [10, 10]
    router.told(0, 0, 10**9)
    assert router._replicas[0].capacity == module.MOST_CHUNKS


def test_the_end_of_a_chain_is_forgotten_first() -> None:
    router = make(2, num_blocks=48)  # 12 chunks
    chains = [router.chain(prompt(seed)) for seed in range(3)]  # of 7
    for chain in chains[:2]:
        router.end(router.route(chain, 1, [0]))
    replica = router._replicas[0]
    assert [replica.depth(chain) for chain in chains] == [5, 7, 0]
    router.end(router.route(chains[0], 1, [0]))
    router.end(router.route(chains[2], 1, [0]))
    assert [replica.depth(chain) for chain in chains] == [5, 0, 7]


def test_a_miss_where_a_hit_was_expected_forgets_all_that_is_older() -> None:
    router = make(2)
    for seed in range(4):
        router.end(send(router, prompt(seed), [0]), 0)
    replica, chains = router._replicas[0], [router.chain(prompt(seed)) for seed in range(4)]
    router.end(send(router, prompt(1), [0]), 448)  # as expected
    assert [replica.depth(chain) for chain in chains] == [7] * 4
    router.end(send(router, prompt(2), [0]), 0)  # evicted; so were those that were used before it
    assert [replica.depth(chain) for chain in chains] == [0, 7, 7, 7]
    under_way = send(router, prompt(9), [0])
    router.end(send(router, prompt(9), [0]), 0)  # the first has not been computed yet: that tells nothing
    assert replica.depth(chains[3]) == 7
    router.end(under_way, 0)
    router.end(send(router, prompt(3), [0]))  # aborted
    assert replica.depth(chains[1]) == 7


def test_a_replica_that_was_restarted_holds_nothing() -> None:
    router = make()
    home = send(router, prompt(0)).replica
    router.told(home, 9, 1000)
    router.restarted(home)
    assert not router._replicas[home].chunks
    assert router.loads[home] == 1, "what is under way ends by itself"


# --- what it is worth ---------------------------------------------------------------------------------------------


class Replicas:
    """Block pools behind routers, which take turns; `in_flight` requests at once, of which any may end first."""

    def __init__(
        self,
        routing: RouterPolicy,
        num_replicas: int,
        num_blocks: int,
        in_flight: int,
        num_routers: int,
        homes: Homes | None = None,
    ) -> None:
        self._pools = [BlockPool(num_blocks) for _ in range(num_replicas)]
        options = {"alone": num_routers == 1, "homes": homes}
        self._routers = [make(num_replicas, routing, num_blocks, **options) for _ in range(num_routers)]
        self._in_flight = in_flight
        self._running: deque[tuple[Router, Route, list[int], int]] = deque()
        self._random = random.Random(0)
        self._tokens = self._hits = 0
        self.served = [0] * num_replicas

    def hit_rate(self, prompts: Sequence[tuple[Prompt, list[bytes]]]) -> float:
        for turn, (token_ids, hashes) in enumerate(prompts):
            self._serve(self._routers[turn % len(self._routers)], token_ids, hashes)
            if turn % 10 == 0:
                self._tell()
        return self._hits / self._tokens

    def _serve(self, router: Router, token_ids: Prompt, hashes: list[bytes]) -> None:
        route = send(router, token_ids)
        pool = self._pools[route.replica]
        blocks = pool.find(hashes)
        cached = len(blocks) * BLOCK
        pool.share(blocks)
        while (taken := pool.allocate(-(-len(token_ids) // BLOCK) - cached // BLOCK)) is None:
            self._end(next(i for i, running in enumerate(self._running) if running[1].replica == route.replica))
        blocks = [*blocks, *taken]
        pool.register(blocks[: len(hashes)], hashes)
        self._tokens += len(token_ids)
        self._hits += cached
        self.served[route.replica] += 1
        self._running.append((router, route, blocks, cached))
        if len(self._running) > self._in_flight:
            self._end(self._random.randrange(len(self._running)))

    def _end(self, index: int) -> None:
        router, route, blocks, cached = self._running[index]
        del self._running[index]
        self._pools[route.replica].release(blocks)
        router.end(route, cached)

    def _tell(self) -> None:
        for number, pool in enumerate(self._pools):
            unfinished = sum(route.replica == number for _, route, _, _ in self._running)
            for router in self._routers:
                router.told(number, unfinished, pool.num_blocks)


def block_hashes(token_ids: Prompt) -> list[bytes]:
    hashes, parent = [], b""
    for end in range(BLOCK, len(token_ids), BLOCK):
        parent = hashlib.sha256(parent + repr(token_ids[end - BLOCK : end]).encode()).digest()
        hashes.append(parent)
    return hashes


@cache
def shared_prefixes(groups: int = 64, count: int = 1500) -> list[tuple[Prompt, list[bytes]]]:
    """With the hashes of their blocks."""
    rng = random.Random(1)
    heads = [prompt(seed, 512) for seed in range(groups)]
    prompts = [prompt(1000 + turn, 608, rng.choice(heads)) for turn in range(count)]
    return [(token_ids, block_hashes(token_ids)) for token_ids in prompts]


@pytest.mark.parametrize(("num_replicas", "in_flight"), [(2, 16), (2, 64), (8, 64)])
def test_the_hit_rate_is_that_of_one_big_cache(num_replicas: int, in_flight: int, file: int) -> None:
    """64 prefixes of 512 tokens, in caches that hold them all, and the requests under way, together and not alone."""
    prompts = shared_prefixes()
    total = 64 * 32 + in_flight * 40

    def serve(
        routing: RouterPolicy, replicas: int, num_routers: int = 1, homes: Homes | None = None
    ) -> tuple[float, Replicas]:
        served = Replicas(routing, replicas, total // replicas, in_flight, num_routers, homes)
        return served.hit_rate(prompts), served

    one, _ = serve(RouterPolicy.round_robin, 1)
    aware, served = serve(RouterPolicy.prefix_aware, num_replicas)
    assert aware > 0.95 * one
    assert max(served.served) < 1.5 * len(prompts) / num_replicas
    blind, _ = serve(RouterPolicy.round_robin, num_replicas)
    assert blind < (0.85 if num_replicas == 2 else 0.5) * one
    apart, _ = serve(RouterPolicy.prefix_aware, num_replicas, num_routers=4)
    assert blind < apart > 0.8 * one
    of_a_machine, _ = serve(RouterPolicy.prefix_aware, num_replicas, 4, Homes(file))
    assert of_a_machine > 0.98 * one


def test_a_route_costs_less_than_the_hashes_that_it_spares() -> None:
    """Of 4,096 tokens, at 8 replicas that hold all of it: CPU time, the least of some."""
    router, token_ids = make(8, num_blocks=10**6), prompt(0, 4096)
    for number in range(8):
        router.end(send(router, token_ids, [number]), 0)
    chain = router.chain(token_ids)
    least = 1.0
    for _ in range(50):
        start = time.process_time_ns()
        for _ in range(4):
            router.end(router.route(chain, 1, range(8)), 4032)
        least = min(least, (time.process_time_ns() - start) / 4e9)
    assert least < 100e-6  # 50 us where nobody else uses the machine
