"""Faults of time, planted into whole runs: each makes numbers better, and each is found by a rule about time."""

from dataclasses import replace

import pytest
from small_runs import measured, probe, served_by

from experiments.lab.judge import validity
from experiments.lab.load.client import Client
from experiments.lab.measure.kinds import Kind, PeerSettings
from experiments.lab.measure.schedule import Outcomes
from experiments.lab.workloads import Fixed, Text
from mini_infer.core.config import EngineConfig

SETTINGS = [*("model=dry", "measure.repeats=1", "engine.cache.num_blocks=512", "engine.scheduler.max_num_seqs=2")]
FIXED = [
    *("workload=fixed", "workload.count=6", "workload.prompt_tokens=20", "workload.output_tokens=12"),
    "workload.concurrency=6",
]
SUFFIX = [
    *("workload=text", "workload.count=3", "workload.concurrency=3"),
    *("engine.cache.prefix_caching=false", "engine/speculation=suffix"),
]


@pytest.fixture
def reasons(compose_config, virtual_time):
    """Why the passes of an engine with steps of 20 ms do not count."""

    def measure(*overrides, load=FIXED):
        variants = {"transformers": {"model": {"dry": {"step_ms": 20.0}}}}
        found = measured(probe(compose_config, *SETTINGS, *load, *overrides, variants=variants))
        return "; ".join(sorted({row.reason for row in found.rows}))

    return measure


def plant(monkeypatch, change):
    """`change` is done to the trace of every request that has ended."""
    real = Outcomes.end

    def end(self, index, *answer, **more):
        real(self, index, *answer, **more)
        self.traces[index] = change(self.traces[index])

    monkeypatch.setattr(Outcomes, "end", end)


def closer(trace, share):
    """Gaps between its tokens times `share`."""
    first = trace.token_times[0]
    return replace(trace, token_times=tuple(first + share * (time - first) for time in trace.token_times))


def halved(trace):
    return replace(trace, token_times=tuple(trace.arrival + (t - trace.arrival) / 2 for t in trace.token_times))


def without(monkeypatch, *names):
    """The run as it is judged without these rules."""
    broken = validity.broken
    monkeypatch.setattr(validity, "broken", lambda e: (found for found in broken(e) if found[0] not in names))


def test_a_sound_run_breaks_no_rule(reasons):
    assert reasons() == ""


def test_a_timer_that_starts_when_a_request_is_scheduled_is_found(reasons, monkeypatch):
    plant(monkeypatch, lambda trace: replace(trace, arrival=trace.first_scheduled))
    assert "latencies add up to" in reasons()
    without(monkeypatch, "latencies_of_nobody")
    assert reasons() == ""


def test_gaps_that_are_scaled_are_found(reasons, monkeypatch):
    plant(monkeypatch, lambda trace: closer(trace, 0.6))
    found = reasons()
    assert "moments at which tokens appeared are the end of no step" in found
    assert "latencies add up to" in found
    assert "before its last token" not in found
    without(monkeypatch, "tokens_between_steps", "latencies_of_nobody")
    assert reasons() == ""


def test_latencies_that_are_halved_are_found(reasons, monkeypatch):
    plant(monkeypatch, halved)
    found = reasons()
    assert "latencies add up to" in found
    assert "after its last token" in found
    assert "are the end of no step" in found
    without(monkeypatch, "edges", "latencies_of_nobody", "tokens_between_steps")
    assert reasons() == ""


@pytest.mark.parametrize("moved", [False, True])
def test_a_pass_that_starts_at_its_first_token_is_found(reasons, monkeypatch, moved):
    """Whether or not requests are said to have arrived then, too."""
    real = Outcomes.run

    def run(self, *arguments):
        served = real(self, *arguments)
        first = min(r.token_times[0] for r in served.requests)
        requests = served.requests
        if moved:
            requests = tuple(replace(r, arrival=max(first, r.arrival)) for r in requests)
        return replace(served, start=first, requests=requests)

    monkeypatch.setattr(Outcomes, "run", run)
    long = ("workload.prompt_tokens=1000", "engine.scheduler.max_num_batched_tokens=128", "workload.count=2")
    found = reasons(*long, "workload.concurrency=2")
    assert "from outside it took" in found
    assert ("after its first arrival" in found) is not moved


# --- over HTTP -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    config = {
        "model": {"path": "dry", "load_format": "dry", "device": "cpu", "dry": {"step_ms": 20.0}},
        "cache": {"num_blocks": 512},
        "scheduler": {"max_num_seqs": 2, "max_num_batched_tokens": 128},
    }
    started = served_by(Kind.served, EngineConfig.from_dict(config), PeerSettings())
    yield f"http://{started.target.host}:{started.target.port}"
    started.close()


@pytest.fixture
def over_http(server, compose_config, peers_are_forked, monkeypatch):
    """Why passes at such an engine's server do not count, by the rules of time."""
    monkeypatch.setattr(validity, "RULES", (validity.of_times,))
    settings = (*SETTINGS, *FIXED, f"peers.http.url={server}", "peers.client.processes=1")

    def measure(*overrides):
        found = measured(probe(compose_config, *settings, *overrides, variants={"transformers": {"kind": "http"}}))
        assert found.rows
        return "; ".join(sorted({row.reason for row in found.rows}))

    return measure


def plant_in_client(monkeypatch, change):
    """`change` is done to what the load client's process tells of a pass."""
    real = Client.outcome

    def outcome(self):
        served, *more = real(self)
        return change(served), *more

    monkeypatch.setattr(Client, "outcome", outcome)


def of_each(change):
    return lambda served: replace(served, requests=tuple(map(change, served.requests)))


LONG = ("workload.prompt_tokens=1500", "workload.count=1")


@pytest.mark.parametrize("load", [(), LONG])
def test_a_sound_run_over_http_breaks_no_rule_of_time(over_http, load):
    assert over_http(*load) == ""


def test_over_http_a_timer_that_starts_when_a_request_is_scheduled_is_found(over_http, monkeypatch):
    """Which is when others have ended, where requests wait for a place."""

    def scheduled(served):
        ends = [r.token_times[-1] for r in served.requests]
        free = [max(end for end in (r.arrival, *ends) if end < r.token_times[0]) for r in served.requests]
        return replace(
            served, requests=tuple(replace(r, arrival=at) for r, at in zip(served.requests, free, strict=True))
        )

    plant_in_client(monkeypatch, scheduled)
    assert "latencies add up to" in over_http()


def test_over_http_gaps_that_are_scaled_are_found(over_http, monkeypatch):
    plant_in_client(monkeypatch, of_each(lambda trace: closer(trace, 0.6)))
    assert "latencies add up to" in over_http()


def test_over_http_latencies_that_are_halved_are_found(over_http, monkeypatch):
    plant_in_client(monkeypatch, of_each(halved))
    found = over_http()
    assert "latencies add up to" in found
    assert "after its last token" in found


def test_over_http_a_pass_that_starts_at_its_first_token_is_found(over_http, monkeypatch):
    """And the requests with it, the time in flight included: the client itself has no other clock."""

    def late(served):
        first = min(r.token_times[0] for r in served.requests)
        requests = tuple(replace(r, arrival=max(first, r.arrival)) for r in served.requests)
        told = sum(r.e2e for r in requests)
        return replace(served, start=first, requests=requests, in_flight_s=told)

    plant_in_client(monkeypatch, late)
    assert over_http(*LONG).startswith("the pass says that it took ")


# --- warm-up -------------------------------------------------------------------------------------------------------


def test_no_warm_up_is_found(reasons, monkeypatch):
    real = Fixed.make
    monkeypatch.setattr(Fixed, "make", lambda self, *given: replace(real(self, *given), warmup=()))
    assert reasons().startswith("nothing was served before the clock started")
    without(monkeypatch, "no_warm_up")
    assert reasons() == ""


def test_a_warm_up_on_the_measured_prompts_is_found(reasons, monkeypatch):
    """With suffix drafts the engine then knows the answers, though no prefix is cached."""
    real = Text.make

    def make(self, *given):
        inputs = real(self, *given)
        return replace(inputs, warmup=inputs.measured)

    monkeypatch.setattr(Text, "make", make)
    without(monkeypatch, "drafts_of_nothing")
    assert reasons(load=SUFFIX).startswith("3 of 3 measured prompts had been served before the clock started")
    without(monkeypatch, "warmed_up_on_itself")
    assert reasons(load=SUFFIX) == ""
