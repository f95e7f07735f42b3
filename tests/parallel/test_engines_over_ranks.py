"""Every mechanism over ranks: the tokens of one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from integrity import check_scheduler

from mini_infer import EngineConfig, LLMEngine, SamplingParams

MakeEngine = Callable[..., LLMEngine]

PROMPTS = [
    "def read(path):\n    with open(",
    "import os\n\nclass Cache:",
    "for i in range(",
    "import os\n\nclass Cache:",
]
PROMPTS += ["def a():\n    return 1\n\ndef b():\n    return 2\n\ndef c():\n    return"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=18, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=2, max_tokens=12, n=2, repetition_penalty=1.1),
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(temperature=0, max_tokens=20, grammar=("regex", r" [a-z]+ \+ [0-9]{1,4}")),
]
GREEDY = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)] * len(PROMPTS)

TABLE: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 8, "max_num_seqs": 4}},
    "no prefix cache, contiguous KV": {
        "cache": {"prefix_caching": False, "layout": "contiguous", "num_blocks": 16},
        "model": {"path": "tiny-target", "max_model_len": 64},
    },
    "recompute": {"cache": {"num_blocks": 20, "block_size": 4}, "model": {"path": "tiny-target", "max_model_len": 64}},
    "swap": {
        "cache": {"num_blocks": 20, "block_size": 4, "num_host_blocks": 16},
        "scheduler": {"preemption": "swap"},
        "model": {"path": "tiny-target", "max_model_len": 64},
    },
    "overlap": {"scheduler": {"overlap": "always"}},
    "overlap and swap": {
        "cache": {"num_blocks": 20, "block_size": 4, "num_host_blocks": 16},
        "scheduler": {"preemption": "swap", "overlap": "always"},
        "model": {"path": "tiny-target", "max_model_len": 64},
    },
    "fp8 keys and values": {"cache": {"dtype": "fp8"}},
    "ngram": {
        "speculation": {"method": "ngram", "num_tokens": 3, "adaptive": False},
        "scheduler": {"overlap": "always"},
    },
    "draft model": {
        "speculation": {"method": "draft", "num_tokens": 3, "adaptive": False, "draft": {"path": "tiny-draft"}},
    },
    "draft model, overlap, adaptive": {
        "speculation": {"method": "draft", "num_tokens": 2, "adaptive": True, "draft": {"path": "tiny-draft"}},
        "scheduler": {"overlap": "always", "max_num_seqs": 4},
    },
}


def tokens(engine: LLMEngine, params: list[SamplingParams]) -> list[list[list[int]]]:
    outputs = engine.generate(PROMPTS, params)
    check_scheduler(engine.scheduler)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@functools.cache
def of_one_process(greedy: bool, cache_dtype: str) -> list[list[list[int]]]:
    config = {"model": {"path": "tiny-target"}, "seed": 0, "cache": {"num_blocks": 64, "dtype": cache_dtype}}
    return tokens(LLMEngine(EngineConfig.from_dict(config)), GREEDY if greedy else PARAMS)


@pytest.mark.parametrize("name", TABLE)
def test_two_ranks_give_the_tokens_of_one_process(make_engine: MakeEngine, name: str) -> None:
    settings = TABLE[name]
    engine = make_engine(**settings)
    greedy = settings.get("speculation", {}).get("method") == "draft"  # what a draft draws decides what is drawn
    expected = of_one_process(greedy, settings.get("cache", {}).get("dtype", "auto"))
    assert tokens(engine, GREEDY if greedy else PARAMS) == expected
    preempted = sum(len(record.preempted) for record in engine.records)
    assert (preempted > 0) == (settings.get("cache", {}).get("num_blocks") == 20)
    swapped = sum(record.swapped_in_blocks for record in engine.records)
    assert (swapped > 0) == ("swap" in name)
    assert any(record.accepted for record in engine.records) == ("speculation" in settings)
    assert engine.startup.tensor_parallel == 2


def test_four_ranks_share_two_kv_heads(make_engine: MakeEngine) -> None:
    engine = make_engine(tensor=4)
    assert tokens(engine, PARAMS) == of_one_process(False, "auto")
    assert engine.executor.runner._runner._model.store.keys(0).shape[-2] == 1


def test_log_probabilities_are_those_of_one_process(make_engine: MakeEngine) -> None:
    engine, alone = make_engine(), LLMEngine(EngineConfig.from_dict({"model": "tiny-target", "seed": 0}))
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2)
    ((ours,), (theirs,)) = engine.generate(PROMPTS[0], params), alone.generate(PROMPTS[0], params)
    for own, other in zip(
        [*ours.outputs[0].logprobs, *ours.prompt_logprobs[1:]],
        [*theirs.outputs[0].logprobs, *theirs.prompt_logprobs[1:]],
        strict=True,
    ):
        assert own.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_cancelled_requests_leave_the_others_as_they_are(make_engine: MakeEngine) -> None:
    engine = make_engine(scheduler={"overlap": "always"})
    expected = of_one_process(True, "auto")
    ids = [engine.add_request(prompt, params) for prompt, params in zip(PROMPTS, GREEDY, strict=True)]
    for _ in range(5):
        engine.step()
    engine.abort(ids[0])
    done = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output.outputs[0].token_ids
    assert [done[request_id] for request_id in ids[1:]] == [row[0] for row in expected[1:]]
    assert len(done[ids[0]]) < 20
    check_scheduler(engine.scheduler)


def test_two_engines_over_ranks_live_in_a_process(make_engine: MakeEngine) -> None:
    engines = make_engine(), make_engine()
    streams = [engine.stream(PROMPTS[0], GREEDY[0]) for engine in engines]
    ends = [list(pair)[-1] for pair in zip(*zip(*streams, strict=True), strict=True)]
    assert [end.outputs[0].token_ids for end in ends] == [of_one_process(True, "auto")[0][0]] * 2
