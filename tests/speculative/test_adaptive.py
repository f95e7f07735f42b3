"""Numbers of drafts: the best by the estimates, and no loss beyond what is allowed for finding out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import product

import numpy as np
import pytest
from at_rate import accepted_at_rate
from pairwise import pairwise

from mini_infer.speculative.policy import StepTime, adaptive
from mini_infer.speculative.policy.adaptive import INITIAL_BUDGET, MAX_BUDGET, MAX_OWED, OUTLIER, AdaptiveDraftLength
from mini_infer.speculative.policy.costs import StepCosts
from mini_infer.speculative.policy.estimates import AcceptanceRate, best_lengths, expected_accepted


def costs(token: float, draft: float = 0.0, padded: bool = False) -> StepCosts:
    """A step takes a second, and `token` for each token beyond one a row; so much more with a batch's size."""
    target = {(r, w): 1 + token * r * (w - 1) for r, w in product((1, 64), (1, 9))}
    return StepCosts(target, {1: draft} if draft else None, padded=padded)


UNTIMED = StepTime()


def expected_tokens(rate: float, k: int) -> float:
    return sum(rate**i for i in range(k + 1))


def fixed_speed(true: StepCosts, rate: float, rows: int, drafts: int) -> float:
    """Of steps that all have so many drafts for each row, over those without: what it is on average."""
    seconds = true.step_seconds(np.full(rows, drafts))
    return expected_tokens(rate, drafts) * true.verify_seconds(rows) / seconds


def book(
    policy: AdaptiveDraftLength,
    requests: Sequence[Hashable],
    drafted: Sequence[int],
    accepted: Sequence[int],
    time: StepTime,
) -> None:
    """A step of all of `requests`, of which some had drafts."""
    rows = zip(requests, drafted, accepted, strict=True)
    policy.book(len(requests), [row for row in rows if row[1]], time)


def worth(policy: AdaptiveDraftLength) -> float:
    """The budget, less the loss that it is to be charged."""
    return policy.budget - policy._deferred


def best(rates: list[float], limits: list[int], table: StepCosts, relative: Sequence[float] = [1.0] * 9) -> list[int]:
    return best_lengths(np.array(rates), np.array(limits), table, relative).tolist()


class TestBestLengths:
    @pytest.mark.parametrize("rate", [0.1, 0.5585, 0.9])
    @pytest.mark.parametrize("draft", [0.02, 0.2])
    @pytest.mark.parametrize("padded", [False, True])
    def test_alone_it_is_the_optimum_of_the_formula(self, rate: float, draft: float, padded: bool) -> None:
        speed = {k: expected_tokens(rate, k) / (1 + k * (draft + 0.01)) for k in range(9)}
        assert best([rate], [8], costs(0.01, draft, padded)) == [max(speed, key=speed.__getitem__)]

    def test_nothing_where_drafts_cost_more_than_they_bring(self) -> None:
        assert best([0.5], [4], costs(0.6)) == [0]
        assert best([0.5] * 64, [4] * 64, costs(0.02)) == [0] * 64
        assert best([0.5], [4], costs(0.02)) != [0]

    def test_limits_hold(self) -> None:
        assert best([0.9] * 3, [0, 2, 5], costs(0.001)) == [0, 2, 5]

    def test_a_row_that_is_often_wrong_gets_fewer(self) -> None:
        fewer, more = best([0.2, 0.95], [8, 8], costs(0.2))
        assert fewer < more

    def test_padding_is_free_for_the_others(self) -> None:
        """A captured graph computes the longest row's tokens for all rows."""
        fewer, more = best([0.2, 0.95], [8, 8], costs(0.05, padded=True))
        assert fewer == more > 0

    def test_what_was_measured_since_corrects_the_table(self) -> None:
        table = costs(0.02)
        assert best([0.8], [4], table) == [4]
        assert best([0.8], [4], table, [1, 1, 1, 2, 2]) == [2]
        assert best([0.8], [4], table, [1, 4, 4, 4, 4]) == [0]


class TestAcceptanceRate:
    def test_what_was_never_tried_does_not_count(self) -> None:
        """Two accepted, one rejected, the fourth unknown."""
        rate = AcceptanceRate(fade=1.0)
        rate.book(drafted=4, accepted=2)
        assert (rate.trials, rate.estimate(0.5, 0)) == (3, pytest.approx(2 / 3))

    def test_is_unbiased(self) -> None:
        rate = AcceptanceRate(fade=1.0)
        for accepted in accepted_at_rate(np.arange(5_000), np.arange(5_000) % 7, 4, 0.7):
            rate.book(4, int(accepted))
        assert rate.estimate(0.0, 0) == pytest.approx(0.7, abs=0.02)

    def test_the_past_fades(self) -> None:
        rate = AcceptanceRate(fade=0.97)
        for accepted in [4] * 50 + [0] * 50:
            rate.book(4, accepted)
        assert rate.estimate(0.5, 4) < 0.3

    def test_a_new_request_is_taken_for_an_average_one(self) -> None:
        policy = AdaptiveDraftLength(costs(0.1), most=4)
        assert policy.choose(["new"], [4]) == [4]
        for _ in range(100):
            book(policy, ["good", "bad"], [4, 4], [4, 0], UNTIMED)
        bad, new, good = policy.choose(["bad", "new", "good"], [4] * 3)
        assert bad < new <= good
        policy.forget("bad")
        bad, new, good = policy.choose(["bad", "new", "good"], [4] * 3)
        assert bad == new


class Played:
    """Steps of a fixed batch, by a table of costs, with true rates of acceptance."""

    def __init__(self, table: StepCosts, rate: Callable[[int], float], rows: int = 1, steps: int = 2_000) -> None:
        policy = AdaptiveDraftLength(table, most=4)
        self.lengths = []
        seconds, tokens = 0.0, 0
        names = list(range(rows))
        step_rates = np.array([[rate(step)] for step in range(steps)])
        accepted_of_4 = accepted_at_rate(np.arange(rows), 8 * np.arange(steps)[:, None], 4, step_rates)
        for step in range(steps):
            drafted = policy.choose(names, [4] * rows)
            accepted = np.minimum(drafted, accepted_of_4[step]).tolist()
            book(policy, names, drafted, accepted, UNTIMED)
            seconds += table.step_seconds(np.array(drafted))
            tokens += rows + sum(accepted)
            self.lengths.append(drafted)
        self.speed = tokens / seconds / (rows / table.verify_seconds(rows))  # over that without drafts
        self.lost_steps = seconds / table.verify_seconds(rows) - tokens / rows


class TestNeverMuchWorseThanOff:
    @pytest.mark.parametrize(("rows", "rate", "token"), pairwise([1, 4, 64], [0.0, 0.2, 0.5585], [0.004, 0.1, 0.8]))
    def test_at_any_batch_and_acceptance(self, rows: int, rate: float, token: float) -> None:
        steps, table = 600, costs(token)
        played = Played(table, lambda _: rate, rows, steps)
        worst = table.step_seconds(np.full(rows, 4)) / table.verify_seconds(rows) - 1
        assert played.lost_steps <= INITIAL_BUDGET + 0.005 * steps + worst
        if worst < 1:
            assert played.speed >= 0.98

    def test_useless_drafts_cost_what_exploring_may(self) -> None:
        played = Played(costs(0.3), lambda _: 0.0)
        assert played.speed >= 0.99
        tail = played.lengths[1_000:]
        assert 0 < sum(drafts > 0 for (drafts,) in tail) < 0.05 * len(tail)

    def test_good_drafts_are_worth_almost_what_the_best_fixed_number_is(self) -> None:
        for rate in (0.5585, 0.9):
            table = costs(0.02, draft=0.05)
            best = max(fixed_speed(table, rate, 1, k) for k in range(5))
            assert Played(table, lambda _, rate=rate: rate).speed >= 0.96 * best

    def test_a_large_batch_falls_back_to_none(self) -> None:
        played = Played(costs(0.05), lambda _: 0.5585, rows=64, steps=300)
        assert sum(map(sum, played.lengths)) < 0.05 * 300 * 64
        assert sum(map(sum, Played(costs(0.05), lambda _: 0.5585, steps=300).lengths)) > 300

    def test_notices_that_drafts_have_become_good(self) -> None:
        """While they were bad it has stopped, but for a probe now and then."""
        played = Played(costs(0.1), lambda step: 0.0 if step < 1_000 else 0.95, steps=4_000)
        assert sum(drafts for (drafts,) in played.lengths[500:1_000]) < 100
        assert np.mean(played.lengths[-500:]) > 3

    def test_notices_that_drafts_have_become_bad(self) -> None:
        played = Played(costs(0.3), lambda step: 0.95 if step < 1_000 else 0.0)
        assert np.mean(played.lengths[500:1_000]) > 1
        assert np.mean(played.lengths[1_100:]) < 0.1


class TestGuarantee:
    """Estimates that are always for drafts, which take 3 steps each and bring nothing."""

    @pytest.fixture(autouse=True)
    def hopeful(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(adaptive, "best_lengths", lambda rates, limits, *_: limits.copy())

    def lost(self, wins: int, seconds: float | None, steps: int = 4_000) -> list[float]:
        """By step, after so many in which drafts won."""
        policy = AdaptiveDraftLength(costs(0.5), most=4)
        lost = [0.0]
        for step in range(wins + steps):
            (drafted,) = policy.choose(["a"], [4])
            won = drafted > 0 and step < wins
            took = (seconds or 3.0) if drafted else 1.0
            book(
                policy,
                ["a"],
                [drafted],
                [4 * won],
                StepTime(took if seconds or not drafted else None, speculative=drafted > 0),
            )
            lost.append(lost[-1] + took - 1 - 4 * won)
        return lost[wins:]

    @pytest.mark.parametrize("seconds", [None, 3.0])
    def test_a_new_engine_loses_its_reserve_and_its_credit(self, seconds: float | None) -> None:
        lost = np.array(self.lost(0, seconds))
        assert (lost <= INITIAL_BUDGET + MAX_BUDGET + 0.005 * np.arange(len(lost)) + 2).all()
        assert lost.max() > INITIAL_BUDGET

    @pytest.mark.parametrize("seconds", [None, 3.0])
    def test_beyond_that_no_more_than_what_was_won(self, seconds: float | None) -> None:
        lost = np.array(self.lost(500, seconds))
        assert (lost - lost[0] <= 2 * MAX_BUDGET + 0.005 * np.arange(len(lost)) + 2).all()

    def test_bad_luck_is_paid_in_instalments_and_good_luck_at_once(self) -> None:
        policy = AdaptiveDraftLength(costs(0.0), most=4, exploration=0.0)
        for _ in range(200):
            policy._overall.book(4, 1)
        hoped = expected_accepted(np.array([0.5]), np.array([4]))
        book(policy, ["a"], [4], [0], UNTIMED)
        assert policy.budget == pytest.approx(INITIAL_BUDGET + hoped, abs=0.1)
        assert worth(policy) == pytest.approx(INITIAL_BUDGET)
        book(policy, ["a"], [4], [4], UNTIMED)
        assert policy.budget == worth(policy) == pytest.approx(INITIAL_BUDGET + 4)


def test_no_proposals_no_drafts() -> None:
    assert AdaptiveDraftLength(costs(0.01), most=4).choose(["a", "b"], [0, 0]) == [0, 0]
    assert AdaptiveDraftLength(costs(0.01), most=4).choose([], []) == []


class Timed:
    """Steps that take what they take, whatever the table says.

    Args:
        true: what steps take.
        noise: of each step, as booked; a tenth of a percent of them take ten times as long.
        catching_up: seconds more for the drafts of a request that had none when there were some last.
    """

    def __init__(
        self,
        table: StepCosts,
        true: StepCosts,
        rate: float,
        rows: int = 1,
        steps: int = 3_000,
        noise: float = 0.0,
        catching_up: float = 0.0,
        seed: int = 0,
    ) -> None:
        policy = AdaptiveDraftLength(table, most=4)
        random = np.random.default_rng((rows, seed))
        names = [f"request {i}" for i in range(rows)]
        self.lengths: list[list[int]] = []
        self.lost = [0.0]  # by step, in steps without drafts
        before: set[str] = set()
        plain = true.verify_seconds(rows)
        seconds = tokens = 0.0
        seeds = np.arange(rows) + 1_000 * seed
        accepted_of_4 = accepted_at_rate(seeds, 8 * np.arange(steps)[:, None], 4, rate)
        for step in range(steps):
            drafted = policy.choose(names, [4] * rows)
            accepted = np.minimum(drafted, accepted_of_4[step]).tolist()
            drafting = {name for name, n in zip(names, drafted, strict=True) if n}
            catches_up = catching_up * len(drafting - before)
            before = drafting or before
            draft_s = true.proposing_seconds(np.array(drafted)) + catches_up
            took = true.step_seconds(np.array(drafted)) + catches_up
            measured = took * max(0.5, random.normal(1, noise)) * (10 if noise and random.random() < 0.001 else 1)
            book(policy, names, drafted, accepted, StepTime(measured, draft_s, speculative=any(drafted)))
            seconds += took
            tokens += rows + sum(accepted)
            self.lengths.append(drafted)
            self.lost.append(seconds / plain - tokens / rows)
        self.speed = tokens / seconds / (rows / plain)


def machine(verify: float = 0.004, draft: float = 0.05, slower: float = 1.0) -> StepCosts:
    """A step of `slower` seconds; a token more in a row costs `verify` of it for each row, a draft `draft`. Captured as
    an engine's steps are."""
    rows = (1, 2, 4, 8, 16, 32, 64, 128)
    target = {(r, w): slower * (1 + verify * r * (w - 1)) for r in rows for w in (1, 2, 3, 5)}
    return StepCosts(target, {1: slower * draft, 128: slower * draft * 4}, product(rows, (2, 3, 5)))


WRONG = {
    "the draft takes 2 times as long": machine(draft=0.3),
    "the draft takes 5 times as long": machine(draft=0.75),
    "verification takes 2 times as long": machine(verify=0.02, draft=0.15),
    "all steps take 2 times as long": machine(verify=0.01, draft=0.15, slower=2.0),
    "all steps take half as long": machine(verify=0.01, draft=0.15, slower=0.5),
    "all steps take half as long, but drafts": machine(verify=0.02, draft=0.3, slower=0.5),
    "drafts take half as long": machine(verify=0.005, draft=0.075),
}
SOON_KNOWN = [wrong for wrong in WRONG if wrong != "the draft takes 5 times as long"]  # finding out has its price


class TestBySeconds:
    """The table is wrong, and only the time that steps take says so."""

    table = machine(verify=0.01, draft=0.15)

    @pytest.mark.parametrize(
        ("wrong", "batch"), list(product(WRONG, [(1, 0.3), (3, 0.5585), (20, 0.3), (65, 0.9)]))[::3]
    )
    def test_never_slower_than_without(self, wrong: str, batch: tuple[int, float]) -> None:
        rows, rate = batch
        true = WRONG[wrong]
        played = Timed(self.table, true, rate, rows, steps=1_200)
        lost = np.array(played.lost)
        most = true.step_seconds(np.full(rows, 4)) / true.verify_seconds(rows)
        few = 3 * (most - OUTLIER) if most > OUTLIER else 0  # until what is dearer than believed is believed
        assert (lost <= INITIAL_BUDGET + most + few + 0.01 * np.arange(len(lost))).all()
        assert played.lost[-1] - played.lost[700] <= 0.02 * 500

    @pytest.mark.parametrize(
        ("wrong", "batch"), list(product(SOON_KNOWN, [(1, 0.5585), (1, 0.9), (3, 0.75), (20, 0.9)]))[::3]
    )
    def test_near_the_best_fixed_number(self, wrong: str, batch: tuple[int, float]) -> None:
        rows, rate = batch
        true = WRONG[wrong]
        best = max(fixed_speed(true, rate, rows, k) for k in range(5))
        assert Timed(self.table, true, rate, rows, 1_000).speed >= 0.94 * best

    @pytest.mark.parametrize(("rows", "rate"), [(1, 0.9), (20, 0.3), (65, 0.5585)])
    def test_noise_and_accidents(self, rows: int, rate: float) -> None:
        quiet = Timed(self.table, self.table, rate, rows)
        noisy = Timed(self.table, self.table, rate, rows, noise=0.05)
        drafts = [np.mean(np.array(played.lengths).max(axis=1)) for played in (quiet, noisy)]
        assert drafts[1] == pytest.approx(drafts[0], rel=0.1, abs=0.1)

    @pytest.mark.parametrize("rows", [1, 4])
    def test_scatter_as_on_a_cpu_does_not_stop_drafts_that_pay(self, rows: int) -> None:
        """A step varies by 15 %, and what is accepted by more: a run of bad luck says little."""
        table = machine(verify=0.6 / rows / 4, draft=0.3)
        best = max(fixed_speed(table, 0.87, rows, k) for k in range(1, 5))
        speeds = [Timed(table, table, 0.87, rows, 600, noise=0.15, seed=seed).speed for seed in range(6)]
        assert 1.25 < best < 1.5
        assert np.mean(speeds) >= 0.95 * best
        assert min(speeds) >= 0.88 * best

    @pytest.mark.parametrize(("rows", "rate"), [(1, 0.5), (8, 0.5), (64, 0.45), (64, 0.2)])
    @pytest.mark.parametrize(("noise", "steps"), [(0.03, 200), (0.15, 600)])
    def test_drafts_that_just_do_not_pay_cost_less_than_two_percent(
        self, rows: int, rate: float, noise: float, steps: int
    ) -> None:
        """By a table that promises more: 1 draft takes 0.1 of a step less there."""
        draft = 0.3 / (1 + 3 * (rows - 1) / 127)
        true, table = machine(0.24 / rows, draft), machine(0.14 / rows, draft)
        assert 0.7 < fixed_speed(true, rate, rows, 1) < 1
        speeds = [Timed(table, true, rate, rows, steps, noise, seed=seed).speed for seed in range(4)]
        assert np.mean(speeds) >= 0.98

    def test_catching_up_says_nothing_about_the_steps_behind_it(self) -> None:
        """One that explores now and then always catches up: its steps are dear, which those in a row would not be."""
        table = machine(verify=0.02, draft=0.1)
        policy = AdaptiveDraftLength(table, most=4)
        for _ in range(5):
            book(policy, ["a"], [0], [0], StepTime(table.verify_seconds(1), speculative=False))
            book(policy, ["a"], [1], [1], StepTime(3 * table.verify_seconds(1), draft_s=1.0))
        assert policy._times.relative(1, 4) == [1.0] * 5

    def test_an_answer_holds_while_nothing_is_learned(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[int] = []
        estimate = adaptive.best_lengths
        monkeypatch.setattr(adaptive, "best_lengths", lambda *a: asked.append(1) or estimate(*a))
        policy = AdaptiveDraftLength(costs(0.6), most=4)

        def asks(limit: int, step: Sequence[int] | None = None, time: StepTime = UNTIMED) -> bool:
            if step is not None:
                book(policy, ["a"], step, [0], time)
            before = len(asked)
            assert policy.choose(["a"], [limit])[0] <= 1
            return len(asked) > before

        assert asks(4)
        assert not asks(4)
        assert asks(3), "of other limits"
        assert asks(3, step=[1]), "a draft was rejected"
        plain = StepTime(speculative=False)
        assert asks(3, [0], plain), "the step behind drafts was charged"
        assert [asks(3, [0], plain) for _ in range(3, adaptive._REASK + 1)] == [False] * (adaptive._REASK - 3) + [True]

    def test_a_draft_model_catches_up_on_one_request_alone(self) -> None:
        """Where drafts lose, the same request explores: for another the draft would compute the whole context."""
        table = machine(draft=0.3)
        played = Timed(table, table, 0.1, rows=20, catching_up=0.1)
        tail = np.array(played.lengths)[1_000:]
        assert np.count_nonzero(tail.any(axis=0)) == 1
        assert played.speed >= 0.98

    @pytest.mark.parametrize("seconds", [None, 11.0])
    def test_indexing_is_paid_in_instalments(self, seconds: float | None) -> None:
        policy = AdaptiveDraftLength(self.table, most=4, exploration=0.0)
        book(policy, ["a"], [0], [0], StepTime(seconds, host_s=10.0))
        assert policy.budget == pytest.approx(INITIAL_BUDGET - 0.1)
        for _ in range(20):
            book(policy, ["a"], [0], [0], StepTime(speculative=False))
        assert policy.budget == pytest.approx(INITIAL_BUDGET - 10 * (1 - 0.99**21))
        assert policy.choose(["a"], [4]) == [4]
        for _ in range(500):
            book(policy, ["a"], [0], [0], StepTime(speculative=False))
        assert policy.budget == pytest.approx(INITIAL_BUDGET - 10, abs=0.1)
        assert policy.choose(["a"], [4]) == [0]

    def test_what_is_beyond_the_credit_is_paid_at_once(self) -> None:
        policy = AdaptiveDraftLength(self.table, most=4, exploration=0.0)
        book(policy, [], [], [], StepTime(host_s=MAX_BUDGET + 2))
        assert policy.budget == pytest.approx(INITIAL_BUDGET - 2 - 0.01 * MAX_BUDGET)

    def test_a_burst_of_prompts_does_not_stop_drafts_that_pay(self) -> None:
        played = Timed(self.table, machine(), 0.9, rows=20, catching_up=1.0, steps=500)
        assert min(len(np.flatnonzero(lengths)) for lengths in played.lengths[50:200]) in (0, 20)
        assert np.mean(np.array(played.lengths[:200]) > 0) > 0.9

    @pytest.mark.parametrize("rate", [0.55, 0.9])
    def test_long_contexts_do_not_stop_drafts_that_pay(self, rate: float) -> None:
        """160 steps at the start, for 20 requests that run for 1,000."""
        played = Timed(machine(), machine(), rate, rows=20, catching_up=8.0, steps=1_000)
        assert np.mean(np.array(played.lengths)[:, 0] > 0) > 0.9
        assert played.lost[-1] < 0

    @pytest.mark.parametrize("seconds", [None, 151.0])
    def test_what_drafts_win_pays_for_contexts_before_it_is_lost(self, seconds: float | None) -> None:
        policy = AdaptiveDraftLength(self.table, most=4, exploration=0.0)
        book(policy, ["a"], [0], [0], StepTime(seconds, draft_s=150.0))
        assert policy.budget == pytest.approx(INITIAL_BUDGET)
        while policy._owed:
            book(policy, ["a"], [4], [4], UNTIMED)
        assert policy.budget == pytest.approx(MAX_BUDGET)

    def test_contexts_that_nothing_wins_back_stop_drafts(self) -> None:
        policy = AdaptiveDraftLength(self.table, most=4, exploration=0.0)
        for _ in range(2):
            book(policy, ["a"], [0], [0], StepTime(draft_s=0.5 * MAX_OWED))
        assert policy.budget == pytest.approx(INITIAL_BUDGET)
        book(policy, ["a"], [0], [0], StepTime(draft_s=INITIAL_BUDGET))
        assert policy.budget == pytest.approx(0)
        assert policy.choose(["a"], [4]) == [0]

    def test_waiting_in_vain_is_paid(self) -> None:
        policy = AdaptiveDraftLength(self.table, most=4, exploration=0.0)
        book(policy, ["a"], [0], [0], StepTime(waited=0.25))
        assert policy.budget == pytest.approx(INITIAL_BUDGET - 0.25)

    def test_a_step_behind_drafts_is_charged_and_is_no_reference(self) -> None:
        """Where drafts are looked up it was planned late, and what it took shows it."""
        policy = AdaptiveDraftLength(self.table, most=4, exploration=0.0)
        book(policy, ["a"], [4], [4], StepTime(1.5))
        before = worth(policy)
        book(policy, ["a"], [0], [0], StepTime(1.25, speculative=False))
        assert worth(policy) == pytest.approx(before - 0.25)
        for _ in range(3):
            book(policy, ["a"], [0], [0], StepTime(1.5, speculative=False))
        book(policy, ["a"], [1], [1], StepTime(3.0))
        assert worth(policy) == pytest.approx(before - 0.25 + 2 - 2)

    def test_contexts_that_get_shorter_are_noticed(self) -> None:
        """Steps without drafts get twice as fast, those with drafts do not: only the former can tell."""
        policy = AdaptiveDraftLength(self.table, most=4)
        lost = 0.0
        for step in range(4_000):
            (drafted,) = policy.choose(["a"], [4])
            plain = 2.0 if step < 1_000 else 1.0
            took = 2.4 if drafted else plain
            accepted = min(drafted, 1)
            book(policy, ["a"], [drafted], [accepted], StepTime(took, speculative=drafted > 0))
            lost += (took / plain - 1 - accepted) if step >= 1_000 else 0
        assert lost <= 200


def test_the_one_that_explored_last_explores_again_unless_it_had_nothing() -> None:
    policy = AdaptiveDraftLength(costs(0.2), most=4)
    first, second = object(), object()
    for _ in range(100):
        policy._overall.book(4, 0)
    assert policy.choose([first, second], [4, 4]) == [1, 0]
    assert policy.choose([first, second, object()], [4, 4, 4]) == [1, 0, 0]
    assert policy.choose([first, second], [0, 4]) == [0, 1]
    assert policy.choose([first, second], [4, 4]) == [1, 0]
    book(policy, [first, second], [0, 0], [0, 0], UNTIMED)
    assert policy.choose([first, second], [4, 4]) == [0, 1]
    policy.forget(first)
    assert policy.choose([second], [4]) == [1]


def test_a_step_with_prompts_has_no_drafts() -> None:
    policy = AdaptiveDraftLength(costs(0.01), most=4)
    assert policy.choose([object()], [4], prompts=True) == [0]
    assert policy.choose([object()], [4]) == [4]


def test_what_could_never_pay_is_not_tried() -> None:
    policy = AdaptiveDraftLength(costs(1.1), most=4)
    for _ in range(100):
        policy._overall.book(4, 0)
    assert policy.choose([object()], [4]) == [0]
