"""Speculation on a GPU, through CUDA graphs and without: a draft with the target's own weights is nearly always right,
unless an input, a block or a sampled token is wrong somewhere."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import pytest
import torch
from integrity import check_scheduler
from model_shapes import SHAPES

from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.core.plan import Admission, StepPlan
from mini_infer.runtime.worker.row_step import real_tokens
from mini_infer.runtime.worker.step_input import Samples

pytestmark = pytest.mark.gpu

SHAPE = SHAPES["qwen2"]
PROMPTS = [[(7 * i + j) % 5000 for j in range(5 + 13 * i)] for i in range(9)]
DRAFT = {"method": "draft", "draft": {"hf_config": SHAPE, "load_format": "dummy"}, "num_tokens": 3, "adaptive": False}


def make(speculation: dict[str, Any], dtype: str = "float32", **sections: Any) -> LLMEngine:
    model = {"path": "qwen2", "load_format": "dummy", "hf_config": SHAPE, "dtype": dtype, "device": "cuda"}
    scheduler = {"max_num_seqs": 16, "max_num_batched_tokens": 256, **sections.pop("scheduler", {})}
    return LLMEngine(
        EngineConfig.from_dict(
            {
                "model": model,
                "cache": {"memory_gib": 0.25},
                "scheduler": scheduler,
                "speculation": speculation,
                **sections,
            }
        )
    )


def tokens(engine: LLMEngine, temperature: float = 0.0, seeded: bool = True, **some: Any) -> list[list[int]]:
    params = [
        SamplingParams(temperature=temperature, seed=i if seeded else None, max_tokens=40 + i, ignore_eos=True, **some)
        for i in range(len(PROMPTS))
    ]
    outputs = engine.generate(PROMPTS, params)
    check_scheduler(engine.scheduler)
    return [output.outputs[0].token_ids for output in outputs]


def equal_share(one: list[list[int]], other: list[list[int]]) -> float:
    equal = sum(
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=True)))
        for a, b in zip(one, other, strict=True)
    )
    return equal / sum(map(len, one))


def accepted_share(engine: LLMEngine) -> float:
    return sum(sum(r.accepted) for r in engine.records) / sum(sum(r.drafted) for r in engine.records)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return tokens(make({}))


@pytest.fixture(autouse=True)
def memory_is_given_back() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("capture", ["always", "never"])
def test_a_draft_that_is_the_target_is_right(expected: list[list[int]], capture: str) -> None:
    engine = make(DRAFT, graphs={"capture": capture})
    assert equal_share(expected, tokens(engine)) > 0.97
    assert accepted_share(engine) > 0.97
    assert bool(engine.startup.draft_graphs.batch_sizes) == (capture == "always")
    assert all(r.draft_s > 0 for r in engine.records if r.drafted)


@pytest.mark.parametrize("capture", ["always", "never"])
@pytest.mark.parametrize("some", [{}, {"presence_penalty": 0.1, "logprobs": 1, "min_tokens": 5, "top_p": 0.95}])
def test_drawn_drafts_are_nearly_all_accepted(capture: str, some: dict[str, Any]) -> None:
    """With penalties and the like they are drawn from a little less than what they are verified by."""
    engine = make(DRAFT, graphs={"capture": capture})
    tokens(engine, temperature=0.8, seeded=False, **some)
    assert accepted_share(engine) > (0.8 if some else 0.95)


@pytest.mark.parametrize("capture", ["always", "never"])
def test_a_seed_reproduces_in_any_company(capture: str) -> None:
    engine = make({**DRAFT, "adaptive": True}, graphs={"capture": capture})
    first = tokens(engine, temperature=0.8)
    assert equal_share(first, tokens(engine, temperature=0.8)) > 0.97
    assert equal_share(first, tokens(make({}), temperature=0.8)) > 0.97


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("rows", [1, 3, 9])
@torch.inference_mode()
def test_rows_with_drafts_have_the_logits_of_any_step(dtype: str, tolerance: float, rows: int) -> None:
    """Captured, padded and with ragged drafts, against one forward of the same tokens that knows where they are."""
    engine = make(DRAFT, dtype)
    runner, block = engine.executor.runner, engine.config.cache.block_size
    model, states = runner._model, runner._states
    lengths = [block * (2 + row) + (row % 3) - 1 for row in range(rows)]  # also at the last place of a block
    counts = sorted(1 + row % 4 for row in range(rows))
    tables = [list(range(12 * row, 12 * row + 12)) for row in range(rows)]
    params = SamplingParams(temperature=0)
    prompts = [[(11 * row + i) % 5000 for i in range(length + 4)] for row, length in enumerate(lengths)]
    admissions = [
        Admission(row, "", prompts[row], lengths[row], tables[row], params, row, frozenset()) for row in range(rows)
    ]
    every, sampled = list(range(rows)), [True] * rows
    for row in every:
        prompt = StepPlan(0, [row], [0], [lengths[row]], [True], 0, admissions=[admissions[row]])
        runner.collect(runner.launch(prompt))
    starts = [length - 1 for length in lengths]
    plan = StepPlan(0, every, starts, counts, sampled, rows, num_drafts=sum(counts) - rows)
    for row in every:  # the prompt's own tokens stand where drafts would
        drafts = torch.tensor(prompts[row][-4:], device="cuda")
        states.history[row, lengths[row] : lengths[row] + 4] = drafts
    history = states.history.clone()
    store = model.store
    before = store.tensors[0].clone()
    step = states.build(plan, Samples.of(plan))
    expected = model.compute_logits(model.forward(step)).float()
    expected_kv = store.tensors[0].clone()
    store.tensors[0].copy_(before)
    descriptor = runner.graphs.fit(rows, max(2, counts[-1]))
    assert descriptor is not None
    states.pack_rows(plan, descriptor.num_rows)
    done = runner.graphs.run(descriptor)
    logits = done.logits[torch.from_numpy(real_tokens(counts, descriptor.query_len)).cuda()].float()
    assert (logits - expected).norm() / expected.norm() < tolerance
    assert torch.equal(history[every, :20], states.history[every, :20]), "what is known is not written to"
    touched = {tables[row][(starts[row] + i) // block] for row in every for i in range(descriptor.query_len)}
    others = [i for i in range(store.num_blocks - 1) if i not in touched]
    kv, expected_kv = (whole.view(whole.shape[0], 2, store.num_blocks, -1) for whole in (store.tensors[0], expected_kv))
    assert torch.equal(kv[:, :, others], expected_kv[:, :, others]), (
        "padding writes to its own blocks and the spare one"
    )


@pytest.mark.parametrize("capture", ["always", "never"])
def test_prompts_and_drafts_in_one_step(capture: str) -> None:
    """In bf16, which has attention kernels of its own for prompts, and for rows that differ in their drafts."""
    engine = make(
        DRAFT, "bfloat16", graphs={"capture": capture}, scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 48}
    )
    tokens(engine)
    assert accepted_share(engine) > 0.9
    assert any(r.drafted and r.prefill_tokens for r in engine.records)


def test_memory_does_not_grow() -> None:
    engine = make(DRAFT)
    tokens(engine)
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        tokens(engine)
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_memory_is_short(expected: list[list[int]], preemption: str) -> None:
    cache = {"num_blocks": 24, "watermark": 0.0}  # 384 tokens, and the requests have about 900
    engine = make(DRAFT, cache=cache, scheduler={"preemption": preemption})
    assert equal_share(expected, tokens(engine)) > 0.97
    assert accepted_share(engine) > 0.9
    assert any(r.preempted for r in engine.records)


def test_lookup_and_as_many_as_pay(expected: list[list[int]]) -> None:
    engine = make({"method": "ngram", "num_tokens": 4})
    assert equal_share(expected, tokens(engine)) > 0.97
    assert engine.startup.speculation == "ngram, up to 4 tokens, as many as pay"


def test_a_stated_rate() -> None:
    engine = make({**DRAFT, "method": "synthetic", "acceptance": 0.5})
    tokens(engine)
    drafting = [r for r in engine.records if r.drafted]
    accepted, drafted = (sum(getattr(r, name)[0] for r in drafting) for name in ("accepted", "drafted"))
    assert accepted / drafted == pytest.approx(0.5, abs=4 * (0.25 / drafted) ** 0.5)
