"""Kernel sweeps, small: what is measured of what can run on a CPU, what is said of the rest, and mistakes."""

import csv
import dataclasses
import importlib
import itertools
import math
import pkgutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

import mini_infer.kernels
from experiments import kernels
from experiments.kernels import CASES, KernelSweep
from experiments.lab.execute import execute
from experiments.lab.kernels import case as kernel_timer
from experiments.lab.kernels import fused as kernel_fused
from experiments.lab.kernels.case import Implementation, VariantAbsent, Work, row_error, worst
from experiments.lab.measure import clocks
from experiments.lab.measure.witness import Timed, witnessed
from experiments.lab.show.progress import Steps
from experiments.lab.store import result as store
from mini_infer.core.config import DType
from mini_infer.core.errors import ConfigError, MiniInferError
from mini_infer.transfer.memory import MemoryTarget

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SMALL = {
    "flash_decode": {"heads": "4/2", "batch": 3, "length": 50, "head_dim": 16},
    "kv_fp8": {"heads": "4/2", "batch": 3, "length": 50, "head_dim": 16},
    "add_rms_norm": {"tokens": 3, "hidden": 64},
    "rope_and_store": {"tokens": 5, "heads": "4/2", "qk_norm": True, "head_dim": 16},
    "silu_mul": {"tokens": 3, "inner": 64},
    "gemv": {"rows": 2, "out": 24, "in": 32},
    "gated_linear": {"rows": 3, "inner": 24, "hidden": 32},
    "moe_layer": {"tokens": 5, "routing": "zipf", "experts": 6, "chosen": 2, "hidden": 32, "inner": 16},
    "mla_decode": {"heads": 4, "batch": 3, "length": 50, "rank": 16, "rope_dim": 8, "block_size": 16},
    "kv_push": {"tokens": 37, "layers": 5, "kv_heads": 2, "head_size": 8, "block_size": 4},
    "decode": {"heads": "4/2", "batch": 3, "length": 50, "head_dim": 16},
    "prefill": {"heads": "4/2", "batch": 2, "length": 50, "queries": 20, "head_dim": 16},
}
LIMITS = kernels.Ceilings(copy_gb_s=100.0, read_gb_s=200.0, matmul_tflop_s={"bfloat16": 50.0})


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(kernel_timer, "PASS_US", 10.0)
    monkeypatch.setattr(kernel_timer, "MAX_COPIES", 3)


def made(case, dtype=torch.float32, **changes):
    found = CASES[case]({**SMALL[case], **changes}, dtype, CPU)
    found.allocate(2)
    return found


@pytest.fixture
def build(compose_config):
    def make(*overrides, **changes):
        config = compose_config(
            "experiment=attention_backends",
            "engine.model.device=cpu",
            "measure.repeats=3",
            "hardware=cpu",
            "measure.threads=1",
            *overrides,
        )
        OmegaConf.set_struct(config, False)
        config.experiment.claims = []
        config.experiment.dtype = "float32"
        config.experiment.sweeps = [
            {"case": "prefill", "shapes": {"heads": ["4/2"], "length": [40], "queries": [24], "head_dim": [16]}},
            {"case": "decode", "shapes": {"size": {"few": {"heads": "4/2", "batch": 3, "length": 40, "head_dim": 16}}}},
        ]
        config.experiment.update(changes)
        OmegaConf.set_struct(config, True)
        return config

    return make


def measure(config):
    with Steps("test") as steps:
        return KernelSweep.from_config(config).measure(steps)


# --- cases ---


@pytest.mark.parametrize("case", ["add_rms_norm", "rope_and_store", "silu_mul", "gemv", "gated_linear"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("variant", ["eager", "torch"])
def test_torch_stays_near_the_reference(case, dtype, bound, variant):
    found = made(case, dtype)
    if variant in found.variants:
        assert 0 <= found.error(found.implementation(variant).run(0)) < bound


@pytest.mark.parametrize(("case", "changes"), [("decode", {}), ("prefill", {}), ("prefill", {"queries": 50})])
def test_sdpa_stays_near_the_reference(case, changes):
    found = made(case, **changes)
    implementation = found.implementation("sdpa")
    assert not implementation.graph_safe
    assert found.error(implementation.run(0)) < 1e-5
    assert found.error(found.implementation("sdpa").run(1)) > 0.1  # the second set of inputs is another one


@pytest.mark.parametrize("variant", CASES["kv_push"].variants)
def test_blocks_of_all_layers_arrive(variant, monkeypatch):
    monkeypatch.setattr(MemoryTarget, "group_bytes", 5000)  # of two layers' 2,560 bytes each
    found = made("kv_push", torch.bfloat16)
    implementation = found.implementation(variant)
    assert found.work().bytes == 5 * 2 * 10 * 4 * 2 * 8 * 2
    assert found.error(implementation.run(0)) == 0
    assert found.error(implementation.run(1)) > 0.1, "the second set of inputs is another one"
    found.implementation(variant)
    assert found.error((found.sets[0][1], *implementation.run(1)[1:])) == 1, "nothing was sent yet"


@pytest.mark.parametrize("routing", ["uniform", "zipf", "one"])
@pytest.mark.parametrize("variant", CASES["moe_layer"].variants)
def test_every_way_to_the_experts_stays_near_the_reference(variant, routing):
    pytest.importorskip("triton")
    found = made("moe_layer", routing=routing)
    assert found.error(found.implementation(variant).run(0)) < 1e-5
    assert found.error(found.implementation(variant).run(1)) > 0.1  # the second set of inputs is another one
    if routing == "one":
        assert found.work().bytes == (2 * 3 * 32 * 16 + 2 * 5 * 32) * 4


def test_keys_and_values_in_fp8_are_the_same_numbers_in_half_the_bytes():
    pytest.importorskip("triton")
    found = made("kv_fp8", torch.bfloat16)
    outputs = {variant: found.implementation(variant).run(0) for variant in found.variants}
    assert row_error(outputs["fp8"], outputs["split_k"]) < 0.01
    assert found.error(outputs["fp8"]) < 0.01
    keys_and_values = 2 * 3 * 50 * 2 * 16
    assert found.work("split_k").bytes - found.work("fp8").bytes == keys_and_values


@pytest.mark.parametrize("variant", ["single_pass", "split_k"])
def test_attention_to_latents_stays_near_the_reference(variant):
    pytest.importorskip("triton")
    found = made("mla_decode")
    assert found.error(found.implementation(variant).run(0)) < 1e-5
    assert found.error(found.implementation(variant).run(1)) > 0.1  # the second set of inputs is another one
    assert found.work().bytes == 3 * (50 * 24 + 4 * (24 + 16)) * 4


@pytest.mark.parametrize("case", ["rope_and_store", "prefill", "silu_mul"])
def test_one_wrong_row_is_found(case):
    found = made(case)
    variant = "sdpa" if case == "prefill" else "eager"
    output = found.implementation(variant).run(0)
    output[-1] *= 1.5
    assert found.error(output) == pytest.approx(0.5, rel=1e-3)


def test_a_wrong_slot_is_found():
    found = made("rope_and_store")
    output = found.implementation("eager").run(0)
    keys = found.sets[0][-2]
    keys[[0, 1]] = keys[[1, 0]]
    assert found.error(output) > 0.1


def test_what_was_stored_by_another_implementation_does_not_count():
    found = made("rope_and_store")
    output = found.implementation("eager").run(0)
    assert found.error(output) < 1e-5
    assert found.error(output) > 0.1  # as of one that has stored nothing


def test_rows_of_nan_are_no_small_error():
    assert math.isnan(row_error(torch.tensor([[math.nan, 1.0]]), torch.ones(1, 2)))
    assert math.isnan(worst([0.1, math.nan, 0.2]))
    assert row_error(torch.tensor([[1.0, 0.0], [3.0, 4.5]]), torch.tensor([[1.0, 0.0], [3.0, 4.0]])) == pytest.approx(
        0.1
    )


def test_the_least_work():
    assert made("add_rms_norm", torch.bfloat16).work() == Work(4 * 3 * 64 * 2)
    assert made("silu_mul", torch.bfloat16).work() == Work(3 * 3 * 64 * 2)
    assert made("gated_linear", torch.bfloat16).work() == Work(
        (2 * 24 * 32 + 3 * (24 + 32)) * 2, 2 * 3 * 48 * 32, "read_gb_s"
    )
    assert made("gemv", torch.bfloat16).work() == Work((24 * 32 + 2 * (24 + 32)) * 2, 2 * 2 * 24 * 32, "read_gb_s")
    rope = made("rope_and_store", torch.bfloat16).work()  # of cos and sin one half each, and a slot of 8 bytes
    assert rope == Work(5 * ((2 * 8 * 16 + 16) * 2 + 8))
    decode = made("decode", torch.bfloat16).work()
    assert decode == Work((2 * 3 * 50 * 2 * 16 + 2 * 3 * 4 * 16) * 2, 4 * 16 * 4 * 3 * 50, "read_gb_s")
    assert made("prefill", batch=1, queries=50).work().flops == 4 * 16 * 4 * 50 * 51 / 2
    assert made("prefill", batch=1, queries=1).work().flops == 4 * 16 * 4 * 50


def test_values_against_the_ceilings():
    values = kernels._values(10.0, Work(500_000, 2e8, "read_gb_s"), DType.bfloat16, LIMITS)
    assert values == pytest.approx({"time_us": 10.0, "gb_s": 50.0, "mbu": 0.25, "tflop_s": 20.0, "mfu": 0.4})
    assert kernels._values(10.0, Work(500_000), DType.bfloat16, LIMITS)["mbu"] == 0.5  # of a copy
    assert set(kernels._values(10.0, Work(1), DType.bfloat16, None)) == {"time_us", "gb_s"}


# --- timing ---


def test_inputs_are_used_up_in_turns(monkeypatch):
    monkeypatch.setattr(kernel_timer, "PASS_US", 0.0)
    used = []
    timer = kernel_timer.prepare(Implementation(used.append), 3, CPU)
    assert not timer.captured
    used.clear()
    assert timer.sample().us > 0
    assert used == [0, 1, 2] * kernel_timer.SAMPLES


def test_copies_outgrow_the_cache(monkeypatch):
    monkeypatch.setattr(kernel_timer, "MAX_COPIES", 512)
    for size in (2**10, 2**20, 2**24, 2**30):
        copies = kernel_timer.copies_needed(size, CPU)
        assert copies == 512 or copies * size > kernel_timer.ROTATED * kernel_timer.CPU_CACHE
    assert kernel_timer.copies_needed(2**30, CPU) == 1


# --- the experiment ---


@pytest.fixture
def no_interpreter(monkeypatch):
    """Tests of kernels switch Triton's interpreter on for the whole process."""
    TritonBackend = pytest.importorskip("mini_infer.attention.triton").TritonBackend
    capabilities = dataclasses.replace(TritonBackend.capabilities, devices=frozenset({"cuda"}))
    monkeypatch.setattr(TritonBackend, "capabilities", capabilities)


def test_what_can_run_is_measured_and_what_cannot_is_stated(build, monkeypatch, no_interpreter):
    monkeypatch.setattr(kernels.ceilings, "find", lambda *_: (LIMITS, ""))  # of whatever machine this is
    found = measure(build())
    points = {"prefill heads=4/2 length=40 queries=24 head_dim=16", "decode few"}
    assert {(row.variant, row.point, row.repeat) for row in found.rows} == {
        ("sdpa", p, r) for p in points for r in range(3)
    }
    assert {row.metric for row in found.rows} == {"time_us", "tflop_s", "mfu", "gb_s", "mbu"}
    assert all(row.value > 0 and row.valid for row in found.rows)
    assert {(gate.variant, gate.point) for gate in found.error_gates} == {("sdpa", point) for point in points}
    assert all(gate.passed and gate.error < 1e-5 for gate in found.error_gates)
    absent = [note for note in found.notes if "absent" in note]
    assert len(absent) == 3
    assert any(note.startswith("FlashAttention-4 is absent: it runs on cuda, not cpu.") for note in absent)


def test_what_is_absent_at_one_point_is_not_said_to_be_absent(build, monkeypatch):
    real = kernel_fused.SiluMul.implementation

    def implementation(self, variant):
        if variant == "torch" and self.shape["tokens"] == 3:
            raise VariantAbsent("it fails here")
        return real(self, variant)

    monkeypatch.setattr(kernel_fused.SiluMul, "implementation", implementation)
    changes = {"variants": {"eager": "", "torch": ""}, "baseline": "eager", "metrics": ["time_us"], "plots": []}
    for tokens, note in (
        ([3, 4], "torch is absent at tokens=3 inner=64: it fails here."),
        ([3], "torch is absent: it"),
    ):
        sweeps = [{"case": "silu_mul", "shapes": {"tokens": tokens, "inner": [64]}}]
        found = measure(build(**changes, sweeps=sweeps))
        assert [n for n in found.notes if "absent" in n] == [n for n in found.notes if n.startswith(note)] != []


THREE = {
    "variants": {"eager": "", "torch": ""},
    "baseline": "eager",
    "metrics": ["time_us"],
    "plots": [],
    "sweeps": [{"case": "silu_mul", "shapes": {"tokens": [2, 3, 4], "inner": [64]}}],
}


MISALIGNED = RuntimeError("Triton Error [CUDA]: misaligned address\nand more")


def break_torch(monkeypatch, at, calls=0, error=MISALIGNED):
    """Its kernel fails at so many tokens, after so many calls that do not."""
    real, made = kernel_fused.SiluMul.compute, itertools.count()

    def compute(self, kernels, *inputs):
        if self.shape["tokens"] == at and inputs[0].dtype is self.dtype and next(made) >= calls:
            raise error
        return real(self, kernels, *inputs)

    monkeypatch.setattr(kernel_fused.SiluMul, "compute", compute)


@pytest.mark.parametrize("calls", [0, 20], ids=["at once", "when it is timed"])
def test_a_kernel_that_fails_costs_its_point_only(build, monkeypatch, calls):
    break_torch(monkeypatch, 3, calls)
    found = measure(build(**THREE, dtype="bfloat16"))
    assert found.status == "complete"
    valid = {(row.variant, row.point.partition(" ")[0]) for row in found.rows if row.valid}
    assert valid == {("eager", f"tokens={n}") for n in (2, 3, 4)} | {("torch", f"tokens={n}") for n in (2, 4)}
    why = "it failed with RuntimeError: Triton Error [CUDA]: misaligned address"
    assert [(row.point, row.reason) for row in found.rows if not row.valid] == [("tokens=3 inner=64", f"absent: {why}")]
    assert f"torch is absent at tokens=3 inner=64: {why}." in found.notes
    assert {gate.point for gate in found.error_gates if gate.variant == "torch"} == {
        f"tokens={n} inner=64" for n in (2, 4)
    }


def test_of_a_shape_that_was_interrupted_nothing_is_kept(build, monkeypatch):
    break_torch(monkeypatch, 3, calls=20, error=KeyboardInterrupt())  # when it is timed
    found = measure(build(**THREE, dtype="bfloat16"))
    assert found.status == "incomplete: interrupted in at tokens=3 inner=64; 1 of 3 rounds are kept"
    assert {row.point for row in found.rows} == {gate.point for gate in found.error_gates} == {"tokens=2 inner=64"}


def test_inputs_that_do_not_fit_cost_their_point_only(build, monkeypatch):
    real = kernel_fused.SiluMul.allocate

    def allocate(self, copies):
        if self.shape["tokens"] == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        real(self, copies)

    monkeypatch.setattr(kernel_fused.SiluMul, "allocate", allocate)
    found = measure(build(**THREE))
    assert {row.point for row in found.rows if row.valid} == {"tokens=2 inner=64", "tokens=3 inner=64"}
    assert sum("at tokens=4 inner=64: it failed with OutOfMemoryError" in note for note in found.notes) == 2


def test_after_an_illegal_access_the_rest_is_not_measured(build, monkeypatch):
    break_torch(monkeypatch, 3)
    monkeypatch.setattr(kernels, "_is_lost", lambda device: True)
    found = measure(build(**THREE, dtype="bfloat16"))
    assert {row.point for row in found.rows} == {"tokens=2 inner=64"}
    assert "torch at tokens=3 inner=64 failed with RuntimeError" in found.status
    assert "so the rest is not measured in at tokens=3 inner=64; 1 of 3 rounds are kept" in found.status


def test_where_everything_fails_it_is_an_error(build, monkeypatch):
    break_torch(monkeypatch, 3)
    only = {**THREE, "variants": {"torch": ""}, "baseline": "torch"}
    only["sweeps"] = [{"case": "silu_mul", "shapes": {"tokens": [3], "inner": [64]}}]
    with pytest.raises(MiniInferError, match=r"nothing was measured. torch is absent: it failed with RuntimeError"):
        measure(build(**only, dtype="bfloat16"))


def test_an_implementation_that_is_wrong_fails_the_gate_and_its_claims(build, monkeypatch, tmp_path):
    real = kernel_fused.SiluMul.eager
    monkeypatch.setattr(kernel_fused.SiluMul, "eager", lambda self, x: real(self, x) * (1.1 if len(x) == 3 else 1))
    places = [f"paths.{place}={tmp_path / place}" for place in ("results", "reports")]
    config = build(
        *places,
        variants={"eager": "torch"},
        baseline="eager",
        sweeps=[{"case": "silu_mul", "shapes": {"tokens": [3, 4], "inner": [64]}}],
        metrics=["time_us"],
        plots=[],
    )
    at, against = {"tokens": 3}, {"tokens": 4}
    claim = {"metric": "time_us", "variant": "eager", "at": at, "against": against, "ratio_at_most": 1e9}
    config.experiment.claims = [claim]
    text = execute(config, "attention_backends", [], tmp_path).read_text()
    assert "numbers are too far from the reference's" in text
    assert "in fp32 from the same inputs at tokens=3 inner=64 | **refuted** | 0.100 | the gate |" in text
    assert "**inconclusive**: its numbers are too far from a reference in fp32" in text
    assert "fresh engine" not in text


# --- the baseline a second time ---


TICK_S = 2.0**-20  # sums of them are exact, so that equal arms have equal times


class Clock:
    """Of fused operations, a call of which takes so many ticks: of what was made second of a case, `second` ticks."""

    def __init__(self, monkeypatch, ticks, second):
        real, self.now, self.called = kernel_fused._Fused.implementation, 0.0, []

        def implementation(case, variant):
            before = vars(case).setdefault("made", [])
            took, name = (second, f"{variant} again") if variant in before else (ticks[variant], variant)
            before.append(variant)
            made = real(case, variant)

            def run(copy):
                self.now += took * TICK_S
                self.called.append(name)
                return made.run(copy)

            return Implementation(run)

        monkeypatch.setattr(kernel_fused._Fused, "implementation", implementation)
        monkeypatch.setattr(kernel_timer, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(kernel_timer, "witnessed", partial(witnessed, clock_s=lambda: self.now))


EAGER_TWICE = ("eager", "eager again")
TWO_CASES = {
    "variants": {"torch": "", "eager": "one by one"},
    "baseline": "eager",
    "metrics": ["time_us"],
    "plots": [],
    "sweeps": [
        {"case": "silu_mul", "shapes": {"tokens": [2, 3], "inner": [64]}},
        {"case": "add_rms_norm", "shapes": {"tokens": [2], "hidden": [64]}},
    ],
}


def timed_twice(build, monkeypatch, tmp_path, second):
    clock = Clock(monkeypatch, {"torch": 5, "eager": 10}, second)
    places = [f"paths.{place}={tmp_path / place}" for place in ("results", "reports")]
    config = build("measure.aa=always", "measure.repeats=2", *places, **TWO_CASES)
    page = execute(config, "attention_backends", [], tmp_path).read_text()
    (path,) = (tmp_path / "results").rglob("default.json")
    return store.read(path), page, clock


def test_the_baseline_is_timed_twice_at_every_point(build, monkeypatch, tmp_path):
    found, page, clock = timed_twice(build, monkeypatch, tmp_path, second=10)
    assert found.info.aa == "eager again"
    assert found.info.variants == {"torch": "torch", "eager": "one by one", "eager again": "one by one again"}
    first, second = ({(r.point, r.repeat): r.value for r in found.rows if r.variant == arm} for arm in EAGER_TWICE)
    assert first == second
    assert len(first) == 3 * 2
    assert {gate.variant for gate in found.info.error_gates} == {"torch", "eager"}
    there_and_back = ["torch", *EAGER_TWICE, "eager", "torch"]
    assert [name for name, _ in itertools.groupby(clock.called)][-5:] == there_and_back  # at the last point
    assert "| 1x |" in page
    assert "differs from itself" not in page


def test_who_fails_leaves_its_turns_to_the_others_and_the_gpu_is_looked_at_once_a_repeat(build, monkeypatch):
    turns, names = [], itertools.cycle(["torch", *EAGER_TWICE])

    def prepare(implementation, copies, device):
        name = next(names)

        def sample():
            turns.append(name)
            if turns.count("torch") == 2 and name == "torch":
                raise RuntimeError("planted")
            return Timed(1.0, 1.0, 1)

        return kernel_timer.Timer(sample, False, implementation)

    monkeypatch.setattr(kernels, "prepare", prepare)
    monkeypatch.setattr(clocks.Watch, "look", lambda self: turns.append("look"))
    found = measure(build("measure.aa=always", **{**TWO_CASES, "sweeps": TWO_CASES["sweeps"][1:]}))
    assert turns == ["torch", *EAGER_TWICE, "look", "eager again", "eager", "torch", "look", *EAGER_TWICE, "look"]
    rows = [(row.variant, row.repeat, row.valid) for row in found.rows]
    assert rows == [*((name, n, True) for name in EAGER_TWICE for n in range(3)), ("torch", 0, False)]


def test_what_is_faster_than_the_hardware_does_not_count(build, monkeypatch):
    """As of a timer that stops too early, or inputs that have stayed in a cache."""
    times = itertools.cycle([Timed(us, us, 1) for us in (0.001, 10.0)])  # of torch, and of eager, at each point
    monkeypatch.setattr(kernels.ceilings, "find", lambda *_: (LIMITS, ""))
    monkeypatch.setattr(
        kernels, "prepare", lambda made, *_: kernel_timer.Timer(partial(Timed, *next(times)), False, made)
    )
    found = measure(build(**{**TWO_CASES, "metrics": ["time_us", "mbu"]}))
    assert {(row.variant, row.valid) for row in found.rows} == {("torch", False), ("eager", True)}
    reasons = {row.reason for row in found.rows if not row.valid}
    assert all(reason.startswith("faster than the hardware allows: ") for reason in reasons)


@pytest.mark.parametrize("factor", [0.6, 1.7])
def test_a_timer_that_tells_another_time_than_the_hosts_clock_does_not_count(build, monkeypatch, factor):
    real = kernel_timer.seconds_of
    monkeypatch.setattr(kernel_timer, "seconds_of", lambda *asked: factor * real(*asked))
    with pytest.raises(MiniInferError, match=r"calls are said to take .* ms, and by the host's clock they took .* ms"):
        measure(build(**TWO_CASES))


def test_what_the_gpu_said_of_itself_is_kept_and_told(build, monkeypatch, tmp_path):
    gpu = SimpleNamespace(read=lambda: clocks.GpuState(1980.0, 512.3, 55.0, None))
    monkeypatch.setattr(clocks, "find_gpu", lambda device: gpu)
    found, page, _ = timed_twice(build, monkeypatch, tmp_path, second=10)
    assert [(process.clock_mhz, process.power_w) for process in found.info.processes] == [(1980.0, 512.3)]
    assert "At the ends of passes the GPU had in the median (power: over a second) 1,980 MHz, 512 W, 55 °C." in page


def test_a_second_arm_that_is_slower_is_said_on_top(build, monkeypatch, tmp_path):
    _, page, _ = timed_twice(build, monkeypatch, tmp_path, second=11)
    head, strip = page.partition("| measured |")[::2]
    assert "the baseline differs from itself: A/A ratio 1.10**" in head
    assert "| 1.10x |" in strip


def test_on_a_gpu_the_baseline_is_timed_twice_without_being_asked(build):
    assert KernelSweep.from_config(build(**THREE)).aa is None
    assert KernelSweep.from_config(build("engine.model.device=cuda", **THREE)).aa == "eager again"
    assert KernelSweep.from_config(build("engine.model.device=cuda", "measure.aa=never", **THREE)).aa is None


def test_a_baseline_that_cannot_run_has_no_second_arm(build, no_interpreter):
    found = measure(build("measure.aa=always", baseline="triton"))
    assert {row.variant for row in found.rows} == {"sdpa"}
    assert not any("again" in note for note in found.notes)


def test_a_second_arm_that_fails_costs_itself_only(build, monkeypatch):
    real, made = kernel_fused.SiluMul.implementation, itertools.count()

    def implementation(self, variant):
        if variant == "eager" and next(made) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, variant)

    monkeypatch.setattr(kernel_fused.SiluMul, "implementation", implementation)
    found = measure(build("measure.aa=always", **THREE))
    lost = {(row.variant, row.point) for row in found.rows if not row.valid}
    assert lost == {("eager again", "tokens=2 inner=64")}
    (note,) = [note for note in found.notes if "absent" in note]
    assert note == "eager again is absent at tokens=2 inner=64: it failed with OutOfMemoryError: CUDA out of memory."
    assert {row.point for row in found.rows if row.valid and row.variant == "eager again"} == {
        "tokens=3 inner=64",
        "tokens=4 inner=64",
    }


def test_ceilings_that_are_not_known_are_a_note(build, monkeypatch, no_interpreter):
    monkeypatch.setattr(kernels.ceilings, "find", lambda *a: (None, "nobody has measured"))
    found = measure(build())
    assert {row.metric for row in found.rows} == {"time_us", "tflop_s", "gb_s"}
    assert "Utilization is left out, because nobody has measured." in found.notes


def test_what_needs_a_gpu_says_so_before_it_starts(compose_config, no_interpreter, monkeypatch):
    for module in pkgutil.walk_packages(mini_infer.kernels.__path__, "mini_infer.kernels."):
        importlib.import_module(module.name)  # here still interpreted, as tests after this one want them
    monkeypatch.setattr(pytest.importorskip("triton").knobs.runtime, "interpret", False)
    needing = {"flash_decode", "kv_fp8", "mla_decode"}
    assert {name for name, case in CASES.items() if case.needs_gpu} == needing
    for name in CASES if not torch.cuda.is_available() else ():
        case, absent = made(name), set()
        for variant in (set(case.variants) - set(case.apart)) - {"compile"}:
            try:
                case.implementation(variant)
            except VariantAbsent:
                absent.add(variant)
        assert (absent == set(case.variants) - set(case.apart)) == (name in needing), name
    for name in needing:
        with pytest.raises(ConfigError, match=r"runs on a CPU \(Triton kernels run on a GPU\): leave out hardware=cpu"):
            KernelSweep.from_config(compose_config(f"experiment={name}", "engine.model.device=cpu"))


def test_where_nothing_can_run_it_is_an_error(build, no_interpreter):
    with pytest.raises(
        ConfigError, match=r"nothing can be measured at .* triton: it runs on cuda, not cpu; flash_attn: it runs on"
    ):
        measure(build(variants={"triton": "", "flash_attn": ""}, baseline="triton"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is chosen when Triton is imported")
@pytest.mark.parametrize(
    ("name", "sweeps", "variants"),
    [
        (
            "flash_decode",
            "[{case: flash_decode, shapes: {heads: ['4/2'], batch: [1, 2], length: [40], head_dim: [16]}}]",
            {"split_k", "single_pass"},
        ),
        (
            "kv_fp8",
            "[{case: kv_fp8, shapes: {heads: ['4/2'], batch: [2], length: [40], head_dim: [16]}}]",
            {"split_k", "fp8"},
        ),
        (
            "fused_kernels",
            "[{case: add_rms_norm, shapes: {tokens: [2], hidden: [32]}},"
            "{case: silu_mul, shapes: {tokens: [2], inner: [32]}},"
            "{case: rope_and_store, shapes: {tokens: [2], heads: ['2/1'], head_dim: [16]}},"
            "{case: gemv, shapes: {rows: [1], out: [32], in: [64]}}]",
            {"eager", "torch", "triton"},
        ),
    ],
)
def test_the_triton_variants_run_in_the_interpreter(run_py, monkeypatch, tmp_path, name, sweeps, variants):
    pytest.importorskip("triton")
    for constant, value in {"PASS_US": 0, "SAMPLES": 1, "MAX_COPIES": 1}.items():
        monkeypatch.setattr(kernel_timer, constant, value)
    overrides = [
        f"experiment={name}", f"experiment.sweeps={sweeps}", "engine.model.device=cpu", "experiment.dtype=float32",
        "experiment.claims=[]", "experiment.plots=[]", "measure.repeats=1", "measure.processes=1",
        f"hydra.run.dir={tmp_path / 'out'}",
        *(f"paths.{place}={tmp_path / place}" for place in ("results", "reports")),
        *(["~experiment.variants.compile", "paths.run=small"] if name == "fused_kernels" else []),
    ]  # fmt: skip
    assert run_py(*overrides) == 0
    (table,) = (tmp_path / "results" / name).glob("*/cpu/*.csv")
    assert {row["variant"] for row in csv.DictReader(table.open())} == variants
    assert "**refuted**" not in (tmp_path / "reports" / f"{name}.md").read_text()


MISTAKES = [
    ({"baseline": "cudnn"}, r"baseline='cudnn' is no variant; variants: sdpa"),
    ({"sweeps": []}, "experiment.sweeps is empty"),
    ({"sweeps": [{"case": "prefil"}]}, "unknown case 'prefil'; did you mean 'prefill'"),
    ({"sweeps": [{"case": "prefill", "shapes": {}}]}, "the case prefill: heads, length, queries missing"),
    ({"sweeps": [{"case": "silu_mul", "shapes": {"token": [1]}}]}, r"unknown implementation 'sdpa'"),
    (
        {"sweeps": [{"case": "decode", "shapes": {"heads": ["4/2"], "batch": [1], "lenght": [8], "length": [8]}}]},
        "the case decode: it has no lenght. A shape has heads, batch, length",
    ),
    (
        {"sweeps": [{"case": "decode", "shapes": {"heads": ["4/3"], "batch": [1], "length": [8]}}]},
        "must look like 28/4",
    ),
    (
        {"sweeps": [{"case": "decode", "shapes": {"heads": ["4/2"], "batch": [0], "length": [8]}}]},
        "batch must be at least 1",
    ),
    (
        {"sweeps": [{"case": "prefill", "shapes": {"heads": ["4/2"], "length": [8], "queries": [9]}}]},
        "9 queries of a sequence of 8 tokens",
    ),
    ({"sweeps": [{"case": "decode", "shapes": {"heads": "4/2"}}]}, r"points\[heads\] must be a list of values"),
    (
        {
            "sweeps": [{"case": "moe_layer", "shapes": {"tokens": [1], "routing": ["even"]}}],
            "variants": {"padded": ""},
            "baseline": "padded",
        },
        "routing is one of uniform, zipf, one.*got 'even'",
    ),
    ({"metrics": ["time"]}, "unknown metric 'time'; did you mean 'time_us'"),
    ({"dtype": "auto"}, "experiment.dtype must be one of"),
    ({"allowed_error": 0}, "experiment.allowed_error must be above 0"),
    (
        {"claims": [{"metric": "mbu", "variant": "sdpa", "at": {"case": "decod"}, "at_most": 1}]},
        "names no measured point",
    ),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_a_mistake_is_found_before_anything_runs(build, changes, message):
    with pytest.raises(ConfigError, match=message):
        KernelSweep.from_config(build(**changes))


def test_a_point_twice_is_a_mistake(build):
    shape = {"heads": ["4/2"], "batch": [1], "length": [8]}
    with pytest.raises(ConfigError, match="has the point 'heads=4/2 batch=1 length=8' twice"):
        KernelSweep.from_config(build(sweeps=[{"case": "decode", "shapes": shape}] * 2))
