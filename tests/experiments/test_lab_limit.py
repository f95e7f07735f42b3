"""What the hardware allows: the least time of a pass by its requests, and the line on a page's first screen."""

from dataclasses import asdict, replace

import pytest
from made_up import result

from experiments.lab.config.axes import CONF
from experiments.lab.judge import pass_floor
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.judge.roofline import StepCosts
from experiments.lab.measure import ceilings
from experiments.lab.measure.costs import served
from experiments.lab.measure.hardware import Ceilings, Hardware
from experiments.lab.measure.traces import RequestRow
from experiments.lab.show import limit, pages
from experiments.lab.store import result as store
from experiments.lab.store.rows import Row
from mini_infer.core.config import EngineConfig

PLAIN = Ceilings(copy_gb_s=1.0, read_gb_s=1.0, matmul_tflop_s={"float32": 1e-3}, threads=2)
DIMS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
QWEN = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 1000, "num_hidden_layers": 2, "tie_word_embeddings": False}
SIZES = QWEN | DIMS | {"max_position_embeddings": 4096, "rope_theta": 1e4, "rms_norm_eps": 1e-6}
MODEL = {"path": "made up", "load_format": "dummy", "hf_config": SIZES, "dtype": "float32"}
KV = 2 * 2 * 16 * 4 * 2  # bytes of a token: K and V, heads, their size, fp32, layers


def row(arrival=0.0, end=1.0, prompt=100, output=11, cached=0, **changes):
    return RequestRow(
        "new", "concurrency=8", "r", "", arrival, arrival, None, end, prompt, output, cached, 0, **changes
    )


def costs_of(**model):
    return StepCosts(*served(EngineConfig.from_dict({"model": {**MODEL, **model}}), "cpu"))


@pytest.fixture(scope="module")
def costs():
    return costs_of()


def test_a_request_alone_reads_the_weights_and_its_kv_once_a_token(costs):
    weights = pass_floor._bytes_of_step(costs, 0)
    found = pass_floor.least([row()], costs, PLAIN)
    # Ten tokens are fed back, behind 100 to 109 others.
    assert found.memory_s == pytest.approx((10 * weights + KV * sum(range(100, 110))) / 1e9)
    per_token, head = costs._token_flops, 2 * 64 * 1000
    assert found.compute_s == pytest.approx((110 * per_token + 11 * head) / 1e9)


def test_requests_that_are_there_together_share_the_weights(costs):
    weights = pass_floor._bytes_of_step(costs, 0)
    together = pass_floor.least([row(), row()], costs, PLAIN)
    after = pass_floor.least([row(), row(1.0, 2.0)], costs, PLAIN)
    assert after.memory_s - together.memory_s == pytest.approx(0), "one that comes as another ends may meet it"
    after = pass_floor.least([row(), row(1.1, 2.0)], costs, PLAIN)
    assert after.memory_s - together.memory_s == pytest.approx(10 * weights / 1e9)
    assert after.compute_s == together.compute_s


def test_what_was_cached_is_neither_computed_nor_read(costs):
    alone, cached = (pass_floor.least([row(cached=n)], costs, PLAIN) for n in (0, 96))
    assert alone.memory_s - cached.memory_s == pytest.approx(10 * 96 * KV / 1e9)
    assert alone.compute_s - cached.compute_s == pytest.approx(96 * costs._token_flops / 1e9)


def test_a_window_bounds_what_a_token_reads():
    dims = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}
    costs = costs_of(hf_config=SIZES | {"architectures": ["Qwen2ForCausalLM"], **dims})
    assert set(costs._windows) == {32}, "or the test shows nothing"
    long, longer = (pass_floor.least([row(prompt=n)], costs, PLAIN).memory_s for n in (1000, 2000))
    assert long == longer


@pytest.mark.parametrize(
    "run", sorted((CONF.parent / "results").glob("*/*/*/default.steps.csv")), ids=lambda p: p.parts[-4]
)
def test_the_least_time_of_a_pass_is_below_that_of_its_steps(run):
    """Of passes that were measured, whose steps are known as well: with prefix hits, preemption, chunks, mixtures."""
    found = store.read(run.with_name("default.json"))
    known, _ = limit._ceilings(found.info)
    for cell in dict.fromkeys((step.variant, step.point) for step in found.steps):
        engine, passes = limit._engine(found.info, *cell), list(limit._passes(found, *cell))
        steps = [r for r in found.rows if (r.variant, r.point, r.metric, r.valid) == (*cell, "floor_ms", True)]
        if known and engine and passes and steps:
            least = pass_floor.least(passes[0][0], engine[0], known.of(engine[1])).seconds
            assert 0 < least < len(found.steps_of(*cell)) * steps[0].value / 1e3
            assert least < passes[0][1]


# The line


def served_result(engine=None, requests=None, known=PLAIN, variants=None, **changes):
    """Of requests over HTTP, without a metric of steps."""
    requests = [row(0, 1), row(0, 2), row(0, 1, repeat=1), row(0, 4, repeat=1)] if requests is None else requests
    config = {"engine": {"model": MODEL, **(engine or {})}, "measure": {"processes": 1}}
    config["experiment"] = {"variants": variants or {"base": {}, "new": {"label": "with", "kind": "served"}}}
    about = {"ceilings": asdict(known) if known else None, "config": config, "via": "http", "experiment": "served"}
    return result(requests=requests, **{**about, **changes})


def test_requests_over_http_say_what_the_hardware_needs_for_them(costs):
    (line,) = limit.lines(served_result())
    least = pass_floor.least([row(), row()], costs, PLAIN)
    assert least.compute_s > least.memory_s
    assert line == (
        f"**Limit**: the hardware needs at least {least.seconds:.4f} of the 3 s of a pass, for the matrix products "
        f"({least.seconds / 3:.2%}; chunked prefill, 512 tokens a step, concurrency 8).".replace("%;", " %;")
    ), "of the median pass"
    slow = replace(PLAIN, read_gb_s=0.05, copy_gb_s=0.05)
    assert "s of a pass, to read weights and KV (" in limit.lines(served_result(known=slow))[0]
    assert f"- {line}\n" in pages.report_page([served_result()], [], lambda info: 0)


def test_settings_of_the_variant_and_its_devices_count():
    two = {"base": {}, "new": {"kind": "served", "parallel": {"replicas": 2}}}
    _, devices = limit._engine(served_result(variants=two).info, "new", "concurrency=8")
    assert devices == 2
    roles = {"base": {}, "new": {"parallel": {"prefill": 1, "decode": 2, "tensor": 2}}}
    assert limit._engine(served_result(variants=roles).info, "new", "concurrency=8")[1] == 6


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": {"speculation": {"method": "ngram", "num_tokens": 4}}},  # several tokens a step
        {"engine": {"model": {**MODEL, "load_format": "dry", "hf_config": None}}},  # moves no bytes
        {"engine": {"of_another_day": 1}},
        {"requests": [row(), row(end=None)]},  # not served
        {"requests": [row(valid=False)]},
        {"requests": []},
        {"via": "url"},  # of a server that may have any settings
        {"variants": {"base": {}, "new": {"kind": "vllm_served"}}},  # a peer's
        {"known": None, "hardware": "simulated-h200"},
    ],
)
def test_no_limit_is_made_up(changes):
    assert limit.lines(served_result(**changes)) == []


def test_a_pass_that_was_faster_than_the_hardware_can_be_is_told():
    (line,) = limit.lines(served_result(requests=[row(end=1e-6)]))
    assert line.startswith("**Limit**: a pass took 1.00e-06 s, and the hardware needs 0.0")
    assert "times or ceilings are wrong" in line


@pytest.mark.parametrize("at", [{"workload.arrivals": "poisson", "workload.rate_per_s": 2.0}, {"rate_per_s": 2.0}])
def test_a_pass_that_lasts_as_long_as_requests_arrive_is_held_against_nothing(at):
    assert limit.lines(served_result(points={"concurrency=8": at})) == []


def test_what_the_experiment_says_stands_where_nothing_is_computed(tmp_path):
    assert limit.lines(result(bounded_by="the link.")) == ["**Limit**: the link."]
    today = "no router finds more tokens in caches than prompts share with earlier ones"
    assert limit.lines(result("fleet", scale="none")) == [f"**Limit**: {today}."], "a result older than the sentence"
    assert "of a pass" in limit.lines(served_result(bounded_by="the link."))[0]


def test_without_ceilings_of_the_processor_the_page_says_so(tmp_path, monkeypatch):
    """Those of another processor are of the same hardware key."""
    monkeypatch.setattr(ceilings, "FOLDER", tmp_path)
    ceilings.save(tmp_path / "cpu.yaml", Hardware("Another CPU", ceilings=(PLAIN,)))
    told = "cpu.yaml holds the ceilings of Another CPU, and none of A CPU: measure them with `python run.py"
    unknown = [f"**Limit**: not known: {told} experiment=ceilings --record`."]
    assert limit.lines(served_result(known=None)) == unknown
    floors = {"floor_ms": Metric("least time of a step", "ms", Better.lower)}
    assert limit.lines(result(metrics=floors, rows=[], claims=())) == unknown, "what was asked for and not measured"
    assert limit.lines(result()) == [], "of no model"
    ceilings.save(tmp_path / "cpu.yaml", Hardware("A CPU", ceilings=(PLAIN,)))  # measured since
    (since,), (then,) = (limit.lines(served_result(**own)) for own in ({"known": None}, {}))
    assert since == then.replace(").", ", by ceilings that were measured since).")


def test_bytes_between_gpus_are_held_against_the_link():
    given = result(metrics={"gb_s": Metric("useful bytes a second", "GB/s", Better.higher)}, rows=[], claims=())
    rows = tuple(Row("base", "concurrency=1", n, "gb_s", 300.0, "GB/s") for n in range(3))
    known = asdict(replace(PLAIN, link_gb_s={"to_peer": 400.0}, threads=None))

    def told(gpus):
        origin = replace(given.info.provenance, device={**given.info.provenance.device, "gpu": "A GPU", "gpus": gpus})
        return limit.lines(replace(given, rows=rows, info=replace(given.info, ceilings=known, provenance=origin)))

    assert told(2)[0].startswith("**Limit**: 300 of the 400 GB/s of a copy to another GPU (")
    assert told(1) == [], "then both sides are one memory"
