"""What a run's record says of the engine that was measured."""

from __future__ import annotations

from dataclasses import replace

from experiments.lab.measure.subjects import _facts
from mini_infer.runtime.worker.startup import CaptureReport, StartupReport

STARTUP = StartupReport(
    device="A GPU",
    dtype="bfloat16",
    implementation="ours",
    attention_prefill="triton",
    attention_decode="triton",
    kernels="triton",
    sampler="triton",
    overlap=True,
    max_model_len=100,
    num_kv_blocks=1000,
    kv_bytes=2**30,
    weight_bytes=2**30,
    seconds=1.0,
    graphs=CaptureReport(batch_sizes=(1, 2, 4), seconds=2.0, memory_bytes=3 * 2**20),
    prefill_graphs=CaptureReport(limits=("graphs.max_prefill_tokens=0",)),
)


def test_graphs_are_told_by_kind_with_what_is_missing() -> None:
    facts = _facts(STARTUP)
    assert facts["CUDA graphs"] == "of 3 batch sizes up to 4 (2.0 s, 3 MiB)"
    assert facts["CUDA graphs of steps with prompts"] == "graphs.max_prefill_tokens=0"
    some = CaptureReport((64, 128), 1.5, 2**20, ("no graph for 192 tokens: out of GPU memory during capture",))
    assert _facts(replace(STARTUP, prefill_graphs=some))["CUDA graphs of steps with prompts"] == (
        "of 2 numbers of tokens up to 128 (1.5 s, 1 MiB); no graph for 192 tokens: out of GPU memory during capture"
    )
    cut = CaptureReport((64,), 1.5, 2**20, in_pieces=True)
    facts = _facts(replace(STARTUP, prefill_graphs=CaptureReport.of_all([cut, cut])))
    assert facts["CUDA graphs of steps with prompts"] == "of 1 numbers of tokens up to 64, in pieces (3.0 s, 2 MiB)"


def test_memory_of_adapters_is_told_where_there_are_some() -> None:
    assert "adapters" not in _facts(STARTUP)
    assert _facts(replace(STARTUP, adapter_bytes=3 * 2**29))["adapters"] == "1.50 GiB"


def test_on_a_cpu_the_config_says_it_all() -> None:
    assert _facts(replace(STARTUP, device="cpu")) == {}
