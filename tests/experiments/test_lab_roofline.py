"""Floors against numbers worked out by hand, and ceilings that are looked up for the right machine only."""

import dataclasses
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from experiments.lab.config.points import Point
from experiments.lab.judge import roofline
from experiments.lab.judge.metrics import SLO
from experiments.lab.judge.roofline import StepCosts, StepWork, floor
from experiments.lab.measure import ceilings, cells, hardware
from experiments.lab.measure.hardware import Ceilings, Hardware
from experiments.lab.measure.kinds import Kind
from experiments.lab.workloads.random import Fixed
from mini_infer import LLMEngine, SamplingParams
from mini_infer.core.config import Device, EngineConfig, ModelConfig
from mini_infer.core.errors import ConfigError
from mini_infer.core.plan import KVUsage, StepRecord
from mini_infer.modeling.loader import load_spec
from mini_infer.quantization.checkpoint_config import rounding

CONF = Path(__file__).resolve().parents[2] / "conf"


def spec_of(name):
    values = OmegaConf.to_container(OmegaConf.load(CONF / "model" / f"{name}.yaml"))
    return load_spec(ModelConfig(**values))


@pytest.fixture(scope="module")
def qwen():
    return spec_of("qwen2_5_7b")


@pytest.fixture(scope="module")
def h200():
    (found,) = ceilings.read(CONF / "hardware" / "h200.yaml").ceilings
    return found


def test_parameters_of_real_models_are_counted_exactly(qwen):
    embedding = qwen.vocab_size * qwen.hidden_size
    assert roofline.layer_weights(qwen) + 2 * embedding == 7_615_616_512  # Qwen2.5-7B, as published
    small = spec_of("qwen3_0_6b")
    assert roofline.layer_weights(small) + small.vocab_size * small.hidden_size == 596_049_920  # Qwen3-0.6B, tied


def test_one_decode_row_of_qwen_7b_on_an_h200_takes_3_21_ms(qwen, h200):
    step = StepCosts(qwen, torch.bfloat16).of(StepWork(tokens=1, sampled=1, rows=1, context=1, pairs=1))
    weights = 2 * (7_615_616_512 - 152_064 * 3_584)  # without the embedding table
    new_kv, embedding, logits = 2 * 28 * 2 * 4 * 128, 2 * 3_584, 2 * 152_064
    assert step.bytes == weights + new_kv + embedding + logits
    assert list(step.flops) == ["bfloat16"]
    assert 1e3 * floor(step, h200).seconds == pytest.approx(3.21, abs=0.005)
    assert floor(step, h200).memory_s > 100 * floor(step, h200).compute_s


def test_a_long_context_adds_its_kv(qwen):
    short = StepCosts(qwen, torch.bfloat16).of(StepWork(64, 64, 64, 64 * 10, 64 * 10))
    long = StepCosts(qwen, torch.bfloat16).of(StepWork(64, 64, 64, 64 * 4096, 64 * 4096))
    tokens = 64 * (4096 - 10)
    assert long.bytes - short.bytes == tokens * 57_344  # bytes a token: 28 layers, K and V, 4 heads, 128, bf16
    assert long.flops["bfloat16"] - short.flops["bfloat16"] == tokens * 28 * 4 * 28 * 128


def test_a_prompt_is_bound_by_operations(qwen, h200):
    n = 4096
    step = StepCosts(qwen, torch.bfloat16).of(StepWork(tokens=n, sampled=1, rows=1, context=n, pairs=n * (n + 1) // 2))
    layers = 7_615_616_512 - 2 * 152_064 * 3_584
    head = 2 * 152_064 * 3_584
    flops = 2 * layers * n + head + 28 * 4 * 28 * 128 * n * (n + 1) // 2
    assert step.flops == {"bfloat16": flops}
    found = floor(step, h200)
    assert found.seconds == found.compute_s == pytest.approx(flops / (h200.tflop_s_of("bfloat16") * 1e12))


@pytest.mark.parametrize(
    ("scheme", "ms", "product"),
    [("fp8", 1.73, "float8_e4m3"), ("w8a8", 1.73, "int8"), ("w8a16", 1.73, "bfloat16"), ("w4a16", 0.99, "bfloat16")],
)
def test_quantized_weights_are_fewer_bytes_and_faster_products(qwen, h200, scheme, ms, product):
    quantized = dataclasses.replace(qwen, quantization=rounding(scheme, 128, symmetric=True))
    assert 1e3 * floor(StepCosts(quantized, torch.bfloat16).of(StepWork(1, 1, 1, 1, 1)), h200).seconds == pytest.approx(
        ms, abs=0.01
    )
    prompt = StepWork(tokens=4096, sampled=1, rows=1, context=4096, pairs=4096 * 4097 // 2)
    found, plain = (StepCosts(spec, torch.bfloat16).of(prompt).flops for spec in (quantized, qwen))
    assert sum(found.values()) == plain["bfloat16"]
    assert found[product] >= 2 * 6.5e9 * 4096


def test_keys_and_values_in_fp8_are_half_the_bytes(qwen):
    step = StepWork(1, 0, 1, 8192, 8192)
    wide, narrow = (
        StepCosts(spec, torch.bfloat16).of(step).bytes for spec in (qwen, dataclasses.replace(qwen, fp8_kv=True))
    )
    assert wide - narrow == pytest.approx(8192 * 57_344 / 2)


def test_prompts_that_sample_nothing_do_not_read_lm_head(qwen):
    step = StepWork(512, 0, 1, 512, 512 * 513 // 2)
    with_logits = StepCosts(qwen, torch.float32).of(dataclasses.replace(step, sampled=1))
    without = StepCosts(qwen, torch.float32).of(step)
    assert with_logits.bytes - without.bytes == 4 * (152_064 * 3_584 + 152_064)


def test_a_window_bounds_what_is_read():
    spec = spec_of("mistral_7b")
    inside = StepCosts(spec, torch.float16).of(StepWork(1, 1, 1, 4000, 4000))
    outside = StepCosts(spec, torch.float16).of(StepWork(1, 1, 1, 9000, 9000))
    assert outside.bytes - inside.bytes == (4096 - 4000 + 1) * 32 * 2 * 8 * 128 * 2
    assert StepCosts(spec, torch.float16).of(StepWork(1, 1, 1, 20_000, 20_000)) == outside


def record(**changes):
    values = {
        "step": 0, "start_time": 0.0, "end_time": 0.01, "schedule_s": 0.0, "execute_s": 0.01, "update_s": 0.0,
        "prefill_tokens": 0, "decode_tokens": 8, "sampled_tokens": 8, "num_running": 8, "num_prefilling": 0,
        "num_waiting": 0, "num_swapped": 0, "kv": KVUsage(100, 60, 0, 800, 960, 0), "prefix_queried_tokens": 0,
        "prefix_hit_tokens": 0, "evictions": 0, "preempted": (), "swapped_out_blocks": 0, "swapped_in_blocks": 0,
        "finished": (), "aborted": (), "failed": (),
    } | changes  # fmt: skip
    known = set(StepRecord._fields)
    return StepRecord(**{key: value for key, value in values.items() if key in known})


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"pipeline": 2}])
def test_the_ranks_of_an_engine_share_a_steps_work(parallel):
    """Two stages compute two steps at a time, so that one ends in half of the time."""
    machine = Ceilings(copy_gb_s=10, read_gb_s=10, matmul_tflop_s={"float32": 1})

    def floor_s(layout):
        engine = EngineConfig.from_dict({"model": {"path": "tiny-target", "device": "cpu"}, "parallel": layout})
        cell = cells.Cell("one", Point("", {}), Kind.engine, engine, Fixed(), "one")
        (found,) = cells.context(cell, SLO(), machine, "").floors([record()])
        return found.seconds

    assert floor_s(parallel) == pytest.approx(floor_s({}) / 2)


def test_work_of_a_record():
    assert roofline.work(record()) == StepWork(tokens=8, sampled=8, rows=8, context=800, pairs=800)
    mixed = record(prefill_tokens=100, sampled_tokens=9, kv=KVUsage(100, 60, 0, 900, 960, 0))
    assert roofline.work(mixed) == StepWork(tokens=108, sampled=9, rows=9, context=900, pairs=800 + 100 * 101 // 2)
    late = record(decode_tokens=7, sampled_tokens=7, dropped_rows=1)
    assert roofline.work(late) == roofline.work(record()), "a row of a request that had ended was computed all the same"
    chunk = record(prefill_tokens=100, num_prefilling=1, kv=KVUsage(100, 60, 0, 900, 960, 0))
    assert roofline.work(chunk).rows == 9


def test_work_never_exceeds_what_the_engine_did():
    """Counted from the plans themselves, row by row."""
    config = EngineConfig.from_dict(
        {"model": {"load_format": "dry", "path": "dry"}, "scheduler": {"max_num_batched_tokens": 40, "max_num_seqs": 8}}
    )
    engine = LLMEngine(config)
    true = []
    schedule = engine.scheduler.schedule

    def noting(now):
        plan = schedule(now)
        rows = list(zip(plan.starts, plan.counts, strict=True))
        true.append(
            (
                sum(plan.counts),
                sum(plan.samples),
                len(rows),
                sum(start + count for start, count in rows),
                sum(count * start + count * (count + 1) // 2 for start, count in rows),
            )
        )
        return plan

    engine.scheduler.schedule = noting
    prompts = [list(range(3 + i, 3 + i + n)) for i, n in enumerate((90, 7, 33, 60))]
    engine.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    done = [entry for entry in true if entry[0]]
    assert len(done) == len(engine.records) > 10
    for entry, (tokens, sampled, rows, context, pairs) in zip(engine.records, done, strict=True):
        found = roofline.work(entry)
        assert (found.tokens, found.sampled) == (tokens, sampled)
        assert found.pairs <= pairs
        assert found.rows >= rows
        if not entry.prefill_tokens:
            assert (found.context, found.pairs) == (context, pairs)


CPU = Ceilings(20.0, 25.0, {"float32": 0.1}, {1: 100.0, 16: 80.0, 64: 30.0}, threads=2)


@pytest.mark.parametrize(
    ("mib", "gb_s"), [(0.5, 100.0), (1, 100.0), (15.9, 100.0), (16, 80.0), (63, 80.0), (64, 30.0), (5000, 30.0)]
)
def test_what_fits_a_cache_may_come_from_it(mib, gb_s):
    assert roofline.bandwidth(CPU, mib * 2**20) == gb_s * 1e9
    assert roofline.bandwidth(dataclasses.replace(CPU, cached_read_gb_s={}), mib * 2**20) == 25e9


def test_a_dtype_that_was_not_measured_counts_at_the_fastest_rate():
    both = dataclasses.replace(CPU, matmul_tflop_s={"float32": 0.1, "bfloat16": 0.2, "int8": 0.8, "float8_e4m3": 1.6})
    assert floor(roofline.Cost(0, {"float16": 1e12}), both).compute_s == pytest.approx(5)
    assert floor(roofline.Cost(0, {"float32": 1e12}), both).compute_s == pytest.approx(10)
    assert floor(roofline.Cost(0, {"int8": 1e12}), both).compute_s == pytest.approx(1 / 1.6), "a library's may be slow"


# --- whose ceilings ------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(hardware, "name", lambda device: "Some CPU 1")
    return Hardware("Some CPU 1", "2026-01-01", "by hand", (dataclasses.replace(CPU, threads=1), CPU))


def test_ceilings_come_back_as_they_were_saved(tmp_path, machine):
    path = tmp_path / "new" / "cpu.yaml"
    ceilings.save(path, machine)
    assert ceilings.read(path) == machine
    assert ceilings.find(path.parent, Hardware(), "cpu", threads=2) == (CPU, "")


def test_other_thread_counts_of_the_same_machine_are_kept(tmp_path, machine):
    path = tmp_path / "cpu.yaml"
    ceilings.save(path, machine)
    more = dataclasses.replace(CPU, threads=8, read_gb_s=99.0)
    ceilings.save(path, dataclasses.replace(machine, ceilings=(more,)))
    assert [c.threads for c in ceilings.read(path).ceilings] == [1, 2, 8]


def test_one_key_holds_several_processors_and_none_replaces_another(tmp_path, monkeypatch, machine):
    path, faster = tmp_path / "cpu.yaml", dataclasses.replace(CPU, read_gb_s=99.0)
    ceilings.save(path, dataclasses.replace(machine, device=Device.cpu))
    ceilings.save(path, Hardware("Some CPU 2", "2026-01-02", "by hand", (faster,), device=Device.cpu))
    ceilings.save(path, Hardware("Some CPU 1", "2026-01-03", "again", (dataclasses.replace(CPU, threads=8),)))
    found = ceilings.read(path)
    assert (found.machine, found.measured, [c.threads for c in found.ceilings]) == (
        "Some CPU 1",
        "2026-01-03",
        [1, 2, 8],
    )
    assert [each.machine for each in found.machines] == ["Some CPU 1", "Some CPU 2"], (
        "the first is what hardware=cpu is"
    )
    assert ceilings.find(tmp_path, Hardware(), "cpu", 2) == (CPU, "")
    monkeypatch.setattr(hardware, "name", lambda device: "Some CPU 2")
    assert ceilings.find(tmp_path, Hardware(), "cpu", 2) == (faster, "")


@pytest.mark.parametrize(
    ("owner", "threads", "problem"),
    [
        (None, 2, r"no ceilings are known for Some CPU 1: .*experiment=ceilings"),
        ("Some CPU 2", 2, r"cpu.yaml holds the ceilings of Some CPU 2, and none of Some CPU 1"),
        ("Some CPU 1", 4, r"no ceilings of Some CPU 1 are known for 4 threads: .*measure.threads=4"),
    ],
)
def test_another_machines_ceilings_are_not_used(tmp_path, machine, owner, threads, problem):
    if owner:
        ceilings.save(tmp_path / "cpu.yaml", dataclasses.replace(machine, machine=owner))
    found, why = ceilings.find(tmp_path, Hardware(), "cpu", threads)
    assert found is None
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(why)


def test_a_chosen_file_counts_on_any_machine(tmp_path, machine):
    chosen = dataclasses.replace(machine, machine="Some CPU 2")
    assert ceilings.find(tmp_path, chosen, "cpu", 2) == (CPU, "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("machine: x\nceilings:\n- {copy_gb_s: 1, read_gb_s: 0, matmul_tflop_s: {float32: 1}}", "must be above 0"),
        ("machine: x\nceilings:\n- {copy_gb_s: fast}", "cpu.yaml.*copy_gb_s"),
        ("machine: x\nowner: y", "did you mean|Known"),
        ("machine: [", "cannot be read"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, machine, text, message):
    (tmp_path / "cpu.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        ceilings.find(tmp_path, Hardware(), "cpu", 1)


def test_a_hidden_cpu_model_is_told_by_its_numbers():
    text = "processor : 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\nmodel name : other\n"
    assert hardware.cpu_name(text) == "AMD EPYC (family 25, model 17)"
    assert hardware.cpu_name(text.replace("AMD EPYC", "AMD EPYC 9654")) == "AMD EPYC 9654"
    assert hardware.cpu_name("") == ""
