"""Every config composes and converts; every mistake in one is an error that names the key and the way out."""

import re
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from ideal import not_shown
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.ablation import Ablation
from experiments.capacity import CapacitySpec
from experiments.lab.config import axes, catalog, schema, typed
from experiments.lab.config.explain import explain, suggest
from experiments.lab.execute import execute
from experiments.lab.measure.kinds import Kind
from experiments.lab.store import provenance
from experiments.lab.workloads import WORKLOADS
from mini_infer.core.config import EngineConfig, LoadFormat
from mini_infer.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
EXPERIMENTS = {name: axes.read(CONF / f"experiment/{name}.yaml") for name in catalog.experiment_names(CONF)}
EVERY = [
    (name, scale, via)
    for name, node in EXPERIMENTS.items()
    for scale, via, _ in axes.nodes(node)
    # At a server's address it is what it is here, or over HTTP where the file says something of that.
    if via != axes.URL or (scale == next(iter(node["scales"])) and (node.get("via") or name == "latency"))
]
GROUPS = [(group, option) for group, options in catalog.groups(CONF).items() for option in options]


def build(config):
    return schema.experiment_class(config).from_config(config)


@pytest.mark.parametrize(("name", "scale", "via"), EVERY)
def test_every_experiment_composes_and_checks_its_settings(compose_config, name, scale, via):
    overrides = [f"experiment={name}", f"scale={scale}", f"via={via}"]
    settled = typed.settle(
        compose_config(*overrides, *(["peers.http.url=http://localhost"] * (via == "url"))), name, overrides
    )
    assert (settled.axes.scale, settled.axes.via) == (scale, via)
    said, composed = axes.said(name, scale, via), schema.plain(settled.config)
    assert said["experiment"].get("claims") == composed["experiment"].get("claims"), "without Hydra it says the same"
    assert len(said["experiment"].get("limits", ())) == len(composed["experiment"].get("limits") or ())
    assert said.get("engine", {}).get("model", {}).get("device") in (None, composed["engine"]["model"]["device"])
    model = Path(settled.config.engine.model.path).name
    assert settled.axes.model == ("" if scale == axes.NO_SCALE else model), "titles name what is measured"
    experiment = build(settled.config)
    assert experiment.spec.question
    assert experiment.spec.method
    assert experiment.claims or via == "url" or name in ("measure", "capacity")  # which ask about what is yours
    for path in experiment.spec.code:
        assert (ROOT / path).is_file(), path
    for plot in experiment.spec.plots:
        assert {panel.metric for panel in plot.panels} <= set(experiment.metrics)
    known = via != "url" and not name.endswith("_trace")  # where the requests are the same, and no file of yours
    if isinstance(experiment, Ablation) and known:
        assert not_shown(experiment) == []
    if isinstance(experiment, Ablation):
        assert experiment.spec.served_by(Kind.http).variants  # what via=url makes of it
        for engine in experiment._gated.values():  # asked by itself
            assert (engine.parallel.replicas, engine.parallel.prefill, engine.parallel.decode) == (1, 0, 0)
    require_gates(experiment)


@pytest.mark.parametrize(("name", "scale", "via"), EVERY)
def test_a_quantity_has_one_claim(name, scale, via):
    """With its target and its aim: what is asked of it beside another variant is another quantity, and what the
    original had is no second bound."""
    bounds = {}
    for claim in axes.said(name, scale, via)["experiment"].get("claims") or ():
        key = claim["metric"], claim["variant"], str(claim.get("at"))
        bounds.setdefault(key, []).append(claim)
    for key, claims in bounds.items():
        ratios = [any(bound.startswith("ratio_") for bound in claim) for claim in claims]
        beside = [
            (ratio, claim.get("to"), str(claim.get("against"))) for ratio, claim in zip(ratios, claims, strict=True)
        ]
        assert len(set(beside)) == len(claims), key
        assert len(claims) == 1 or not any(claim["source"].startswith("original") for claim in claims), key


def require_gates(experiment):
    """Where tokens are generated gates are on, and who has an engine and generates none says so on the page."""
    assert experiment.settings.gates or not experiment.generates
    if isinstance(experiment, Ablation):
        kinds = [(changes or {}).get("kind", "engine") for changes in experiment.spec.variants.values()]
        dry = experiment.engine.model.load_format is LoadFormat.dry  # whose tokens are made up
        assert experiment.generates == (not dry and bool({"engine", "served"} & set(kinds)))
    elif {"LLMEngine", "AsyncEngine"} & vars(sys.modules[type(experiment).__module__]).keys():
        assert experiment.generates or any("No gate of tokens" in limit for limit in experiment.spec.limits)


@pytest.mark.parametrize(
    ("setting", "device", "why"),
    [
        ("measure.gates=false", "cpu", "quickstart generates tokens, .*"),
        ("measure.aa=never", "cuda", "quickstart is measured on a GPU, .* its baseline a second time"),
    ],
)
def test_nothing_is_recorded_without_its_gates_and_on_a_gpu_its_second_arm(
    compose_config, tmp_path, setting, device, why
):
    typed = ["experiment=quickstart", setting, f"engine.model.device={device}"]
    config = compose_config(*typed, "paths.results=results")
    with pytest.raises(ConfigError, match=rf"{setting}: {why}: leave it out, or for a trial --record"):
        execute(config, "quickstart", typed, tmp_path)


def test_on_a_cpu_a_recorded_run_needs_no_second_arm(compose_config, tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "commit", Mock(side_effect=InterruptedError))  # what comes next
    typed = ["experiment=quickstart", "measure.aa=never"]
    with pytest.raises(InterruptedError):
        execute(compose_config(*typed, "paths.results=results"), "quickstart", typed, tmp_path)


def test_who_generates_tokens_on_a_gpu_has_a_gate_of_logits(compose_config):
    """What a scale allows them is left out where no engine runs, and nowhere else."""
    config = compose_config("experiment=capacity", "scale=7b", "system=simulated")
    assert config.experiment.gate_logit_error == 0.02
    schema.experiment_spec(CapacitySpec, config, generates=False)
    with pytest.raises(ConfigError, match="gate_logit_error"):
        schema.experiment_spec(CapacitySpec, config, generates=True)
    for name in ("calibrate", "disaggregation"):
        made = schema.experiment_class(at_7b := compose_config(f"experiment={name}", "scale=7b")).from_config(at_7b)
        assert made.spec.gate_logit_error == 0.02


def test_the_default_config_is_the_engines_own(compose_config):
    assert schema.engine_config(compose_config().engine) == EngineConfig(seed=0)


def test_options_do_what_they_say(compose_config):
    engine = schema.engine_config(
        compose_config("engine/cache=contiguous", "engine/batching=static", "model=qwen3_0_6b").engine
    )
    assert engine.cache.layout.value == "contiguous"
    assert not engine.cache.prefix_caching
    assert engine.scheduler.batching.value == "static"
    assert engine.model.load_format is LoadFormat.dummy
    assert engine.model.hf_config["head_dim"] == 128


def test_every_kind_of_workload_has_a_file():
    assert set(WORKLOADS) <= set(catalog.groups(CONF)["workload"])


def test_nodes_have_the_defaults_of_the_settings():
    made = schema.node(EngineConfig)
    made.cache.block_size = 3  # mutable, which the settings are not
    assert schema.build(EngineConfig, {}, "engine") == EngineConfig()


MISTAKES = [
    ("experiment=quikstart", r"experiment=quikstart; did you mean 'quickstart'\? Known: .*scheduler_overhead"),
    ("experiment=quikstart", r"Known: all_reduce"),  # and not what others build on
    ("model=tiny-targte", r"model=tiny-targte; did you mean 'tiny-target'\? Known: deepseek_v2_lite, dry"),
    ("engine/cache=pagd", r"engine/cache=pagd; did you mean 'paged'\? Known: contiguous, paged"),
    ("engine/cach=paged", r"'engine/cach'; did you mean 'engine/cache'\?"),
    ("engine=vllm", r"engine=vllm: another system is system=vllm, and mechanisms are engine/<name>="),
    ("experimnt=quickstart", r"'experimnt'; did you mean 'experiment'\?"),
    (
        "engine.cache.blok_size=3",
        r"'engine.cache.blok_size'; did you mean 'block_size'\? Known in engine.cache: layout",
    ),
    ("engine.cache.layout=pagd", r"engine.cache.layout cannot be 'pagd'; did you mean 'paged'\? Known: paged, contig"),
    ("engine.cache.block_size=many", r"engine.cache.block_size: Value 'many'"),
    ("workload.conut=3", r"'workload.conut'; did you mean 'count'\?"),
    ("measure.repeat=3", r"'measure.repeat'; did you mean 'repeats'\?"),
    ("quickstart", r"cannot read 'quickstart'.*key=value"),
    ("experiment=null", "takes the name of one of its options"),
    ("tracker.kind=wnb", r"tracker.kind cannot be 'wnb'.* Known: none, wandb"),
    ("engine/prefix_cache=off", "Known: disabled, enabled"),
    ("model.device=auto", r"unknown setting 'model.device'; did you mean 'engine.model.device'\?$"),
    ("cache.blok_size=3", r"unknown setting 'cache.blok_size'; did you mean 'engine.cache.block_size'\?$"),
    ("hardware=h200x2", r"hardware=h200x2: say hardware=h200, and a run counts the GPUs that it uses itself"),
    ("hardware=h20x2", r"hardware=h20x2; did you mean 'h200'\? Known: cpu, h200"),
    ("hardware.ceilings.read_gb_s=1", r"'read_gb_s' is typed under a list, which is given as a whole"),
    ("engine/drafting=none", r"'engine/drafting'; .* Known: .*engine/prefix_cache"),
]


@pytest.mark.parametrize(("override", "message"), MISTAKES)
def test_a_mistake_on_the_command_line_is_explained(compose_config, override, message):
    with pytest.raises(Exception) as caught:  # noqa: PT011  # Hydra's own kinds; the text is what matters
        compose_config(override)
    text = explain(caught.value, list(catalog.groups(CONF)))
    assert text is not None
    assert len(text.splitlines()) < 5
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(text)


def test_nobody_is_told_to_type_what_was_typed():
    assert suggest("model", ["model", "modes"]) == "; did you mean 'modes'? Known: model, modes"
    assert suggest("model", ["model"]) == ". Known: model"


@pytest.mark.parametrize(
    "text",
    [
        "ENGINE.model.device=cuda needs a GPU. Set ENGINE.model.device=auto",
        "ENGINE.numerics=batch_invariant, and 'ENGINE.cache.num_blocks'",
        "experiment.variants.on.cache.block_size=3",
        "mini-infer-serve --model.device auto",
        "measure.seed=3 and engine/numerics=fast",
        "/models/model.path, model.safetensors and these numerics",
    ],
)
def test_an_error_of_the_engine_names_keys_as_run_py_knows_them(text):
    for told in (text.replace("ENGINE.", ""), text.replace("ENGINE", "engine")):
        assert explain(ConfigError(told)) == text.replace("ENGINE", "engine")


def test_the_way_out_of_a_gpu_that_is_not_there_can_be_taken(run_py, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    asked = "experiment=prefix_cache", "hardware=h200"
    assert run_py(*asked, "measure.processes=1") == 2
    (way,) = re.findall(r"Set (\S+)$", capsys.readouterr().err.strip())
    assert way == "engine.model.device=auto"
    assert run_py("show", "prefix_cache", "hardware=h200", way) == 0
    capsys.readouterr()


MISTAKES_IN_YAML = [
    ({"clams": []}, r"'experiment.clams'; did you mean 'claims'\?"),
    ({"baseline": "hf"}, r"experiment.baseline: there is no variant 'hf'. Known: transformers, engine"),
    ({"metrics": ["ttft"]}, r"unknown metric 'ttft'; did you mean 'ttft_ms'\? Known: .*itl_ms"),
    ({"points": {"workload.concurency": [1]}}, r"'workload.concurency'; did you mean 'concurrency'\?"),
    ({"points": {"workload.concurrency": []}}, r"must be a list of values, got \[\]"),
    ({"points": {"workload.concurrency": ["x"]}}, r"workload.concurrency: Value 'x'"),
    ({"points": {"workload.concurrency": [0]}}, r"workload.concurrency must be at least 1, got 0"),
    (
        {"variants": {"transformers": {"kind": "hf"}, "engine": {"needs": ["gpus"]}}},
        r"experiment.variants.engine.needs must be a list of cpu, gpu, fp8, shared, unquantized; got \['gpus'\]",
    ),
    (
        {"variants": {"transformers": {"kind": "hf"}, "engine": {"needs": ["gpu"]}}, "baseline": "engine"},
        r"experiment.baseline=engine cannot be left out: a setting for GPUs, and this is a CPU",
    ),
    ({"variants": {"transformers": {"kind": "hg"}, "engine": {}}}, r"transformers.kind must be one of engine, hf"),
    (
        {"variants": {"transformers": {"kind": "hf"}, "engine": {"cache": {"blok_size": 3}}}},
        r"experiment.variants.engine: unknown setting .*blok_size'; did you mean 'block_size'\?",
    ),
    (
        {"variants": {"transformers": {"kind": "hf"}, "engine": {"cache": {"layout": "contiguous"}}}},
        r"prefix_caching=true needs engine.cache.layout=paged",
    ),
    (
        {"claims": [{"metric": "ttft_ms", "variant": "engine", "at": {"workload.concurrency": 9}, "at_most": 1}]},
        r"experiment.claims\[0\].at=.* names no measured point. Measured: concurrency=1, concurrency=8",
    ),
    ({"claims": [{"metric": "ttft_ms", "variant": "engine"}]}, r"needs exactly one of at_least, at_most, ratio"),
    (
        {"claims": [{"metric": "itl_ms", "variant": "engine", "at_most": 1}]},
        r"claims\[0\] is about a metric that is not measured, 'itl_ms'; did you mean 'ttft_ms'\?",
    ),
    (
        {"claims": [{"metric": "ttft_ms", "variant": "engin", "at_most": 1}]},
        r"claims\[0\] is about an unknown variant, 'engin'; did you mean 'engine'\? Known: transformers, engine",
    ),
    ({"claims": [{"metric": "ttft_ms", "vriant": "engine", "at_most": 1}]}, r"did you mean 'variant'\?"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES_IN_YAML)
def test_a_mistake_in_an_experiment_is_found_before_anything_runs(compose_config, changes, message):
    config = compose_config("experiment=quickstart")
    OmegaConf.set_struct(config, False)
    for key, value in changes.items():
        config.experiment[key] = value
    OmegaConf.set_struct(config, True)
    try:
        build(config)
        text = "no error"
    except (ConfigError, OmegaConfBaseException) as error:
        text = explain(error)
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(text)


def test_no_variant_has_the_name_of_the_second_arm(compose_config):
    config = compose_config("experiment=quickstart", "measure.aa=always")
    OmegaConf.set_struct(config, False)
    config.experiment.variants["transformers again"] = {"kind": "hf"}
    with pytest.raises(ConfigError, match="transformers again has the name of the baseline's second arm: rename it"):
        build(config)


def test_bad_input_is_told_by_our_message_alone(run_py, capsys):
    assert run_py("experiment=quickstart", "workload.concurrency=4") == 2
    (line,) = capsys.readouterr().err.splitlines()  # and before it no other one of Hydra's
    assert line.startswith("error: workload.concurrency=4: quickstart sets workload.concurrency itself, by its points")


def test_a_crash_is_no_bad_input_and_keeps_its_traceback(run_py, monkeypatch):
    monkeypatch.setattr("experiments.lab.execute.execute", Mock(side_effect=ZeroDivisionError("a fault of ours")))
    with pytest.raises(ZeroDivisionError, match="a fault of ours"):
        run_py("experiment=quickstart")


@pytest.mark.parametrize("arguments", [[], ["experiment=quikstart"]])
def test_the_program_ends_with_code_2_and_no_traceback(run_py, capsys, arguments):
    assert run_py(*arguments) == 2
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    if not arguments:
        assert all(name in shown for name in EXPERIMENTS)


def test_help_lists_experiments_with_their_questions_and_all_groups(run_py, capsys):
    assert run_py("--help") == 0
    shown = capsys.readouterr().out
    for name, node in EXPERIMENTS.items():
        assert name in shown
        assert str(node["experiment"]["question"]).strip() in shown
    for group, option in GROUPS:
        assert group in shown
        assert option in shown


@pytest.mark.parametrize(
    ("arguments", "time"),
    [
        (["prefix_cache", "scale=tiny"], r"about \d+ minutes on cpu: "),
        (["measure"], r"about (\d+ minutes) on cpu: \1 for (\d+) passes and their searches on .*, and this has \2$"),
        (["latency", "scale=7b"], r"about \d+ minutes on h200: "),  # perhaps a result of before there were processes
        (["ceilings"], r"\d+ minutes on \w+, on "),
    ],
)
def test_show_says_how_long_a_run_takes(run_py, capsys, arguments, time):
    assert run_py("show", *arguments) == 0
    assert re.search(f"^time      {time}", capsys.readouterr().out, re.MULTILINE)


def test_half_of_the_passes_take_half_of_the_time(run_py, capsys):
    def told(*typed):
        assert run_py("show", "quickstart", *typed) == 0
        return re.search(
            r"^time +about (\d+) (s|minutes) on cpu: .* and this has (\d+)$", capsys.readouterr().out, re.MULTILINE
        )

    whole, half = told("measure.repeats=2"), told("measure.repeats=1")
    seconds = [int(found[1]) * {"s": 1, "minutes": 60}[found[2]] for found in (whole, half)]
    assert int(whole[3]) == 2 * int(half[3])
    assert seconds[1] == pytest.approx(seconds[0] / 2, rel=0.25)
    assert "1 minutes" not in (whole[0] + half[0])


def test_show_names_what_an_experiment_that_is_no_ablation_measures(run_py, capsys):
    assert run_py("show", "calibrate") == 0
    shown = capsys.readouterr().out
    assert "\nvariants  engine\npoints    2: rows alone; with prompts\nmetrics   steps, median_error, " in shown


def test_a_model_may_be_given_by_its_folder():
    assert catalog.shorthand(["model=tiny", "model=/models/x", "a=b/c"], CONF) == [
        "model=tiny",
        "engine.model.path=/models/x",
        "a=b/c",
    ]
