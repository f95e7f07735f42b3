"""Speculation changes no token: greedy, and sampled where nothing random proposes; alone and with memory short."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from integrity import check_scheduler

from mini_infer import ConfigError, EngineConfig, LLMEngine, SamplingParams
from mini_infer.core.plan import Draft, StepPlan, StepResult, count_drafts
from mini_infer.core.request import Request
from mini_infer.modeling.loader import load_spec
from mini_infer.runtime.worker import served_model
from mini_infer.runtime.worker.worker import Worker
from mini_infer.speculative.policy.adaptive import AdaptiveDraftLength
from mini_infer.speculative.policy.costs import StepCosts

TINY = {"path": "tiny-target", "device": "cpu", "max_model_len": 96}
DRAFT = {"method": "draft", "draft": {"path": "tiny-draft"}, "adaptive": False}
MACHINES: dict[str, dict[str, dict[str, Any]]] = {
    "overlap": {"scheduler": {"overlap": "always"}},
    "short of memory, recompute": {
        "cache": {"num_blocks": 12, "block_size": 8, "watermark": 0.0},
        "scheduler": {"max_num_seqs": 6, "max_num_batched_tokens": 23, "overlap": "always"},
    },
    "short of memory, swap": {
        "cache": {"num_blocks": 12, "block_size": 8, "watermark": 0.0},
        "scheduler": {"max_num_seqs": 6, "max_num_batched_tokens": 29, "preemption": "swap"},
    },
    "static and contiguous": {
        "cache": {"num_blocks": 32, "block_size": 16, "layout": "contiguous", "prefix_caching": False},
        "scheduler": {"batching": "static", "max_num_seqs": 4},
    },
}
PROMPTS = [
    "import os\nimport sys\n\ndef main():\n",
    "import os\nimport sys\n\ndef parse(text):\n    return text.split()\n\ndef join(parts):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "for i in range(10):\n    print(i)\n",
    "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [",
    "def f(a, b):\n    if a is None:\n        raise ValueError\n    if b is None:\n",
    "while True:\n",
]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def make_engine(speculation: dict[str, Any] | None = None, **sections: Any) -> LLMEngine:
    return LLMEngine(EngineConfig.from_dict({"model": TINY, "speculation": speculation or {}, **sections}))


def tokens(engine: LLMEngine, params: SamplingParams | list[SamplingParams]) -> list[list[list[int]]]:
    outputs = engine.generate(PROMPTS, params)
    check_scheduler(engine.scheduler)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def without() -> LLMEngine:
    return make_engine()


@pytest.fixture(scope="module")
def expected(without: LLMEngine) -> list[list[list[int]]]:
    return tokens(without, GREEDY)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_draft_model_changes_no_greedy_token(expected: list, machine: str) -> None:
    engine = make_engine({**DRAFT, "num_tokens": 3}, **MACHINES[machine])
    assert tokens(engine, GREEDY) == expected
    assert tokens(engine, GREEDY) == expected  # blocks that are found in the cache have the draft's KV, too
    records = engine.records
    drafted, accepted = (sum(sum(getattr(r, name)) for r in records) for name in ("drafted", "accepted"))
    assert accepted > 0.4 * drafted > 0
    assert any(r.draft_s > 0 for r in records)
    if machine.startswith("short"):
        assert any(r.preempted for r in records)
        assert any(r.drafted and r.prefill_tokens for r in records), "drafts and prompts never shared a step"


@pytest.mark.parametrize(
    ("quantization", "kv", "machine"),
    [
        ("w8a8", "fp8", "short of memory, swap"),
        ("mixed", "auto", "short of memory, recompute"),
        ("fp8_block", "auto", "short of memory, recompute"),
        ("w4a16", "fp8", "short of memory, swap"),
    ],
)
def test_a_quantized_model_gives_the_tokens_that_it_gives_plainly(quantization: str, kv: str, machine: str) -> None:
    """With a quantized draft, chunks, hits, preemption and overlap.

    fp8 activations have steps of up to 6 %. Where the last bit of float32, which depends on a row's company, decides to
    which side one is rounded, a later token may be another: so a few tokens are compared.
    """
    greedy = dataclasses.replace(GREEDY, max_tokens=10)
    model = TINY | {"path": "tiny-draft", "quantization": quantization, "quantization_group": 64}
    sections: dict[str, Any] = MACHINES[machine] | {"cache": MACHINES[machine]["cache"] | {"dtype": kv}}
    engine = LLMEngine(EngineConfig.from_dict({"model": model, "cache": {"dtype": kv}}))
    plain = tokens(engine, greedy)
    engine.close()
    draft = {**DRAFT, "draft": {"path": "tiny-draft", "quantization": quantization}, "num_tokens": 3}  # other groups
    engine = LLMEngine(EngineConfig.from_dict({"model": model, "speculation": draft, **sections}))
    assert tokens(engine, greedy) == plain
    for _ in range(2):  # the second time from the cache
        assert engine.generate(PROMPTS[1], greedy)[0].outputs[0].token_ids == plain[1][0]
    records, startup = engine.records, engine.startup
    assert sum(sum(r.accepted) for r in records) > 0.4 * sum(sum(r.drafted) for r in records) > 0
    assert any(r.preempted for r in records)
    assert any(r.prefix_hit_tokens for r in records)
    assert startup.quantization.startswith(quantization)
    assert startup.draft_quantization == startup.quantization
    assert ("float8" in startup.kv_dtype) == (kv == "fp8")
    engine.close()


@pytest.mark.parametrize(("method", "machine"), [("ngram", "short of memory, recompute"), ("suffix", "overlap")])
def test_lookup_changes_no_token_even_at_a_temperature(without: LLMEngine, method: str, machine: str) -> None:
    some = {"max_tokens": 24, "logprobs": 1}
    params = [
        SamplingParams(temperature=0, stop=["self"], **some),
        SamplingParams(temperature=0.7, seed=1, n=3, **some),
        SamplingParams(temperature=0.7, seed=2, top_p=0.9, presence_penalty=0.5, **some),
        SamplingParams(temperature=1.0, seed=3, top_k=5, min_tokens=20, **some),
        SamplingParams(temperature=0, repetition_penalty=1.2, **some),
        SamplingParams(temperature=0.3, seed=4, min_p=0.1, logit_bias={5: 1.0}, **some),
        SamplingParams(temperature=0, grammar=("regex", "[a-f ]{5,30}"), **some),
    ]
    engine = make_engine({"method": method, "adaptive": False, "num_tokens": 5}, **MACHINES[machine])
    wanted, got = without.generate(PROMPTS, params), engine.generate(PROMPTS, params)
    for one, other in zip(wanted, got, strict=True):
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert (a.token_ids, a.text, a.finish_reason, a.stop_reason) == (
                b.token_ids,
                b.text,
                b.finish_reason,
                b.stop_reason,
            )
            assert [(x.token_id, x.rank) for x in a.logprobs] == [(x.token_id, x.rank) for x in b.logprobs]
            assert [x.logprob for x in a.logprobs] == pytest.approx([x.logprob for x in b.logprobs], abs=1e-3)
    assert any(sum(r.accepted) for r in engine.records)


def test_a_seed_reproduces_in_any_company(without: LLMEngine) -> None:
    """And without speculation: what decides a token does not depend on whether it had a draft."""
    params = [SamplingParams(temperature=0.6, seed=i, max_tokens=16, ignore_eos=True) for i in range(len(PROMPTS))]
    engine = make_engine({**DRAFT, "num_tokens": 3}, **MACHINES["overlap"])
    first = tokens(engine, params)
    assert sum(sum(r.accepted) for r in engine.records) > 0.3 * sum(sum(r.drafted) for r in engine.records)
    alone = [[c.token_ids for c in engine.generate(p, own)[0].outputs] for p, own in zip(PROMPTS, params, strict=True)]
    assert first == alone == tokens(without, params)


def test_drafts_that_were_drawn_are_often_right() -> None:
    params = SamplingParams(temperature=0.6, max_tokens=16, ignore_eos=True)
    engine = make_engine({**DRAFT, "num_tokens": 3}, seed=0)
    first = tokens(engine, params)
    assert sum(sum(r.accepted) for r in engine.records) > 0.4 * sum(sum(r.drafted) for r in engine.records)
    assert first == tokens(make_engine({**DRAFT, "num_tokens": 3}, seed=0), params)


def test_as_many_drafts_as_pay_are_made_of_the_right_tokens(expected: list, quick_step_costs: None) -> None:
    """Whatever this machine says of costs; with them set so that drafts come and go."""
    engine = make_engine(
        {**DRAFT, "num_tokens": 3, "adaptive": True}, scheduler={"max_num_seqs": 4, "overlap": "always"}
    )
    lengths = engine.scheduler.speculator.policy
    assert isinstance(lengths, AdaptiveDraftLength)
    lengths.costs = StepCosts({(1, 1): 1.0, (1, 4): 1.1, (4, 1): 1.0, (4, 4): 3.0}, {1: 0.01, 4: 0.2})
    assert tokens(engine, GREEDY) == expected
    widths = [len(r.drafted) for r in engine.records if r.decode_tokens]
    assert len(set(widths)) > 1
    assert not any(r.drafted for r in engine.records if r.prefill_tokens), "nobody knows what they would cost there"
    params = SamplingParams(temperature=0.6, seed=1, max_tokens=16, ignore_eos=True)
    assert all(len(output[0]) == 16 for output in tokens(engine, params))
    check_scheduler(engine.scheduler)


def test_synthetic_drafts_are_accepted_at_their_rate() -> None:
    dry = {"load_format": "dry"}
    speculation = {"method": "synthetic", "acceptance": 0.7, "num_tokens": 4, "adaptive": False}
    engine = LLMEngine(EngineConfig.from_dict({"seed": 0, "model": dry, "speculation": speculation}))
    engine.generate([[65 + i] for i in range(64)], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    first = [r for r in engine.records if r.drafted]
    rate = sum(r.accepted[0] for r in first) / sum(r.drafted[0] for r in first)
    assert rate == pytest.approx(0.7, abs=0.02)
    both = sum(r.accepted[1] for r in first if len(r.drafted) > 1) / sum(
        r.drafted[1] for r in first if len(r.drafted) > 1
    )
    assert both == pytest.approx(0.49, abs=0.02)


def test_drafts_are_counted_by_place() -> None:
    plan = StepPlan(0, [0, 1, 2], [5, 5, 5], [1, 3, 4], [True] * 3, num_decode_rows=3, num_drafts=5)
    assert count_drafts(plan, StepResult([[1], [1, 2], [1, 2, 3, 4]])) == ((2, 2, 1), (2, 1, 1))


@pytest.mark.parametrize(
    ("speculation", "words"),
    [
        ({"method": "ngram", "num_tokens": 0}, "speculation.method=none"),
        ({"method": "ngram", "num_tokens": 300}, "from 1 to 32"),
        ({"method": "draft"}, "speculation.draft.path"),
        ({"method": "ngram", "draft": {"path": "tiny-draft"}}, "no model proposes"),
        ({"method": "synthetic"}, "speculation.acceptance"),
        ({"method": "ngram", "acceptance": 0.5}, "speculation.acceptance"),
        ({"method": "synthetic", "acceptance": 1.5}, "from 0 to 1"),
        ({"method": "ngram", "ngram_min": 5}, "ngram_max"),
        ({"method": "draft", "draft": {"path": "tiny-draft", "load_format": "dry"}}, "a draft needs a model"),
        ({"method": "draft", "draft": {"path": "tiny-draft", "dtype": "int3"}}, "speculation.draft.dtype"),
        ({"method": "guess"}, "none, draft, ngram, suffix, synthetic"),
    ],
)
def test_settings_that_cannot_work_are_refused(speculation: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_dict({"speculation": speculation})


def test_a_draft_of_another_vocabulary_is_refused() -> None:
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 9999,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    with pytest.raises(ConfigError, match="another vocabulary"):
        make_engine({"method": "draft", "draft": {"hf_config": shape, "load_format": "dummy"}})


def test_no_room_for_the_drafts_kv_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*arguments: object) -> None:
        raise ConfigError("a KV cache of 8 blocks takes 9 GiB, which the GPU has not free: lower cache.num_blocks")

    monkeypatch.setattr(served_model, "allocate_kv", no_room)
    with pytest.raises(ConfigError, match=r"speculation.draft has as many KV blocks .* cache.num_blocks"):
        make_engine(DRAFT)


def test_a_draft_longer_than_any_request_is_refused() -> None:
    model = {**TINY, "max_model_len": 12}
    with pytest.raises(ConfigError, match="lower the first to 10"):
        LLMEngine(EngineConfig.from_dict({"model": model, "speculation": {"method": "ngram", "num_tokens": 11}}))


def test_a_draft_larger_than_the_target_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    speculation = {"method": "draft", "draft": {"path": "tiny-target"}, "adaptive": False}
    with caplog.at_level(logging.WARNING):
        LLMEngine(EngineConfig.from_dict({"model": {**TINY, "path": "tiny-draft"}, "speculation": speculation}))
    assert "larger than the target" in caplog.text


def test_memory_is_kept_back_for_no_graph_that_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def bytes_of_graphs(captures_rows: bool = True, **graphs: Any) -> int:
        sections = {"model": TINY, "speculation": {**DRAFT, "num_tokens": 3}, "graphs": graphs}
        monkeypatch.setattr(Worker, "_captures_rows", captures_rows)
        return Worker(EngineConfig.from_dict({**sections, "scheduler": {"max_num_seqs": 64}}))._bytes_of_graphs()

    assert bytes_of_graphs(captures_rows=False, capture="never") == 0
    rows_alone, none = bytes_of_graphs(max_prefill_tokens=0), bytes_of_graphs(False, max_prefill_tokens=0)
    vocab_size = load_spec(EngineConfig.from_dict({"model": TINY}).model).vocab_size
    assert (rows_alone, none) == (64 * (4 + 3) * vocab_size * 4, 0), "logits of the target's tokens, and of the drafts"
    assert bytes_of_graphs(max_prefill_tokens=0, max_batch=16) == rows_alone // 4
    assert 0 < bytes_of_graphs(False) < bytes_of_graphs() - rows_alone, "prompts of the target, and of both"


class Foresight:
    """Proposes what each request will produce, as an engine without speculation has said."""

    most, needs_tokens, waits, keeps_up = 3, True, True, False

    def __init__(self, outputs: dict[str, list[int]]) -> None:
        self._outputs = outputs

    def plan(self, requests: Sequence[Request], prompts: bool) -> dict[int, Draft]:
        drafts = {}
        for row, request in enumerate(requests):
            done = len(request.output_token_ids)
            tokens = self._outputs[request.request_id][done : done + self.most]
            if tokens and request.num_in_flight == 1:
                drafts[row] = Draft(len(tokens), tokens)
        return drafts

    def book(self, *arguments: object) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass


@pytest.mark.parametrize("overlap", ["never", "always"])
def test_penalties_count_the_drafts_that_stand_before_a_token(overlap: str) -> None:
    """Not what was picked there before anybody thought of penalties: a draft may stand just because of them."""
    params = [
        SamplingParams(
            temperature=0.7 * (i % 2),
            seed=i,
            max_tokens=30,
            ignore_eos=True,
            presence_penalty=(0.0, 1.5, 2.0)[i % 3],
            frequency_penalty=(2.0, 0.0)[i % 2],
            repetition_penalty=(1.0, 2.5, 1.3)[i // 3 % 3],
            logprobs=(None, 1)[i // 2 % 2],
            min_tokens=(0, 7)[i // 4 % 2],
        )
        for i in range(24)
    ]
    prompts = [[65 + i, 66, 67, 68] for i in range(len(params))]
    sections = {
        "model": {"load_format": "dry"},
        "scheduler": {"overlap": overlap},
        "speculation": {"method": "ngram", "num_tokens": 3, "adaptive": False},
    }
    outputs = LLMEngine(EngineConfig.from_dict({**sections, "speculation": {}})).generate(prompts, params)
    expected = [output.outputs[0].token_ids for output in outputs]
    engine = LLMEngine(EngineConfig.from_dict(sections))
    engine.scheduler.speculator = Foresight({str(i): own for i, own in enumerate(expected)})  # type: ignore[assignment]
    for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(prompt, own, request_id=str(i))
    got = dict.fromkeys(map(str, range(len(params))), None)
    while engine.has_unfinished_requests():
        for output in engine.step():
            got[output.request_id] = output.outputs[0].token_ids
    assert list(got.values()) == expected
    assert sum(sum(r.accepted) for r in engine.records) == sum(sum(r.drafted) for r in engine.records) > 400
