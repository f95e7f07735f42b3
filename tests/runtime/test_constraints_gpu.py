"""Grammars, biases and log-probabilities of prompts on a GPU, where plain rows run in CUDA graphs beside them: every
request gets what the CPU gives it, which knows neither graphs nor overlap."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from integrity import check_scheduler
from schemas import PERSON

from mini_infer import EngineConfig, LLMEngine, RequestOutput, SamplingParams

pytestmark = pytest.mark.gpu
pytest.importorskip("llguidance")

DATE = r"(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]"
PROMPTS = ["def fibonacci(n):\n    if n < 2:\n", "Answer: ", "import ", "class Tree:\n    def __init__(self"] * 6


def params() -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [
        {},
        {"grammar": ("json_schema", PERSON)},
        {"grammar": ("regex", DATE)},
        {"logit_bias": {65: 100.0}},
        {"prompt_logprobs": 2, "logprobs": 2},
        {"temperature": 0.8, "seed": 5, "grammar": ("regex", DATE)},
    ]
    return [SamplingParams(**{"temperature": 0, "max_tokens": 60, **kinds[i % len(kinds)]}) for i in range(24)]


def outputs(device: str) -> list[RequestOutput]:
    model = {"path": "tiny-target", "device": device, "dtype": "float32"}
    cache = {"memory_gib": 0.25}
    engine = LLMEngine(EngineConfig.from_dict({"model": model, "cache": cache, "scheduler": {"max_num_seqs": 16}}))
    given = engine.generate(PROMPTS, params())
    check_scheduler(engine.scheduler)
    assert engine.scheduler.usage().used_blocks == 0
    engine.close()
    return given


def test_constrained_rows_beside_plain_ones() -> None:
    found, expected = outputs("cuda"), outputs("cpu")
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        text = one.outputs[0].text
        if index % 6 == 1:
            assert set(json.loads(text)) == {"name", "age"}
        elif index % 6 in (2, 5):
            assert re.fullmatch(DATE, text)
        elif index % 6 == 3:
            assert set(one.outputs[0].token_ids) == {65}
        elif index % 6 == 4:
            assert one.prompt_logprobs is not None
            assert other.prompt_logprobs is not None
            for a, b in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
                assert a is not None
                assert b is not None
                assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
    greedy = [index for index in range(24) if index % 6 != 5]
    same = sum(found[i].outputs[0].token_ids == expected[i].outputs[0].token_ids for i in greedy)
    assert same >= 0.9 * len(greedy), "two orders of a sum may tip a close choice, in a request or two"
