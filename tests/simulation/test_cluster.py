"""Replicas behind the router on one time line."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from made_up_costs import CONFIG, COSTS, LIMITS, replica

from mini_infer.core.config import HandOver, ParallelConfig, RouterPolicy
from mini_infer.core.errors import RequestError
from mini_infer.core.request import Request
from mini_infer.serving.router import Router
from mini_infer.simulation.cluster import Cluster


def cluster(
    count: int,
    skips: bool = True,
    routing: RouterPolicy = RouterPolicy.prefix_aware,
    blocks: int = LIMITS.num_blocks,
) -> Cluster:
    limits = replace(LIMITS, num_blocks=blocks)
    return Cluster([replica(skips=skips, limits=limits) for _ in range(count)], Router(routing, count, CONFIG.cache))


def run(of: Cluster, rate: float, count: int = 150) -> dict[str, Request]:
    rng, now = random.Random(0), 0.0
    ended: dict[str, Request] = {}
    shared = [[rng.randrange(200) for _ in range(128)] for _ in range(4)]
    for index in range(count):
        now += rng.expovariate(rate)
        while (request := of.advance(now)) is not None:
            ended[request.request_id] = request
            assert of.clock.now == request.token_times[-1]
        assert of.clock.now == now
        of.send(str(index), rng.choice(shared) + [rng.randrange(200)] * 5, rng.randrange(1, 40), now)
    while (request := of.advance()) is not None:
        ended[request.request_id] = request
    return ended


@pytest.mark.parametrize(("count", "blocks"), [(1, 400), (3, 400), (2, 45), (2, 60), (2, 70), (2, 80)])
def test_skipping_changes_nothing_in_a_cluster(count: int, blocks: int) -> None:
    """Also where memory is short, and some compute again what others have computed or are about to."""
    steps, skipped = (run(cluster(count, skips, blocks=blocks), rate=60 * count) for skips in (False, True))
    assert list(steps) == list(skipped)
    assert any(request.num_preemptions for request in steps.values()) == (blocks < 100)
    for name, request in steps.items():
        assert skipped[name].token_times == request.token_times
        assert skipped[name].num_cached_tokens == request.num_cached_tokens


def test_the_same_requests_give_the_same_result() -> None:
    first, again = (run(cluster(3), rate=150) for _ in range(2))
    assert {name: r.token_times for name, r in first.items()} == {name: r.token_times for name, r in again.items()}


def test_more_replicas_are_quicker_and_a_prefix_is_computed_once_on_each() -> None:
    def mean_ttft(ended: dict[str, Request]) -> float:
        return sum(r.token_times[0] - r.arrival_time for r in ended.values()) / len(ended)

    one, three = run(cluster(1), rate=150), run(cluster(3), rate=150)
    assert mean_ttft(three) < mean_ttft(one) / 2
    spread = run(cluster(3, routing=RouterPolicy.round_robin), rate=150)
    assert sum(r.num_cached_tokens == 0 for r in spread.values()) > sum(
        r.num_cached_tokens == 0 for r in three.values()
    )


def test_little_is_kept_of_what_has_ended() -> None:
    """Also where nobody collects garbage: the last steps' requests of each replica at most."""

    def alive() -> int:
        return sum(isinstance(thing, Request) for thing in gc.get_objects())

    three = cluster(3)
    gc.collect()
    gc.disable()
    try:
        before = alive()
        assert len(run(three, rate=150)) == 150
        assert alive() - before <= 3 * CONFIG.scheduler.max_num_seqs
    finally:
        gc.enable()


def test_time_goes_on_without_requests_and_never_back() -> None:
    idle = cluster(2)
    assert idle.advance(5.0) is None
    assert idle.clock.now == 5.0
    request = idle.send("late", [1, 2, 3], 2)
    assert (request.arrival_time, idle.advance()) == (5.0, request)
    assert idle.clock.now > 5.0
    assert idle.advance() is None


def test_what_was_due_before_is_not_begun_before_it_comes() -> None:
    idle = cluster(2)
    idle.advance(5.0)
    request = idle.send("again", [1, 2, 3], 2, arrival=3.0)
    assert idle.advance() is request
    assert request.arrival_time == 3.0
    assert request.token_times[0] > 5.0


def test_a_request_that_is_refused_is_nobodys_load() -> None:
    one = cluster(1)
    with pytest.raises(RequestError, match="do not fit"):
        one.send("long", [0] * 600, 1)
    assert one._routers[0].loads == [0]


def test_what_breaks_down_serves_nobody_until_another_starts() -> None:
    three = cluster(3, routing=RouterPolicy.round_robin)
    requests = [three.send(str(index), [index] * 5, 20) for index in range(9)]
    three.advance(0.02)
    lost = three.stop(1)
    assert len(lost) == 3
    more = [three.send("more", [1] * 5, 20) for _ in range(4)]
    ended = []
    while (request := three.advance()) is not None:
        ended.append(request)
    assert set(ended) == {*requests, *more} - set(lost)
    assert not three._sent
    three.start(1, replica())
    started = three.send("again", [3] * 5, 2)
    others = [three.send("others", [3] * 5, 2) for _ in range(2)]
    assert started.token_times == []
    assert {three._sent[request][1].replica for request in (started, *others)} == {0, 1, 2}
    while three.advance() is not None:
        pass
    assert started.token_times[0] > three.clock.now - 0.1, "its clock does not begin at 0"


def test_several_routers_hear_what_the_others_have_sent() -> None:
    """So that they spread requests as one would."""
    routers = [Router(RouterPolicy.least_loaded, 4, CONFIG.cache, alone=False) for _ in range(2)]
    four = Cluster([replica() for _ in range(4)], *routers)
    for index in range(12):
        four.advance(0.02 * (index + 1))
        four.send(str(index), [index] * 5, 200)
    homes = [route.replica for _, route in four._sent.values()]
    assert sorted(homes) == [number for number in range(4) for _ in range(3)]
    while four.advance() is not None:
        pass
    assert [replica.ours for router in routers for replica in router._replicas] == [0] * 8


def apart(
    prefill: int,
    decode: int,
    overlap: bool = True,
    skips: bool = True,
    blocks: int = LIMITS.num_blocks,
    **costs: float,
) -> Cluster:
    """Engines for prompts, and engines that decode. `costs`: of those of a step, others."""
    both = ParallelConfig(prefill=prefill, decode=decode, hand_over=HandOver.always)
    each = replace(LIMITS, num_blocks=blocks), replace(COSTS, **costs)
    engines = [replica(overlap, skips, replace(CONFIG, parallel=one), *each) for one in both.of_engines]
    return Cluster(engines, Router(both.routing, len(engines), CONFIG.cache))


def test_a_prompt_is_computed_by_one_engine_and_decoded_by_another() -> None:
    """All but its last token: 9 of 10, in a step of the first engine, and then 1 in a step of the second."""
    two = apart(1, 1, overlap=False)
    two.advance(0.01)
    request = two.send("a", range(10), 2)
    assert two.advance() is request
    host = 2e-4 + 1e-6
    computed = 0.01 + host + 5e-3 + 8 / 1999 * 45e-3 + 9e-6 + 45e-10  # 45 pairs
    first = computed + host + 4e-3 + 10e-8  # a row like any
    assert request.token_times == pytest.approx([first, first + host + 4e-3 + 11e-8], rel=1e-12)
    moved = request.handover
    assert moved is not None
    assert (moved.asked, moved.begun) == (0.01, 0.01)
    assert (moved.computed, moved.arrived) == pytest.approx((computed, computed), rel=1e-12)


def test_a_prompt_that_is_too_long_for_who_computes_prompts_stays_with_who_decodes() -> None:
    both = ParallelConfig(prefill=1, decode=1, hand_over=HandOver.always)
    lengths = replace(LIMITS, max_model_len=8), LIMITS
    one, other = (
        replica(False, False, replace(CONFIG, parallel=parallel), limits, COSTS)
        for parallel, limits in zip(both.of_engines, lengths, strict=True)
    )
    two = Cluster([one, other], Router(both.routing, 2, CONFIG.cache))
    request = two.send("a", range(10), 2)
    assert two.advance() is request
    assert request.handover is None
    assert not two._errands._computing


def test_blocks_on_their_way_hold_up_who_waits_for_them() -> None:
    """Three blocks of a prompt, pushed from the beginning of its one step on, of some 5 ms."""
    for push_s, hidden in ((1e-3, True), (4e-3, False)):
        two = apart(1, 1, overlap=False, push_block_s=push_s)
        request = two.send("a", range(10), 2)
        assert two.advance() is request
        moved, begun = request.handover, 2e-4 + 1e-6
        assert moved is not None
        assert moved.copying == pytest.approx(3 * push_s)
        assert moved.arrived == pytest.approx(moved.computed if hidden else begun + 3 * push_s, rel=1e-12)
        assert request.token_times[0] == pytest.approx(moved.arrived + begun + 4e-3 + 10e-8, rel=1e-12)


def test_blocks_hold_up_the_step_that_they_are_pushed_beside() -> None:
    computed = []
    for held in (0.0, 1e-4):
        two = apart(1, 1, held_block_s=held)
        moved = two.send("a", range(10), 2)
        assert two.advance() is moved
        assert moved.handover is not None
        computed.append(moved.handover.computed)
    assert computed[1] - computed[0] == pytest.approx(3e-4)


def test_an_engines_pushes_take_turns() -> None:
    """Two prompts, of a step with 16 blocks of 20 ms each: the second one's go when the first one's are there."""
    two = apart(1, 1, push_block_s=0.02)
    requests = [two.send(name, [index] * 65, 1) for index, name in enumerate("ab")]
    while two.advance() is not None:
        pass
    arrived = [request.handover.arrived for request in requests if request.handover is not None]
    assert arrived == pytest.approx([2e-4 + 1e-6 + 0.32, 2e-4 + 1e-6 + 0.64], rel=1e-3)


@pytest.mark.parametrize("push_block_s", [0.0, 1e-3])
@pytest.mark.parametrize("blocks", [60, LIMITS.num_blocks])
def test_skipping_changes_nothing_where_prompts_are_computed_apart(blocks: int, push_block_s: float) -> None:
    """Also where memory is so short that requests give way whose prompts are under way."""
    clusters = [apart(2, 2, skips=skips, blocks=blocks, push_block_s=push_block_s) for skips in (False, True)]
    steps, skipped = (run(two, rate=150) for two in clusters)
    assert len(steps) == 150
    assert {name: r.token_times for name, r in steps.items()} == {name: r.token_times for name, r in skipped.items()}
    assert any(r.num_preemptions for r in steps.values()) == (blocks == 60)
    for two in clusters:
        assert not two._errands._computing
        assert not two._sent
        assert [engine.core.scheduler.kv.num_free for engine in two._replicas] == [blocks] * 4
        assert not any(engine.core.scheduler.kv.transfers for engine in two._replicas)


def test_streams_do_not_wait_for_prompts_that_another_engine_computes() -> None:
    def worst_gap(of: Cluster) -> float:
        streams = [of.send("stream", [index] * 5, 200) for index in range(3)]
        for index in range(10):
            of.advance(0.05 * (index + 1))
            of.send("long", [index] * 300, 1)
        while of.advance() is not None:
            pass
        return max(after - before for r in streams for before, after in pairwise(r.token_times[1:]))

    assert worst_gap(apart(1, 1)) < worst_gap(cluster(1)) - 1e-3
