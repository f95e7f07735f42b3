"""/metrics, read as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from http_server import Server, running, samples, wait_for
from prometheus_client.parser import text_string_to_metric_families

from mini_infer.serving.link.replica import Replica
from mini_infer.serving.link.wire import Ready
from mini_infer.serving.metrics import Metrics
from mini_infer.serving.stats import HISTOGRAMS, Histogram, Stats


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--model.dry.step_ms", "5") as server:
        yield server


def test_counts_of_what_was_served(server: Server) -> None:
    before = server.metrics()
    server.complete("a" * 40, max_tokens=8, ignore_eos=True)
    server.complete("a" * 40, max_tokens=8, ignore_eos=True, n=2)
    wait_for(lambda: server.metrics()["request_success_total"] == before["request_success_total"] + 3)
    after = server.metrics()
    change = {name: after[name] - before[name] for name in after if name in before}
    assert change["generation_tokens_total"] == 24
    assert change["prompt_tokens_total"] >= 80
    assert change["prefix_cache_hits_total"] >= 32
    for name in HISTOGRAMS:
        per_token = name == "inter_token_latency_seconds"
        moved = name.startswith("request_kv_transfer")  # test_disaggregation.py has engines that move any
        assert change[f"{name}_count"] == (21 if per_token else 0 if moved else 3), name
    assert change["request_generation_tokens_sum"] == 24
    assert change["request_prompt_tokens_sum"] == 120
    assert 7 * 3 * 0.005 <= change["inter_token_latency_seconds_sum"] <= change["e2e_request_latency_seconds_sum"]
    assert after["kv_cache_usage_perc"] == after["num_requests_running"] == 0


def test_gauges_while_it_runs(server: Server) -> None:
    body = {"prompt": "a" * 600, "max_tokens": 500, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # held: the response is closed with it
        next(lines)
        wait_for(lambda: server.metrics()["num_requests_running"] == 1)
        wait_for(lambda: 0 < server.metrics()["kv_cache_usage_perc"] < 1)
    server.wait_until_idle()
    ended = samples(server.http.get("/metrics").text, "request_success_total")
    assert {sample.labels["finished_reason"] for sample in ended} == {"stop", "length", "abort", "error", "deadline"}


def test_types_and_labels(server: Server) -> None:
    text = server.http.get("/metrics").text
    families = {f.name: f for f in text_string_to_metric_families(text)}
    for name in ("time_to_first_token_seconds_bucket", "http_responses_total"):  # as other tests read them
        read = {(*sorted(sample.labels.items()), sample.value) for sample in samples(text, name)}
        family = families["mini_infer:" + name.rpartition("_")[0]]
        told = [sample for sample in family.samples if sample.name == f"mini_infer:{name}"]
        assert read == {(*sorted(sample.labels.items()), sample.value) for sample in told} != set()
    assert families["mini_infer:num_requests_running"].type == "gauge"
    assert families["mini_infer:generation_tokens"].type == "counter"
    assert families["mini_infer:time_to_first_token_seconds"].type == "histogram"
    assert families["mini_infer:generation_tokens"].samples[0].labels == {"model_name": "dry", "replica": "0"}
    assert families["mini_infer:cache_config_info"].samples[0].labels["block_size"] == "16"
    assert families["process_cpu_seconds"].samples[0].value > 0
    assert all(family.documentation for family in families.values())


def test_values_on_a_bound_count_below_it() -> None:
    name = "inter_token_latency_seconds"
    gaps = Histogram.of(name)
    gaps.observe_all(HISTOGRAMS[name][1], np.array([0.005, 0.0051, 1000.0]))
    gaps.observe(HISTOGRAMS[name][1], 0.005)
    stats = Stats(num_requests_running=2, kv_cache_usage_perc=0.25, histograms={name: gaps})
    info = Ready("dry", 64, 512, {"cache": {}}, {"num_kv_blocks": 4}, 1)
    up, down = Replica(0, "a"), Replica(3, "b")
    up.stats, up.failure = stats, None
    up.info = info
    metrics = Metrics([SimpleNamespace(name="dry", replicas=[up, down])], own_process=False)
    families = {f.name: f for f in text_string_to_metric_families(metrics.render().decode())}
    below = {s.labels["le"]: s.value for s in families[f"mini_infer:{name}"].samples if "le" in s.labels}
    assert (below["0.0025"], below["0.005"], below["0.01"], below["10.0"], below["+Inf"]) == (0, 2, 3, 3, 4)
    assert [s.value for s in families["mini_infer:num_requests_running"].samples] == [2]
    assert [(s.labels["replica"], s.value) for s in families["mini_infer:replica_up"].samples] == [("0", 1), ("3", 0)]
    assert families["mini_infer:kv_cache_usage_perc"].samples[0].value == 0.25
    assert "process_cpu_seconds" not in families


def test_drafts_are_counted_by_place() -> None:
    flags = ("--speculation.method", "synthetic", "--speculation.acceptance", "0.5", "--speculation.num_tokens", "2")
    with running(*flags, "--speculation.adaptive", "false") as server:
        text = server.complete("a" * 40, max_tokens=64, ignore_eos=True, seed=3)["choices"][0]["text"]
        assert text == server.complete("a" * 40, max_tokens=64, ignore_eos=True, seed=3)["choices"][0]["text"]
        wait_for(lambda: server.metrics()["generation_tokens_total"] == 128)
        found = server.metrics()
        families = {f.name: f for f in text_string_to_metric_families(server.http.get("/metrics").text)}
    drafts, drafted, accepted = (
        found[f"spec_decode_num_{name}_total"] for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert 0 < drafts < drafted <= 2 * drafts
    assert 0.2 * drafted < accepted < 0.8 * drafted
    places = families["mini_infer:spec_decode_num_accepted_tokens_per_pos"].samples
    assert [sample.labels["position"] for sample in places] == ["0", "1"]
    assert sum(sample.value for sample in places) == accepted
