"""What a start does for its speed's sake, and what it says of where its seconds went."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from model_shapes import LATENTS, SHAPES

from mini_infer import EngineConfig, LLMEngine
from mini_infer.runtime.worker.memory import largest_steps, steps_of_each_size
from mini_infer.runtime.worker.startup import Phases


def test_seconds_are_told_by_phase_and_waited_for() -> None:
    now = [0.0]

    def finish() -> None:
        now[0] += 2.0  # of a device

    phase = Phases(finish, lambda: now[0])
    for name, seconds in (("load", 1.0), ("capture", 5.0), ("load", 3.0)):
        with phase(name):
            now[0] += seconds
    assert phase.seconds == {"load": 8.0, "capture": 7.0}
    now[0] += 1.0
    assert phase.total == 16.0


def test_an_engine_tells_where_its_seconds_went() -> None:
    startup = LLMEngine(EngineConfig()).startup
    assert {"load", "tokenizer", "allocate", "reserve memory"} <= startup.phases.keys()
    assert 0 < sum(startup.phases.values()) <= startup.seconds


def test_what_takes_long_to_import_is_imported_when_it_is_needed() -> None:
    code = (
        "import sys; from mini_infer import EngineConfig, LLMEngine; "
        "LLMEngine(EngineConfig.from_dict({'model': {'path': 'tiny-draft', 'device': 'cpu'}})).generate('x'); "
        "late = {'llguidance', 'msgspec', 'torch._dynamo', 'transformers.models.auto.modeling_auto'}; "
        "assert not late & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("budget", [16, 64])
def test_the_end_of_the_longest_prompt_is_tried_where_it_is_expanded(budget: int) -> None:
    scheduler = {"max_num_seqs": 4, "max_num_batched_tokens": budget}
    config = EngineConfig.from_dict({"scheduler": scheduler, "cache": {"block_size": 16}})
    *_, step = largest_steps(config, max_model_len=33, block=0, expands=True)
    new = min(budget, 32)
    assert (step.starts, step.counts, step.num_decode_rows) == ([32 - new], [new], 0)
    (admission,) = step.admissions
    assert (len(admission.token_ids), admission.block_table) == (32, [0, 0, 0])


@pytest.mark.parametrize("most", [1, 5, 8, 40])
def test_steps_of_each_size_are_of_requests_that_the_largest_admits(most: int) -> None:
    config = EngineConfig.from_dict({"scheduler": {"max_num_seqs": most, "max_num_batched_tokens": 200}})
    (largest,) = largest_steps(config, max_model_len=50, block=0)
    plans = steps_of_each_size(largest, [1, 2, 4, 8, 24], max_model_len=50)
    decode = [plan.num_rows for plan in plans if plan.num_decode_rows == plan.num_rows == plan.num_tokens]
    assert decode == [size for size in [*range(1, 17), 24] if size <= most]
    prompts = [(plan.num_rows, plan.counts[0]) for plan in plans[len(decode) :]]
    assert prompts == [(1, 32), (2, 32), (3, 42)][: {1: 1}.get(most, 3)]
    admitted = {admission.req_index for admission in largest.admissions}
    assert all(set(plan.req_indices) <= admitted for plan in plans)


@pytest.mark.parametrize(("most", "drafts"), [(1, 1), (5, 3), (40, 4)])
def test_steps_with_drafts_are_of_each_size_and_each_number_of_them(most: int, drafts: int) -> None:
    scheduler = {"max_num_seqs": most, "max_num_batched_tokens": 200}
    config = EngineConfig.from_dict({"scheduler": scheduler, "speculation": {"method": "ngram", "num_tokens": drafts}})
    largest = largest_steps(config, max_model_len=50, block=0)[0]
    plans = steps_of_each_size(largest, [1, 2, 4, 8, 24], max_model_len=50, drafts=drafts)
    drafted = {(plan.num_rows, plan.counts[0] - 1) for plan in plans if plan.drafts}
    assert {rows for rows, count in drafted if count == min(2, drafts)} >= {*range(1, 1 + min(most, 16))}
    assert {count for rows, count in drafted if rows == 1} == {*range(1, 1 + drafts)}
    assert all(len(row) == plan.counts[0] - 1 for plan in plans for row in plan.drafts.values())
    assert {plan.num_rows for plan in plans if plan.following} == {1, 2, 16}.intersection(range(1, 1 + most))
    ends = {plan.starts[0] for plan in plans if plan.drafts} - {1}
    assert ends == {plan.counts[0] for plan in plans if not plan.num_decode_rows}, "drafts catch up with every prompt"


DRAFT = SHAPES["qwen3"] | {"num_hidden_layers": 2}
TRITON = {"prefill": "triton", "decode": "triton"}
SERVED: dict[str, dict[str, Any]] = {
    "quantized": {"model": {"hf_config": SHAPES["qwen3"], "quantization": "fp8"}, "attention": TRITON},
    "experts": {"model": {"hf_config": SHAPES["qwen2_moe"]}, "cache": {"dtype": "fp8"}, "attention": TRITON},
    "latents": {"model": {"hf_config": LATENTS}},
    "batch-invariant": {"model": {"hf_config": SHAPES["qwen2"]}, "numerics": "batch_invariant"},
    "drafts": {
        "model": {"hf_config": SHAPES["qwen2"]},
        "attention": TRITON,
        "graphs": {"capture": "never"},
        "speculation": {
            "method": "draft",
            "num_tokens": 3,
            "adaptive": False,
            "draft": {"load_format": "dummy", "hf_config": DRAFT},
        },
    },
}


def test_no_kernel_is_met_that_the_start_has_not_compiled() -> None:
    """A variant of its own for the head of three rows that sample took a serving engine 300 ms."""
    scheduler = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "overlap": "always"}
    settings = []
    for special in SERVED.values():
        model = {"load_format": "dummy", "device": "cpu", "dtype": "bfloat16", "kernels": "triton"} | special["model"]
        model |= {"max_model_len": 1000, "hf_config": model["hf_config"] | {"num_hidden_layers": 2}}
        cache = {"num_blocks": 3000} | special.get("cache", {})
        settings.append(json.dumps({"scheduler": scheduler, **special, "model": model, "cache": cache}))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = [sys.executable, str(Path(__file__).with_name("variants_met.py")), *settings]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert dict(zip(SERVED, json.loads(done.stdout.splitlines()[-1]), strict=True)) == {name: [] for name in SERVED}
