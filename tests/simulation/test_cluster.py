"""Replicas behind the router on one time line."""

from __future__ import annotations

import random

import pytest
from made_up_costs import CONFIG, replica

from mini_infer.core.config import RouterPolicy
from mini_infer.core.errors import RequestError
from mini_infer.core.request import Request
from mini_infer.serving.router import Router
from mini_infer.simulation.cluster import Cluster


def cluster(count: int, skips: bool = True, routing: RouterPolicy = RouterPolicy.prefix_aware) -> Cluster:
    return Cluster([replica(skips=skips) for _ in range(count)], Router(routing, count, CONFIG.cache))


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


@pytest.mark.parametrize("count", [1, 3])
def test_skipping_changes_nothing_in_a_cluster(count: int) -> None:
    steps, skipped = (run(cluster(count, skips), rate=60 * count) for skips in (False, True))
    assert list(steps) == list(skipped)
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
