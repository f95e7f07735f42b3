"""Workloads have the stated lengths, are the same for the same seed, and never warm the cache for what is measured."""

import dataclasses
import json
import statistics

import numpy as np
import pytest
from workload_tools import DRY, Letters, assert_hits_are_intended, dry_engine, serve_in_turn, starts

from experiments.lab.workloads import (
    WORKLOADS,
    Arrivals,
    Fixed,
    Mixed,
    MultiTurn,
    SharedPrefix,
    Text,
    Trace,
    Uniform,
    prompt_lengths,
)
from experiments.lab.workloads import text as text_workload
from experiments.lab.workloads.base import OPEN_LOOP_WARMUP, Vocabulary, gamma_times
from mini_infer.core.config import DryConfig, LoadFormat, ModelConfig
from mini_infer.core.errors import ConfigError

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{40 + i}.5000000,{90 + 7 * i},{3 + i}\n" for i in range(6)
)


@pytest.fixture
def small(tmp_path):
    """One small workload of every kind that draws its own tokens."""
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    return [
        Fixed(count=6, prompt_tokens=33, output_tokens=3),
        Uniform(
            count=6,
            min_prompt_tokens=5,
            max_prompt_tokens=70,
            min_output_tokens=1,
            max_output_tokens=5,
            urgent_share=0.5,
        ),
        SharedPrefix(count=6, prefix_tokens=48, suffix_tokens=9, output_tokens=3, groups=2, hit_rate=0.7),
        SharedPrefix(count=6, prefix_tokens=48, suffix_tokens=9, output_tokens=3, groups=2, prime=True),
        Mixed(streams=3, prompts=2, stream_prompt_tokens=20, stream_output_tokens=8, prompt_tokens=90),
        MultiTurn(conversations=3, turns=3, prompt_tokens=40, user_tokens=7, answer_tokens=12),
        Trace(path=str(path), limit=6),
    ]


def test_a_seed_names_the_inputs(small):
    for load in small:
        inputs = load.make(DRY, seed=3)
        assert load.make(DRY, seed=3) == inputs
        assert starts(load.make(DRY, seed=4).measured) != starts(inputs.measured)


def test_warmup_begins_differently_from_everything_measured_or_primed(small):
    for load in small:
        inputs = load.make(DRY, seed=0)
        new = [item for item in inputs.warmup if item.follows is None]
        assert new
        assert len({*starts(new)}) == len(new)
        assert {*starts(new)}.isdisjoint({*starts(inputs.measured), *starts(inputs.prime)})


def test_tokens_are_of_the_vocabulary_and_the_list_is_complete(small):
    for load in small:
        inputs = load.make(DRY, seed=0)
        assert len(inputs.measured) == load.num_requests
        for item in (*inputs.measured, *inputs.warmup, *inputs.prime):
            assert all(0 <= token < DRY.size for token in item.prompt)


def test_a_prefix_cache_finds_what_the_workload_intends_and_nothing_else(small):
    for load in small:
        hits = assert_hits_are_intended(load.make(DRY, seed=1))
        assert (hits > 0) == isinstance(load, (SharedPrefix, MultiTurn))


def test_every_kind_is_described_in_plain_values(small):
    for load in small:
        inputs = load.make(DRY, seed=0)
        told = load.describe(inputs)
        assert json.loads(json.dumps(told)) == told
        assert told["kind"] == load.kind
        assert told["requests"] == len(inputs.measured)
        assert told["prompt_tokens"] == sum(prompt_lengths(inputs.measured))
        assert told["output_tokens"] == sum(item.output_tokens for item in inputs.measured)
        assert told["hit_share"] == told["shared_tokens"] / told["prompt_tokens"]


def test_fixed_prompts_have_exact_lengths_and_share_no_start():
    load = Fixed(count=20, concurrency=4, prompt_tokens=33, output_tokens=7)
    inputs = load.make(Letters(), seed=3)
    assert {len(item.prompt) for item in inputs.measured} == {33}
    assert {item.output_tokens for item in inputs.measured} == {7}
    assert (len(inputs.measured), len(inputs.warmup)) == (20, 4)
    assert len({*starts(inputs.measured), *starts(inputs.warmup)}) == 24


def test_uniform_covers_its_range_ends_included():
    load = Uniform(count=400, min_prompt_tokens=3, max_prompt_tokens=8, min_output_tokens=2, max_output_tokens=6)
    inputs = load.make(Letters(size=4096), seed=0)
    assert {len(item.prompt) for item in inputs.measured} == set(range(3, 9))
    assert {item.output_tokens for item in inputs.measured} == set(range(2, 7))
    assert {item.name for item in inputs.measured} == {""}


def test_uniform_is_the_benchmark_of_nano_vllm():
    inputs = Uniform().make(Letters(max_model_len=2048), seed=0)
    prompts = [len(item.prompt) for item in inputs.measured]
    outputs = [item.output_tokens for item in inputs.measured]
    assert len(prompts) == len(inputs.warmup) == 256
    assert (min(prompts + outputs) >= 100, max(prompts + outputs) <= 1024) == (True, True)
    assert abs(statistics.mean(prompts) - 562) < 3 * 267 / 16  # three standard errors
    assert abs(statistics.mean(outputs) - 562) < 3 * 267 / 16


@pytest.mark.parametrize(("spread", "lowest", "highest"), [(0.0, 60, 60), (0.5, 35, 85), (1.0, 10, 110)])
def test_the_spread_of_outputs_keeps_their_mean_and_the_prompts(spread, lowest, highest):
    load = Uniform(count=300, max_prompt_tokens=120, min_output_tokens=10, max_output_tokens=110, output_spread=spread)
    measured = load.make(Letters(), seed=0).measured
    outputs = [item.output_tokens for item in measured]
    assert lowest <= min(outputs) <= lowest + 2
    assert highest - 2 <= max(outputs) <= highest
    assert abs(statistics.mean(outputs) - 60) < 5
    whole = dataclasses.replace(load, output_spread=1.0).make(Letters(), seed=0).measured
    assert [item.prompt for item in measured] == [item.prompt for item in whole]


def test_urgent_requests_are_the_stated_share():
    measured = Uniform(count=40, urgent_share=0.25, max_prompt_tokens=120).make(Letters(), seed=0).measured
    classes = [(item.priority, item.name) for item in measured]
    assert classes.count((0, "urgent")) == 10
    assert classes.count((1, "normal")) == 30
    assert classes != sorted(classes)


# --- shared prefixes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "sharing"), [(0.0, 0), (0.3, 6), (0.9, 18), (1.0, 20)])
def test_the_hit_rate_is_a_share_of_the_requests(rate, sharing):
    load = SharedPrefix(count=20, prefix_tokens=64, suffix_tokens=16, output_tokens=2, hit_rate=rate, groups=3)
    inputs = load.make(DRY, seed=0)
    assert {len(item.prompt) for item in inputs.measured} == {80}
    heads = [item.prompt[:64] for item in inputs.measured]
    groups = {head: heads.count(head) for head in heads if heads.count(head) > 1}
    assert sum(groups.values()) == sharing
    assert len(groups) == min(3, sharing)
    assert not sharing or max(groups.values()) - min(groups.values()) <= 1
    assert len({item.prompt[64:] for item in inputs.measured}) == 20
    # the first of each group computes what the others find
    assert sum(item.shared_tokens for item in inputs.measured) == 64 * (sharing - len(groups))
    assert assert_hits_are_intended(inputs) == 64 * (sharing - len(groups))
    told = load.describe(inputs)
    assert (told["sharing_requests"], told["groups"]) == (sharing, len(groups))


def test_a_higher_hit_rate_adds_requests_and_moves_none():
    def sharing(rate):
        measured = SharedPrefix(count=30, hit_rate=rate, prime=True).make(DRY, seed=0).measured
        return {index for index, item in enumerate(measured) if item.name == "hit"}

    assert sharing(0.2) < sharing(0.6) < sharing(1.0)


def test_a_primed_prefix_is_there_for_the_first_request_of_a_burst():
    load = SharedPrefix(
        count=8, prefix_tokens=64, suffix_tokens=5, output_tokens=2, groups=2, prime=True, arrivals=Arrivals.burst
    )
    inputs = load.make(DRY, seed=0)
    assert len(inputs.prime) == 2
    assert {item.prompt[:64] for item in inputs.prime} == {item.prompt[:64] for item in inputs.measured}
    assert {item.shared_tokens for item in inputs.measured} == {64}
    engine = dry_engine()
    serve_in_turn(engine, inputs.prime)
    outputs = engine.generate([list(item.prompt) for item in inputs.measured])
    assert [output.outputs[0].metrics.num_cached_tokens for output in outputs] == [64] * 8


def test_without_priming_a_burst_finds_at_most_what_is_intended():
    inputs = SharedPrefix(count=8, prefix_tokens=64, suffix_tokens=5, arrivals=Arrivals.burst).make(DRY, seed=0)
    outputs = dry_engine().generate([list(item.prompt) for item in inputs.measured])
    found = [output.outputs[0].metrics.num_cached_tokens for output in outputs]
    assert all(hit <= item.shared_tokens for hit, item in zip(found, inputs.measured, strict=True))
    assert sum(found) < 7 * 64  # those of one step could not wait for each other


def test_a_prefix_that_ends_inside_a_block_is_found_up_to_the_block_before():
    inputs = SharedPrefix(count=4, prefix_tokens=70, suffix_tokens=30, output_tokens=1).make(DRY, seed=0)
    assert inputs.measured[1].shared_tokens == 70
    assert assert_hits_are_intended(inputs) == 3 * 64
    assert assert_hits_are_intended(inputs, block_size=4) == 3 * 68


def test_no_prefix_means_nothing_shared():
    inputs = SharedPrefix(count=5, prefix_tokens=0, suffix_tokens=40, prime=True).make(DRY, seed=0)
    assert not inputs.prime
    assert sum(item.shared_tokens for item in inputs.measured) == 0


# --- mixed and multi-turn -------------------------------------------------------------------------------------------


def test_mixed_sends_prompts_into_running_streams():
    load = Mixed(streams=3, prompts=4, stream_prompt_tokens=8, stream_output_tokens=50, prompt_every_s=0.25)
    inputs = load.make(DRY, seed=0)
    told = [(item.name, item.arrival_s, len(item.prompt), item.output_tokens) for item in inputs.measured]
    assert told == [("stream", 0.0, 8, 50)] * 3 + [("prompt", 0.25 * n, 1024, 8) for n in (1, 2, 3, 4)]
    assert [item.name for item in inputs.warmup] == ["stream"] * 3 + ["prompt"] * 2
    assert {item.arrival_s for item in inputs.warmup} == {None}
    assert load.in_flight == 7


def test_in_a_pass_of_several_rounds_streams_follow_each_other_and_as_many_are_there_until_the_end():
    load = Mixed(streams=4, prompts=2, stream_prompt_tokens=8, stream_output_tokens=80, stream_rounds=3)
    streams = [item for item in load.make(DRY, seed=0).measured if item.name == "stream"]
    assert {item.arrival_s for item in streams} == {None}
    assert load.in_flight == 4
    assert load.num_requests == len(streams) + 2
    places, ends = [0] * 4, []  # in each a stream generates a token a step
    for item in streams:
        place = places.index(min(places))
        places[place] += item.output_tokens
        ends.append(places[place])
    assert places == [3 * 80] * 4, "they end together, so that the load does not fade out"
    assert len(set(ends[:-4])) == len(ends[:-4]), "before that no two end at once, and begin as a burst"


def test_conversations_grow_turn_by_turn():
    load = MultiTurn(conversations=2, turns=3, prompt_tokens=40, user_tokens=7, answer_tokens=12, think_s=0.5)
    inputs = load.make(DRY, seed=0)
    assert [(item.name, item.follows) for item in inputs.measured] == [
        ("turn1", None),
        ("turn2", 0),
        ("turn3", 1),
        ("turn1", None),
        ("turn2", 3),
        ("turn3", 4),
    ]
    assert prompt_lengths(inputs.measured) == [40, 59, 78] * 2
    assert [item.shared_tokens for item in inputs.measured] == [0, 51, 70] * 2
    assert [item.think_s for item in inputs.measured] == [0.0, 0.5, 0.5] * 2
    assert load.in_flight == 2
    assert len(inputs.warmup) == 6
    found = serve_in_turn(dry_engine(), inputs.measured)
    assert found == [(40, 0), (59, 48), (78, 64)] * 2


def test_turns_wait_for_their_answers_and_only_first_ones_are_scheduled():
    load = MultiTurn(conversations=5, turns=2, arrivals=Arrivals.poisson, rate_per_s=3.0)
    times = [item.arrival_s for item in load.make(DRY, seed=0).measured]
    assert times[1::2] == [None] * 5
    assert times[0] == 0.0
    assert times[0::2] == sorted(times[0::2])
    assert load.num_warmup == 5


# --- text -----------------------------------------------------------------------------------------------------------


def test_text_prompts_are_held_out_code_of_unequal_lengths():
    load = Text(count=16, min_prompt_tokens=32, max_prompt_tokens=160, min_output_tokens=2, max_output_tokens=9)
    vocabulary = Vocabulary(ModelConfig())
    inputs = load.make(vocabulary, seed=0)
    lengths = [len(item.prompt) for item in inputs.measured]
    assert len(inputs.measured) == 16
    assert len(set(lengths)) > 5
    assert min(lengths) >= 30  # cut out of its module, a prompt may lose or gain a token at its ends
    assert max(lengths) <= 162
    assert {2 <= item.output_tokens <= 9 for item in inputs.measured} == {True}
    assert len({item.output_tokens for item in inputs.measured}) > 3
    assert "def " in vocabulary.tokenizer.decode(inputs.measured[0].prompt)
    assert len({*starts(inputs.measured), *starts(inputs.warmup)}) == len(inputs.measured) + len(inputs.warmup)
    assert load.make(vocabulary, seed=0) == inputs
    assert (
        len(dataclasses.replace(load, count=Text.most, warmup=OPEN_LOOP_WARMUP).make(vocabulary, seed=2).measured)
        == Text.most
    )


def test_texts_with_one_beginning_are_used_once(monkeypatch):
    texts = [f"{i // 2:04d} the same beginning and then {i}" for i in range(14)]
    monkeypatch.setattr(text_workload, "heldout_prompts", lambda *_: texts)
    inputs = Text(count=4, concurrency=2).make(Letters(), seed=0)
    assert len({*starts(inputs.measured), *starts(inputs.warmup)}) == 6
    with pytest.raises(ConfigError, match=r"workload\.count=6 and 2 for the warm-up are more than the 7 held-out"):
        Text(count=6, concurrency=2).make(Letters(), seed=0)


# --- arrivals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cv", [0.25, 1.0, 3.0])
def test_gaps_have_the_stated_mean_and_variation(cv):
    times = gamma_times(20_001, rate_per_s=8.0, cv=cv, rng=np.random.default_rng(0))
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert (gaps >= 0).all()
    assert np.mean(gaps) == pytest.approx(1 / 8, rel=5 * cv / np.sqrt(20_000))
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(cv, rel=0.1)
    if cv == 1.0:  # exponential: as many gaps are beyond the mean as should be
        assert np.mean(gaps > 1 / 8) == pytest.approx(np.exp(-1), abs=0.02)


def test_any_workload_can_be_an_open_loop(small):
    for load in small:
        if isinstance(load, Mixed):
            continue
        bursty = dataclasses.replace(load, arrivals=Arrivals.gamma, rate_per_s=5.0, cv=2.0)
        closed = dataclasses.replace(load, arrivals=Arrivals.closed)
        burst = dataclasses.replace(load, arrivals=Arrivals.burst)
        first = [item for item in bursty.make(DRY, seed=0).measured if item.follows is None]
        assert first[-1].arrival_s > first[0].arrival_s == 0.0
        assert {item.arrival_s for item in closed.make(DRY, seed=0).measured} == {None}
        assert {item.arrival_s for item in burst.make(DRY, seed=0).measured} <= {0.0, None}
        assert {item.arrival_s for item in bursty.make(DRY, seed=0).warmup} == {None}
        assert bursty.describe(bursty.make(DRY, seed=0))["cv"] == 2.0
        # only times change
        assert starts(bursty.make(DRY, seed=0).measured) == starts(burst.make(DRY, seed=0).measured)


def test_a_rate_stretches_the_same_arrivals():
    slow, fast = (
        [i.arrival_s for i in Fixed(arrivals=Arrivals.poisson, rate_per_s=r).make(DRY, seed=0).measured]
        for r in (1.0, 4.0)
    )
    assert slow == pytest.approx([4 * t for t in fast])


def test_warmup_reaches_the_measured_concurrency():
    assert Fixed(count=16).num_warmup == 16
    assert Fixed(count=16, concurrency=4).num_warmup == 4
    assert Fixed(count=16, concurrency=1).num_warmup == 2
    assert Fixed(count=500, arrivals=Arrivals.burst).num_warmup == 500
    assert Fixed(count=500, arrivals=Arrivals.poisson, rate_per_s=1.0).num_warmup == 16
    assert Fixed(count=500, warmup=7).num_warmup == 7


# --- what cannot be -------------------------------------------------------------------------------------------------

MISTAKES = [
    (Fixed, {"count": 0}, r"workload\.count must be at least 1, got 0"),
    (Fixed, {"concurrency": 0}, r"workload\.concurrency must be at least 1"),
    (Fixed, {"warmup": 0}, r"workload\.warmup must be at least 1"),
    (Fixed, {"arrivals": Arrivals.poisson}, r"arrivals=poisson needs workload\.rate_per_s"),
    (Fixed, {"arrivals": Arrivals.gamma, "rate_per_s": 1.0}, r"arrivals=gamma needs workload\.cv"),
    (Fixed, {"arrivals": Arrivals.gamma, "rate_per_s": 1.0, "cv": 0.0}, r"workload\.cv must be above 0"),
    (Fixed, {"arrivals": Arrivals.poisson, "rate_per_s": float("nan")}, r"rate_per_s must be above 0, got nan"),
    (Fixed, {"arrivals": Arrivals.poisson, "rate_per_s": float("inf")}, r"rate_per_s must be above 0, got inf"),
    (Fixed, {"rate_per_s": 3.0}, r"rate_per_s=3.0 needs workload\.arrivals=poisson or gamma; it is closed"),
    (Fixed, {"arrivals": Arrivals.burst, "concurrency": 3}, r"concurrency=3 needs workload\.arrivals=closed"),
    (Fixed, {"arrivals": Arrivals.trace}, r"arrivals=trace needs workload=trace; .* use closed, burst, poisson, gamma"),
    (Text, {"max_output_tokens": 3}, r"max_output_tokens=3 is below workload\.min_output_tokens=16"),
    (Uniform, {"max_prompt_tokens": 3}, r"max_prompt_tokens=3 is below workload\.min_prompt_tokens=100"),
    (Uniform, {"output_spread": 1.5}, r"output_spread must be a share, .* got 1.5"),
    (SharedPrefix, {"hit_rate": -0.1}, r"hit_rate must be a share, from 0 to 1, got -0.1"),
    (SharedPrefix, {"prefix_tokens": -1}, r"prefix_tokens must be at least 0"),
    (SharedPrefix, {"suffix_tokens": 0}, r"suffix_tokens must be at least 1"),
    (Mixed, {"prompt_every_s": 0.0}, r"prompt_every_s must be above 0"),
    (MultiTurn, {"think_s": -1.0}, r"think_s must be at least 0"),
    (Trace, {"shrink": 0.5}, r"shrink must be at least 1, got 0.5"),
    (Trace, {"arrivals": Arrivals.closed, "rate_scale": 2.0}, r"rate_scale=2.0 needs workload\.arrivals=trace"),
]


@pytest.mark.parametrize(("cls", "settings", "message"), MISTAKES)
def test_settings_out_of_range_are_named(cls, settings, message):
    with pytest.raises(ConfigError, match=message):
        cls(**settings)


def test_prompts_that_cannot_all_differ():
    with pytest.raises(ConfigError, match=r"sequences of 1 tokens from 128 token ids cannot all begin differently"):
        Fixed(count=500, prompt_tokens=1).make(Letters(), seed=0)
    with pytest.raises(ConfigError, match="longer, or fewer"):
        SharedPrefix(count=500, suffix_tokens=1).make(Letters(), seed=0)


def test_requests_longer_than_the_model_are_refused_before_any_token_is_drawn(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE.replace(",90,", ",999999999,"))
    huge = 10**12
    for load, settings in [
        (Fixed(prompt_tokens=huge), r"workload\.prompt_tokens=1000000000000 or workload\.output_tokens=128"),
        (Uniform(max_output_tokens=huge), r"workload\.max_output_tokens=1000000000000"),
        (SharedPrefix(prefix_tokens=huge), r"workload\.prefix_tokens=1000000000000"),
        (Mixed(prompt_tokens=huge), r"workload\.prompt_tokens=1000000000000"),
        (Mixed(stream_output_tokens=huge), r"workload\.stream_output_tokens=1000000000000"),
        (MultiTurn(turns=10**9), r"workload\.turns=1000000000"),
        (Trace(path=str(path), limit=6), r"raise workload\.shrink"),
    ]:
        with pytest.raises(ConfigError, match=rf"the model takes 8192: .*{settings}"):
            load.make(DRY, seed=0)


def test_a_request_may_fill_the_model_to_the_last_token():
    full = Fixed(count=2, prompt_tokens=60, output_tokens=68)
    assert_hits_are_intended(full.make(Letters(max_model_len=128), seed=0))
    with pytest.raises(ConfigError, match=r"61 prompt and 68 output tokens, 129 together; the model takes 128"):
        dataclasses.replace(full, prompt_tokens=61).make(Letters(max_model_len=128), seed=0)


def test_a_text_that_is_longer_in_another_vocabulary_is_refused():
    with pytest.raises(ConfigError, match=r"lower workload\.max_prompt_tokens=160 or workload\.max_output"):
        Text().make(Letters(size=70_000, max_model_len=128), seed=0)


def test_the_vocabulary_knows_the_models_length():
    assert Vocabulary(ModelConfig()).max_model_len == 2048
    assert Vocabulary(ModelConfig(max_model_len=100)).max_model_len == 100
    dry = ModelConfig(load_format=LoadFormat.dry, dry=DryConfig(max_model_len=300))
    assert Vocabulary(dry).max_model_len == 300
    assert Vocabulary(dataclasses.replace(dry, max_model_len=200)).max_model_len == 200


def test_every_file_in_conf_makes_the_kind_it_names(compose_config):
    from experiments.lab.config import schema

    for kind, cls in WORKLOADS.items():
        assert type(schema.workload(compose_config(f"workload={kind}"))) is cls
    load = schema.workload(
        compose_config("workload=shared_prefix", "workload.arrivals=gamma", "workload.rate_per_s=2", "workload.cv=3")
    )
    assert (load.arrivals, load.rate_per_s, load.cv) == (Arrivals.gamma, 2.0, 3.0)


@pytest.mark.parametrize("kind", WORKLOADS)
def test_every_setting_is_documented_with_its_default(kind):
    import re
    from pathlib import Path

    text = (Path(__file__).resolve().parents[2] / "docs/workloads.md").read_text()
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    documented = {}
    for names, default in re.findall(r"^\| (`.*?) \| (.*?) \|", sections["Arrivals"] + sections[kind], re.MULTILINE):
        names = re.findall(r"`(\w+)`", names)
        documented |= dict(zip(names, default.split(", ") if len(names) > 1 else [default], strict=True))
    for field in dataclasses.fields(WORKLOADS[kind]):
        default = getattr(field.default, "value", field.default)
        shown = documented[field.name].strip("`")
        if default is not None and default != "":
            assert shown == str(default).lower(), field.name


def test_the_lab_drives_conversations_and_bursts_as_they_are_meant():
    from experiments.lab.measure.subjects import drive

    talk = MultiTurn(conversations=4, turns=3, prompt_tokens=40, answer_tokens=12, concurrency=2).make(DRY, seed=0)
    served = drive(dry_engine(), talk.measured, 2)
    assert [r.cached_tokens for r in served.requests] == [0, 48, 80] * 4
    load = SharedPrefix(count=8, prefix_tokens=64, suffix_tokens=9, prime=True, arrivals=Arrivals.burst)
    inputs = load.make(DRY, seed=0)
    engine = dry_engine()
    for items, in_flight in ((inputs.warmup, load.in_flight), (inputs.prime, 1)):
        drive(engine, items, in_flight)
    served = drive(engine, inputs.measured, load.in_flight)
    assert [r.cached_tokens for r in served.requests] == [r.shared_tokens for r in served.requests] == [64] * 8
