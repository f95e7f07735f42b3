"""Every experiment in conf/ runs from its config to its report, on the dry model and with few requests."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from omegaconf import OmegaConf, open_dict
from test_lab_configs import EXPERIMENTS

from experiments import expert_quantization
from experiments.lab.config import axes
from experiments.lab.execute import execute
from experiments.lab.judge import exact_gate, logit_gate
from experiments.lab.kernels import case as kernel_timer
from experiments.lab.store import result as store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("quick_figures", "peers_are_forked", "engines_are_threads"),
]  # together they take a minute

ROOT = Path(__file__).resolve().parents[2]


def _runs(node) -> Iterator[tuple[str, list[str]]]:
    """(scale, those variants that run) of an experiment: at the first scale all of them, named by nobody; at others
    those which differ from all before by more than a number. Of sizes, points and bounds a run here has its own, and
    test_lab_configs.py composes them all. Over HTTP a server runs in test_lab_serving.py."""
    scales = [(scale, said) for scale, via, said in axes.nodes(node) if via == axes.IN_PROCESS] or [("", {})]
    known = {(name, ()) for name in node["experiment"].get("variants") or {}}
    for index, (scale, said) in enumerate(scales):
        variants = said.get("experiment", {}).get("variants") or {}
        ours = {name: changes or {} for name, changes in variants.items() if not _is_peer(changes)}
        new = [name for name, changes in ours.items() if (name, _words(changes)) not in known]
        if index == 0 or new:
            yield scale, new if index else []
        known |= {(name, which) for name, changes in ours.items() for which in ((), _words(changes))}


def _is_peer(changes) -> bool:
    return (changes or {}).get("kind", "engine") not in ("engine", "served")


def _words(node, key: str = "") -> tuple[str, ...]:
    """The settings that are no numbers, and no label."""
    if isinstance(node, Mapping):
        return tuple(word for name, item in node.items() for word in _words(item, f"{key}.{name}"))
    return () if (type(node) in (int, float) or key == ".label") else (f"{key}={node}",)


EVERY = [(name, *run) for name, node in EXPERIMENTS.items() for run in _runs(node)]

# A short run is too small for a percentile, and a busy machine may be late or change its speed meanwhile.
FORGIVEN = ("not shown: ", "fell behind its schedule", "the machine's speed changed", "latencies add up to")
FEW = {
    "fixed": ["workload.count=4", "workload.prompt_tokens=40", "workload.output_tokens=8"],
    "uniform": [
        *("workload.count=4", "workload.warmup=2", "workload.min_output_tokens=8", "workload.max_output_tokens=24")
    ],
    "text": ["workload.count=4"],
    "shared_prefix": ["workload.count=4", "workload.prefix_tokens=160", "workload.suffix_tokens=40"],
    "multi_turn": [
        *("workload.conversations=2", "workload.turns=2", "workload.prompt_tokens=40", "workload.user_tokens=8"),
        *("workload.answer_tokens=12", "workload.think_s=0"),
    ],
    "mixed": [
        *("workload.streams=2", "workload.stream_output_tokens=6", "workload.prompts=2"),
        *("workload.prompt_every_s=0.01", "workload.prompt_tokens=1024"),
    ],
    "trace": [
        "workload.limit=4",
        "workload.shrink=8",
        "workload.max_prompt_tokens=200",
        "workload.max_output_tokens=12",
    ],
}
# On a CPU there is torch alone, so the sweeps keep what it can do.
KERNELS = [
    *("engine.model.device=cpu", "measure.repeats=1", "experiment.dtype=float32", "~experiment.variants.triton"),
    "hardware=h200",
]
OWN = {
    "scheduler_overhead": [
        *("experiment.steps=20", "experiment.matches=3", "measure.repeats=1", "experiment.waiting=[10,100]"),
        *("experiment.running=[8,16,32]", "experiment.prompt_tokens=[512]", "experiment.waiting_running=16"),
    ],
    "quantization": [
        "engine.model.path=tiny-draft",
        *("experiment.windows=1", "experiment.window_tokens=32", "experiment.few_windows=1", "experiment.prompts=1"),
        *("experiment.new_tokens=3", "experiment.samples=1", "experiment.length=16", "experiment.single=[w4_rtn]"),
        *("experiment.parts=[down]", "experiment.left=[0.2]"),
        # What is calibrated takes longer; tests/calibration has it on a smaller model.
        *("~experiment.variants.w8a8_smoothquant", "~experiment.variants.mixed", "~experiment.variants.w4_awq"),
        *("~experiment.variants.w4_gptq", "~experiment.variants.w4_gptq_32", "~experiment.variants.w4_gptq_32z"),
    ],
    "expert_quantization": [  # one variant of a kind
        *("experiment.windows=1", "experiment.window_tokens=4", "~experiment.variants.bf16"),
        *("~experiment.variants.w8a16", "~experiment.variants.w4_64", "~experiment.variants.w4_32"),
        "~experiment.variants.uniform",
    ],
    "fleet": [
        *("experiment.window_s=8", "experiment.restart_s=2"),
        *("~experiment.cases", "+experiment.cases={small: {replicas: 3, routers: 2, down: 0.4, swing: 0.5}}"),
        *("experiment.prefix_tokens=64", "experiment.claims=[]"),
    ],
    "simulator_speed": ["experiment.simulated_s=16", "experiment.replicas=[2]", "measure.repeats=1"],
    "capacity": [
        *("model=dry", "engine.model.device=cpu", "engine.model.dry.step_ms=2", "engine.cache.memory_gib=null"),
        *("engine.model.max_model_len=1024", "workload.count=10", "workload.prefix_tokens=64"),
    ],
    "calibrate": [
        *("model=tiny", "engine.model.path=tiny-draft", "engine.model.device=cpu", "engine.cache.memory_gib=0.03"),
        *("engine.model.load_format=auto", "engine.model.hf_config=null", "engine.model.dtype=float32"),
        *(
            "engine.model.routing=learned",
            "experiment.rows=[1,2]",
            "experiment.contexts=[16]",
            "experiment.prompts=[2,4,8,16,24,32]",
        ),
        *("experiment.decodes=[2]", "experiment.beside_prompts=[4,8,16]", "+experiment.gate_logit_error=0.02"),
    ],
    "ceilings": ["experiment.mib={cpu: [1]}", "experiment.matmul={cpu: [64]}", "measure.repeats=1"],
    "fused_kernels": [
        *KERNELS,
        "~experiment.variants.compile",
        "experiment.sweeps=[{case: add_rms_norm, shapes: {tokens: [3], hidden: [64]}},"
        "{case: rope_and_store, shapes: {tokens: [3], heads: ['4/2'], qk_norm: [true], head_dim: [16]}},"
        "{case: silu_mul, shapes: {tokens: [3], inner: [64]}},"
        "{case: gemv, shapes: {rows: [1], matrix: {small: {out: 24, in: 32}}}},"
        "{case: gated_linear, shapes: {rows: [3], model: {small: {inner: 24, hidden: 32}}}}]",
    ],
    "all_reduce": [
        *("engine.model.device=cpu", "measure.repeats=1", "experiment.dtype=float32", "experiment.hidden=32"),
        "experiment.rows=[1,3]",
    ],
    "expert_exchange": [
        *("engine.model.device=cpu", "measure.repeats=1", "experiment.dtype=float32", "experiment.hidden=16"),
        *("experiment.inner=8", "experiment.experts=4", "experiment.chosen=2", "experiment.tokens=[1]"),
        "experiment.routing=[zipf]",
    ],
    "disaggregation": [
        *("model=tiny", "engine.model.path=tiny-draft", "engine.model.device=cpu", "engine.model.dtype=float32"),
        *("engine.model.max_model_len=512", "engine.cache.memory_gib=0.03", "measure.repeats=1"),
        *("engine.model.load_format=auto", "engine.model.hf_config=null", "engine.scheduler.max_num_seqs=16"),
        *("experiment.prompt_tokens=[40]", "experiment.prompts=1", "experiment.stream_tokens=4"),
        "+experiment.gate_logit_error=0.02",
        "experiment.mixes=[{name: long prompts, prompt_tokens: 40, output_tokens: 3, rates_per_s: [100], "
        "seconds: 0.03, streams: 1}]",
    ],
    "composition_moe": [  # which no dry model is
        *("model=tiny_moe", "engine.model.device=cpu", "engine.model.dtype=float32", "engine.cache.memory_gib=0.03"),
        *("engine.model.load_format=auto", "engine.model.hf_config=null", "engine.model.routing=learned"),
        *("engine.model.max_model_len=256", "engine.scheduler.max_num_batched_tokens=256", "measure.repeats=1"),
        *("workload.count=4", "workload.prefix_tokens=32", "workload.suffix_tokens=8", "workload.output_tokens=4"),
        *("measure.gates=false", "measure.aa=never"),
    ],
    "moe_layer": [
        *(option for option in KERNELS if option != "~experiment.variants.triton"),
        *("~experiment.variants.few", "~experiment.variants.grouped"),
        "experiment.sweeps=[{case: moe_layer, "
        "shapes: {tokens: [3], experts: [4], chosen: [2], hidden: [16], inner: [8]}}]",
    ],
    "kv_push": [
        *(option for option in KERNELS if option != "~experiment.variants.triton"),
        "experiment.sweeps=[{case: kv_push, shapes: {tokens: [40], layers: [3], kv_heads: [2], head_size: [8]}}]",
    ],
    "attention_backends": [
        *KERNELS,
        "experiment.sweeps=[{case: prefill, shapes: {heads: ['4/2'], length: [40], queries: [24], head_dim: [16]}},"
        "{case: decode, shapes: {heads: ['4/2'], batch: [3], length: [40], head_dim: [16]}}]",
    ],
}
# A dry model has no draft: the shipped draft model runs these as target and as draft, with what is slow left out. KV of
# the tiers is real, too.
_PAIR = [
    *(
        "model=tiny",
        "engine.model.path=tiny-draft",
        "engine.model.dtype=float32",
        "engine.model.device=cpu",
        "engine.model.max_model_len=512",
    ),
    # An engine with drafts measures what steps of every size cost, up to the largest there can be.
    *("engine.scheduler.max_num_seqs=4", "engine.scheduler.max_num_batched_tokens=512", "engine.cache.memory_gib=0.03"),
    *("measure.repeats=1", "measure.aa=never"),
]
_DRAFT = "engine.speculation.draft={path: tiny-draft, load_format: auto, hf_config: null}"
PAIRED = {
    "spec_decode": [
        *("~experiment.variants.draft_1", "~experiment.variants.draft_2", "~experiment.variants.draft_7"),
        "workload.min_output_tokens=8",
        "workload.max_output_tokens=8",
    ],
    "spec_decode_edits": ["workload.min_output_tokens=8", "workload.max_output_tokens=8"],
    "spec_decode_drafts": [_DRAFT],
    "spec_decode_acceptance": [_DRAFT],
    "spec_decode_adaptive": [_DRAFT],
    "spec_decode_quantized": [_DRAFT],
    "quantization_speed": [],
    "kv_tiers": ["engine.cache.num_blocks=null"],
    "composition": ["engine.model.max_model_len=400", "workload.output_tokens=12", _DRAFT],
}
CHOSEN = {"composition": ["prefix", "overlap", "drafts", "prefix+drafts"]}  # one pair of two kinds
ELSEWHERE = {"simulator_trace"}  # test_lab_simulated.py runs it
HEAVY = {"mla", "expert_parallel", "scaling"}  # whose points are more than a test can take
# A dry model has nothing to share: tests/parallel has engines.
OVER_RANKS = {"expert_parallel", "pipeline_parallel", "scaling"}
NEEDS_TRITON = {"flash_decode", "kv_fp8", "mla_decode"}  # test_lab_kernels.py runs it in Triton's interpreter
LEFT_OUT = NEEDS_TRITON | ELSEWHERE
GATED = ("calibrate", "disaggregation")  # by tokens and by logits, with an engine of their own


@pytest.fixture(autouse=True)
def quick_kernels(monkeypatch) -> None:
    monkeypatch.setattr(kernel_timer, "PASS_US", 10.0)
    monkeypatch.setattr(kernel_timer, "MAX_COPIES", 2)


@pytest.fixture(autouse=True)
def quick_gates(monkeypatch) -> None:
    """Settings that a gate has seen, of whichever experiment, are not asked again. Of the probes, all of which
    test_lab_exact_gate.py asks, few are: equal blocks behind other beginnings, and the end of a chunk."""
    monkeypatch.setattr(exact_gate, "CHUNK", 96)
    monkeypatch.setattr(expert_quantization, "GATE_ANSWER", 4)
    monkeypatch.setattr(exact_gate, "MODEL", exact_gate.DRAFT)
    monkeypatch.setattr(exact_gate, "probes", lambda whole=False: _few(PROBES(whole)))
    monkeypatch.setattr(exact_gate.ExactGate, "_gates", _gates_once)
    monkeypatch.setattr(logit_gate, "expect", partial(_once, EXPECT))
    monkeypatch.setattr(logit_gate, "measure", partial(_once, LOGITS))
    monkeypatch.setattr(logit_gate, "PROMPTS", (7, 40))
    monkeypatch.setattr(logit_gate, "STEPS", 3)


PROBES, GATES_OF = exact_gate.probes, exact_gate.ExactGate._gates
EXPECT, LOGITS = logit_gate.expect, logit_gate.measure
GATES: list = []  # what was asked, and the gates
KNOWN: list = []  # what was asked, and the answer


def _few(probes):
    chosen = [*probes[2:5], *(probe for probe in probes if len(probe[0]) == exact_gate.CHUNK + 1)]
    return [(prompt, replace(params, max_tokens=6)) for prompt, params in chosen]


def _gates_once(self, variant, *asked):
    if all(known != asked for known, _ in GATES):
        GATES.append((asked, GATES_OF(self, variant, *asked)))
    return next([replace(gate, variant=variant) for gate in found] for known, found in GATES if known == asked)


def _once(function, *asked):
    if all(known != (function, asked) for known, _ in KNOWN):
        KNOWN.append(((function, asked), function(*asked)))
    return next(answer for known, answer in KNOWN if known == (function, asked))


@pytest.mark.parametrize(
    ("name", "scale", "alone"),
    [pytest.param(*case, id="-".join(case[:2])) for case in EVERY if case[0] not in LEFT_OUT],
)
def test_it_runs(compose_config, tmp_path: Path, name: str, scale: str, alone: list[str]) -> None:
    places = [f"paths.{place}={tmp_path / place}" for place in ("results", "reports")]
    chosen = [f"experiment={name}", *([f"scale={scale}"] if scale else [])]
    overrides = [*chosen, *places, "measure.threads=1"]  # more of them would wait for each other on a busy machine
    if name in OWN:
        overrides += OWN[name]
    elif name.endswith("_trace"):
        trace = _recorded(tmp_path, 4)
        overrides += [
            "model=dry",
            "engine.model.device=cpu",
            "engine.model.dry.max_model_len=2048",
            "measure.repeats=1",
        ]
        overrides += [f"workload.path={trace}", *FEW["trace"]]
    elif name in PAIRED:
        overrides += [*_PAIR, *FEW[_kind(compose_config(*chosen, "model=tiny"))], *PAIRED[name]]
    else:
        overrides += [
            "model=dry",
            "engine.model.device=cpu",
            "engine.model.dry.max_model_len=2048",
            f"engine.model.dry.step_ms={int(name.startswith('simulator'))}",  # what takes no time has no rates
            "measure.repeats=1",
            *FEW[_kind(compose_config(*chosen, "model=dry"))],
        ]
    config = compose_config(*overrides)
    with open_dict(config):
        config.experiment.claims = []  # they are about points and sizes that this run does not have
        chosen_variants = alone or CHOSEN.get(name, [])
        for variant in [*config.experiment.variants] if chosen_variants else ():
            if variant not in (*chosen_variants, config.experiment.baseline):
                del config.experiment.variants[variant]
        for variant in [*config.experiment.variants] if name == "composition_moe" else ():
            if "chunked" in variant or "overlap" in variant:  # as in `composition`
                del config.experiment.variants[variant]
        if name not in OWN:
            _leave_out_peers(config.experiment)
        if name in PAIRED or name in HEAVY:
            config.experiment.points = {}
        for changes in config.experiment.variants.values() if name in OVER_RANKS else ():
            changes.pop("parallel", None)
        for changes in config.experiment.variants.values() if name.startswith("kv_tiers") else ():
            if "host_prefix_gib" in changes.get("cache", {}):
                # A dry model's blocks are small: 2,000 of them.
                changes.cache.host_prefix_gib = 0.01 if name in PAIRED else 2**-12
        if "search" in config.experiment:
            few = {"low_per_s": 200, "high_per_s": 800, "steps": 2, "doublings": 0, "seconds": 0}
            config.experiment.search.update(few)
        if config.experiment.get("keep_engines") and name not in OWN:
            config.engine.model.max_model_len = min(config.engine.model.max_model_len or 2048, 2048)
            _leave_out_the_gpu(config.experiment)
    # Or hardware=h200 would say where; what is few was no setting.
    typed = [*chosen, *(["engine.model.device=cpu"] if "hardware=h200" in overrides else [])]
    report = execute(config, name, typed, ROOT)

    (table,) = _tables(tmp_path, name)
    rows = list(csv.DictReader(table.open()))
    info = store.read(table.with_suffix(".json")).info
    gates = [gate for gate in info.gates if gate.against]
    assert all(gate.passed for gate in (*gates, *info.error_gates))  # each request gets what it is answered alone
    assert gates or name not in (*GATED, "expert_quantization", "quantization", "scheduler_overhead")
    assert name not in GATED or {gate.variant for gate in info.error_gates} == {gate.variant for gate in gates}
    assert name not in PAIRED or {gate.variant for gate in gates} == set(config.experiment.variants)
    assert {row["variant"] for row in rows}
    if name not in OWN:
        wrong = {row["reason"] for row in rows if row["valid"] == "false"}
        assert all(any(word in reason for word in FORGIVEN) for reason in wrong), wrong
    assert str(config.experiment.question)[:30] in report.read_text()


@pytest.mark.soak
@pytest.mark.usefixtures("peers_are_forked")
def test_recorded_arrivals_reach_two_engines_behind_a_router(compose_config, tmp_path: Path) -> None:
    """With servers, as `run.py experiment=replicas_trace workload.path=FILE` starts them."""
    typed = ["experiment=replicas_trace", f"workload.path={_recorded(tmp_path, 12)}"]
    places = [f"paths.{place}={tmp_path / place}" for place in ("results", "reports")]
    settings = ["workload.limit=12", "workload.warmup=2", "measure.repeats=1", "measure.threads=1"]
    config = compose_config(*typed, *places, *settings)
    with open_dict(config):
        config.experiment.points = {"workload.rate_scale": [2]}
        for name in ("round_robin", "least_loaded"):
            del config.experiment.variants[name]
    execute(config, "replicas_trace", typed, ROOT)

    (table,) = _tables(tmp_path, "replicas_trace")
    rows = list(csv.DictReader(table.open()))
    values = {(row["variant"], row["metric"]): float(row["value"]) for row in rows if row["value"]}
    for variant in ("one", "prefix_aware"):
        assert values[variant, "slo_share"] > 0
        assert values[variant, "prefix_hit_rate"] > 0.3  # two of each three blocks are everybody's
    wrong = {row["reason"] for row in rows if row["valid"] == "false"}
    assert all(any(word in reason for word in FORGIVEN) for reason in wrong), wrong


def _recorded(folder: Path, requests: int) -> Path:
    """A made-up trace as Mooncake's are written."""
    trace = folder / "mooncake.jsonl"
    line = '{"timestamp": %d, "input_length": 1500, "output_length": 90, "hash_ids": [7, 8, %d]}\n'
    trace.write_text("".join(line % (10 * number, number) for number in range(requests)))
    return trace


def _kind(config) -> str:
    return (
        OmegaConf.get_type(config.workload)
        .__name__.lower()
        .replace("sharedprefix", "shared_prefix")
        .replace("multiturn", "multi_turn")
    )


def _leave_out_peers(experiment) -> None:
    """transformers cannot run a model without weights, and a server (test_lab_serving.py) takes seconds to start: its
    variants are measured without it."""
    for changes in experiment.variants.values():
        if (changes or {}).get("kind") == "served":
            del changes["kind"]
        (changes or {}).pop("parallel", None)  # several engines are a server's, too, and a dry model has no ranks
    peers = [name for name, changes in experiment.variants.items() if _is_peer(changes)]
    for name in peers:
        del experiment.variants[name]
    if experiment.baseline in peers:
        experiment.baseline = next(iter(experiment.variants))


def _leave_out_the_gpu(experiment) -> None:
    """Points of full size, and graphs."""
    experiment.points = {}
    experiment.again_at = experiment.gate_at = []
    if experiment.get("timeline") is not None:
        experiment.timeline = {}
    if experiment.get("profile") is not None:
        experiment.profile = [{}]
    for changes in experiment.variants.values():
        (changes or {}).pop("graphs", None)


def _tables(tmp_path: Path, name: str) -> list[Path]:
    found = (tmp_path / "results" / name).glob("*/*cpu/*.csv")  # or simulated-cpu
    return [
        path for path in found if not path.name.endswith((".steps.csv", ".requests.csv", ".gaps.csv", ".blocks.csv"))
    ]
