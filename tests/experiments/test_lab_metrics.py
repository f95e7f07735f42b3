"""Formulas on timelines worked out by hand, and their list in docs/metrics.md."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.lab.judge import formulas
from experiments.lab.judge.formulas import SERVING, Context, Missing
from experiments.lab.judge.metrics import SLO, RequestTrace, Served
from experiments.lab.judge.roofline import Floor
from experiments.lab.measure.traces import joined
from experiments.lab.workloads import Arrivals, Fixed, Mixed
from mini_infer.core.errors import ConfigError
from mini_infer.core.plan import KVUsage, StepRecord

DOC = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def trace(arrival, times, **more):
    return RequestTrace(4, len(times), arrival, tuple(times), tuple(range(len(times))), **more)


def record(step, start, end, **changes):
    usage = {"total_blocks": 10, "used_blocks": 4, "cached_blocks": 2, "used_slots": 30, "reserved_slots": 64}
    kv = KVUsage(**{key: changes.pop(key, value) for key, value in usage.items()}, host_blocks_used=0)
    values = {
        **dict.fromkeys(("schedule_s", "execute_s", "update_s"), 0.0),
        **dict.fromkeys(("prefill_tokens", "decode_tokens", "sampled_tokens", "evictions"), 0),
        **dict.fromkeys(("num_running", "num_prefilling", "num_waiting", "num_swapped"), 0),
        **dict.fromkeys(("prefix_queried_tokens", "prefix_hit_tokens", "swapped_out_blocks", "swapped_in_blocks"), 0),
        **dict.fromkeys(("preempted", "finished", "aborted", "failed"), ()),
        **changes,
    }
    return StepRecord(step=step, start_time=start, end_time=end, kv=kv, **values)


def value(name, served, context=None):
    return formulas.measure(served, [name], context)[name]


def test_latencies_of_one_request():
    request = trace(1.0, [1.5, 1.7, 2.0])
    assert request.ttft == pytest.approx(0.5)
    assert request.e2e == pytest.approx(1.0)
    assert request.tpot == pytest.approx(0.25)
    assert request.gaps == pytest.approx([0.2, 0.3])


def test_parts_of_a_pass_are_one_in_the_order_of_the_workload():
    first, second, third = (trace(arrival, [3.0]) for arrival in (2.0, 0.5, 1.0))
    parts = Served((first, third), 1.0, 3.0, in_flight_s=2.0), Served((second,), 0.5, 4.0, in_flight_s=1.5)
    assert joined(parts, [[0, 2], [1]]) == Served((first, second, third), 0.5, 4.0, in_flight_s=3.5)
    untold = replace(parts[1], in_flight_s=None)
    assert joined([parts[0], untold], [[0, 2], [1]]).in_flight_s is None, "of one part nobody knows it"


def test_a_chunk_of_tokens_counts_as_so_many_equal_gaps():
    request = trace(0.0, [1.0, 1.6, 1.6, 1.6, 1.8])
    assert request.gaps == pytest.approx([0.2, 0.2, 0.2, 0.2])


def test_a_request_of_one_token_or_none_has_no_tpot():
    assert trace(0.0, [1.0]).tpot is None
    assert trace(0.0, [1.0]).gaps == []
    nothing = trace(0.0, [], error="refused")
    assert (nothing.ttft, nothing.e2e, nothing.tpot, nothing.gaps) == (None, None, None, [])


def test_times_are_means_and_percentiles_take_a_sample():
    served = Served((trace(0.0, [1.0, 2.0]), trace(1.0, [3.0, 4.0, 6.0])), 0.0, 6.0)
    assert value("ttft_ms", served) == pytest.approx(1500)
    assert value("itl_ms", served) == pytest.approx(4000 / 3)
    assert value("itl_max_ms", served) == pytest.approx(2000)
    assert value("tpot_ms", served) == pytest.approx(1250)  # 1 s and 1.5 s a token: a request counts once
    assert value("e2e_ms", served) == pytest.approx(3500)
    assert value("ttft_p99_ms", served) == Missing("not shown: 2 samples do not show a P99, which takes 1000")
    assert value("tpot_ms", Served((trace(0.0, [1.0]),), 0.0, 1.0)) == Missing("no request gave a sample of it")
    ten = Served(tuple(trace(0.0, [float(i)]) for i in range(1, 11)), 0.0, 10.0)
    assert value("ttft_p50_ms", ten) == pytest.approx(5500)
    assert isinstance(value("ttft_p90_ms", ten), Missing)


def streams(count, pauses, tokens=100, apart=0.0):
    """Streams of a batch, one token every 10 ms, with so many pauses of 100 ms that stop all of them."""
    times, now = [], 0.0
    for token in range(tokens):
        now += 0.1 if token in range(5, 5 + 7 * pauses, 7) else 0.01
        times.append(now)
    return Served(tuple(trace(0.0, [t + apart * i for t in times]) for i in range(count)), 0.0, now + apart * count)


def test_copies_of_a_pause_are_one_sample():
    twelve, few = streams(64, pauses=12), streams(64, pauses=9)
    assert value("itl_p99_ms", twelve) == pytest.approx(100)
    assert value("itl_p99_ms", few) == Missing(
        "not shown: 9 moments lie beyond the P99, which takes 10: gaps of several requests that end together are one"
    )
    assert value("itl_p99_ms", streams(64, pauses=9, apart=0.005)) == pytest.approx(100)  # they are not in step
    assert value("itl_p50_ms", few) == pytest.approx(10)


def test_a_long_open_loop_is_measured_without_its_ramps():
    requests = tuple(trace(float(i), [i + (9.0 if i < 10 or i > 90 else 0.5)]) for i in range(101))
    served = Served(requests, 0.0, 109.0).without_ramps()
    assert served.window == (10.0, 90.0)
    assert value("ttft_ms", served) == 500
    assert value("output_tokens_per_s", served) == pytest.approx(89 / 80)  # nine of them began before it
    assert value("requests_per_s", served) == pytest.approx(89 / 80)
    assert value("goodput_rps", served, Context(SLO(ttft_ms=600))) == pytest.approx(81 / 80)
    assert value("slo_share", served, Context(SLO(ttft_ms=600))) == 1
    assert value("total_s", served) == 109
    assert Served(requests[:40], 0.0, 50.0).without_ramps().window is None  # too short for a steady state


def test_where_no_request_counts_there_is_no_rate():
    """As between the two halves of a trace with a hole."""
    served = Served((trace(0.0, [1.0]), trace(99.0, [99.5])), 0.0, 99.5, window=(10.0, 90.0))
    for name in ("output_tokens_per_s", "requests_per_s"):
        assert isinstance(value(name, served), Missing)
    assert value("output_tokens_per_s", replace(served, window=(0.0, 90.0))) == pytest.approx(1 / 90)


def test_a_burst_shows_no_rate():
    """All have come before the first is answered."""
    requests = tuple(trace(i / 50, [i / 50 + 0.1, i / 50 + 2.0]) for i in range(101))
    served = Served(requests, 0.0, 4.0).without_ramps()
    for name in ("output_tokens_per_s", "requests_per_s", "goodput_rps"):
        missing = value(name, served, Context(SLO(ttft_ms=600)))
        assert missing.reason.startswith("not shown: what counts of the requests has come within 1.6 s"), name
    assert value("ttft_ms", served) == pytest.approx(100)


def test_a_few_requests_that_come_at_once_are_a_burst_too():
    """30 at 645/s, of which an engine answers 47 a second: each is in time, and no second of it could be repeated."""
    requests = tuple(trace(i / 645, [i / 645 + 0.1, 0.6]) for i in range(30))
    served = Served(requests, 0.0, 0.635).without_ramps()
    assert value("slo_share", served, Context(SLO(ttft_ms=300))) == 1
    missing = value("goodput_rps", served, Context(SLO(ttft_ms=300)))
    assert missing.reason.startswith("not shown: what counts of the requests has come within 0.045 s")
    calm = tuple(trace(float(i), [i + 0.1, i + 0.6]) for i in range(30))
    assert value("goodput_rps", Served(calm, 0.0, 30.0).without_ramps(), Context(SLO(ttft_ms=300))) == 1
    assert value("requests_per_s", Served(requests, 0.0, 0.635)) == pytest.approx(30 / 0.635), "of a closed loop"


@pytest.mark.parametrize(
    ("workload", "ramps"),
    [
        (Fixed(arrivals=Arrivals.poisson, rate_per_s=4), True),
        (Fixed(arrivals=Arrivals.burst), False),
        (Fixed(), False),
        (Mixed(), False),  # its streams are there from the start, and are what is looked at
    ],
)
def test_ramps_are_of_requests_that_arrive_one_after_another(workload, ramps):
    assert workload.has_ramps is ramps


def test_energy_is_the_gpus_own():
    served = Served((trace(0.0, [1.0, 2.0]), trace(0.0, [1.0, 2.0])), 0.0, 2.0, joules=100.0)
    assert value("joules_per_token", served) == 25.0
    assert not value("joules_per_token", replace(served, joules=None)).applies


def test_rates_credit_a_token_to_the_window_in_which_it_appeared():
    late = trace(0.0, [1.0, 2.0, 9.0])  # its last token came after the window
    served = Served((trace(0.0, [1.0, 2.0]), late), 0.0, 5.0)
    assert value("output_tokens_per_s", served) == pytest.approx(4 / 5)
    assert value("input_tokens_per_s", served) == pytest.approx(8 / 5)
    assert value("requests_per_s", served) == pytest.approx(2 / 5)
    assert value("total_s", served) == 5.0


def test_a_failed_request_is_neither_throughput_nor_goodput():
    served = Served((trace(0.0, [1.0]), trace(0.0, [], error="refused")), 0.0, 1.0)
    assert value("requests_per_s", served) == 1.0
    assert value("goodput_rps", served, Context(SLO(ttft_ms=2000))) == 1.0


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (SLO(ttft_ms=1000), 1),
        (SLO(ttft_ms=3000), 2),
        (SLO(ttft_ms=3000, tpot_ms=1000), 1),
        (SLO(ttft_ms=3000, tpot_ms=1500, itl_ms=1999), 1),  # TPOT spreads the stall of 2 s; ITL does not
        (SLO(e2e_ms=2000), 1),
        (SLO(ttft_ms=1), 0),
    ],
)
def test_goodput_counts_requests_that_met_every_bound(slo, good):
    served = Served((trace(0.0, [1.0, 2.0]), trace(1.0, [3.0, 4.0, 6.0])), 0.0, 10.0)
    assert value("goodput_rps", served, Context(slo)) == pytest.approx(good / 10)


def test_the_cache_is_weighed_by_how_long_steps_took():
    short = record(0, 0.0, 1.0, used_slots=10, reserved_slots=100)
    long = record(1, 5.0, 8.0, used_slots=90, reserved_slots=100)
    served = Served((), 0.0, 8.0, (short, long))
    assert value("kv_utilization", served) == pytest.approx((10 + 3 * 90) / (4 * 100))


def test_steps_are_counted_and_averaged():
    steps = (
        record(0, 0.0, 0.5, prefill_tokens=100, schedule_s=0.002, evictions=3),
        record(1, 0.5, 0.6, prefill_tokens=20, decode_tokens=4, schedule_s=0.004, swapped_out_blocks=5),
        record(2, 0.6, 0.9, decode_tokens=2, swapped_in_blocks=4),
    )
    served = Served((), 0.0, 1.0, steps)
    expected = {
        "steps": 3,
        "step_ms": 300,
        "schedule_ms": 2,
        "batch_size": 3,
        "evictions": 3,
        "swapped_blocks": 9,
    }
    assert formulas.measure(served, list(expected)) == pytest.approx(expected)


def test_hits_and_preemptions_are_those_of_requests():
    requests = (trace(0.0, [1.0], cached_tokens=3, preemptions=2), trace(0.0, [1.0], name="b", cached_tokens=1))
    served = Served(requests, 0.0, 1.0, (record(0, 0.0, 1.0),))
    assert value("prefix_hit_rate", served) == pytest.approx(4 / 8)
    assert value("prefix_hit_rate@b", served) == pytest.approx(1 / 4)
    assert value("preemptions", served) == 2


def test_a_class_of_requests_is_measured_over_the_whole_pass():
    served = Served((trace(0.0, [1.0], name="a"), trace(1.0, [4.0, 5.0], name="b")), 0.0, 5.0)
    assert value("ttft_ms@b", served) == pytest.approx(3000)
    assert value("output_tokens_per_s@b", served) == pytest.approx(2 / 5)
    assert formulas.describe("ttft_ms@b").label == "time to first token, mean request, of b"


def test_a_peer_has_no_steps_and_that_is_no_fault():
    peer = Served((trace(0.0, [1.0]),), 0.0, 1.0)
    for name in ("kv_utilization", "prefix_hit_rate", "preemptions", "steps", "batch_size", "mbu", "peak_memory_mib"):
        found = value(name, peer)
        assert isinstance(found, Missing), name
        assert not found.applies


def test_the_roofline_needs_ceilings():
    served = Served((), 0.0, 1.0, (record(0, 0.0, 0.4), record(1, 0.4, 1.0)))
    assert value("mbu", served, Context(no_floors="nobody measured them")).reason == "nobody measured them"
    known = Context(floors=lambda records: [Floor(0.3, 0.1), Floor(0.2, 0.5)])
    found = formulas.measure(served, ["mbu", "mfu", "floor_ms"], known)
    assert found == pytest.approx({"mbu": 0.5, "mfu": 0.6, "floor_ms": 400.0})


def test_peak_memory_is_in_mib():
    served = Served((), 0.0, 1.0, (record(0, 0.0, 1.0),), peak_memory=3 * 2**20)
    assert value("peak_memory_mib", served) == 3.0
    assert value("peak_memory_mib", replace(served, peak_memory=None)).applies is False


def test_what_a_token_takes_is_known_of_engines_alone():
    served = Served((), 0.0, 1.0, (record(0, 0.0, 1.0),), kv_token_bytes=576)
    assert value("kv_token_bytes", served) == 576
    assert value("kv_token_bytes", replace(served, kv_token_bytes=None)).applies is False


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ttft", r"unknown metric 'ttft'; did you mean 'ttft_ms'\? Known: .*itl_ms"),
        ("itl_p98_ms@stream", r"unknown metric 'itl_p98_ms'; did you mean 'itl_p9"),
        ("steps@stream", r"'steps@stream': steps is taken of the whole pass. Of one class of requests: ttft_ms"),
        ("ttft_ms@", r"names no class of requests: write ttft_ms@<name>, or ttft_ms for all"),
        ("goodput_rps", r"goodput_rps needs experiment.slo, such as"),
    ],
)
def test_a_metric_that_cannot_be_is_named_with_the_way_out(name, message):
    with pytest.raises(ConfigError, match=message):
        formulas.require_known([name], SLO())


def test_a_class_that_the_workload_lacks_is_named():
    formulas.require_classes(["ttft_ms", "ttft_ms@stream"], ["stream", "prompt"], "workload=mixed")
    with pytest.raises(
        ConfigError, match=r"'ttft_ms@steam': workload=mixed has no requests called 'steam'; did you mean"
    ):
        formulas.require_classes(["ttft_ms@steam"], ["stream", "prompt"], "workload=mixed")


def test_an_slo_is_above_zero():
    with pytest.raises(ConfigError, match=r"experiment.slo.ttft_ms must be above 0, got 0"):
        SLO(ttft_ms=0)


def test_the_document_lists_every_metric_with_its_unit_and_no_other():
    units = {"": {"share", "count"}}
    found = {}
    for line in DOC.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            found.update(dict.fromkeys(re.findall(r"`([^`]+)`", cells[0]), cells[1]))
    assert set(found) == set(SERVING)
    for name, unit in found.items():
        assert unit in units.get(SERVING[name].metric.unit, {SERVING[name].metric.unit}), name
