"""The driver keeps its schedule: closed loop, open loop, conversations; on a clock that the test turns."""

import pytest
import torch

from experiments.lab.measure.subjects import EngineSubject, Kind, drive, require_servable
from experiments.lab.workloads import Item
from mini_infer import LLMEngine
from mini_infer.core.config import (
    CacheConfig,
    Device,
    DryConfig,
    EngineConfig,
    LoadFormat,
    ModelConfig,
    Policy,
    SchedulerConfig,
)
from mini_infer.core.errors import ConfigError
from mini_infer.runtime.executor.dry import DryModel

TICK = 1e-4  # a look at the clock takes so long


class Clock:
    """Moves when somebody looks at it, and when somebody sleeps; `late` is by how much sleeping takes too long."""

    def __init__(self, late=0.0):
        self.now, self.late, self.slept = 100.0, late, []

    def __call__(self):
        self.now += TICK
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds + self.late


def engine(clock, **sections):
    model = ModelConfig(load_format=LoadFormat.dry, dry=DryConfig(max_model_len=256))
    cache = sections.pop("cache", CacheConfig(num_blocks=64))
    return LLMEngine(EngineConfig(model=model, cache=cache, **sections), clock=clock)


def prompt(first, length=20):
    return tuple((first + i) % 250 for i in range(length))


def run(items, concurrency=1, late=0.0, **sections):
    clock = Clock(late)
    return drive(engine(clock, **sections), items, concurrency, sleep=clock.sleep), clock


def in_flight(served, request):
    """How many others were in flight when it arrived."""
    others = [r for r in served.requests if r is not request]
    return sum(r.arrival <= request.arrival < r.token_times[-1] for r in others)


def test_a_closed_loop_has_at_most_so_many_in_flight():
    served, clock = run([Item(prompt(i), 5 + i) for i in range(6)], concurrency=2)
    assert [len(r.token_ids) for r in served.requests] == [5, 6, 7, 8, 9, 10]
    assert max(in_flight(served, r) for r in served.requests) == 1
    assert all(r.sent is None and r.lag == 0 for r in served.requests)
    assert clock.slept == []
    assert served.start == served.requests[0].arrival


def test_an_open_loop_arrives_on_schedule_however_many_are_in_flight():
    times = [0.0, 0.001, 0.002, 2.0]
    served, clock = run([Item(prompt(i), 8, arrival_s=t) for i, t in enumerate(times)])
    arrivals = [r.arrival - served.start for r in served.requests]
    assert arrivals == pytest.approx(times)
    assert in_flight(served, served.requests[2]) == 2
    assert clock.slept == [pytest.approx(2.0, abs=0.1)]  # idle until the last one
    assert all(r.sent >= r.arrival and r.lag < 10 * TICK for r in served.requests)
    assert served.requests[3].token_times[0] > served.start + 2.0


def test_latency_starts_at_the_schedule_and_a_running_step_is_no_lag():
    """Two arrive while the first one's steps keep the thread; they wait, and the client is not to blame."""
    served, _ = run([Item(prompt(0), 30, arrival_s=0.0), Item(prompt(50), 2, arrival_s=0.5 * TICK)])
    second = served.requests[1]
    assert second.arrival - served.start == pytest.approx(0.5 * TICK)
    assert second.sent > second.arrival
    assert second.lag < 10 * TICK
    assert second.ttft > second.sent - second.arrival


def test_a_client_that_oversleeps_lags():
    served, _ = run([Item(prompt(i), 2, arrival_s=float(i)) for i in range(4)], late=0.05)
    assert [r.lag > 0.049 for r in served.requests] == [False, True, True, True]


def test_open_and_closed_loop_may_be_mixed():
    streams = [Item(prompt(i), 40, name="stream") for i in range(3)]
    prompts = [Item(prompt(100 + i), 1, arrival_s=0.002 * (i + 1), name="prompt") for i in range(2)]
    served, _ = run([*streams, *prompts], concurrency=2)
    assert [r.name for r in served.requests] == ["stream"] * 3 + ["prompt"] * 2
    first, second, third, early, _ = served.requests
    assert first.arrival == second.arrival
    assert third.arrival >= min(first.token_times[-1], second.token_times[-1])
    assert in_flight(served, early) == 2  # the places are all taken, and that does not concern it


@pytest.mark.parametrize("first_arrival", [None, 0.25])
def test_a_conversation_goes_on_from_what_was_really_answered(first_arrival):
    turns = [
        Item(prompt(1, 33), 7, arrival_s=first_arrival),
        Item(prompt(90, 10), 5, follows=0, think_s=0.5, shared_tokens=39),
        Item(prompt(160, 10), 3, follows=1, think_s=0.25, shared_tokens=54),
    ]
    served, _ = run(turns)
    first, second, third = served.requests
    assert [r.prompt_tokens for r in served.requests] == [33, 33 + 7 + 10, 50 + 5 + 10]
    assert second.arrival - first.token_times[-1] == pytest.approx(0.5, abs=0.01)
    assert third.arrival - second.token_times[-1] == pytest.approx(0.25, abs=0.01)
    whole = [*turns[0].prompt, *first.token_ids, *turns[1].prompt]
    alone, _ = run([Item(tuple(whole), 5)])
    assert second.token_ids == alone.requests[0].token_ids
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)  # whole blocks of what went before
    assert [r.sent is None for r in served.requests] == [first_arrival is None] * 3


def test_a_closed_loop_gives_a_thinking_users_place_to_somebody_else():
    items = [Item(prompt(1), 4), Item(prompt(60), 4, follows=0, think_s=9.0), Item(prompt(120), 4)]
    served, _ = run(items, concurrency=1)
    first, second, other = served.requests
    assert first.token_times[-1] <= other.arrival < other.token_times[-1] < second.arrival


def test_priorities_reach_the_scheduler():
    items = [Item(prompt(i), 6, arrival_s=0.0, priority=5 - i) for i in range(5)]
    scheduler = SchedulerConfig(policy=Policy.priority, max_num_seqs=1)
    served, _ = run(items, scheduler=scheduler)
    ends = [r.token_times[-1] for r in served.requests]
    assert ends == sorted(ends, reverse=True)


def test_what_is_observed_is_the_pass_and_nothing_before_it():
    clock = Clock()
    subject = engine(clock)
    drive(subject, [Item(prompt(7), 30)], 1, sleep=clock.sleep)
    items = [Item(prompt(i, 40), 3, name="a") for i in (100, 180)]
    served = drive(subject, items, 2, sleep=clock.sleep)
    assert sum(r.prefill_tokens for r in served.records) == 80
    assert served.records[0].start_time >= served.start
    assert [name for r in served.records for name in r.finished] == ["a-0", "a-1"]
    assert [r.request_id for r in served.requests] == ["a-0", "a-1"]
    assert subject.observers == []


def test_a_request_that_the_engine_refuses_costs_the_others_nothing():
    items = [Item(prompt(1), 4), Item(prompt(2, 300), 4), Item(prompt(3), 4, follows=1), Item(prompt(4), 4, follows=2)]
    served, _ = run(items, concurrency=1)
    good, refused, *followers = served.requests
    assert (good.error, len(good.token_ids)) == ("", 4)
    assert "at most 255 are allowed" in refused.error
    assert [r.error for r in followers] == ["the request that it follows has no answer"] * 2


def test_a_step_that_fails_fails_its_requests_and_the_pass_goes_on(monkeypatch):
    real, calls = DryModel.forward, []

    def forward(model, step):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("planted")
        return real(model, step)

    monkeypatch.setattr(DryModel, "forward", forward)
    served, _ = run([Item(prompt(1), 9), Item(prompt(60), 9), Item(prompt(120), 4)], concurrency=2)
    assert [r.error for r in served.requests] == ["RuntimeError: planted"] * 2 + [""]
    assert len(served.requests[2].token_ids) == 4


def test_an_aborted_request_is_said_to_be(monkeypatch):
    clock = Clock()
    subject = engine(clock)
    real = subject.step

    def step():
        subject.abort("request-0")
        return real()

    monkeypatch.setattr(subject, "step", step)
    served = drive(subject, [Item(prompt(1), 9), Item(prompt(60), 9)], 2, sleep=clock.sleep)
    assert [r.error for r in served.requests] == ["it was aborted", ""]


def test_a_step_that_always_fails_is_raised(monkeypatch):
    subject = engine(Clock())
    monkeypatch.setattr(subject, "step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        drive(subject, [Item(prompt(1), 9)], 1)
    assert subject.observers == []


def test_memory_is_that_of_weights_and_the_fullest_step(checkpoint):
    model = ModelConfig(path=str(checkpoint))
    subject = EngineSubject(EngineConfig(model=model, cache=CacheConfig(num_blocks=32)))
    one = subject.serve([Item(prompt(1, 17)[:17], 2)], 1).peak_memory
    three = subject.serve([Item(tuple((i * 7 + j) % 120 for j in range(17)), 2) for i in range(3)], 3).peak_memory
    weights = 4 * (2 * 128 * 32 + 32 + 2 * (3 * 32 * 64 + 2 * 32 * 32 + 2 * 32 * 16 + 32 + 2 * 16 + 2 * 32))
    block = 2 * 2 * 16 * 2 * 8 * 4
    assert (one, three) == (weights + 2 * block, weights + 6 * block)
    subject.close()


def test_memory_of_a_gpu_that_others_hold_is_not_the_engines(checkpoint, monkeypatch):
    """By a made-up allocator: 500 bytes are others', 300 the engine's, and a pass takes 40 more and keeps 10."""
    given_out = iter([500, 800, 900, 910, 910, 910])  # in the meantime somebody has taken 100
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(given_out))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 940)
    for name in ("reset_peak_memory_stats", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    subject = EngineSubject(EngineConfig(model=ModelConfig(path=str(checkpoint)), cache=CacheConfig(num_blocks=32)))
    subject._on_gpu = True
    assert subject.serve([Item(prompt(1, 17)[:17], 2)], 1).peak_memory == 300 + 40
    assert subject.serve([Item(prompt(1, 17)[:17], 2)], 1).peak_memory == 300 + 10 + 30
    subject.close()


@pytest.mark.gpu
def test_memory_on_a_gpu_is_of_the_engine_alone():
    """Others live beside it, as variants do that keep their engines."""

    def opened(blocks):
        model = ModelConfig(path="tiny-target", device=Device.cuda)
        return EngineSubject(EngineConfig(model=model, cache=CacheConfig(num_blocks=blocks)))

    def peak(subject):
        return subject.serve([Item(prompt(1, 17)[:17], 8)] * 4, 4).peak_memory

    first = opened(256)
    alone = peak(first)
    second = opened(4096)
    assert peak(second) > 2 * alone
    assert peak(first) == pytest.approx(alone, rel=0.02)
    second.close()
    first.close()


LOAD_CLIENTS = {Kind.served_bench, Kind.vllm_bench}  # which make arrivals of their own


@pytest.mark.parametrize(
    ("item", "refused_by"),
    [
        (Item((1,), 1), set()),
        (Item((1,), 1, arrival_s=0.0), {Kind.hf, *LOAD_CLIENTS}),
        (Item((1,), 1, follows=0), {Kind.hf, Kind.hf_continuous, *LOAD_CLIENTS}),
        (Item((1,), 1, priority=1), {Kind.hf, Kind.hf_continuous, *LOAD_CLIENTS}),
    ],
)
def test_a_peer_refuses_what_it_cannot_serve(item, refused_by):
    for kind in set(Kind) - refused_by:
        require_servable(kind, [item], "theirs")
    for kind in refused_by:
        with pytest.raises(ConfigError, match=rf"experiment.variants.theirs: the kind {kind.value} cannot serve"):
            require_servable(kind, [item], "theirs")
