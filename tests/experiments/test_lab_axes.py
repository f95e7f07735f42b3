"""Axes and what is typed: every key counts, or is refused before anything runs."""

import json
import re
import subprocess
from dataclasses import fields, replace
from pathlib import Path
from typing import get_type_hints

import pytest
from made_up import METRICS, different
from made_up import result as demo
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError

from experiments.ablation import Ablation
from experiments.lab.config import ablation_spec, axes, catalog, schema, typed
from experiments.lab.execute import execute
from experiments.lab.judge.gate import ErrorGate
from experiments.lab.measure.kinds import Kind
from experiments.lab.show import report, sweeps
from experiments.lab.show.answer import sentence
from experiments.lab.show.compare import OTHER_MACHINE, compare
from experiments.lab.store import result as store
from experiments.lab.store import runs
from experiments.lab.store.result import StoreError, page_name, run_path
from experiments.lab.workloads.base import Vocabulary
from mini_infer.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("quick_figures")

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"


def settle(compose_config, experiment, *typed_in):
    """As run.py does."""
    overrides = catalog.shorthand([f"experiment={experiment}", *typed_in], CONF)
    return typed.settle(compose_config(*overrides), experiment, overrides)


UNREAD = [
    ("flash_decode", "workload.count=3", "workload.count"),
    ("flash_decode", "workload=fixed", "workload"),  # a file that says its kind alone
    ("quantization", "workload.count=3", "workload.count"),
    ("expert_quantization", "workload.count=3", "workload.count"),
    ("disaggregation", "workload.count=3", "workload.count"),
    ("calibrate", "workload.count=3", "workload.count"),
    ("flash_decode", "engine/attention=sdpa", "engine.attention.prefill"),
    ("ceilings", "engine/attention=sdpa", "engine.attention.prefill"),
    ("scheduler_overhead", "engine/attention=sdpa", "engine.attention.prefill"),
    ("simulator_speed", "model=tiny_draft", "engine.model.path"),
    ("all_reduce", "measure.seed=3", "measure.seed"),
    ("flash_decode", "engine.cache.memory_gib=3", "engine.cache.memory_gib"),
    ("ceilings", "engine.cache={memory_gib: 3}", "engine.cache.memory_gib"),
    ("quantization", "engine/quantization=w8a8", "engine.model.quantization"),
    ("quantization", "engine.scheduler.max_num_seqs=3", "engine.scheduler.max_num_seqs"),
    ("flash_decode", "system=vllm", "measure.system"),
    ("expert_quantization", "hardware=h200", "hardware.device"),  # it reads on a CPU
    ("disaggregation", "engine/connector=nixl", "engine.parallel.connector"),  # its variants say which
    ("calibrate", "measure.repeats=3", "measure.repeats"),
    ("capacity", "peers.processes=1", "peers.processes"),
    ("flash_decode", "+peers.vllm.args={seed: 3}", "peers.vllm.args.seed"),
    ("ceilings", "measure.aa=always", "measure.aa"),
    ("quantization", "measure.aa=always", "measure.aa"),
]
SHADOWED = [
    ("quickstart", ["workload.concurrency=4"], r"sets workload.concurrency itself, by its points: experiment.points"),
    ("prefix_cache", ["workload.hit_rate=0.7"], r"experiment.points.workload.hit_rate=\[0,0.5,1.0\] chooses"),
    ("prefix_cache", ["engine.cache.prefix_caching=false"], r"by its variants: experiment.variants.off.cache"),
    ("prefix_cache", ["engine/prefix_cache=disabled"], r"prefix_cache sets engine.cache.prefix_caching itself"),
    (
        "prefix_cache",
        ["experiment.points.engine.cache.prefix_caching=[true,false]"],
        r"prefix_cache sets engine.cache.prefix_caching itself, by its variants",
    ),
    ("cuda_graph", ["engine/graphs=never"], r"cuda_graph sets engine.graphs.capture itself, by its variants"),
    ("chunked_prefill", ["engine/prefill=whole"], r"sets engine.scheduler.chunked_prefill itself"),
    ("serving", ["workload.rate_per_s=3"], r"sets workload.rate_per_s itself, by its search"),
    ("quickstart", ["+foo=1"], r"unknown setting 'foo'"),
    ("quickstart", ["+experimnt.samples=1"], r"unknown setting 'experimnt.samples'; did you mean 'experiment'"),
    ("latency", ["workload.concurrency=3"], r"points: experiment.points.load=\[batch 1,.*,batch 256\] leaves it alone"),
    (
        "latency",
        ["experiment.points.load=[batch 8]", "workload={prompt_tokens: 3}"],
        r"latency sets workload.prompt_tokens itself, by its points: experiment.points.load=\[batch 8\] chooses",
    ),
    ("kv_memory", ["+scale.x=1"], "unknown setting 'scale.x'"),
    ("kv_memory", ["+scale={x: 1}"], "unknown setting 'scale.x'"),
    ("kv_memory", ["+costs.x=1"], "unknown setting 'costs.x'"),
    ("kv_memory", ["+axes.foo=1"], "unknown setting 'axes.foo'"),
    ("kv_memory", ["+scales.foo=1"], "unknown setting 'scales.foo'"),
    ("kv_memory", ["+via.foo=1"], "unknown setting 'via.foo'"),
    ("kv_memory", ["+workload.foo=1"], r"unknown setting 'workload.foo'\. Known in workload: .*, urgent_share"),
    ("kv_memory", ["axes.model=mine"], r"unknown setting 'axes.model'\. Known: engine, .*scale, system, tracker, via"),
    ("kv_memory", ["+experiment.points={load: {short: 3}}"], r"points\[load\] must be a list of values"),
    ("kv_memory", ["experiment.variants=3"], r"experiment.variants must map names to settings, got 3"),
    ("latency", ["system=vllm", "engine/attention=sdpa"], "vLLM does not read engine.attention.prefill"),
    ("latency", ["system=vllm", "engine/overlap=never"], "vLLM does not read engine.scheduler.overlap"),
    ("quickstart", ["system=hf", "engine/quantization=w8a8"], "generate does not read engine.model.quantization"),
    ("kv_memory", ["via=url", "engine.cache.block_size=32"], "an OpenAI server does not read engine.cache.block_size"),
    ("kv_memory", ["measure.costs=mine"], "mini-infer does not read measure.costs"),
    ("kv_memory", ["system=simulated", "measure.gates=false"], "mini-infer, simulated does not read measure.gates"),
    ("quickstart", ["peers.vllm.timeout_s=3"], "quickstart does not read peers.vllm.timeout_s"),
    (
        "quickstart",
        ["+experiment.variants.other={kind: vlm}", "workload.count=3"],
        "other.kind must be one of engine, ",
    ),
    ("quickstart", ["engine/dispatch=padded"], "parallel.dispatch does nothing while engine.parallel.expert=1: change"),
    ("measure", ["engine/dispatch=padded"], "engine.parallel.dispatch does nothing while engine.parallel.expert=1"),
    (
        "quickstart",
        ["engine/router=round_robin"],
        "routing does nothing while engine.parallel.replicas=1 and .*decode=0",
    ),
    ("quickstart", ["engine.speculation.num_tokens=3"], "num_tokens does nothing while engine.speculation.method=none"),
    ("quickstart", ["engine.speculation.draft.path=tiny-draft"], "draft.path does nothing while .*method=none"),
    ("quickstart", ["engine/drafts=always"], "adaptive does nothing while engine.speculation.method=none: change that"),
    ("quickstart", ["engine/connector=stream"], "connector does nothing while engine.parallel.prefill=0: change that"),
    ("quickstart", ["engine.model.dry.step_ms=3"], "dry.step_ms does nothing while engine.model.load_format=auto"),
    ("quickstart", ["peers.http.url=http://x"], "does not read peers.http.url, .* leave it out, or add via=url"),
    ("flash_decode", ["peers.http.url=http://x"], "flash_decode does not read peers.http.url"),
    *(
        (name, [option], f"{name} does not read {key}, and would measure the same: leave it out. It reads ")
        for name, option, key in UNREAD
    ),
    ("flash_decode", ["experiment.points.length=[3]"], r"flash_decode has no experiment.points"),
    ("prefix_cache", ["scale=0_6b"], r"nothing of scale=0_6b via=in_process. It is measured at scale=tiny via=in_pro"),
    ("quickstart", ["via=http"], r"nothing of scale=tiny via=http. It is measured at scale=tiny via=in_process\|url"),
    ("prefix_cache", ["scale=7b", "experiment.points.load=[half]"], r"points.load has no 'half'. Known: 90 % shared"),
    ("prefix_cache", ["experiment.points.loda=[half]"], r"experiment.points has no 'loda'"),
    (
        "prefix_cache",
        ["scale=7b", "hardware=h200", "engine.cache.memory_gib=150"],
        r"more than the 139.8 GiB of NVIDIA",
    ),
]


@pytest.mark.parametrize(("experiment", "typed_in", "message"), SHADOWED)
def test_what_would_have_no_effect_is_refused(compose_config, experiment, typed_in, message):
    with pytest.raises(ConfigError, match=message):
        settle(compose_config, experiment, *typed_in)


@pytest.mark.parametrize(
    ("experiment", "typed_in"),
    [
        ("quickstart", ["engine/speculation=none"]),
        ("quickstart", ["engine/speculation=ngram", "engine.speculation.num_tokens=3"]),
        ("quickstart", ["model=dry", "engine.model.dry.step_ms=3"]),
        ("spec_decode", ["engine.speculation.ngram_max=3"]),  # one of its variants drafts by it
        ("quickstart", ["engine.parallel.tensor=2", "engine/all_reduce=library"]),
    ],
)
def test_settings_of_a_mechanism_that_is_on_are_taken(compose_config, experiment, typed_in):
    assert settle(compose_config, experiment, *typed_in).changed


@pytest.mark.parametrize("experiment", ["kv_memory", "flash_decode", "all_reduce", "expert_exchange", "disaggregation"])
def test_a_second_arm_that_is_typed_is_measured(compose_config, experiment):
    config = settle(compose_config, experiment, "measure.aa=always", "hardware=cpu").config
    found = schema.experiment_class(config).from_config(config)
    assert found.aa == f"{found.baseline} again"
    assert found.aa in found.variants


def test_what_is_said_to_be_read_is_there():
    said = {key for kind in Kind for key in kind.can.reads} | {*ablation_spec.READ, *typed.EVERYWHERE} - {"hydra"}
    for file in map(OmegaConf.load, (CONF / "experiment").glob("*.yaml")):
        if "_target_" in file.experiment:
            said |= set(schema.experiment_class(file).reads)
    for key in said:
        node = schema.RunConfig
        for part in key.split("."):
            assert part in {f.name for f in fields(node)}, key
            node = get_type_hints(node)[part]


def test_what_the_experiment_leaves_alone_is_taken(compose_config):
    settled = settle(compose_config, "prefix_cache", "workload.suffix_tokens=64", "engine/batching=static")
    assert settled.config.workload.suffix_tokens == 64
    assert settled.config.engine.scheduler.batching.value == "static"
    assert settled.changed == {"workload.suffix_tokens": "64", "engine/batching": "static"}
    assert store.run_name(settled.changed) == "engine_batching=static,suffix_tokens=64"


def test_a_run_is_named_by_the_settings_of_its_experiment_too(compose_config):
    settled = settle(compose_config, "disaggregation", "experiment.stream_tokens=6", "experiment.prompts=2")
    assert settled.changed == {"experiment.stream_tokens": "6", "experiment.prompts": "2"}


MISLABELLED = [  # measured as it was typed, and once recorded in the place of `default`
    ("prefix_cache", ["experiment.variants.on.cache.prefix_caching=false"], "variants.on.prefix_caching=False"),
    (
        "chunked_prefill",
        ["experiment.variants.chunk_64.scheduler.max_num_batched_tokens=512"],
        "variants.chunk_64.max_num_batched_tokens=512",
    ),
    ("spec_decode", ["experiment.variants.draft_4.speculation.num_tokens=2"], "variants.draft_4.num_tokens=2"),
    ("prefix_cache", ["experiment.claims=[]"], "claims=none"),
    ("prefix_cache", ["experiment.claims.0.ratio_at_most=0.99"], "claims.0.ratio_at_most=0.99"),
    ("prefix_cache", ["experiment.claims=[]", "experiment.metrics=[ttft_ms]"], "claims=none,metrics=ttft_ms"),
    ("prefix_cache", ["+experiment.variants.more={cache: {block_size: 8}}"], "variants.more.block_size=8"),
    ("flash_decode", ["experiment.variants.fa4=mine"], "fa4=mine"),
    ("replicas", ["~experiment.variants.least_loaded"], "least_loaded=deleted"),
    ("prefix_cache", ["measure.repeats=3"], "repeats=4"),
]


@pytest.mark.parametrize(("experiment", "typed_in", "run"), MISLABELLED)
def test_a_run_that_asks_otherwise_is_called_so(compose_config, experiment, typed_in, run):
    settled = settle(compose_config, experiment, *typed_in)
    assert store.run_name(settled.changed) == run
    assert settled.notes, "beside the name, which paths.run=default can hide"


def test_a_variant_is_no_longer_what_its_label_says(compose_config):
    typed_in = ["experiment.variants.on.cache.prefix_caching=false", "paths.run=default"]
    settled = settle(compose_config, "prefix_cache", *typed_in)
    assert dict(Ablation.from_config(settled.config).variants) == {
        "off": "without",
        "on": "with (prefix_caching False)",
    }
    assert settled.notes == ("Not as the experiment has it: variants.on.cache.prefix_caching=False.",)
    mine = settle(compose_config, "prefix_cache", *typed_in, "experiment.variants.on.label=mine")
    assert Ablation.from_config(mine.config).variants["on"] == "mine"
    runs_of_a_sweep = [swept(n, "x", variants={"base": "off", "new": f"on (x {n})"}) for n in (1, 2)]
    assert sweeps.joined(runs_of_a_sweep)[0].info.variants == {"base": "off", "new": "on"}


def test_a_variant_that_is_left_out_takes_its_claims_along(compose_config, run_py, capsys):
    settled = settle(
        compose_config, "composition", "~experiment.variants.overlap+drafts", "~experiment.variants.prefix"
    )
    names = list(Ablation.from_config(settled.config).variants)
    assert "prefix+drafts" in names
    assert not {"overlap+drafts", "prefix"} & set(names)
    assert settled.notes == ("Measured without overlap+drafts, prefix.",)
    lost = settle(compose_config, "prefix_cache", "~experiment.variants.on")
    assert lost.notes == ("Measured without on. Left out: 2 claims about what is not measured.",)
    assert Ablation.from_config(lost.config).claims == []
    with pytest.raises(ConfigError, match=r"experiment.variants has no 'onn'; did you mean 'on'\? Known: off, on"):
        settle(compose_config, "prefix_cache", "~experiment.variants.onn")
    assert run_py("show", "prefix_cache", "~experiment.variants.off") == 2  # as the run
    assert "experiment.baseline: there is no variant 'off'. Known: on" in capsys.readouterr().err


def test_claims_stay_about_the_baseline_that_they_were_made_for(compose_config):
    """Another one is what tables compare with."""
    own = Ablation.from_config(settle(compose_config, "prefix_cache").config)
    found = Ablation.from_config(settle(compose_config, "prefix_cache", "experiment.baseline=on").config)
    assert (own.baseline, found.baseline) == ("off", "on")
    assert found.claims == own.claims
    gone = settle(compose_config, "prefix_cache", "experiment.baseline=on", "~experiment.variants.off")
    assert gone.notes[0] == "Measured without off. Left out: 2 claims about what is not measured."


def test_an_odd_number_of_repeats_is_rounded_up_and_said(compose_config):
    settled = settle(compose_config, "prefix_cache", "measure.repeats=3")
    assert settled.config.measure.repeats == 4
    assert settled.notes[0].startswith("measure.repeats=3 was rounded up to 4: variants take turns in ABBA order")
    assert settle(compose_config, "prefix_cache", "measure.repeats=1").config.measure.repeats == 1


@pytest.mark.parametrize(
    ("experiment", "typed_in", "kept", "lost"),
    [
        ("prefix_cache", ["scale=7b", "hardware=cpu"], 2, "1 claim"),
        ("latency", ["scale=0_6b", "engine.model.device=cpu"], 3, "3 claims"),
        ("fused_kernels", ["hardware=cpu"], 5, "3 claims"),
        ("prefix_cache", ["scale=7b", "hardware=h200"], 3, ""),
        ("prefix_cache", ["via=http", "hardware=h200"], 3, ""),  # ratios, and a share of the client's
    ],
)
def test_bounds_that_were_for_a_gpu_are_not_a_cpus(compose_config, experiment, typed_in, kept, lost):
    settled = settle(compose_config, experiment, *typed_in)
    said = settled.config.experiment
    assert len(said.claims) == kept
    assert bool(lost) == all("at_most" not in claim and "at_least" not in claim for claim in said.claims)
    notes = [f"{lost} with bounds for a GPU."] if lost else []
    assert [note.partition("Left out: ")[2] for note in settled.notes] == notes
    assert bool(schema.plain(said).get("target")) == ("scale=7b" in typed_in and not lost)


def test_show_promises_no_machines_time_to_another(run_py, capsys):
    assert run_py("show", "prefix_cache", "scale=7b", "hardware=cpu") == 0
    assert "on h200" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed_in", "why"),
    [
        ("simulator_trace workload.path=nowhere.csv", "workload.path=nowhere.csv cannot be read"),
        ("simulator_trace workload.path={trace}", "line 6: it is 6.000 s earlier than the line before it"),
        ("prefix_cache system=simulated engine.parallel.expert=2", "ranks that share experts are not simulated"),
        ("calibrate engine.parallel.expert=2", "ranks that share experts are not simulated"),
        (
            "capacity engine.parallel.expert=2",
            "error: engine.parallel.expert=2: ranks that share experts are not simulated",
        ),
        (
            "quickstart engine/mla=absorbed",
            "attention.mla=absorbed: Qwen2ForCausalLM has no multi-head latent attention",
        ),
        (
            "quickstart engine.parallel.replicas=2",
            "replicas are engines behind mini-infer-serve, and this is one engine",
        ),
        ("quickstart engine/routing=uniform", "model.routing=uniform: Qwen2ForCausalLM has no experts"),
        ("measure engine/prefill=whole", "max_num_batched_tokens=512 is less than the longest prompt (2048 tokens"),
        ("measure model=tiny-moe engine.parallel.expert=3", "These numbers of ranks work: 1, 2, 4, 8, 16"),
    ],
)
def test_show_refuses_what_a_run_refuses(run_py, capsys, tmp_path, typed_in, why):
    trace, seconds = tmp_path / "azure.csv", [0, 1, 2, 9, 3, *range(4, 60)]
    lines = [f"2023-11-16 18:15:{second:02d}.0000000,100,5" for second in seconds]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    assert run_py("show", *typed_in.format(trace=trace).split()) == 2
    shown = capsys.readouterr()
    assert (why in shown.err, shown.out) == (True, "")


def test_show_has_the_variants_of_one_system_where_one_is_asked_for(run_py, capsys):
    assert run_py("show", "latency", "scale=1_5b", "system=ours") == 0
    shown = capsys.readouterr().out
    assert re.search(r"^variants +engine \(baseline engine\)$", shown, re.MULTILINE)
    assert "\npeer " not in shown
    assert re.search(r"^claims +0$", shown, re.MULTILINE)


def test_narrowed_points_are_measured_alone_and_claims_about_others_go(compose_config):
    whole = Ablation.from_config(settle(compose_config, "prefix_cache").config)
    settled = settle(compose_config, "prefix_cache", "experiment.points.workload.hit_rate=[0,0.25]")
    found = Ablation.from_config(settled.config)
    assert [point.name for point in found.points] == ["hit_rate=0", "hit_rate=0.25"]
    assert {claim.point for claim in whole.claims} == {"hit_rate=0", "hit_rate=1.0"}
    assert {claim.point for claim in found.claims} == {"hit_rate=0"}
    assert found.spec.timeline is None  # it was at a point that is not measured
    assert settled.notes == (
        "Measured at other points than the experiment's own: workload.hit_rate 0,0.25. "
        "Left out: 1 claim about other points.",
    )
    assert settled.changed == {"workload.hit_rate": "0,0.25"}
    own = settle(compose_config, "prefix_cache", "experiment.points.workload.hit_rate=[0,0.5,1.0]")
    assert own.notes == ()
    assert len(own.config.experiment.claims) == len(whole.claims)


def test_named_points_are_chosen_by_their_names(compose_config):
    settled = settle(compose_config, "prefix_cache", "scale=7b", "experiment.points.load=[0 % shared]")
    found = Ablation.from_config(settled.config)
    assert [point.name for point in found.points] == ["0 % shared"]
    assert {claim.point for claim in found.claims} == {"0 % shared"}
    assert store.run_name(settled.changed) == "load=0_shared"


def test_a_search_goes_with_points_that_are_typed(compose_config):
    """It sets arrivals of its own, and the points need others."""
    settled = settle(compose_config, "measure", "experiment.points.workload.concurrency=[1,64]")
    found = Ablation.from_config(settled.config)
    of = {point: cell.workload for (_, point), cell in found._cells.items()}
    assert {of[point.name].concurrency for point in found._grid} == {1, 64}
    assert {(of[point.name].concurrency, of[point.name].arrivals.value) for point in found._tried} == {
        (None, "poisson")
    }


def test_names_of_settings_give_way_to_one_of_them_that_is_typed(compose_config):
    settled = settle(compose_config, "serving", "experiment.points.workload.concurrency=[1,4]")
    found = Ablation.from_config(settled.config)
    assert [point.name for point in found._grid] == ["concurrency=1", "concurrency=4"]
    assert settled.notes == (
        "Measured at other points than the experiment's own: workload.concurrency 1,4 in the place of load. "
        "Left out: 2 claims about other points.",
    )


def test_points_are_added_by_name(compose_config):
    added = "+experiment.points.load.burst={workload.arrivals: poisson, workload.rate_per_s: 9}"
    one = ["scaling", "scale=7b", added]
    found = Ablation.from_config(settle(compose_config, *one).config)
    assert [point.name for point in found.points][-2:] == ["long answers, 16/s", "burst"]
    alone = Ablation.from_config(settle(compose_config, *one, "experiment.points.load=[burst]").config)
    assert [point.name for point in alone.points] == ["burst"]
    assert [point.name for point in alone._gate_at] == ["burst"], "in the place of 8 clients, which is not measured"


def test_a_setting_that_needs_another_may_be_typed_where_points_have_that(compose_config):
    rates = ["~experiment.points.load", "+experiment.points.workload.rate_per_s=[4,8]", "workload.arrivals=poisson"]
    found = Ablation.from_config(settle(compose_config, "scaling", "scale=7b", *rates).config)
    assert {cell.workload.rate_per_s for cell in found._cells.values()} == {4.0, 8.0}


def test_a_claim_is_changed_from_the_command_line(compose_config):
    settled = settle(compose_config, "prefix_cache", "experiment.claims.0.ratio_at_most=0.5")
    assert Ablation.from_config(settled.config).claims[0].value == 0.5
    assert settle(compose_config, "prefix_cache", "experiment.claims=[]").config.experiment.claims == []


@pytest.mark.parametrize("typed_in", ["model=llama3_1_8b", "engine.model.hf_config.num_hidden_layers=2"])
def test_another_model_has_a_page_of_its_own_without_the_bounds(compose_config, typed_in):
    settled = settle(compose_config, "latency", typed_in)
    own = settle(compose_config, "latency")
    assert own.axes.model == "Qwen2.5-7B"
    assert len(own.config.experiment.claims) == 10
    assert settled.config.experiment.claims == []
    assert "Left out: 10 claims with bounds for Qwen2.5-7B." in settled.notes[0]
    assert settled.axes.scale in ("Llama-3_1-8B", "Qwen2_5-7B_changed")
    assert (settled.default_scale, settled.axes.method) == ("7b", "")
    assert settle(compose_config, "latency", "model=qwen2_5_7b").axes == own.axes  # the same model is no other


@pytest.mark.parametrize(
    ("experiment", "typed_in"),
    [
        ("capacity", ["workload=trace", "hardware=h200", "slo.ttft_ms=500", "slo.tpot_ms=25"]),
        ("calibrate", ["hardware=h200"]),
    ],
)
def test_a_model_brings_its_scale(compose_config, run_py, capsys, experiment, typed_in):
    alone = settle(compose_config, experiment, "model=qwen2_5_7b", *typed_in)
    assert alone.axes.scale == "7b"
    assert alone.config == settle(compose_config, experiment, "scale=7b", *typed_in).config
    assert settle(compose_config, experiment, "model=tiny").axes.scale == "tiny"
    typed_too = settle(compose_config, experiment, "model=qwen2_5_7b", "scale=tiny", "hardware=h200")
    assert typed_too.config.engine.model.dtype == "float32", "as it was typed"
    assert run_py(f"experiment={experiment}", *typed_in, "model=qwen2_5_7b", "--cfg", "job") == 0
    assert "dtype: bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize("experiment", ["capacity", "calibrate", "simulator", "simulator_trace"])
def test_large_models_are_planned_calibrated_and_predicted_with_their_scales(compose_config, experiment):
    scales = {"qwen3_32b": "32b", "qwen3_30b_a3b": "30b_a3b", "deepseek_v2_lite": "v2_lite"}
    for model, scale in scales.items():
        found = settle(compose_config, experiment, f"model={model}", "hardware=h200")
        assert (found.axes.scale, found.config.engine.model.dtype) == (scale, "bfloat16")


@pytest.mark.parametrize("model", ["llama3_1_8b", "qwen2_5_7b,qwen3_0_6b"])
def test_a_model_on_a_gpu_without_a_scale_of_its_own_names_one(compose_config, model):
    message = r"model on a GPU with the settings of scale=tiny, which is for a CPU: type the .*, scale=7b or scale=0_6b"
    overrides = catalog.shorthand(["experiment=capacity", f"model={model}", "hardware=h200"], CONF)
    one = [f"model={model.partition(',')[0]}" if text.startswith("model=") else text for text in overrides]
    with pytest.raises(ConfigError, match=message):  # Hydra hands on one of a sweep at a time
        typed.settle(compose_config(*one), "capacity", one)


def test_a_model_in_a_folder_is_named_by_it(compose_config, checkpoint):
    settled = settle(compose_config, "quickstart", f"model={checkpoint}")
    assert (settled.axes.scale, settled.axes.model) == ("random-qwen2", "random-qwen2")


def test_what_a_scale_says_is_merged_after_the_experiment_and_before_the_command_line(compose_config):
    config = settle(compose_config, "prefix_cache", "scale=7b").config
    assert (config.engine.cache.memory_gib, config.engine.model.device.value) == (31, "cuda")
    assert settle(compose_config, "prefix_cache", "scale=7b", "engine.cache.memory_gib=20").config.engine.cache[
        "memory_gib"
    ] == 20  # fmt: skip
    assert settle(compose_config, "prefix_cache", "scale=7b", "hardware=cpu").config.engine.model.device == "cpu"


def test_over_http_every_variant_is_served(compose_config):
    settled = settle(compose_config, "prefix_cache", "scale=7b", "via=http")
    experiment = Ablation.from_config(settled.config)
    kinds = {cell.variant: cell.kind for cell in experiment._cells.values()}
    assert kinds == {"off": Kind.served, "on": Kind.served, "vllm": Kind.vllm_served, "off again": Kind.served}
    assert list(experiment._gated) == ["off", "on"]  # no engine is measured on a GPU without a gate
    assert "client_busy" in experiment.metrics
    assert settled.axes.procedure.startswith("mini-infer-serve answers over HTTP")
    with pytest.raises(ConfigError, match=r"transformers.generate is not served over HTTP by us: .*via=url"):
        Ablation.from_config(settle(compose_config, "prefix_cache", "via=http", "system=hf").config)


def test_any_server_is_asked_by_its_address(compose_config):
    settled = settle(compose_config, "chunked_prefill", "via=url", "peers.http.url=http://localhost:8000")
    experiment = Ablation.from_config(settled.config)
    assert {cell.kind for cell in experiment._cells.values()} == {Kind.http}
    with pytest.raises(ConfigError, match=r"via=url needs the server's address: peers.http.url="):
        ablation_spec.require_possible(settle(compose_config, "chunked_prefill", "via=url").config)


def test_our_system_alone_leaves_the_peers_out(compose_config):
    found = Ablation.from_config(settle(compose_config, "quickstart", "system=ours").config)
    assert dict(found.variants) == {"engine": "mini-infer"}


def test_nodes_are_the_files_scales_and_ways():
    node = OmegaConf.create(
        {
            "scales": {"a": {"engine": {"x": 1, "y": 1}}, "b": None},
            "via": {"http": {"engine": {"y": 2}, "scales": {"a": {"engine": {"x": 3}}}}},
        }
    )
    found = {(scale, via): content for scale, via, content in axes.nodes(node)}
    assert found[("a", "in_process")] == {"engine": {"x": 1, "y": 1}}
    assert found[("a", "http")] == {"engine": {"x": 3, "y": 2}}
    assert ("b", "http") not in found
    assert found[("b", "url")] == {"engine": {"y": 2}}


def test_limits_of_a_scale_and_a_way_stand_behind_those_of_all():
    """Nothing is said twice."""
    node = OmegaConf.create(
        {
            "scales": {"a": {"experiment": {"limits": ["of a", "of all"]}}, "b": None},
            "via": {"http": {"experiment": {"limits": ["over HTTP"]}, "scales": ["a"]}},
        }
    )
    said = {(s, via): content["experiment"]["limits"] for s, via, content in axes.nodes(node, ["of all"])}
    assert said[("b", "in_process")] == ["of all"]
    assert said[("a", "http")] == ["of all", "of a", "over HTTP"]
    assert said[("b", "url")] == ["of all", "over HTTP"]


# Runs


def test_a_run_is_a_trial_unless_it_is_recorded(compose_config):
    assert compose_config().paths.results == "trial/results"
    assert catalog.shorthand(["--record"], CONF) == ["paths.results=results", "paths.reports=reports"]
    assert catalog.shorthand(["model=tiny-draft", "model=tiny"], CONF) == ["engine.model.path=tiny-draft", "model=tiny"]
    long = f"engine.model.hf_config={{architectures: [{'Llama' * 60}]}}"  # no file's name is
    assert catalog.shorthand([long], CONF) == [long]
    assert catalog.shorthand(["--resume"], CONF) == ["paths.resume=true"]
    assert catalog.shorthand(["slo.ttft_ms=500"], CONF) == ["experiment.slo.ttft_ms=500"]
    ignored = subprocess.run(["git", "check-ignore", "trial/results/x"], cwd=ROOT, capture_output=True, check=False)
    assert ignored.returncode == 0


def test_a_recorded_run_says_so_and_stands_at_its_axes(compose_config, tmp_path, monkeypatch):
    given = ["experiment=quickstart", "model=dry", "measure.repeats=1", "workload.count=2"]
    more = [*catalog.shorthand(["experiment.points.workload.concurrency=[1]", "--record"], CONF)]
    config = compose_config(*given, *more)
    config.experiment.variants.transformers = {}
    execute(config, "quickstart", [*given, *more], tmp_path)
    path = runs.find(tmp_path / "results", "quickstart/dry/cpu/repeats=1,concurrency=1,count=2")
    info = store.read(path).info
    assert info.provenance.command.endswith("--record")
    assert "paths." not in info.provenance.command
    assert info.title == "Quickstart: the engine against transformers.generate, dry"
    assert (tmp_path / "reports/quickstart.dry.in_process.md").is_file()
    assert path.relative_to(tmp_path / "results").with_suffix("") == run_path(info)


def test_a_page_is_one_scale_and_way(compose_config):
    info = demo().info
    at = lambda **axes: page_name(replace(info, **axes))  # noqa: E731
    assert at(scale="7b", default_scale="7b") == "demo"
    assert at(scale="7b", default_scale="tiny") == "demo.7b.in_process"
    assert at(scale="7b", default_scale="7b", via="http") == "demo.7b.http"


@pytest.fixture
def repository(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    git("init", "-q")
    git("config", "user.email", "t@t")
    git("config", "user.name", "t")
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "b.py").write_text("1")
    git("add", "-A")
    git("commit", "-qm", "first")
    return tmp_path, git


def test_compare_with_what_was_published(repository):
    root, git = repository
    path = store.write(root / "results", demo())
    git("add", "-A")
    git("commit", "-qm", "published")
    faster = [replace(row, value=row.value * 2) for row in demo().rows]
    other = replace(demo().info.provenance, device={**demo().info.provenance.device, "cpu": "another"})
    info = replace(demo().info, provenance=other)
    store.write(root / "results", replace(demo(), rows=tuple(faster), info=info))
    folder = root / "was"
    folder.mkdir()
    text = compare(runs.published(path, "HEAD", folder), path, "HEAD")
    assert f"A  {path} at HEAD" in text
    assert text.index(OTHER_MACHINE) < text.index("B/A")
    (root / "same").mkdir()
    store.write(root / "results", demo())
    text = compare(runs.published(path, "HEAD", root / "same"), path, "HEAD")
    assert "\n\nA and B are the same measurement, of 2026-01-01T00:00:00+00:00, commit 0123456789ab" in text
    with pytest.raises(StoreError, match="was not published at HEAD~1"):
        runs.published(path, "HEAD~1", folder)
    with pytest.raises(StoreError, match="git knows no revision 'nonsense'"):
        runs.published(path, "nonsense", folder)


def test_without_a_name_all_runs_are_compared_whose_rows_differ(repository, run_py, capsys):
    root, git = repository
    results, moved = root / "results", root / "results/moved/own.in_process"
    paths = {name: store.write(results, demo(name)) for name in ("faster", "as_it_was", "before", "gone", "damaged")}
    store.write(results, demo("elsewhere", seed=7))
    git("add", "-A")
    git("commit", "-qm", "published")
    twice = tuple(replace(row, value=row.value * 2) for row in demo().rows)
    store.write(results, replace(demo("faster"), rows=twice))
    moved.parent.mkdir()
    git("mv", str(paths["before"].parents[1]), str(moved))
    git("rm", "-rq", str(paths["gone"].parents[2]))
    git("commit", "-qm", "moved")
    paths["damaged"].with_suffix(".csv").write_text("")
    store.write(results, demo("new", seed=3))
    git("add", "-A")

    def told(revision):
        assert run_py("compare", "--rev", revision, "--results", str(results)) == 0
        return dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())

    origin = demo().info.provenance
    moved_to = replace(origin, device={**origin.device, "cpu": "another"})
    store.write(results, replace(demo("elsewhere"), info=replace(demo("elsewhere").info, provenance=moved_to)))
    unfinished = demo("as_it_was", seed=9)
    store.write(results, replace(unfinished, info=replace(unfinished.info, run="default-incomplete")))
    git("add", "-A")
    lines = told("HEAD~1")
    assert lines.pop("elsewhere/own.in_process/cpu/default").startswith(
        "on DIFFERENT MACHINES (A CPU, then another), 12 rows: "
    )
    assert lines.pop("faster/own.in_process/cpu/default") == "12 rows: 8 B slower, 4 B faster"
    assert lines.pop("gone/own.in_process/cpu/default") == "gone since"
    assert "new/own.in_process/cpu/default.json was not published at HEAD~1" in lines.pop(
        "new/own.in_process/cpu/default"
    )
    assert "is not the one that default.json was written with" in lines.pop("damaged/own.in_process/cpu/default")
    assert list(lines) == ["A is HEAD~1, B is now"], "what was only moved is no difference, nor what is as it was"
    git("commit", "-qm", "all of it")
    assert run_py("compare", "--rev", "HEAD", "--results", str(results)) == 0
    assert capsys.readouterr().out == "No recorded result has other rows than at HEAD.\n"


def test_what_was_published_is_found_where_it_lay_then(repository):
    root, git = repository
    path = store.write(root / "results", demo())
    moved = path.parents[1] / "h200" / path.name
    git("add", "results")
    git("commit", "-qm", "published")
    moved.parent.mkdir()
    for old in path.parent.iterdir():
        git("mv", str(old), str(moved.parent))
    git("commit", "-qm", "moved")
    folder = root / "was"
    folder.mkdir()
    assert store.read(runs.published(moved, "HEAD~1", folder)) == store.read(moved)


def test_stale_results_are_those_whose_code_has_commits_since(repository):
    root, git = repository
    head = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    for _ in range(2):
        (root / "a.py").write_text((root / "a.py").read_text() + "1")
        git("commit", "-qam", "changed")
    origin = replace(demo().info.provenance, commit=head.stdout.strip())

    def result(name, code):
        return replace(demo(), info=replace(demo().info, experiment=name, code=code, provenance=origin))

    text = runs.table([result("x", ("a.py",)), result("y", ("b.py",)), result("z", ())], root)
    assert "    2 commits  x/own.in_process/cpu/default" in text
    assert "y/own" not in text
    git("commit", "-q", "--allow-empty", "-m", "empty")
    (root / "b.py").write_text("2")
    git("commit", "-qam", "changed")
    assert "    1 commit   y/own.in_process/cpu/default" in runs.table([result("y", ("b.py",))], root)
    assert "z/own.in_process/cpu/default: no commit known" in text
    assert "1 of 3 runs are due" in text


# Sweeps


def swept(value, key="workload.count", **changes):
    return demo(run=f"{key.rpartition('.')[2]}={value}", changed={key: str(value)}, **changes)


def test_a_sweep_is_one_result_with_a_curve_over_its_key():
    default = demo(config={"workload": {"count": 4}})
    other = swept(3, "workload.seed")
    found = sweeps.joined([default, swept(8), swept(16), swept(2), other, swept(8, hardware="h200")])
    assert [r.info.run for r in found] == ["default", "sweep-count", "seed=3", "count=8"]
    info = found[1].info
    assert list(info.points)[::2] == [f"count={n} concurrency=1" for n in (2, 4, 8, 16)]
    assert info.points["count=16 concurrency=8"] == {"workload.concurrency": 8, "workload.count": 16}
    assert {row.point for row in found[1].rows} == set(info.points)
    assert len(found[1].rows) == 4 * len(default.rows)
    assert [panel.x for panel in info.plots[0].panels] == ["workload.count"] * 3
    assert [run.run for run in found[1].runs] == ["count=2", "default", "count=8", "count=16"]


def test_runs_of_several_processors_are_no_sweep():
    """They have one hardware key, and a curve over their speeds would be the processors' as much as the setting's."""
    other = swept(16)
    there = replace(other.info.provenance, device={**other.info.provenance.device, "cpu": "Another CPU"})
    runs_of = [swept(4), replace(other, info=replace(other.info, provenance=there)), swept(8)]
    assert [r.info.run for r in sweeps.joined(runs_of)] == ["sweep-count", "count=16"]


def test_the_answer_of_a_sweep_is_over_its_key():
    """Not of its last value, which alone may show nothing."""

    def found(**changes):
        runs_of = [swept(n, "workload.suffix_tokens", noise=0.001, **changes) for n in (64, 32)]
        rows = [replace(r, value=r.value * (1.44 if r.variant == "new" else 1)) for r in runs_of[1].rows]
        return sweeps.joined([runs_of[0], replace(runs_of[1], rows=tuple(rows))])[0]

    text = sentence(found(variants={"base": "without", "new": "with"}))
    ends = r"with 1\.50x \[.*\] at 64 to 2\.16x \[.*\] at 32, of without\."
    assert re.fullmatch(rf"Tokens/s, concurrency 8 over suffix tokens 32 to 64: {ends}", text)
    alone = sentence(found(variants={"base": "alone"}, gates=[]))
    assert alone.startswith("Tokens/s, concurrency 8 over suffix tokens 32 to 64: alone ")
    same = sweeps.joined([swept(n, "engine/dispatch", variants={"a": "a", "base": "b"}, rows=[]) for n in ("x", "y")])
    assert sentence(same[0]) == "There is no answer: no valid measurement."


def test_runs_that_differ_in_what_is_no_key_are_no_sweep():
    alike = [replace(swept(8), info=replace(swept(8).info, run=name)) for name in ("one", "other")]
    assert [r.info.run for r in sweeps.joined(alike)] == ["one", "other"]
    found = sweeps.joined([*alike, swept(16)])
    assert [r.info.run for r in found] == ["sweep-count", "other"]
    assert [run.run for run in found[0].runs] == ["one", "count=16"]


def test_a_sweep_is_as_doubtful_as_its_runs(tmp_path):
    error = ErrorGate("a", None, error=0.5, allowed=0.01, against="fp32")
    wrong = swept(8, gates=[different("a", "")], error_gates=(error,), status="incomplete: interrupted")
    info = next(r.info for r in sweeps.joined([swept(2), wrong]) if r.runs)
    assert info.status == "incomplete: interrupted"
    for gates in (info.gates, info.error_gates):
        failed = [gate for gate in gates if not gate.passed]
        assert {point for point in info.points for gate in failed if gate.covers("a", point)} == {
            f"count=8 concurrency={n}" for n in (1, 8)
        }
    for value in (2, 8):
        store.write(tmp_path / "results", swept(value))
    old = {"count=2": 7, "count=8": 0}
    report.rebuild(tmp_path / "results", tmp_path / "reports", since=lambda info: old.get(info.run, 0))
    assert "7 commits since" in (tmp_path / "reports/demo.md").read_text()


def test_a_page_of_a_sweep_has_a_table_and_a_figure_and_no_stack_of_runs(tmp_path):
    for value in (2, 4, 8):
        store.write(tmp_path / "results", swept(value))
    report.rebuild(tmp_path / "results", tmp_path / "reports")
    text = (tmp_path / "reports/demo.md").read_text()
    assert text.count("## cpu, with") == 1
    assert "count=4 concurrency=8" in text
    assert "![Over count](figures/demo-cpu-sweep-count-over-count.png)" in text
    assert (tmp_path / "reports/figures/demo-cpu-sweep-count-over-count.png").is_file()
    assert "[count=4](../results/demo/own.in_process/cpu/count=4.csv)" in text


# experiment=measure


def test_without_claims_the_answer_names_the_best_setting():
    quiet = demo(claims=(), noise=0.001)
    assert sentence(quiet).startswith("Best in tokens/s, concurrency 8: chunked prefill, 512 tokens a step, 1.50x [")
    same = demo(claims=(), variants={"base": "a", "new": "b"}, metrics={"itl_p99_ms": METRICS["itl_p99_ms"]})
    assert sentence(same).startswith("No difference is shown in P99 ITL, concurrency 8: a ")
    three = sentence(demo(claims=(), variants={"base": "a", "new": "b", "most": "c"}, noise=0.001))
    ratios, _, each = three.partition(" (")
    assert re.sub(r" \[.*?\]", "", ratios) == "Best in tokens/s, concurrency 8: c, 2.25x of a, 1.50x of b"
    assert [part.split(" [")[0][:4] for part in each.split("; ")] == ["a 4,", "b 6,", "c 9,"]
    alone = demo(claims=(), variants={"base": "a"})
    assert sentence(alone).startswith("Tokens/s, concurrency 8: a ")


def test_measure_takes_ones_own_model_and_workload(compose_config, checkpoint):
    settled = settle(compose_config, "measure", f"model={checkpoint}", "workload=uniform", "workload.count=8")
    experiment = Ablation.from_config(settled.config)
    assert settled.axes.scale == "random-qwen2"
    assert settled.changed == {"workload": "uniform", "workload.count": "8"}
    assert experiment.spec.search.rates
    assert list(experiment.variants) == ["default", "tokens_512", "at_once_8"]  # n-grams of made-up prompts say nothing
    typed = ["~experiment.variants.at_once_8", "+experiment.variants.few={scheduler: {max_num_seqs: 2}}"]
    texts = Ablation.from_config(settle(compose_config, "measure", *typed).config)
    assert list(texts.variants) == ["default", "tokens_512", "ngram", "few"]


SETTINGS = {
    "workload=text hardware=cpu": ["tokens_512", "at_once_8", "ngram"],
    "workload=multi_turn hardware=cpu": ["tokens_512", "at_once_8", "no_prefix_cache"],
    "workload=shared_prefix hardware=cpu": ["tokens_512", "at_once_8", "no_prefix_cache"],
    "workload=shared_prefix workload.hit_rate=0 hardware=cpu": ["tokens_512", "at_once_8"],
    "workload=uniform hardware=h200": ["tokens_512", "tokens_2048", "at_once_64", "fp8_kv", "fp8_weights"],
}


@pytest.mark.parametrize(("typed_in", "variants"), SETTINGS.items())
def test_measure_tries_the_settings_that_this_machine_and_workload_have_a_use_for(compose_config, typed_in, variants):
    experiment = Ablation.from_config(settle(compose_config, "measure", *typed_in.split()).config)
    assert list(experiment.variants) == ["default", *variants, *filter(None, [experiment.aa])]
    assert set(experiment.spec.variants) == set(experiment.variants) - {experiment.aa}


@pytest.mark.parametrize(
    "quantized", [{}, {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}]
)
def test_weights_that_are_quantized_already_are_not_quantized_again(compose_config, checkpoint, tmp_path, quantized):
    """By nobody who has asked for it: the setting is one of the experiment's own."""
    said = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | quantized))
    typed_in = (f"model={tmp_path}", "engine.model.load_format=dummy", "workload=uniform", "hardware=h200")
    settled = settle(compose_config, "measure", *typed_in, "engine.model.max_model_len=256")
    experiment = Ablation.from_config(settled.config)
    assert ("fp8_weights" in experiment.variants) is not quantized
    told = "Left out: weights in fp8: these weights are quantized already, or computed with by transformers' code."
    assert (told in experiment.notes) is bool(quantized)


def test_what_is_left_out_is_told_with_the_reason(compose_config, monkeypatch):
    def notes(*typed_in):
        return Ablation.from_config(settle(compose_config, "measure", "workload=uniform", *typed_in).config).notes

    assert notes("hardware=cpu")[:2] == [
        "Left out: 2,048 tokens a step, 64 requests at once, keys and values in fp8, weights in fp8: "
        "a setting for GPUs, and this is a CPU.",
        "Left out: without prefix cache: no two prompts of workload=uniform begin alike.",
    ]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for capability, told in {(8, 0): True, (8, 9): False, (9, 0): False}.items():
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda own=capability: own)
        why = "Left out: keys and values in fp8, weights in fp8: this GPU does not compute in fp8."
        assert (why in notes("hardware=h200")) is told


TRACE = "2023-11-16 18:15:0{}.0000000,100,5"


@pytest.mark.parametrize("workload", sorted(path.stem for path in (CONF / "workload").glob("*.yaml")))
def test_measure_takes_every_workload_or_says_which(compose_config, tmp_path, workload):
    (tmp_path / "t.csv").write_text(
        "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *map(TRACE.format, range(8))])
    )
    more = [f"workload.path={tmp_path}/t.csv", "workload.limit=8"] if workload == "trace" else []
    if workload == "mixed":
        why = (
            "measure sets arrivals, concurrency, rate_per_s itself, and workload=mixed has none: take fixed, uniform, "
        )
        with pytest.raises(ConfigError, match=why):
            settle(compose_config, "measure", f"workload={workload}")
        return
    settled = settle(compose_config, "measure", f"workload={workload}", *more)
    experiment = Ablation.from_config(settled.config)
    loads = [(point in experiment._tried, experiment._cell("default", point)) for point in experiment.points[:-1]]
    assert {(tried, cell.workload.arrivals.value) for tried, cell in loads} == {(False, "closed"), (True, "poisson")}
    assert all(cell.workload.make(Vocabulary(cell.engine.model), 0).measured for _, cell in loads[:4])
    assert [cell.workload.rate_per_s for tried, cell in loads if tried] == experiment.spec.search.rates
    assert any("in the place of 20 a second" in note for note in settled.notes) == (workload == "poisson")


def test_a_workload_that_lacks_what_points_set_is_named(compose_config):
    with pytest.raises(
        ConfigError, match="quickstart sets concurrency itself, and workload=mixed has none: take fixed"
    ):
        settle(compose_config, "quickstart", "workload=mixed")
    with pytest.raises(ConfigAttributeError, match="concurency"):  # which `explain` words: no workload has it
        settle(compose_config, "measure", "+experiment.points.workload.concurency=[3]")
