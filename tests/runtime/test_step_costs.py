"""What steps cost, on a dry model whose times are set."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from mini_infer import EngineConfig, LLMEngine
from mini_infer.core.limits import Limits
from mini_infer.core.plan import StepPlan, StepResult
from mini_infer.runtime.graphs.step_graphs import BatchDescriptor
from mini_infer.speculative import step_costs
from mini_infer.speculative.policy.adaptive import AdaptiveDraftLength
from mini_infer.speculative.policy.costs import StepCosts
from mini_infer.speculative.step_costs import measure_costs


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that passes only while the dry model takes it: what else the machine does, does not show."""
    now = 0.0
    ours = threading.get_ident()  # threads that other tests have left sleep, too

    def sleep(seconds: float, really: Callable[[float], None] = time.sleep) -> None:
        nonlocal now
        if threading.get_ident() == ours:
            now += seconds
        else:
            really(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: now)


def policy_of(**dry: float) -> AdaptiveDraftLength:
    model = {"load_format": "dry", "dry": {"max_model_len": 64, **dry}}
    speculation = {"method": "ngram", "num_tokens": 3}
    engine = LLMEngine(
        EngineConfig.from_dict({"model": model, "speculation": speculation, "scheduler": {"max_num_seqs": 4}})
    )
    assert engine.startup.speculation == "ngram, up to 3 tokens, as many as pay"
    policy = engine.scheduler.speculator.policy
    assert isinstance(policy, AdaptiveDraftLength)
    return policy


@pytest.mark.usefixtures("clock")
def test_costs_are_those_of_the_machine() -> None:
    costs = policy_of(step_ms=4.0, decode_token_us=1000.0).costs
    assert costs.verify_seconds(1, 1) == pytest.approx(0.005)
    assert costs.verify_seconds(4, 1) == pytest.approx(0.008)
    assert costs.verify_seconds(1, 4) < 1.8 * costs.verify_seconds(1, 1), "drafts cost this model next to nothing"
    assert costs.draft_seconds(4) == 0


@pytest.mark.usefixtures("clock")
def test_drafts_that_cost_nothing_are_made() -> None:
    assert policy_of(step_ms=4.0).choose(["a", "b"], [3, 2]) == [3, 2]


class Machine:
    """A runner and a clock. A step takes as many milliseconds as it has tokens, and 10 more; its drafting 1 a row and
    draft; the first launch of each width, which compiles, 3 seconds more. Reading it takes `reading` ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drafts: bool = True, reading: float = 0.0) -> None:
        self.now = 0.0
        self.under_way = 0
        self.most_under_way: dict[int, int] = {}  # by tokens a row
        self.rows: list[int] = []
        self.prompts: list[list[int]] = []
        self.drafts: list[Sequence[int]] = []
        self._drafts, self._reading = drafts, reading
        self._compiled: set[int] = set()
        monkeypatch.setattr(step_costs.time, "perf_counter", lambda: self.now)

    def launch(self, plan: StepPlan) -> StepPlan:
        width = plan.counts[-1]
        self.prompts += [admission.token_ids for admission in plan.admissions]
        self.drafts += plan.drafts.values()
        if plan.num_decode_rows:
            if width not in self._compiled:
                self._compiled.add(width)
                self.now += 3.0
            self.rows.append(plan.num_rows)
        self.under_way += 1
        self.most_under_way[width] = max(self.under_way, self.most_under_way.get(width, 0))
        self.now += (10 + plan.num_tokens + plan.num_drafts * self._drafts) * 1e-3
        return plan

    def collect(self, plan: StepPlan) -> StepResult:
        self.under_way -= 1
        self.now += self._reading * 1e-3
        return StepResult([[] for _ in plan.req_indices], draft_s=plan.num_drafts * self._drafts * 1e-3)


def measured(
    machine: Machine, method: str = "draft", overlap: bool = False, captured: tuple[BatchDescriptor, ...] = ()
) -> StepCosts:
    speculation = {"method": method, "num_tokens": 4, **({"draft": {"path": "x"}} if method == "draft" else {})}
    config = EngineConfig.from_dict({"speculation": speculation, "scheduler": {"max_num_seqs": 100}})
    limits = Limits(1024, "", 1_000, 0)
    return measure_costs(machine, config, limits, 1_000, overlap, captured)  # type: ignore[arg-type]


def test_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = measured(Machine(monkeypatch))
    assert costs.verify_seconds(1, 1) == pytest.approx(0.011)
    assert costs.verify_seconds(7, 1) == pytest.approx(0.017)
    assert costs.verify_seconds(100, 5) == pytest.approx(0.510)
    assert costs.draft_seconds(1) == pytest.approx(0.001)
    assert costs.draft_seconds(100) == pytest.approx(0.1)
    assert measured(Machine(monkeypatch), "ngram").draft_seconds(100) == 0


def test_rows_are_not_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU computes equal rows with less power, and so faster, than any that are served."""
    machine = Machine(monkeypatch)
    measured(machine, "ngram")
    assert max(map(max, machine.prompts)) < 1_000, "the vocabulary"
    assert all(len(set(prompt)) > 200 for prompt in machine.prompts)
    assert len({prompt[-1] for prompt in machine.prompts[1:101]}) > 80, "the tokens that are computed"
    assert len({tuple(draft) for draft in machine.drafts if len(draft) == 4}) > 80, "and those that are verified"


@pytest.mark.parametrize("budget", [0.0, 0.1, 2.0])
def test_compiling_does_not_use_up_the_budget(monkeypatch: pytest.MonkeyPatch, budget: float) -> None:
    """The largest number of rows is there, whatever time the first launches take; others as long as there is time."""
    monkeypatch.setattr(step_costs, "BUDGET_S", budget)
    machine = Machine(monkeypatch)
    costs = measured(machine)
    assert {1, 100} <= set(costs.rows)
    assert costs.tokens_per_row == [1, 2, 3, 5]
    assert costs.target_s[-1][-1] == pytest.approx(0.510)
    assert [rows for rows, before in pairwise([*machine.rows[1:], 0]) if rows != before][:2] == [1, 100]
    assert (len(costs.rows) > 3) == (budget == 2.0)


def test_gaps_get_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    measured(machine)
    order = list(dict.fromkeys(machine.rows))
    assert order[:3] == [1, 100, 16]


GRID = tuple(BatchDescriptor(rows, width) for width in (2, 3, 5) for rows in (1, 8, 64, 100) if rows * width <= 300)


def test_captured_steps_are_measured_where_they_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = measured(Machine(monkeypatch), captured=GRID)
    assert set(costs.rows) <= {1, 8, 64, 100}
    assert costs.captured == [(d.num_rows, d.query_len) for d in sorted(GRID, key=lambda d: d.num_rows * d.query_len)]
    assert costs.target_s[-1][-1] == pytest.approx(0.510), "also what is not captured"


def test_steps_with_drafts_overlap_unless_they_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    costs = measured(machine, overlap=True)
    assert set(machine.most_under_way.values()) == {2}
    assert (costs.waiting, costs.padded) == (0, True)
    machine = Machine(monkeypatch)
    costs = measured(machine, "suffix", overlap=True)
    assert {width: most for width, most in machine.most_under_way.items() if width > 1} == {2: 1, 3: 1, 5: 1}
    assert machine.most_under_way[1] == 2
    assert not costs.padded


def test_waiting_costs_what_overlap_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    collect = machine.collect

    def slow_alone(plan: StepPlan) -> StepResult:
        machine.now += 0.0011 * (machine.under_way == 1)  # nothing else is under way meanwhile
        return collect(plan)

    monkeypatch.setattr(machine, "collect", slow_alone)
    assert measured(machine, "ngram", overlap=True).waiting == pytest.approx(0.1)


def test_a_line_says_what_was_measured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        measured(Machine(monkeypatch))
    assert "step costs" in caplog.text
    assert "1/2/3/5 tokens a row" in caplog.text
