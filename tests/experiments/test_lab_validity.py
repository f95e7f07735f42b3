"""Each rule finds the fault that is planted for it, and says so; a sound pass breaks none."""

import inspect
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from experiments.lab.judge import validity
from experiments.lab.judge.validity import Evidence
from experiments.lab.measure import clocks
from experiments.lab.measure.traces import HostUse, RequestTrace, Served
from experiments.lab.workloads import Item


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
    of_pass = {"start": 0.0, "end": count - 0.7}
    of_pass |= {name: more.pop(name) for name in list(more) if name in Served.__dataclass_fields__}
    return Evidence(Served(requests, **of_pass), vocab_size=100, **more)


def steps(*times, start=0.0, update_s=0.01, **more):
    """Records of steps that end at these times."""
    defaults = {"drafted": (), "prefill_tokens": 0, "decode_tokens": 1, **more}
    begins = (start, *times)
    return tuple(
        SimpleNamespace(start_time=begin, end_time=end, update_s=update_s, **defaults)
        for begin, end in zip(begins, times, strict=False)
    )


def of(rule, faulty):
    """What it says; empty where it is kept."""
    return dict(validity.broken(faulty)).get(rule, "")


ENDS = [i + gap for i in range(10) for gap in (0.1, 0.2, 0.3)]  # of the steps behind the sound pass
KNOWN = tuple(Item((i, 1, 2), 3) for i in range(10))
SLOW = {i: {"token_times": (i + 0.1, i + 0.16, i + 0.22)} for i in range(9)}  # gaps of 60 ms where there were 100


def test_a_sound_pass_breaks_no_rule():
    tokens = [r.token_ids for r in evidence().requests]
    witnesses = {"outside_s": 9.4, "in_flight_s": 3.02, "records": steps(*ENDS), "floors_s": [0.09] * 30}
    warm = {"items": KNOWN, "before": (Item((7, 7, 7), 3),)}
    assert validity.problem(evidence(drift=clocks.Drift(0.05), first_tokens=tokens, **witnesses, **warm)) == ""


@pytest.mark.parametrize("rule", sorted({*re.findall(r'yield "(\w+)"', inspect.getsource(validity))}))
def test_every_rule_has_its_planted_fault(rule):
    assert PLANTED[rule]
    for faulty, reason in PLANTED[rule]:
        assert reason in of(rule, faulty)
        assert list(validity.broken(faulty)) == [(rule, validity.problem(faulty))]


PLANTED = {
    "drafts_of_nothing": [
        (evidence(made_up_prompts=True), "would be verified on random tokens"),  # though nothing was drafted
        (evidence(records=steps(*ENDS, drafted=(2, 1)), made_up_prompts=True), "would be verified on random tokens"),
    ],
    "timed_from_outside": [
        (evidence(outside_s=18.6), "the pass says that it took 9.3 s, and from outside it took 18.6 s"),
        (evidence(outside_s=9.0), "the pass says that it took 9.3 s, and from outside it took 9 s"),
    ],
    "edges": [
        (evidence(start=0.1), "the pass starts 100 ms after its first arrival"),
        (evidence(start=-1.0), "the pass starts 1e+03 ms before its first arrival"),
        (evidence(end=9.25), "the pass ends 50 ms before its last token"),
        (evidence(end=9.6), "the pass ends 300 ms after its last token"),
    ],
    "tokens_between_steps": [
        (evidence(records=steps(*ENDS), changed=SLOW), "18 of 30 moments at which tokens appeared are the end of no")
    ],
    "latencies_of_nobody": [
        (evidence(in_flight_s=6.0), "latencies add up to 3 s, and requests were in flight for 6 s"),
        (evidence(in_flight_s=3.0, changed=SLOW), "latencies add up to 2.28 s, and requests were in flight for 3 s"),
        (  # timers that start when a request is scheduled, half of its time later
            evidence(in_flight_s=3.0, changed={i: {"arrival": i + 0.15} for i in range(1, 10)}),
            "latencies add up to 1.65 s, and requests were in flight for 3 s",
        ),
    ],
    "faster_than_possible": [
        (
            evidence(records=steps(*ENDS, prefill_tokens=8192), floors_s=[0.1] * 13 + [2.0] + [0.1] * 16),
            "1 of 30 steps took less than the hardware needs: step 13 took 100 ms for 8192 prompt tokens and 1 running "
            "requests, which take 2000 ms",
        )
    ],
    "no_warm_up": [(evidence(before=()), "nothing was served before the clock started")],
    "warmed_up_on_itself": [
        (evidence(items=KNOWN, before=KNOWN[2:4]), "2 of 10 measured prompts had been served before the clock started")
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
    "clocks_drifted": [
        (evidence(drift=clocks.Drift(0.08)), "the host's speed changed by 8 % during the pass (5 % are allowed)")
    ],
    "memory_grew": [(evidence(memory_growth=3 * 2**20), "3 MiB of GPU memory were taken inside the timed part")],
    "compiled_inside": [
        (evidence(compiled=("dot", "dot", "sum")), "3 kernels were compiled inside the timed part: dot, sum")
    ],
}


# On an H200, 7B: steps of some 8,100 prompt tokens, whose floor is 136 ms, and a last one of half of that.
READ_LATE = [0.2306, 0.4220, 0.6148, 1.0264, 1.2318, 1.2546, 1.3483]
FLOORS = [0.136] * 6 + [0.075]


def test_an_end_that_was_read_late_makes_no_step_too_fast():
    late = evidence(records=steps(*READ_LATE, update_s=0.0), floors_s=FLOORS)
    assert of("faster_than_possible", late) == ""
    assert validity.late_readings(late) == 1 / 7


def test_of_a_pipeline_more_ends_may_have_been_read_late():
    """Two stages, three steps under way: the host read the end of the third step as it had launched a long one."""
    ends = [0.2, 0.4, 0.95, 0.99, 1.0, 1.2]
    assert of("faster_than_possible", evidence(records=steps(*ends, update_s=0.0), floors_s=[0.2] * 6))
    two = evidence(records=steps(*ends, update_s=0.0), floors_s=[0.2] * 6, stages=2)
    assert of("faster_than_possible", two) == ""
    scaled = evidence(records=steps(*(0.1 * (i + 1) for i in range(40)), update_s=0.0), floors_s=[0.2] * 40, stages=2)
    assert of("faster_than_possible", scaled)


def test_times_that_are_scaled_are_too_fast_in_the_long_run():
    scaled = evidence(records=steps(*(0.6 * 0.19 * (i + 1) for i in range(40)), update_s=0.0), floors_s=[0.136] * 40)
    assert "steps took less than the hardware needs" in of("faster_than_possible", scaled)
    early = [*READ_LATE[:5], *(end - 0.2 for end in READ_LATE[5:])]
    assert of("faster_than_possible", evidence(records=steps(*early, update_s=0.0), floors_s=FLOORS))


def test_a_pass_may_break_several_rules():
    text = validity.problem(evidence(drift=clocks.Drift(0.5), changed={3: {"asked_tokens": 4}}))
    assert text.count("; ") == 1


def test_one_request_in_a_hundred_may_be_late():
    assert of("client_fell_behind", evidence(100, {3: {"sent": 3.25}})) == ""
    assert of("client_fell_behind", evidence(100, {3: {"sent": 3.25}, 4: {"sent": 4.25}})) != ""


def test_while_a_step_runs_nothing_can_be_sent_and_that_is_no_lag():
    busy = {3: {"sent": 3.26, "could_send": 3.255}}
    assert of("client_fell_behind", evidence(10, busy)) == ""


def test_a_burst_is_allowed_five_milliseconds():
    def burst(lag):
        changes = {i: {"arrival": 0.0, "could_send": 0.0, "sent": lag} for i in range(10)}
        return of("client_fell_behind", evidence(10, changes))

    assert burst(0.004) == ""
    assert "10 of 10 requests were sent up to 6 ms late (5 ms are allowed)" in burst(0.006)


def test_a_closed_loop_has_no_schedule_to_fall_behind():
    assert of("client_fell_behind", evidence(10, {i: {"sent": None} for i in range(10)})) == ""


def test_short_answers_may_be_alike():
    assert of("stuck_sampler", evidence(2, {i: {"token_ids": (9, 9, 9)} for i in range(2)})) == ""


def test_who_computes_a_shared_prefix_does_not_matter():
    swapped = {3: {"cached_tokens": 16}, 4: {"shared_tokens": 16}}
    assert of("unintended_hits", evidence(changed=swapped)) == ""


def test_few_hits_are_a_note_where_the_cache_is_on():
    served = evidence(changed={3: {"shared_tokens": 100, "cached_tokens": 48}}).served
    assert validity.few_hits(served, True) == "48 of 100 shared prompt tokens were found in the prefix cache"
    assert validity.few_hits(served, False) == ""
    assert validity.few_hits(evidence().served, True) == ""


@pytest.mark.parametrize(
    ("after", "problem"),
    [
        (clocks.Speed(1.04), ""),
        (clocks.Speed(0.9), "the host's speed changed by 10 % during the pass (5 % are allowed)"),
        (clocks.Speed(1.2, 2.0), ""),  # a GPU computes, and the host's work is hidden behind its own
        (clocks.Speed(1.3, 2.0), "the host's speed changed by 30 % during the pass (25 % are allowed)"),
        (clocks.Speed(1.2, 2.12), "the GPU's speed changed by 6 % during the pass (5 % are allowed)"),
    ],
)
def test_a_clock_may_drift_as_far_as_it_matters(after, problem, monkeypatch):
    monkeypatch.setattr(clocks, "take", lambda device, wanted: after)
    before = clocks.Speed(1.0, None if after.gpu_s is None else 2.0)
    assert clocks.Watch("cpu").after(before).problem == problem


def test_a_watch_wants_the_best_speed_so_far_before_and_the_passes_own_after(monkeypatch):
    speeds = iter([1.0, 1.1, 0.9, 1.2])
    wanted = []

    def take(device, target=None):
        wanted.append(target and target.host_s)
        return clocks.Speed(next(speeds))

    monkeypatch.setattr(clocks, "take", take)
    watch = clocks.Watch("cpu")
    assert watch.after(watch.before()).host == pytest.approx(0.1)
    assert watch.after(watch.before()).host == pytest.approx(1.2 / 0.9 - 1)
    assert watch.summary() == {}
    assert wanted == [None, 1.0, 1.0, 0.9]


def test_a_server_that_tells_no_token_ids_is_judged_by_its_counts():
    silent = {i: {"token_ids": (), "tells_tokens": False} for i in range(10)}
    assert validity.problem(evidence(changed=silent, first_tokens=[(1,)] * 10)) == ""
    short = {**silent, 3: {**silent[3], "token_times": (3.1, 3.2)}}
    assert "1 of 10 requests did not get" in validity.problem(evidence(changed=short))
