"""Faults planted into a whole run end as INVALID rows or a failed gate; what a YAML asks for is measured and kept."""

import itertools
import time
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from small_runs import measured, probe

from experiments.lab.judge import validity
from experiments.lab.measure import clocks, hardware, subjects
from experiments.lab.workloads import Fixed
from mini_infer.core.errors import ConfigError
from mini_infer.runtime.executor.dry import DryModel

pytestmark = pytest.mark.slow  # some seconds together

FIXED = ["workload=fixed", "workload.count=4", "workload.prompt_tokens=40", "workload.output_tokens=5"]


@pytest.fixture
def build(compose_config):
    return partial(probe, compose_config, "model=dry", "measure.repeats=2", "engine.cache.num_blocks=128")


def reasons(findings, variant="engine"):
    return {row.reason for row in findings.rows if row.variant == variant}


# --- planted faults ----------------------------------------------------------------------------------------------


def test_accidental_shared_prefixes_are_invalid(build, monkeypatch):
    real = Fixed.make

    def make(self, vocabulary, seed):
        inputs = real(self, vocabulary, seed)
        first = inputs.measured[0]
        spoiled = [replace(item, prompt=first.prompt[:32] + item.prompt[32:]) for item in inputs.measured]
        return replace(inputs, measured=tuple(spoiled))

    monkeypatch.setattr(Fixed, "make", make)
    assert reasons(measured(build(*FIXED, "workload.concurrency=1"))) == {
        "96 prompt tokens of unrelated prompts came from a prefix cache"
    }


def test_a_lagging_client_is_invalid(build, monkeypatch):
    real = subjects.drive

    def drive(engine, items, concurrency, **more):
        return real(engine, items, concurrency, sleep=lambda s: time.sleep(s + 0.03), **more)

    monkeypatch.setattr("experiments.lab.measure.subjects.drive", drive)
    open_loop = [
        "workload.arrivals=poisson",
        "workload.rate_per_s=20",
    ]  # slow enough to wait for, on a busy machine too
    (reason,) = reasons(measured(build(*FIXED, *open_loop, "measure.repeats=1")))
    assert "the client fell behind its schedule" in reason


def test_logits_of_nan_are_invalid(build, monkeypatch):
    real = DryModel.compute_logits
    monkeypatch.setattr(DryModel, "compute_logits", lambda self, hidden: torch.full_like(real(self, hidden), torch.nan))
    found = measured(build(*FIXED))
    assert all("every token of every request is" in reason for reason in reasons(found))
    assert all(gate.passed for gate in found.gates)  # both are alike, and wrong


def test_a_sampler_that_is_not_steady_is_invalid_from_the_second_repeat_on(build, monkeypatch):
    real, calls = DryModel.compute_logits, itertools.count()
    monkeypatch.setattr(DryModel, "compute_logits", lambda self, hidden: real(self, hidden + next(calls)))
    found = measured(build(*FIXED))
    assert {row.valid for row in found.rows if row.repeat == 0} == {True}
    assert reasons(found, "transformers") - {""} == {"4 of 4 requests got other greedy tokens than in the first repeat"}
    assert not any(gate.passed for gate in found.gates)


def test_clocks_that_drift_are_invalid(build, monkeypatch):
    speeds = itertools.cycle([1.0, 1.2])
    monkeypatch.setattr(clocks, "take", lambda device, wanted=None: clocks.Speed(next(speeds)))
    found = measured(build(*FIXED, metrics=["steps"]))
    assert reasons(found) == {"the host's speed changed by 20 % during the pass (5 % are allowed)"}
    assert len(found.rows) == 2 * 2 * 3  # each was tried three times


def test_what_the_host_does_beside_a_gpu_is_told(build, monkeypatch):
    speeds = itertools.cycle([1.0, 1.2])
    monkeypatch.setattr(clocks, "take", lambda device, wanted=None: clocks.Speed(next(speeds), gpu_s=1.0))
    found = measured(build(*FIXED, metrics=["steps"]))
    assert reasons(found) == {""}
    assert any(note.startswith("The host's speed changed by 20 % during 4 of 4 passes") for note in found.notes)


def test_ends_that_were_read_late_are_told_once(build, monkeypatch):
    shares = itertools.cycle([0.0, 0.023])
    monkeypatch.setattr(validity, "late_readings", lambda evidence: next(shares))
    late = [note for note in measured(build(*FIXED, metrics=["steps"])).notes if "look shorter" in note]
    assert [note[:26] for note in late] == ["In 2 of 4 passes the host "]
    assert late[0].endswith(": up to 2.3 % of a pass's steps.")


def test_a_pass_is_measured_again_when_the_clocks_are_steady(build, monkeypatch):
    speeds = itertools.chain([1.0, 1.2], itertools.repeat(1.0))
    monkeypatch.setattr(clocks, "take", lambda device, wanted=None: clocks.Speed(next(speeds)))
    found = measured(build(*FIXED, metrics=["steps"], timeline={}))
    assert [(row.variant, row.repeat, row.valid) for row in found.rows] == [
        ("transformers", 0, False),
        ("transformers", 0, True),
        ("engine", 0, True),
        ("engine", 1, True),
        ("transformers", 1, True),
    ]
    assert found.gates[0].total_tokens == 2 * 4 * 5
    stored = Counter((r.repeat, r.attempt, r.valid) for r in found.requests if r.variant == "transformers")
    assert stored == {(0, 0, False): 4, (0, 1, True): 4, (1, 0, True): 4}
    assert [(row.variant, row.repeat) for row in found.gaps] == [(r.variant, r.repeat) for r in found.rows if r.valid]
    assert {sum(row.histogram[1]) for row in found.gaps} == {4 * 4}, "of 5 tokens each"


def test_requests_that_the_engine_refuses_are_invalid(build):
    variants = {"transformers": {}, "engine": {"model": {"max_model_len": 30}}}
    found = reasons(measured(build(*FIXED, variants=variants)))
    assert found
    assert all(r.startswith("4 of 4 requests failed: the prompt has 40 tokens; at most 29 are allowed") for r in found)


# --- what a YAML may ask for -------------------------------------------------------------------------------------


def test_an_open_loop_is_measured_from_its_schedule(build):
    found = measured(
        build(
            *FIXED,
            "workload.arrivals=poisson",
            "workload.rate_per_s=10",
            "measure.repeats=1",
            metrics=["ttft_ms", "goodput_rps", "requests_per_s", "total_s"],
            slo={"ttft_ms": 1000},
        )
    )
    values = {row.metric: row.value for row in found.rows if row.variant == "engine"}
    assert values["goodput_rps"] == pytest.approx(values["requests_per_s"]) == pytest.approx(4 / values["total_s"])
    assert values["total_s"] >= found.workload["last_arrival_s"]
    assert found.workload["arrivals"] == "poisson"


def test_classes_of_requests_are_measured_apart(build):
    mixed = [
        "workload=mixed",
        "workload.streams=3",
        "workload.stream_prompt_tokens=20",
        "workload.stream_output_tokens=40",
        "workload.prompts=2",
        "workload.prompt_tokens=64",
        "workload.prompt_output_tokens=2",
        "workload.prompt_every_s=0.01",
    ]
    found = measured(build(*mixed, metrics=["itl_max_ms@stream", "e2e_ms@prompt", "batch_size"], timeline={}))
    assert {row.metric for row in found.rows} == {"itl_max_ms@stream", "e2e_ms@prompt", "batch_size"}
    assert {request.name for request in found.requests} == {"stream", "prompt"}
    with pytest.raises(ConfigError, match=r"workload=mixed has no requests called 'steam'; did you mean 'stream'\?"):
        measured(build(*mixed, metrics=["itl_ms@steam"]))


def test_hits_of_a_shared_prefix_are_valid_and_primed_ones_are_there(build):
    shared = ["workload=shared_prefix", "workload.prefix_tokens=64", "workload.suffix_tokens=16"]
    small = ["workload.count=4", "workload.output_tokens=3", "workload.prime=true"]
    variants = {"transformers": {"cache": {"prefix_caching": False}}, "engine": {}}
    found = measured(build(*shared, *small, variants=variants, metrics=["prefix_hit_rate"]))
    assert all(row.valid for row in found.rows)
    assert {(row.variant, row.value) for row in found.rows} == {("transformers", 0.0), ("engine", 64 / 80)}
    assert found.workload["hit_share"] == 64 / 80
    assert found.gates[0].passed


def test_steps_of_the_asked_point_and_first_repeat_are_kept(build):
    points = {"workload.concurrency": [1, 4]}
    found = measured(build(*FIXED, points=points, timeline={"workload.concurrency": 4}))
    assert {(s.variant, s.point) for s in found.steps} == {(v, "concurrency=4") for v in ("transformers", "engine")}
    steps = [s for s in found.steps if s.variant == "engine"]
    assert [s.step for s in steps] == list(range(len(steps)))
    assert sum(s.prefill_tokens for s in steps) == 4 * 40
    assert sum(s.decode_tokens for s in steps) == 4 * 4
    assert sorted(name for s in steps for name in s.finished) == [f"request-{i}" for i in range(4)]
    assert 0 <= steps[0].start_s < steps[-1].start_s
    at = {"variant": "engine", "point": "concurrency=4", "repeat": 1}  # requests are kept of every pass
    requests = [r for r in found.requests if at.items() <= vars(r).items()]
    assert [(r.request, r.prompt_tokens, r.output_tokens) for r in requests] == [
        (f"request-{i}", 40, 5) for i in range(4)
    ]
    assert all(r.arrival_s <= r.first_scheduled_s <= r.first_token_s <= r.end_s for r in requests)
    assert all(r.queue_s + r.prefill_s + r.decode_s == pytest.approx(r.end_s - r.arrival_s) for r in requests)
    assert len(found.requests) == 2 * 2 * 2 * 4  # variants, points, repeats


UNCACHED = {"cache": {"prefix_caching": False}}


def mapped(build, **asked):
    """By variant, whose each block is after each step."""
    found, by = measured(build(*FIXED, timeline={}, block_map=True, **asked)), dict[str, dict]()
    for row in found.blocks:
        for step in range(row.first, row.last + 1):
            owners = by.setdefault(row.variant, {}).setdefault(step, {})
            assert row.block not in owners, "a block has one state at a time"
            owners[row.block] = row.owner, row.empty
    return by


def test_it_is_noted_whose_blocks_are_which(build):
    contiguous = {"cache": {"layout": "contiguous", **UNCACHED["cache"]}, "model": {"max_model_len": 64}}
    found = mapped(build, variants={"transformers": contiguous, "engine": UNCACHED})
    first = Counter(found["engine"][0].values())
    assert first == {(f"request-{index}", False): 3 for index in range(4)}, "40 tokens of a prompt and the first one"
    assert Counter(found["transformers"][0].values()) == {
        (f"request-{index}", empty): count for index in range(4) for empty, count in ((False, 3), (True, 1))
    }, "of 64 tokens that it may have"


def test_blocks_that_several_have_and_that_nobody_has_are_known(build):
    shared = ["workload=shared_prefix", "workload.count=4", "workload.prefix_tokens=64", "workload.suffix_tokens=16"]
    more = ["workload.output_tokens=4", "workload.hit_rate=1.0", "workload.prime=true"]
    experiment = build(*shared, *more, timeline={}, block_map=True)
    found = [row for row in measured(experiment).blocks if row.variant == "engine"]
    assert {row.block for row in found} == {row.block for row in found if row.owner != "cached"}, "others are left out"
    assert Counter(row.owner for row in found if row.last == max(r.last for r in found)) == {"cached": 4 + 4}
    owners = Counter(row.owner for row in found if row.first == 0)
    assert owners["shared"] == 4
    assert [owners[f"hit-{index}"] for index in range(4)] == [1] * 4, "after 64 of 80 tokens"


def test_a_map_is_of_variants_that_tell_of_their_blocks_and_of_requests_that_have_ended(build, monkeypatch):
    assert not measured(build(*FIXED, block_map=True)).blocks, "there is no timeline"
    real = subjects.drive

    def drive(*given, **more):
        served = real(*given, **more)
        return replace(served, requests=tuple(replace(r, error="lost") for r in served.requests))

    three = {"transformers": {}, "a": {}, "b": {}}
    found = measured(build(*FIXED, variants=three, timeline={}, block_map=True))
    assert list(dict.fromkeys(row.variant for row in found.blocks)) == ["transformers", "a"]
    monkeypatch.setattr(subjects, "drive", drive)
    found = measured(build(*FIXED, timeline={}, block_map=True))
    assert not found.blocks
    assert "engine: there is no map of its blocks, because 4 of 4 requests failed: lost." in found.notes


def test_no_steps_are_kept_where_nobody_asks(build):
    assert measured(build(*FIXED)).steps == []


def test_a_timeline_of_a_point_that_is_not_measured_is_refused(build):
    with pytest.raises(ConfigError, match=r"experiment.timeline=.* names no measured point. Measured: concurrency=1"):
        build(*FIXED, points={"workload.concurrency": [1, 4]}, timeline={"workload.concurrency": 3})


def test_what_has_no_meaning_is_left_out_with_a_note(build):
    found = measured(build(*FIXED, metrics=["mbu", "peak_memory_mib", "steps"]))
    assert {row.metric for row in found.rows} == {"steps"}
    left_out = "useful share of the memory bandwidth is left out, because a dry model moves no bytes"
    assert f"engine: {left_out}." in found.notes


def test_floors_of_what_is_measured_are_this_machines_whatever_hardware_was_chosen(build, monkeypatch):
    monkeypatch.setattr(hardware, "name", lambda device: "A CPU that nobody has measured")
    typed = ["model=tiny", "hardware=cpu", "measure.gates=false", "measure.repeats=1"]
    found = measured(build(*typed, *FIXED, metrics=["floor_ms", "steps"]))
    assert {row.metric for row in found.rows} == {"steps"}
    assert found.ceilings is None
    assert any("and none of A CPU that nobody has measured" in note for note in found.notes)


def test_few_hits_are_noted(build):
    shared = ["workload=shared_prefix", "workload.prefix_tokens=64", "workload.suffix_tokens=20", "workload.count=4"]
    found = measured(build(*shared))  # all at once: nobody has left anything yet
    assert "engine, repeat 1: 0 of 192 shared prompt tokens were found in the prefix cache." in found.notes


def test_the_workload_is_described_point_by_point_where_points_differ(build):
    found = measured(build(*FIXED, points={"workload.concurrency": [1, 4]}))
    assert (found.workload["in_flight"], found.workload["requests"]) == ([1, 4], 4)


def test_a_peer_cannot_be_asked_for_an_open_loop(build, checkpoint):
    experiment = build(
        *FIXED,
        "workload.arrivals=burst",
        f"engine.model.path={checkpoint}",
        "engine.model.load_format=auto",
        variants={"transformers": {"kind": "hf"}, "engine": {}},
    )
    with pytest.raises(ConfigError, match=r"variants.transformers: the kind hf cannot serve arrival times"):
        measured(experiment)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"metrics": ["goodput_rps"]}, "goodput_rps needs experiment.slo"),
        ({"slo": {"ttft_ms": -1}}, "experiment.slo.ttft_ms must be above 0"),
        ({"gate_logit_error": 0}, "gate_logit_error must be above 0"),
        ({"samples": -1}, "experiment.samples must be at least 0"),
        ({"metrics": ["itl_p99_ms@"]}, "names no class of requests"),
    ],
)
def test_a_mistake_in_the_settings_is_named(build, settings, message):
    with pytest.raises(ConfigError, match=message):
        build(*FIXED, **settings)
