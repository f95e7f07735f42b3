"""Rows of a batch: blind to what is around them, penalised by the formulas, and the same by both main paths."""

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from mini_infer.core.request import SamplingParams
from mini_infer.kernels.sampling.draw import pick_rows
from mini_infer.runtime.sampling.sampler import Sampler

PATHS = [  # where the logits lie, and the main path: none, the torch reference of one, or the fused kernels
    ("cpu", None),
    ("cpu", "reference"),
    *(pytest.param("cuda", main, marks=pytest.mark.gpu) for main in (None, "reference", "fused")),
]
GREEDY = SamplingParams(temperature=0)


class Batch:
    """One request a slot, and all of them in order as a batch."""

    def __init__(
        self,
        params,
        vocab_size,
        *,
        seeds=None,
        positions=None,
        prompts=None,
        outputs=None,
        stop_ids=(),
        masks=(),
        device="cpu",
        main=None,
    ):
        n = len(params)
        self.masks = dict(masks)  # slot -> the tokens that it may pick, as bits
        prompts, outputs = prompts or [[0]] * n, outputs or [[]] * n
        lengths = [len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True)]
        self.positions = np.array(lengths if positions is None else positions, np.int64)
        self.sampler = Sampler(n, vocab_size, device, main_path(main))
        self.param_rows = torch.zeros((n, self.sampler.num_params), dtype=torch.int32)
        self.history = torch.zeros((n + 1, 512), dtype=torch.int32)
        for slot, (p, prompt, output) in enumerate(zip(params, prompts, outputs, strict=True)):
            self.history[slot, : len(prompt) + len(output)] = torch.tensor([*prompt, *output], dtype=torch.int32)
            encoded = self.sampler.admit(slot, p, seeds[slot] if seeds else slot, len(prompt), stop_ids)
            self.param_rows[slot] = torch.from_numpy(encoded)
        self.history, self.param_rows = self.history.to(device), self.param_rows.to(device)

    def sample(self, logits, slots=None):
        """The tokens and their logprobs of some of the slots, or of all."""
        slots = np.arange(len(self.positions)) if slots is None else np.asarray(slots)
        positions = self.positions[slots]
        step = SimpleNamespace(
            param_rows=self.param_rows[slots.tolist()],
            sampled_positions=torch.from_numpy(positions).to(logits.device),
        )
        masks = {row: self.masks[slot] for row, slot in enumerate(slots.tolist()) if slot in self.masks}
        token_ids, logprobs = self.sampler.sample(logits, step, slots, positions, self.history, masks)
        if logits.is_cuda:
            torch.cuda.synchronize()
        return token_ids.tolist(), logprobs.finish() if logprobs else {}


def main_path(name):
    if name == "fused":
        from mini_infer.kernels.sampling.sample import sample_rows

        return sample_rows
    return pick_rows if name == "reference" else None


def pick(logits, params, **kwargs):
    return Batch(params, logits.shape[1], **kwargs).sample(logits)[0]


def random_logits(rows, vocab_size, seed=0, scale=3.0, ties=False):
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    return logits.bfloat16().float() if ties else logits


def random_params(rng):
    """Each feature in about half of the rows."""
    return SamplingParams(
        temperature=rng.choice([0, 0.3, 1.0, 2.5]),
        top_k=int(rng.choice([0, 0, 1, 5, 40, 5000])),
        top_p=float(rng.choice([1, 1, 0.9, 0.3, 1e-6])),
        min_p=float(rng.choice([0, 0, 0.02, 0.3, 1])),
        repetition_penalty=float(rng.choice([1, 1, 1.3, 0.7])),
        presence_penalty=float(rng.choice([0, 0, 0.5, -1.5])),
        frequency_penalty=float(rng.choice([0, 0, 0.25, 2])),
        min_tokens=int(rng.choice([0, 0, 3, 60])),
        logprobs=[None, None, 0, 4][rng.integers(4)],
        logit_bias=[{}, {}, {3: -100, 40: 2.5}, {int(t): 4 for t in rng.choice(97, 20)}][rng.integers(4)],
    )


class TestPenalties:
    def test_repetition_as_transformers(self):
        rng = np.random.default_rng(0)
        logits = random_logits(8, 100)
        prompts = [rng.integers(0, 100, n + 1).tolist() for n in range(8)]
        outputs = [rng.integers(0, 100, 3 * n).tolist() for n in range(8)]
        penalties = [1.0, 1.1, 1.5, 0.5, 3.0, 10.0, 0.9, 1.01]
        params = [SamplingParams(temperature=0, repetition_penalty=p) for p in penalties]
        got = pick(logits, params, prompts=prompts, outputs=outputs)
        for row, penalty in enumerate(penalties):
            ids = torch.tensor([prompts[row] + outputs[row]])
            expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits[row : row + 1].clone())
            assert got[row] == expected.argmax()

    @given(st.data())
    def test_all_three_against_the_formula(self, data):
        tokens = st.lists(st.integers(0, 7), min_size=1, max_size=12)
        prompt, output = data.draw(tokens), data.draw(tokens)
        params = SamplingParams(
            temperature=0,
            repetition_penalty=data.draw(st.sampled_from([1.0, 0.5, 2.0])),
            presence_penalty=data.draw(st.sampled_from([0.0, 1.0, -2.0])),
            frequency_penalty=data.draw(st.sampled_from([0.0, 0.5, -1.0])),
        )
        logits = random_logits(1, 8, seed=data.draw(st.integers(0, 9)), scale=1)
        expected = logits[0].tolist()
        for token in set(prompt + output):
            value = expected[token]
            expected[token] = value * params.repetition_penalty if value < 0 else value / params.repetition_penalty
        for token, count in Counter(output).items():
            expected[token] -= params.presence_penalty + count * params.frequency_penalty
        assert pick(logits, [params], prompts=[prompt], outputs=[output]) == [int(np.argmax(expected))]

    def test_presence_and_frequency_ignore_the_prompt(self):
        params = SamplingParams(temperature=0, presence_penalty=2, frequency_penalty=2)
        assert pick(torch.tensor([[1.0, 0.5]]), [params], prompts=[[0, 0]]) == [0]
        assert pick(torch.tensor([[1.0, 0.5]]), [params], prompts=[[1]], outputs=[[0]]) == [1]

    def test_tokens_past_the_position_do_not_count(self):
        """What an earlier owner left in the slot."""
        for params in (SamplingParams(temperature=0, frequency_penalty=2), GREEDY):
            batch = Batch([params, SamplingParams(temperature=0, repetition_penalty=3)], 2, prompts=[[1], [1] * 9])
            batch.history[0, 1:] = 0
            assert batch.sample(torch.tensor([[1.0, 0.5], [1.0, 0.5]]))[0] == [0, 0]

    def test_logits_are_left_as_they_are(self):
        logits = random_logits(4, 50)
        before = logits.clone()
        params = [SamplingParams(min_tokens=5, repetition_penalty=1.3, presence_penalty=1, top_k=3, top_p=0.5)] * 4
        pick(logits, params, stop_ids=(1, 2))
        assert torch.equal(logits, before)


class TestMinTokens:
    def test_stop_tokens_wait_for_their_time(self):
        logits = torch.tensor([[0.0, 5.0, 9.0, 8.0]]).expand(3, 4)
        params = [SamplingParams(temperature=0, min_tokens=2)] * 3
        outputs = [[], [0], [0, 0]]
        assert pick(logits, params, outputs=outputs, stop_ids={2, 3, 77}) == [1, 1, 2]

    def test_a_sampled_row_never_gives_a_banned_token(self):
        logits = torch.tensor([[0.0, 0.0, 20.0]]).expand(50, 3)
        assert 2 not in pick(logits, [SamplingParams(min_tokens=1)] * 50, stop_ids=[2])


@pytest.mark.parametrize(("device", "main"), PATHS)
class TestIndependenceOfTheBatch:
    @pytest.mark.parametrize("vocab_size", [97, 1024])
    def test_a_mixed_batch_equals_its_rows_alone(self, vocab_size, device, main):
        rng = np.random.default_rng(vocab_size)
        n = 96
        params = [random_params(rng) for _ in range(n)]
        logits = random_logits(n, vocab_size, seed=1, ties=True).to(device)
        seeds = rng.integers(0, 2**62, n).tolist()
        prompts = [rng.integers(0, vocab_size, rng.integers(1, 30)).tolist() for _ in range(n)]
        outputs = [rng.integers(0, vocab_size, rng.integers(0, 30)).tolist() for _ in range(n)]
        masks = {row: rng.bytes(-(-vocab_size // 8)) for row in rng.choice(n, n // 3).tolist()}
        arguments = {"seeds": seeds, "prompts": prompts, "outputs": outputs, "stop_ids": (3, 4), "device": device}
        arguments["masks"] = masks
        batch = Batch(params, vocab_size, **arguments, main=main)
        before = logits.clone()
        together, logprobs = batch.sample(logits)
        assert torch.equal(logits, before)
        for row in range(n):
            if row in masks:
                assert masks[row][together[row] // 8] >> together[row] % 8 & 1
            tokens, entries = batch.sample(logits[row : row + 1], [row])
            assert tokens == [together[row]], params[row]
            assert (0 in entries) == (row in logprobs) == (params[row].logprobs is not None)
            if row in logprobs:
                assert entries[0].token_id == logprobs[row].token_id == together[row]
                assert entries[0].rank == logprobs[row].rank

        order = rng.permutation(n)
        assert batch.sample(logits[order.tolist()], order)[0] == [together[row] for row in order]
        assert Batch(params, vocab_size, **arguments).sample(logits)[0] == together

    def test_another_slot_gives_the_same_token(self, device, main):
        logits = random_logits(1, 500).to(device).expand(8, 500)
        tokens = pick(logits, [SamplingParams(top_p=0.95)] * 8, seeds=[42] * 8, device=device, main=main)
        assert len(set(tokens)) == 1

    def test_seed_and_position_change_the_token(self, device, main):
        logits = torch.zeros(64, 5000, device=device)
        params = [SamplingParams()] * 64
        assert len(set(pick(logits, params, seeds=range(64), device=device, main=main))) > 60
        assert len(set(pick(logits, params, seeds=[1] * 64, positions=range(1, 65), device=device, main=main))) > 60

    def test_a_broken_row_breaks_no_other(self, device, main):
        nan, inf = torch.nan, torch.inf
        good = random_logits(1, 6).to(device)
        broken = [
            [nan] * 6,
            [0, nan, 0, 9, 9, 9],
            [inf] * 6,
            [-inf] * 6,
            [0, 1, inf, 2, 3, 4],
            [-inf, 0, nan, inf, 0, 0],
        ]
        for params in (
            GREEDY,
            SamplingParams(),
            SamplingParams(temperature=1e-5, top_k=3, top_p=0.9, min_p=0.1),
            SamplingParams(repetition_penalty=1.2, presence_penalty=1, logprobs=3),
        ):
            logits = torch.cat([good, torch.tensor(broken, device=device), good])
            tokens = pick(logits, [params] * 8, seeds=[5] * 8, device=device, main=main)
            assert tokens[0] == tokens[-1] == pick(good, [params], seeds=[5], device=device, main=main)[0]
            assert all(0 <= token < 6 for token in tokens)
            assert tokens[2] == 1  # a NaN counts as the largest
            assert tokens[5] == 2


class TestRare:
    def test_none_where_the_main_path_does_it_all(self):
        params = [GREEDY, SamplingParams(top_k=3, top_p=0.5, min_p=0.1), SamplingParams(min_tokens=2)]
        batch = Batch(params, 10, outputs=[[], [], [5, 5]], stop_ids=[1])
        assert batch.sampler.rare(np.arange(3), batch.positions) is None
        assert batch.sampler.rare(np.arange(3), batch.positions - 1) is not None
        assert batch.sampler.rare(np.arange(2), batch.positions[:2]) is None

    def test_min_tokens_without_stop_tokens_bans_nothing(self):
        batch = Batch([SamplingParams(min_tokens=5)], 10)
        assert batch.sampler.rare(np.arange(1), batch.positions) is None

    def test_a_slot_forgets_its_former_owner(self):
        batch = Batch([SamplingParams(top_k=3, min_tokens=9, logprobs=2, presence_penalty=1)], 10, stop_ids=[1])
        assert batch.sampler.rare(np.arange(1), batch.positions) is not None
        batch.sampler.admit(0, GREEDY, 0, 1, ())
        assert batch.sampler.rare(np.arange(1), batch.positions) is None

    def test_only_rare_rows_are_done_again(self):
        params = [
            GREEDY,
            SamplingParams(temperature=0, repetition_penalty=9),
            SamplingParams(temperature=0, logprobs=0),
        ]
        batch = Batch(params, 4, prompts=[[3], [3], [3]], main="reference")
        logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).expand(3, 4)
        rare = batch.sampler.rare(np.arange(3), batch.positions)
        tokens = torch.tensor([77, 77, 0], dtype=torch.int32)  # of a captured graph, say
        logprobs = batch.sampler.resample(logits, tokens, rare, batch.history)
        assert tokens.tolist() == [77, 2, 0]
        assert logprobs.finish()[2].token_id == 0
        assert logprobs.finish()[2].rank == 4

    def test_no_rows(self):
        assert pick(torch.empty(0, 10), []) == []


class TestLogprobs:
    def test_of_the_models_own_distribution(self):
        logits = random_logits(3, 40)
        params = [
            SamplingParams(temperature=0.2, top_k=2, repetition_penalty=2, logprobs=5),
            SamplingParams(),
            SamplingParams(temperature=0, logprobs=0),
        ]
        tokens, logprobs = Batch(params, 40).sample(logits)
        assert set(logprobs) == {0, 2}
        reference = logits.double().log_softmax(1)
        for row, entry in logprobs.items():
            assert entry.token_id == tokens[row]
            assert entry.logprob == pytest.approx(float(reference[row, entry.token_id]), abs=1e-5)
            assert entry.rank == 1 + int((logits[row] > logits[row, entry.token_id]).sum())
            values, ids = reference[row].topk(params[row].logprobs)
            assert [token for token, _ in entry.top] == ids.tolist()
            assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-5)
        assert logprobs[2].rank == 1

    def test_more_than_the_vocabulary(self):
        entry = Batch([SamplingParams(logprobs=20)], 4).sample(random_logits(1, 4))[1][0]
        assert len(entry.top) == 4
        assert math.fsum(math.exp(value) for _, value in entry.top) == pytest.approx(1)
