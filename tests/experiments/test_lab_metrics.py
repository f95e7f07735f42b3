"""Latency definitions on a timeline worked out by hand."""

import pytest

from experiments.lab import metrics
from experiments.lab.metrics import RequestTrace, Served
from mini_infer.core.errors import ConfigError


def trace(arrival, times):
    return RequestTrace(4, len(times), arrival, tuple(times), tuple(range(len(times))))


def test_latencies_of_one_request():
    request = trace(1.0, [1.5, 1.7, 2.0])
    assert request.ttft == pytest.approx(0.5)
    assert request.e2e == pytest.approx(1.0)
    assert request.tpot == pytest.approx(0.25)
    assert request.gaps == pytest.approx([0.2, 0.3])


def test_a_chunk_of_tokens_counts_as_so_many_equal_gaps():
    request = trace(0.0, [1.0, 1.6, 1.6, 1.6, 1.8])
    assert request.gaps == pytest.approx([0.2, 0.2, 0.2, 0.2])


def test_a_single_token_has_no_tpot():
    assert trace(0.0, [1.0]).tpot is None
    assert trace(0.0, [1.0]).gaps == []


def test_throughput_counts_from_the_first_arrival_to_the_end():
    served = Served((trace(0.0, [1.0, 2.0]), trace(0.0, [1.0, 2.0, 4.0])), 0.0, 5.0)
    found = metrics.measure(served, ["output_tokens_per_s", "total_s", "ttft_ms", "e2e_ms", "ttft_p99_ms"])
    assert found == {
        "output_tokens_per_s": 1.0,
        "total_s": 5.0,
        "ttft_ms": 1000.0,
        "e2e_ms": 3000.0,
        "ttft_p99_ms": None,  # two requests show no P99
    }


def test_an_unknown_metric_is_named_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'ttft'; known: .*ttft_ms"):
        metrics.require_known(["ttft"])
