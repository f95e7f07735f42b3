"""prompt_logprobs: what the model thinks of the prompt's own tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from integrity import check_scheduler
from transformers import AutoModelForCausalLM

from mini_infer import EngineConfig, LLMEngine, RequestError, SamplingParams, assets
from mini_infer.core.request import FinishReason, TokenLogprob
from mini_infer.runtime.sampling import logprobs

PROMPT = [40 + i * 7 % 60 for i in range(30)]
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=2)
PLAIN = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def dry(**sections: Any) -> LLMEngine:
    cache = {"block_size": 4, **sections.pop("cache", {})}
    model = {"load_format": "dry", "dry": {"max_model_len": 64}}
    return LLMEngine(EngineConfig.from_dict({"model": model, "cache": cache, **sections}))


@pytest.fixture(scope="module")
def expected() -> list[TokenLogprob | None]:
    (output,) = dry().generate([PROMPT], PARAMS)
    assert output.prompt_logprobs is not None
    return output.prompt_logprobs


@pytest.mark.parametrize("budget", [2048, 7])
def test_as_transformers_has_them(budget: int) -> None:
    config = {"model": {"path": "tiny-target", "device": "cpu", "dtype": "float32"}}
    scheduler = {"max_num_batched_tokens": budget, "max_num_seqs": 4}
    engine = LLMEngine(EngineConfig.from_dict({**config, "scheduler": scheduler}))
    text = "def fibonacci(n):\n    if n < 2:\n        return n\n    return"
    params = [SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=k, logprobs=1) for k in (3, 0)]
    with_top, without = engine.generate([text, text[:20]], params)
    model = AutoModelForCausalLM.from_pretrained(assets.shipped_path("tiny-target"), dtype=torch.float32).eval()
    ids = torch.tensor([with_top.prompt_token_ids])
    with torch.inference_mode():
        reference = model(ids).logits[0].double().log_softmax(dim=1)
    entries = with_top.prompt_logprobs
    assert entries is not None
    assert entries[0] is None
    assert len(entries) == ids.shape[1]
    for position, entry in enumerate(entries[1:]):
        assert entry is not None
        row, token = reference[position], int(ids[0, position + 1])
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=2e-3)
        assert entry.rank == pytest.approx(1 + int((row > row[token]).sum()), abs=1)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=2e-3)
    assert without.prompt_logprobs is not None
    assert [entry.top for entry in without.prompt_logprobs if entry] == [()] * (len(without.prompt_token_ids) - 1)


@pytest.mark.parametrize(
    "sections",
    [
        {"scheduler": {"max_num_batched_tokens": 4, "max_num_seqs": 2}},
        {"scheduler": {"max_num_batched_tokens": 7, "max_num_seqs": 2, "overlap": "always"}},
        {"scheduler": {"batching": "static"}},
        {"scheduler": {"chunked_prefill": False}},
        {"cache": {"prefix_caching": False}},
    ],
)
def test_the_same_however_the_prompt_is_computed(expected: list, sections: dict) -> None:
    engine = dry(**sections)
    outputs = engine.generate([PROMPT, PROMPT[:9], PROMPT], [PARAMS, PARAMS, PLAIN])
    assert [output.prompt_logprobs for output in outputs] == [expected, expected[:9], None]


def test_few_logits_at_a_time(expected: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "LOGITS_AT_A_TIME", 2 * 512 + 1)
    engine = dry()
    sizes = []
    model = engine.executor.runner._model
    compute = model.compute_logits
    monkeypatch.setattr(model, "compute_logits", lambda hidden: sizes.append(len(hidden)) or compute(hidden))
    assert engine.generate([PROMPT], PARAMS)[0].prompt_logprobs == expected
    assert max(sizes) == 2


def test_the_prefix_cache_is_filled_but_not_read(expected: list) -> None:
    engine = dry()

    def cached(params: SamplingParams) -> int:
        (output,) = engine.generate([PROMPT], params)
        assert output.prompt_logprobs == (None if params is PLAIN else expected)
        metrics = output.outputs[0].metrics
        assert metrics is not None
        return metrics.num_cached_tokens

    assert [cached(params) for params in (PARAMS, PLAIN, PARAMS)] == [0, 28, 0]
    assert sum(record.prefix_queried_tokens for record in engine.records) == len(PROMPT)


def test_siblings_share_the_prompt_that_was_computed_for_the_leader(expected: list) -> None:
    params = SamplingParams(n=3, temperature=1, max_tokens=3, ignore_eos=True, prompt_logprobs=2, logprobs=0)
    (output,) = dry().generate([PROMPT], params)
    assert output.prompt_logprobs == expected
    assert [c.metrics.num_cached_tokens for c in output.outputs if c.metrics] == [0, 28, 28]
    assert [len(c.logprobs or ()) for c in output.outputs] == [3, 3, 3]


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_brings_them_with_its_first_output(expected: list, n: int) -> None:
    params = SamplingParams(n=n, temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=2)
    outputs = list(dry(scheduler={"max_num_batched_tokens": 8, "max_num_seqs": 4}).stream(PROMPT, params))
    assert [output.prompt_logprobs for output in outputs] == [expected] + [None] * (len(outputs) - 1)


def test_a_prompt_of_one_token() -> None:
    engine = dry()
    assert engine.generate([[40]], PARAMS)[0].prompt_logprobs == [None]
    assert engine.generate([[40, 41]], PARAMS)[0].prompt_logprobs[1].token_id == 41


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("overlap", ["never", "always"])
def test_a_prompt_that_gives_way_halfway(expected: list, preemption: str, overlap: str) -> None:
    """A request of higher priority takes its blocks; what is known of it by then is not computed again."""
    scheduler = {"policy": "priority", "preemption": preemption, "overlap": overlap}
    budget = {"max_num_batched_tokens": 8, "max_num_seqs": 2}
    engine = dry(scheduler={**scheduler, **budget}, cache={"num_blocks": 16, "watermark": 0.0})
    engine.add_request(PROMPT, PARAMS, request_id="slow", priority=1)
    engine.step()
    engine.step()
    engine.add_request([50] * 40, PLAIN, request_id="urgent", priority=0)
    answers, reasons = {}, {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers.setdefault(output.request_id, output.prompt_logprobs)
            reasons[output.request_id] = output.outputs[0].finish_reason
        check_scheduler(engine.scheduler)
    assert any("slow" in record.preempted for record in engine.records)
    assert answers == {"slow": expected, "urgent": None}
    assert set(reasons.values()) == {FinishReason.length}


@pytest.mark.parametrize(("value", "message"), [(-1, "from 0 to 64"), (65, "from 0 to 64"), (1.0, "an integer")])
def test_impossible_numbers(value, message: str) -> None:
    with pytest.raises(RequestError, match=f"prompt_logprobs must be {message}"):
        SamplingParams(prompt_logprobs=value)
