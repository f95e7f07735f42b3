"""Every mechanism over ranks: the tokens of one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import cells
from integrity import check_scheduler

from experiments.lab.judge.logit_gate import probe_logits
from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.core.limits import Limits
from mini_infer.parallel import context
from mini_infer.parallel.all_reduce import Collectives
from mini_infer.runtime.executor import local
from mini_infer.runtime.worker.worker import Worker
from mini_infer.speculative.policy.costs import StepCosts

MakeEngine = Callable[..., LLMEngine]

PROMPTS = [
    "def a():\n    return 1\n\ndef b():",
    "import os\n\nclass Cache:",
    "for i in range(",
    "import os\n\nclass Cache:",
    "def a():\n    return 1\n\ndef b():\n    return 2\n\ndef c():\n    return",
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=18, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=2, max_tokens=12, n=2, repetition_penalty=1.1),
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(temperature=0, max_tokens=20, grammar=("regex", r" [a-z]+ \+ [0-9]{1,4}")),
]
GREEDY = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)] * len(PROMPTS)

UNDRAWN = [replace(params, temperature=0) for params in PARAMS]  # with the same grammar, penalty and number of answers

# What decides about tokens, and one process has as well; whatever else is in a row of the table does not.
DRAFT = {"method": "draft", "num_tokens": 3, "adaptive": False, "draft": {"path": "tiny-draft"}}
WIDE_HEADS = {  # which blocks of scales leave whole
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2048, "hidden_size": 256},
    **{"intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 128, "max_position_embeddings": 64, "initializer_range": 0.1, "tie_word_embeddings": False},
}
MADE_UP = {"path": "made up", "load_format": "dummy", "hf_config": WIDE_HEADS, "tokenizer": "tiny-target"}
ALIKE: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8 weights, fp8 keys and values": {"model": {"quantization": "w8a16"}, "cache": {"dtype": "fp8"}},
    "int4 weights": {"model": {"quantization": "w4a16"}},
    "fp8 weights, a scale a block": {"model": {**MADE_UP, "quantization": "fp8_block"}},
    "fp8 weights, a scale an output": {"model": {"quantization": "fp8"}},
    "draft model": {"speculation": DRAFT},  # what it draws decides what is drawn
}
FEW_BLOCKS = {"num_blocks": 16, "block_size": 4}  # one request may need all of them
# (what is alike, settings, what happens). Mechanisms that do not touch each other share an engine. Of five prompts the
# last begins like the first, and finds it in the cache where four at most run at once.
TABLE: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "no prefix cache, contiguous KV, ngram": (
        "plain",
        {
            "cache": {"prefix_caching": False, "layout": "contiguous", "num_blocks": 16},
            "speculation": {"method": "ngram", "num_tokens": 3, "adaptive": False},
            "scheduler": {"overlap": "always", "max_num_seqs": 4},
        },
        {"accepted"},
    ),
    "chunks, overlap and swap": (
        "plain",
        {
            "cache": {**FEW_BLOCKS, "num_host_blocks": 16},
            "scheduler": {"preemption": "swap", "overlap": "always", "max_num_batched_tokens": 8, "max_num_seqs": 4},
        },
        {"chunks", "hits", "preempted", "swapped"},
    ),
    "recompute, prefixes in host memory, int8 weights, fp8 keys and values": (
        "int8 weights, fp8 keys and values",
        {"cache": {**FEW_BLOCKS, "host_prefix_gib": 2**-8}, "scheduler": {"max_num_seqs": 5}},
        {"chunks", "hits", "preempted", "loaded"},
    ),
    "int4 weights": ("int4 weights", {"cache": {"block_size": 4}, "scheduler": {"max_num_seqs": 4}}, {"hits"}),
    "fp8 weights, a scale a block": ("fp8 weights, a scale a block", {}, set()),
    "fp8 weights, a scale an output": ("fp8 weights, a scale an output", {}, set()),
    "draft model": (
        "draft model",
        {"cache": {"block_size": 4}, "scheduler": {"max_num_seqs": 4}},
        {"accepted", "hits"},
    ),
    "draft model, overlap, adaptive": (
        "plain",
        {
            "cache": {"block_size": 4},
            "speculation": {**DRAFT, "num_tokens": 2, "adaptive": True},
            "scheduler": {"overlap": "always", "max_num_seqs": 4},
        },
        {"accepted", "hits"},
    ),
}
TWO, STAGES, FOUR = "2 ranks", "2 stages", "2 stages of 2 ranks"
LAYOUTS = {TWO: {"tensor": 2}, STAGES: {"tensor": 1, "pipeline": 2}, FOUR: {"tensor": 2, "pipeline": 2}}
# These run always; all 22 cells take some 40 s of CPU time, in processes that share it.
OFTEN = {
    "no prefix cache, contiguous KV, ngram": (TWO,),
    "chunks, overlap and swap": (FOUR,),
    "recompute, prefixes in host memory, int8 weights, fp8 keys and values": (TWO, STAGES),
    "int4 weights": (TWO,),
    "fp8 weights, a scale a block": (FOUR,),
    "draft model": (FOUR,),
    "draft model, overlap, adaptive": (STAGES,),
}
# With a scale a token each rank rounds its own inputs by one of its own: docs/parallel.md.
ROUNDED_BY_RANK = [("fp8 weights, a scale an output", layout) for layout in (TWO, FOUR)]
CASES = cells(
    (cell for cell in product(TABLE, LAYOUTS) if cell not in ROUNDED_BY_RANK),
    [(name, layout) for name, layouts in OFTEN.items() for layout in layouts],
)


def together(*all_of: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Settings by section."""
    sections = {section for settings in all_of for section in settings}
    return {section: {k: v for s in all_of for k, v in s.get(section, {}).items()} for section in sections}


def tokens(engine: LLMEngine, params: list[SamplingParams]) -> list[list[list[int]]]:
    outputs = engine.generate(PROMPTS, params)
    check_scheduler(engine.scheduler)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@functools.cache
def alone(alike: str = "plain") -> LLMEngine:
    plain = {"model": {"path": "tiny-target"}, "cache": {"num_blocks": 64}}
    return LLMEngine(EngineConfig.from_dict({"seed": 0, **together(plain, ALIKE[alike])}))


@functools.cache
def of_one_process(asked: str, alike: str = "plain") -> list[list[list[int]]]:
    return tokens(alone(alike), {"all": PARAMS, "undrawn": UNDRAWN, "greedy": GREEDY}[asked])


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_ranks_give_the_tokens_of_one_process(make_engine: MakeEngine, name: str, layout: str) -> None:
    (alike, settings, happens), parallel = TABLE[name], LAYOUTS[layout]
    model = {"model": {"path": "tiny-target", "max_model_len": 64}}
    engine = make_engine(**together(model, ALIKE[alike], settings), parallel=parallel)
    adaptive = settings.get("speculation", {}).get("adaptive", False)
    if adaptive:  # whatever this machine says of costs; how many drafts there are decides what is drawn
        policy: Any = engine.scheduler.speculator.policy
        policy.costs = StepCosts({(1, 1): 1.0, (1, 4): 1.1, (4, 1): 1.0, (4, 4): 1.2}, {1: 0.01, 4: 0.02})
    assert tokens(engine, UNDRAWN if adaptive else PARAMS) == of_one_process("undrawn" if adaptive else "all", alike)
    events = {
        "chunks": [record.num_prefilling for record in engine.records],
        "hits": [record.prefix_hit_tokens for record in engine.records],
        "preempted": [len(record.preempted) for record in engine.records],
        "swapped": [record.swapped_in_blocks for record in engine.records],
        "loaded": [record.loaded_blocks for record in engine.records],
        "accepted": [sum(record.accepted) for record in engine.records],
    }
    assert {event for event, counts in events.items() if any(counts)} == happens
    startup = engine.startup
    assert (startup.tensor_parallel, startup.pipeline_parallel) == (parallel["tensor"], parallel.get("pipeline", 1))


def test_sums_that_are_under_way_while_the_next_half_is_computed(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "IN_HALVES", 2)
    begun = []
    begin = Collectives.begin_all_reduce
    monkeypatch.setattr(Collectives, "begin_all_reduce", lambda own, x: begun.append(len(x)) or begin(own, x))
    assert tokens(make_engine(), PARAMS) == of_one_process("all")
    assert max(begun) > 8


def test_four_ranks_share_two_kv_heads(make_engine: MakeEngine) -> None:
    engine = make_engine(tensor=4)
    assert tokens(engine, PARAMS) == of_one_process("all")
    assert engine.executor.runner._runner._model.store.keys(0).shape[-2] == 1


@pytest.mark.parametrize("overlap", ["never", "always"])
def test_every_stage_has_other_requests(make_engine: MakeEngine, overlap: str) -> None:
    engine = make_engine(tensor=1, parallel={"pipeline": 3}, scheduler={"overlap": overlap})
    runner, plans = engine.executor.runner, []
    launch = runner.launch
    runner.launch = lambda plan: plans.append(plan) or launch(plan)
    assert tokens(engine, GREEDY) == of_one_process("greedy")
    in_flight = [plan for plan in plans if plan.num_decode_rows]
    assert max(len(engine.core._in_flight), 0) == 0
    shares = [sorted(plan.req_indices) for plan in in_flight[3:-3]]
    assert {len(share) for share in shares} <= {1, 2}  # of five requests
    for three in zip(shares, shares[1:], shares[2:], strict=False):
        assert len({index for share in three for index in share}) == sum(map(len, three))


def test_an_engine_of_stages_goes_on_after_everybody_has_gone_and_can_be_asked_for_logits(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(tensor=1, parallel={"pipeline": 2})
    for _ in range(6):  # steps that nobody collects
        for prompt in PROMPTS:
            engine.add_request(prompt, GREEDY[0])
        for _ in range(3):
            engine.step()
        for request in engine._outputs.unfinished():
            engine.abort(request.request_id)
        while engine.has_unfinished_requests():
            engine.step()
    assert tokens(engine, GREEDY) == of_one_process("greedy")
    token_ids = engine.tokenizer.encode("def read(path):\n    return open(path)")
    torch.testing.assert_close(probe_logits(engine, token_ids, 5), probe_logits(alone(), token_ids, 5))


def test_cancelled_requests_leave_the_others_as_they_are(make_engine: MakeEngine) -> None:
    engine = make_engine(scheduler={"overlap": "always"})
    expected = of_one_process("greedy")
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


def test_two_engines_over_ranks_live_in_a_process_and_have_its_log_probabilities(make_engine: MakeEngine) -> None:
    engines = make_engine(), make_engine()
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2)
    streams = [engine.stream(PROMPTS[0], params) for engine in engines]
    told = list(zip(*zip(*streams, strict=True), strict=True))  # of both, turn by turn
    (theirs,) = alone().generate(PROMPTS[0], params)
    expected = [entry.logprob for entry in (*theirs.outputs[0].logprobs, *theirs.prompt_logprobs[1:])]
    for ours in told:
        (of_prompt,) = (output.prompt_logprobs for output in ours if output.prompt_logprobs is not None)
        assert ours[-1].outputs[0].token_ids == theirs.outputs[0].token_ids
        found = [entry.logprob for entry in (*ours[-1].outputs[0].logprobs, *of_prompt[1:])]
        assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("least", [0, 1])
def test_limits_are_the_least_of_all_ranks(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, least: int
) -> None:
    """One of the ranks has less room for KV, and finds less of the host's memory free."""
    settle, allocate = local.settle_limits, Worker.allocate
    own: list[int] = []  # this process's rank

    def affordable(worker: Worker, limits: Limits | None = None) -> int:
        own[:] = [worker._parallel.number]
        return 30 if own == [least] else 50

    def settle_here(config: EngineConfig, length: int, blocks: int, block_bytes: int) -> Limits:
        host_blocks = 10 if own == [least] else 20
        return settle(config, length, blocks, block_bytes, host_gib=2 * host_blocks * block_bytes / 2**30)

    def allocate_and_tell(worker: Worker, limits: Limits, *files: Any) -> None:
        (tmp_path / str(worker._parallel.number)).write_text(f"{limits.num_blocks} {limits.num_host_blocks}")
        allocate(worker, limits, *files)

    monkeypatch.setattr(local, "settle_limits", settle_here)
    monkeypatch.setattr(Worker, "affordable_blocks", affordable)
    monkeypatch.setattr(Worker, "allocate", allocate_and_tell)
    engine = make_engine(cache={"num_blocks": None}, scheduler={"preemption": "swap"})
    assert (engine.executor.limits.num_blocks, engine.executor.limits.num_host_blocks) == (30, 10)
    assert engine.scheduler.kv.num_blocks == 30
    assert len(engine.generate("def f(", GREEDY[0])[0].outputs[0].token_ids) == 20
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["30 10"] * 2
