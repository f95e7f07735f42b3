"""Each rule finds the fault that is planted for it, and says so; a sound pass breaks none."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from experiments.lab.judge import validity
from experiments.lab.judge.validity import Evidence
from experiments.lab.measure import clocks
from experiments.lab.measure.traces import HostUse, RequestTrace, Served


def request(index=0, **changes):
    sound = RequestTrace(
        prompt_tokens=20,
        asked_tokens=3,
        arrival=float(index),
        token_times=(index + 0.1, index + 0.2, index + 0.3),
        token_ids=(5, 6 + index, 7),
        sent=index + 0.001,
        could_send=index + 0.0005,
    )
    return replace(sound, **changes)


def evidence(count=10, changed=(), **more):
    """`changed`: index -> what is different about that request."""
    changed = dict(changed)
    requests = tuple(request(i, **changed.get(i, {})) for i in range(count))
    of_pass = {name: more.pop(name) for name in ("memory_growth", "host") if name in more}
    return Evidence(Served(requests, 0.0, 100.0, **of_pass), vocab_size=100, **more)


def test_a_sound_pass_breaks_no_rule():
    tokens = [r.token_ids for r in evidence().requests]
    assert validity.problem(evidence(drift=0.05, first_tokens=tokens)) == ""


@pytest.mark.parametrize("rule", validity.RULES, ids=lambda rule: rule.__name__)
def test_every_rule_has_its_planted_fault(rule):
    assert PLANTED[rule.__name__]
    for faulty, reason in PLANTED[rule.__name__]:
        assert reason in rule(faulty)
        assert [other.__name__ for other in validity.RULES if other(faulty)] == [rule.__name__]
        assert validity.problem(faulty) == rule(faulty)


DRAFTED = Served(
    evidence().served.requests, 0.0, 100.0, records=(SimpleNamespace(drafted=()), SimpleNamespace(drafted=(2, 1)))
)
PLANTED = {
    "drafts_of_nothing": [
        (Evidence(DRAFTED, vocab_size=100, made_up_prompts=True), "drafts were verified on random tokens")
    ],
    "failures": [
        (
            evidence(changed={3: {"error": "the pool is too small", "token_ids": (), "token_times": ()}}),
            "1 of 10 requests failed: the pool is too small",
        )
    ],
    "wrong_lengths": [
        (evidence(changed={3: {"token_ids": (5, 9), "token_times": (3.1, 3.2)}}), "1 of 10 requests did not get"),
        (evidence(changed={3: {"asked_tokens": 4}, 4: {"asked_tokens": 2}}), "2 of 10 requests did not get"),
    ],
    "outside_vocabulary": [
        (
            evidence(changed={3: {"token_ids": (5, 100, -1)}}),
            "2 tokens are none of the vocabulary's 100, the first is 100",
        )
    ],
    "stuck_sampler": [
        (evidence(changed={i: {"token_ids": (0, 0, 0)} for i in range(10)}), "every token of every request is 0")
    ],
    "unsteady_tokens": [
        (
            evidence(first_tokens=[(5, 6 + i, 8 if i == 2 else 7) for i in range(10)]),
            "1 of 10 requests got other greedy tokens than in the first repeat",
        )
    ],
    "unintended_hits": [
        (
            evidence(changed={3: {"cached_tokens": 16}}),
            "16 prompt tokens of unrelated prompts came from a prefix cache",
        ),
        (
            evidence(
                changed={3: {"cached_tokens": 16, "shared_tokens": 16}, 4: {"cached_tokens": 18, "shared_tokens": 16}}
            ),
            "34 prompt tokens came from a prefix cache, and the workload shares 32",
        ),
    ],
    "client_fell_behind": [
        (
            evidence(changed={3: {"sent": 3.2505}}),  # arrivals are 1 s apart: 100 ms are allowed
            "1 of 10 requests were sent up to 250 ms late (100 ms are allowed)",
        )
    ],
    "client_was_busy": [
        (
            evidence(host=HostUse(client_s=9.0, client_busy=0.9, tells_cached=True)),
            "a process of the load client was busy 90 % of the time",
        )
    ],
    "clocks_drifted": [(evidence(drift=0.08), "the machine's speed changed by 8 % during the pass (5 % are allowed)")],
    "memory_grew": [(evidence(memory_growth=3 * 2**20), "3 MiB of GPU memory were taken inside the timed part")],
}


def test_a_pass_may_break_several_rules():
    text = validity.problem(evidence(drift=0.5, changed={3: {"asked_tokens": 4}}))
    assert text.count("; ") == 1


def test_one_request_in_a_hundred_may_be_late():
    assert validity.client_fell_behind(evidence(100, {3: {"sent": 3.25}})) == ""
    assert validity.client_fell_behind(evidence(100, {3: {"sent": 3.25}, 4: {"sent": 4.25}})) != ""


def test_while_a_step_runs_nothing_can_be_sent_and_that_is_no_lag():
    busy = {3: {"sent": 3.26, "could_send": 3.255}}
    assert validity.client_fell_behind(evidence(10, busy)) == ""


def test_a_burst_is_allowed_five_milliseconds():
    def burst(lag):
        changes = {i: {"arrival": 0.0, "could_send": 0.0, "sent": lag} for i in range(10)}
        return validity.client_fell_behind(evidence(10, changes))

    assert burst(0.004) == ""
    assert "10 of 10 requests were sent up to 6 ms late (5 ms are allowed)" in burst(0.006)


def test_a_closed_loop_has_no_schedule_to_fall_behind():
    assert validity.client_fell_behind(evidence(10, {i: {"sent": None} for i in range(10)})) == ""


def test_short_answers_may_be_alike():
    assert validity.stuck_sampler(evidence(2, {i: {"token_ids": (9, 9, 9)} for i in range(2)})) == ""


def test_who_computes_a_shared_prefix_does_not_matter():
    swapped = {3: {"cached_tokens": 16}, 4: {"shared_tokens": 16}}
    assert validity.unintended_hits(evidence(changed=swapped)) == ""


def test_few_hits_are_a_note_where_the_cache_is_on():
    served = evidence(changed={3: {"shared_tokens": 100, "cached_tokens": 48}}).served
    assert validity.few_hits(served, True) == "48 of 100 shared prompt tokens were found in the prefix cache"
    assert validity.few_hits(served, False) == ""
    assert validity.few_hits(evidence().served, True) == ""


def test_drift_is_the_larger_change_of_host_and_gpu():
    before = clocks.Speed(1.0, 2.0)
    assert clocks.drift(before, clocks.Speed(1.1, 2.0)) == pytest.approx(0.1)
    assert clocks.drift(before, clocks.Speed(0.99, 2.4)) == pytest.approx(0.2)
    assert clocks.drift(clocks.Speed(1.0), clocks.Speed(0.9)) == pytest.approx(0.1)


def test_a_watch_wants_the_best_speed_so_far_before_and_the_passes_own_after(monkeypatch):
    speeds = iter([1.0, 1.1, 0.9, 1.2])
    wanted = []

    def take(device, target=None):
        wanted.append(target and target.host_s)
        return clocks.Speed(next(speeds))

    monkeypatch.setattr(clocks, "take", take)
    watch = clocks.Watch("cpu")
    assert watch.drift_since(watch.before()) == pytest.approx(0.1)
    assert watch.drift_since(watch.before()) == pytest.approx(1.2 / 0.9 - 1)
    assert wanted == [None, 1.0, 1.0, 0.9]


def test_a_server_that_tells_no_token_ids_is_judged_by_its_counts():
    silent = {i: {"token_ids": (), "tells_tokens": False} for i in range(10)}
    assert validity.problem(evidence(changed=silent, first_tokens=[(1,)] * 10)) == ""
    short = {**silent, 3: {**silent[3], "token_times": (3.1, 3.2)}}
    assert "1 of 10 requests did not get" in validity.problem(evidence(changed=short))
