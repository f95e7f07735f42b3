"""The gate on logits: what is compared, what a wrong kernel does to it, and what becomes of it in a run."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from made_up import result
from small_runs import measured, probe

from experiments import ablation
from experiments.lab.judge import logit_gate
from experiments.lab.judge.claims import Bound, Claim, Verdict, judge
from experiments.lab.judge.gate import ErrorGate
from experiments.lab.measure import cells
from experiments.lab.measure.kinds import Kind
from experiments.lab.show import report
from experiments.lab.show.answer import flags
from experiments.lab.show.grids import Sheet
from experiments.lab.store import result as store
from experiments.lab.store.rows import Row, Table
from mini_infer.core.config import EngineConfig, KernelChoice, When
from mini_infer.core.errors import ConfigError
from mini_infer.core.model_config import Quantization
from mini_infer.kernels.ops import TorchKernels

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 5,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1.0e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 300,
    "torch_dtype": "bfloat16",
    "layer_types": ["full_attention"] * 5,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(logit_gate, "PROMPTS", (7, 40))
    monkeypatch.setattr(logit_gate, "STEPS", 4)


def config(dtype="bfloat16", **sections):
    model = {"path": "some/model", "load_format": "dummy", "hf_config": SHAPE, "dtype": dtype, "device": "cpu"}
    return EngineConfig.from_dict({"model": model, "cache": {"memory_gib": 0.01}, **sections})


def test_the_model_keeps_its_shape_and_loses_layers():
    scheduler, lora = {"max_num_batched_tokens": 512, "max_num_seqs": 256}, {"max_adapters": 1, "dummy": 1}
    small = logit_gate.shrunk(config(scheduler=scheduler, lora=lora))
    assert small.model.hf_config["num_hidden_layers"] == 2
    assert small.model.hf_config["layer_types"] == ["full_attention"] * 2
    assert SHAPE["num_hidden_layers"] == 5  # and the one that was given stays as it was
    assert (small.model.max_model_len, small.cache.num_blocks, small.cache.memory_gib) == (512, 128, None)
    assert small.scheduler.max_num_batched_tokens == 512  # chunks are what they were
    assert small.lora.max_adapters == 0
    assert logit_gate.shrunk(small) == small


def test_the_reference_is_plain_torch_in_fp32():
    exact = logit_gate.reference(logit_gate.shrunk(config()))
    assert (exact.model.dtype.value, exact.model.kernels) == ("float32", KernelChoice.torch)
    assert (exact.attention.prefill.value, exact.attention.decode.value) == ("sdpa", "sdpa")
    assert (exact.graphs.capture, exact.scheduler.overlap) == (When.never, When.never)
    assert exact.model.seed == 0


def test_a_checkpoint_gives_its_shape():
    tiny = EngineConfig.from_dict({"model": {"path": "tiny-target", "device": "cpu"}})
    small = logit_gate.shrunk(tiny)
    assert small.model.load_format.value == "dummy"
    assert small.model.hf_config["num_hidden_layers"] == 2


def test_fp32_against_itself_has_no_error():
    (gate,) = logit_gate.gates({"new": config("float32")}, 0.02)
    assert gate.error < 1e-5  # a batch's sums may have another order
    assert (gate.equal_rows, gate.rows, gate.point) == (
        20,
        20,
        None,
    )  # two prompts, five logits each, alone and together
    assert gate.passed
    assert (
        gate.against == "sdpa in fp32 (2 layers; prefill of 7, 40 tokens, then 4 decode steps of 1 row and of 2 rows)"
    )


def test_bf16_is_near_and_variants_alike_are_computed_once(monkeypatch):
    calls = []
    for name in ("expect", "measure"):
        real = getattr(logit_gate, name)
        monkeypatch.setattr(logit_gate, name, lambda *of, name=name, real=real: (calls.append(name), real(*of))[1])
    drafts = {"method": "ngram", "num_tokens": 2}
    same = config(scheduler={"max_num_seqs": 7, "overlap": "always"}, speculation=drafts)
    other = config(scheduler={"max_num_batched_tokens": 16, "max_num_seqs": 7})
    found = logit_gate.gates({"base": config(), "same": same, "chunks": other}, 0.02)
    assert calls == ["expect", "measure", "measure"], "chunks need no reference of their own"
    assert [gate.variant for gate in found] == ["base", "same", "chunks"]
    assert all(1e-4 < gate.error < 0.02 and gate.passed for gate in found)
    assert found[0].error == found[1].error


def test_a_wrong_kernel_fails(monkeypatch):
    real = TorchKernels.silu_mul
    monkeypatch.setattr(
        TorchKernels, "silu_mul", lambda self, x: real(self, x) * (1.2 if x.dtype is torch.bfloat16 else 1)
    )
    (gate,) = logit_gate.gates({"new": config()}, 0.02)
    assert gate.error > 0.02
    assert not gate.passed


@pytest.mark.parametrize(("scheme", "most"), [("w8a16", 0.02), ("w8a8", 0.1), ("fp8", 0.15)])
def test_codes_that_flip_are_allowed_for_where_activations_are_rounded_alone(scheme, most):
    given = config()
    given = replace(given, model=replace(given.model, quantization=Quantization(scheme)))
    (gate,) = logit_gate.gates({"new": given}, 0.02)
    assert gate.passed
    assert (gate.allowed == 0.02) == (scheme == "w8a16")
    assert gate.allowed <= most


def test_a_wrong_kernel_fails_where_activations_are_rounded(monkeypatch):
    real = TorchKernels.quantized_linear

    def wrong(self, x, *rest, **others):
        y = real(self, x, *rest, **others)
        return y * (1.2 if y.dtype is torch.bfloat16 else 1)

    monkeypatch.setattr(TorchKernels, "quantized_linear", wrong)
    given = config()
    given = replace(given, model=replace(given.model, quantization=Quantization.fp8))
    (gate,) = logit_gate.gates({"new": given}, 0.02)
    assert not gate.passed


def test_errors_are_of_rows():
    expected = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 10.0]])
    found = logit_gate.compare(torch.tensor([[3.0, 4.5, 0.0], [0.0, 11.0, 10.0]]), expected, 0.02, "x")
    assert found == ErrorGate("", None, pytest.approx(1.1), 0.02, "x", 1, 2)
    broken = logit_gate.compare(torch.tensor([[math.nan, 4.0, 0.0], [0.0, 0.0, 10.0]]), expected, 0.02, "x")
    assert math.isnan(broken.error)
    assert not broken.passed


# --- in a run ---


@pytest.fixture
def build(compose_config):
    settings = ("measure.repeats=1", "engine.cache.num_blocks=64", "workload=fixed", "workload.count=2")
    lengths = ("workload.prompt_tokens=20", "workload.output_tokens=3")
    return partial(probe, compose_config, *settings, *lengths, metrics=["ttft_ms"])


def test_every_engine_is_gated_the_baseline_too(build, monkeypatch):
    monkeypatch.setattr(ablation.Ablation, "_exact_gates", lambda *asked: [])  # test_lab_exact_gate.py has those
    found = measured(
        build("model=tiny", "engine.model.device=cpu", "engine.model.max_model_len=256", gate_logit_error=0.02)
    )
    assert [(gate.variant, gate.passed) for gate in found.error_gates] == [("transformers", True), ("engine", True)]


def test_a_dry_model_has_no_logits(build):
    assert not measured(build("model=dry", "engine.model.device=cpu", gate_logit_error=0.02)).error_gates


@pytest.mark.parametrize(
    ("changes", "gates"),
    [
        ({"model": {"dtype": "bfloat16"}}, []),
        ({"speculation": {"method": "synthetic", "acceptance": 0.5}}, []),
        ({"seed": 7}, [True]),
    ],
)
def test_tokens_that_rounding_or_a_decree_chooses_are_not_compared(build, changes, gates):
    small = ("engine.model.path=tiny-draft", "engine.model.device=cpu", "engine.model.max_model_len=256")
    few = ("engine.scheduler.max_num_seqs=2", "engine.scheduler.max_num_batched_tokens=256")
    variants = {"transformers": {}, "engine": changes}
    found = measured(build("model=tiny", *small, *few, "measure.gates=false", variants=variants)).gates
    assert [gate.passed for gate in found] == gates


@pytest.mark.parametrize("lora", [{"adapters": {"mine": "a folder"}}, {"dummy": 1}, {}])
def test_tokens_of_adapters_are_not_compared(lora):
    engine = {"model": {"path": "tiny-draft", "device": "cpu"}, "lora": {"max_adapters": 1, **lora}}
    cell = SimpleNamespace(kind=Kind.engine, engine=EngineConfig.from_dict(engine))
    assert cells.tokens_must_agree(cell) == (not lora)


@pytest.mark.parametrize(("name", "value"), [("gate_logit_error", 0), ("gate_logit_error", -1)])
def test_mistakes_are_named(build, name, value):
    with pytest.raises(ConfigError, match=f"experiment.{name} must be"):
        build("model=dry", **{name: value})


# --- in a report ---

AT = Claim("speed", "new", "p", Bound.ratio_at_least, 1.0, "base", "p")
ROWS = [Row(variant, "p", repeat, "speed", 2.0 + repeat, "") for variant in ("base", "new") for repeat in range(3)]


def error_gate(variant="new", point=None, error=0.03):
    return ErrorGate(variant, point, error, 0.02, "sdpa in fp32", 38, 39)


@pytest.mark.parametrize(
    ("gates", "reason"),
    [
        ([error_gate()], "its numbers are too far from sdpa in fp32, so its speed does not count"),
        ([error_gate(point="p")], "its numbers are too far"),
        ([error_gate("base")], "what it is compared with does not count: its numbers are too far"),
    ],
)
def test_a_claim_on_wrong_numbers_is_inconclusive(gates, reason):
    judged = judge(AT, Table(ROWS), gates)
    assert judged.verdict is Verdict.inconclusive
    assert judged.reason.startswith(reason)


def test_gates_of_others_change_nothing():
    for gate in (error_gate(point="q"), error_gate("other"), error_gate(error=0.01)):
        assert judge(AT, Table(ROWS), [gate]).verdict is Verdict.supported


def test_the_figures_stand_beside_the_speed(tmp_path):
    passed = error_gate("base", error=0.0061), error_gate(error=0.0072)
    given = result(error_gates=passed, plots=())
    (grid, *_) = Sheet(given).grids(["output_tokens_per_s"])
    assert grid.header[-2:] == ("same tokens", "error")
    assert grid.rows[0][-2:] == ("baseline", "0.00610")
    assert grid.rows[1][-2:] == ("all 900", "0.00720")
    store.write(tmp_path / "results", given)
    report.rebuild(tmp_path / "results", tmp_path / "reports")
    text = (tmp_path / "reports/demo.md").read_text()
    claim = "whole prompts and chunked prefill, 512 tokens a step: relative error at most 0.0200 against sdpa in fp32"
    assert f"| {claim} | **supported** | 0.00720; 38 of 39 greedy tokens agree | the gate |" in text
    assert "*error* is the largest relative error" in text
    assert store.read(tmp_path / "results/demo/own.in_process/cpu/default.json").info.error_gates == passed


def test_a_failed_gate_is_told_first():
    given = result(error_gates=(error_gate(),), plots=())
    assert flags(given) == ["numbers are too far from the reference's"]
    assert "     refuted  chunked prefill, 512 tokens a step: relative error" in report.summary(given)
    assert [row[-1] for row in Sheet(given).grids(["ttft_p50_ms"])[0].rows] == ["-", "FAILED: 0.0300"]
