"""Ranks on GPUs: tokens, graphs and faults as on a CPU. They need two."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch

from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.core.errors import RankError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

PROMPTS = ["def read(path):\n    with open(", "import os\n\nclass Cache:", "for i in range("]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=48, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, prompt_logprobs=1, logprobs=3),
]


LAYOUTS: list[dict[str, int]] = [{"tensor": 2}, {"pipeline": 2}]


def answers(parallel: dict[str, int], **sections: Any) -> list[Any]:
    values = {"model": {"path": "tiny-target"}, "seed": 0, "cache": {"num_blocks": 256}, **sections}
    engine = LLMEngine(EngineConfig.from_dict({**values, "parallel": parallel}))
    try:
        outputs = engine.generate(PROMPTS, PARAMS)
    finally:
        engine.close()
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"graphs": {"capture": "never"}},
        {"scheduler": {"max_num_batched_tokens": 64, "max_num_seqs": 4}},
        {"scheduler": {"overlap": "never"}},
        {"speculation": {"method": "ngram", "num_tokens": 3, "adaptive": False}},
        {"cache": {"num_blocks": 12, "num_host_blocks": 32}, "scheduler": {"preemption": "swap"}},
    ],
)
def test_two_gpus_give_the_bits_of_one(sections: dict[str, Any], parallel: dict[str, int]) -> None:
    if sections.get("scheduler", {}).get("preemption"):
        sections = {**sections, "model": {"path": "tiny-target", "max_model_len": 128}}
    expected = answers({}, numerics="batch_invariant", model={"path": "tiny-target", "max_model_len": 128})
    assert answers(parallel, numerics="batch_invariant", **sections) == expected


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_fast_numerics_in_fp32_give_the_tokens_of_one(parallel: dict[str, int]) -> None:
    model = {"path": "tiny-target", "dtype": "float32"}
    found, expected = answers(parallel, model=model), answers({}, model=model)
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in expected]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_does_not_keep_the_gpu_waiting(number: int, parallel: dict[str, int]) -> None:
    values = {"model": {"path": "tiny-target"}, "parallel": {**parallel, "timeout_s": 3.0}}
    engine = LLMEngine(EngineConfig.from_dict(values))
    (process,) = engine.executor._ranks.processes
    threading.Timer(0.3, os.kill, (process.pid, number)).start()
    params = SamplingParams(temperature=0, max_tokens=1800, ignore_eos=True)
    with pytest.raises(RankError, match="rank 1"):
        engine.generate(PROMPTS * 100, params)
    engine.close()
