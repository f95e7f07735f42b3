"""logit_bias: added to a row's own logits, before whatever else is done to them."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mini_infer import EngineConfig, LLMEngine, RequestError, SamplingParams
from mini_infer.core.request import FinishReason
from mini_infer.kernels.sampling.draw import pick_rows
from mini_infer.runtime.sampling.sampler import Sampler


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    return LLMEngine(EngineConfig.from_dict({"model": {"load_format": "dry", "dry": {"max_model_len": 256}}}))


def pick(logits: torch.Tensor, params: list[SamplingParams], main=None, stop_ids=(), history=()) -> list[int]:
    """The tokens of a batch, one request a row, each behind `history`."""
    rows, vocab_size = logits.shape
    sampler = Sampler(rows, vocab_size, "cpu", main)
    encoded = [sampler.admit(slot, own, slot, 0, stop_ids) for slot, own in enumerate(params)]
    positions = np.full(rows, len(history), np.int64)
    step = SimpleNamespace(
        param_rows=torch.from_numpy(np.stack(encoded)), sampled_positions=torch.from_numpy(positions)
    )
    past = torch.tensor([list(history)] * rows, dtype=torch.int32).reshape(rows, -1)
    return sampler.sample(logits, step, np.arange(rows), positions, past)[0].tolist()


@pytest.mark.parametrize("main", [None, pick_rows])
def test_biases_reach_their_own_row_and_token(main) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0]).expand(5, 4)
    biases = [{}, {0: 4}, {3: -100}, {1: 1.5, 2: 2.0, 3: -0.5}, {3: -1.0, 2: 0.5}]
    params = [SamplingParams(temperature=0, logit_bias=bias) for bias in biases]
    assert pick(logits, params, main) == [3, 0, 2, 2, 2]
    assert pick(logits[:1], params[:1], main) == [3]
    assert logits[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("main", [None, pick_rows])
def test_a_bias_multiplies_the_odds(main) -> None:
    params = [SamplingParams(logit_bias={2: math.log(3)})] * 4000
    counts = Counter(pick(torch.zeros(4000, 4), params, main))
    assert counts[2] / 4000 == pytest.approx(0.5, abs=0.03)
    assert counts[0] / 4000 == pytest.approx(1 / 6, abs=0.03)


def test_penalties_apply_to_what_the_bias_made_of_a_logit() -> None:
    logits = torch.tensor([[1.0, 2.1, 0.0]])
    divided = SamplingParams(temperature=0, repetition_penalty=2, logit_bias={0: 3})
    assert pick(logits, [divided], history=[0]) == [1], "(1 + 3) / 2 < 2.1, though 1 / 2 + 3 is not"
    multiplied = SamplingParams(temperature=0, repetition_penalty=2, logit_bias={0: -3, 1: -4, 2: -3.5})
    assert pick(logits, [multiplied], history=[0]) == [1]
    counted = SamplingParams(temperature=0, frequency_penalty=1, presence_penalty=1, logit_bias={0: 5})
    assert pick(logits, [counted], history=[0, 0]) == [0]
    assert pick(logits, [counted], history=[0, 0, 0]) == [1]


def test_a_bias_does_not_lift_the_ban_of_min_tokens() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, logit_bias={1: 100})
    assert pick(torch.zeros(1, 3), [params], stop_ids=[1], history=[0]) == [0]
    assert pick(torch.zeros(1, 3), [params], stop_ids=[1], history=[0, 0]) == [1]


def test_greedy_and_sampled_requests_beside_others(engine: LLMEngine) -> None:
    plain = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (alone,) = engine.generate("hello", plain)
    forbidden = alone.outputs[0].token_ids[0]
    params = [
        plain,
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logit_bias={forbidden: -100}),
        SamplingParams(temperature=0, max_tokens=5, logit_bias={65: 100}),
        SamplingParams(temperature=3, seed=1, max_tokens=20, ignore_eos=True, logit_bias={70: 30, 71: 30, 72: -100}),
    ]
    together = [output.outputs[0].token_ids for output in engine.generate(["hello"] * 4, params)]
    assert together[0] == alone.outputs[0].token_ids
    assert forbidden not in together[1]
    assert together[2] == [65] * 5
    assert together[3].count(70) + together[3].count(71) > 15
    for own, tokens in zip(params, together, strict=True):
        assert engine.generate("hello", own)[0].outputs[0].token_ids == tokens


def test_end_of_sequence_can_be_forced_and_logprobs_are_the_models_own(engine: LLMEngine) -> None:
    (eos,) = engine.tokenizer.eos_token_ids
    params = SamplingParams(temperature=0, min_tokens=3, logit_bias={eos: 100}, logprobs=1)
    completion = engine.generate("hello", params)[0].outputs[0]
    assert completion.finish_reason is FinishReason.stop
    assert len(completion.token_ids) == 4
    last = completion.logprobs[-1]
    assert last.token_id == eos
    assert last.rank > 1
    assert last.logprob < last.top[0][1]


def test_forms_of_a_bias() -> None:
    expected = ((3, 1.0), (7, -2.5))
    for form in ({7: -2.5, 3: 1}, [(7, -2.5), (3, 1)], [[3, 1], [7, -2.5]]):
        params = SamplingParams(logit_bias=form)
        assert params.logit_bias == params.biases == expected
        assert hash(params) == hash(SamplingParams(logit_bias=expected))
    assert SamplingParams(logit_bias={}) == SamplingParams(logit_bias=None) == SamplingParams()


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({"5": 1}, "logit_bias must be an integer, got '5'"),
        ({5: "1"}, "logit_bias must be a finite number"),
        ({5: float("nan")}, "logit_bias must be a finite number"),
        ({5: 100.5}, "logit_bias must be from -100 to 100"),
        ({True: 1}, "logit_bias must be an integer"),
        (5, "logit_bias must be a list"),
        ([5], "logit_bias must map token ids to numbers"),
        ("{}", "logit_bias must be a list"),
        ([({}, 1)], "logit_bias must be an integer"),
    ],
)
def test_impossible_biases(bias, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(logit_bias=bias)
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize("token", [512, -1, 10**12])
def test_a_token_that_does_not_exist(engine: LLMEngine, token: int) -> None:
    with pytest.raises(RequestError, match=f"biased token id {token} is out of range: 0 to 511") as caught:
        engine.generate("a", SamplingParams(logit_bias={0: 1, token: 1}))
    assert caught.value.param == "logit_bias"
