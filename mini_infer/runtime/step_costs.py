"""What steps cost on this machine, measured when the engine starts: decode steps with and without drafts, by rows."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mini_infer.core.config import EngineConfig
from mini_infer.core.plan import Admission, StepPlan
from mini_infer.core.request import SamplingParams
from mini_infer.runtime.memory import Limits
from mini_infer.runtime.runner import Runner
from mini_infer.speculative.costs import StepCosts

CONTEXT_TOKENS = 256  # of each row, where requests may be as long
REPEATS = 3
PIPELINED = 4  # steps without drafts that are launched before the first is read, where steps overlap
BUDGET_S = 2.0  # that measuring may take, give or take a number of rows; what is larger is extrapolated


def measure_costs(
    runner: Runner, config: EngineConfig, limits: Limits, overlap: bool, padded: bool
) -> tuple[StepCosts, float]:
    """What steps cost, and what it costs a step to wait for the one before it: a share of its time.

    Takes slots and blocks as it pleases: nobody may hold any.

    Args:
        overlap: steps without drafts are launched before the one before is read; those with drafts never are.
        padded: as of StepCosts.
    """
    most = config.speculation.num_tokens
    token_counts = sorted({1, 2, 1 + (most + 1) // 2, 1 + most})
    target: dict[tuple[int, int], float] = {}
    draft: dict[int, float] = {}
    waiting = [0.0]
    started = time.perf_counter()
    for rows in _row_counts(config):
        runner.collect(runner.launch(_admit(rows, config, limits)))
        for count in token_counts:
            plan = _decode(rows, count, config, limits)
            seconds, drafting = _time(runner, plan, PIPELINED if overlap and count == 1 else 1)
            target[rows, count] = seconds - drafting
            if overlap and count == 1:
                waiting.append(_time(runner, plan, 1)[0] / seconds - 1)
            if count > 1 and config.speculation.has_draft_model:
                draft[rows] = drafting / (count - 1)
        if time.perf_counter() - started > BUDGET_S:
            break
    return StepCosts(target, draft or None, padded), max(waiting)


def _time(runner: Runner, plan: StepPlan, steps: int) -> tuple[float, float]:
    """Seconds of a step, and of them those of the draft model."""
    runs = []
    for _ in range(1 + REPEATS):  # the first compiles what is not compiled yet
        start = time.perf_counter()
        results = [runner.collect(step) for step in [runner.launch(plan) for _ in range(steps)]]
        runs.append(((time.perf_counter() - start) / steps, results[-1].draft_s))
    return min(runs[1:])  # whatever else the machine does makes a run longer, never shorter


def _row_counts(config: EngineConfig) -> list[int]:
    scheduler = config.scheduler
    most = scheduler.max_num_batched_tokens // (1 + config.speculation.num_tokens)
    largest = max(1, min(scheduler.max_num_seqs, most))
    return [rows for rows in (2**i for i in range(largest.bit_length())) if rows < largest] + [largest]


def _context(config: EngineConfig, limits: Limits) -> int:
    return max(1, min(CONTEXT_TOKENS, limits.max_model_len - 1 - config.speculation.num_tokens))


def _admit(rows: int, config: EngineConfig, limits: Limits) -> StepPlan:
    """Gives rows their slots, with a context that nobody computes: what is in it does not matter."""
    context = _context(config, limits)
    width = -(-(context + 1 + config.speculation.num_tokens) // config.cache.block_size)
    params = SamplingParams(temperature=0)
    admissions = [
        Admission(
            row,
            "a measurement",
            [0] * context,
            context,
            [(row * width + i) % limits.num_blocks for i in range(width)],
            params,
            row,
            frozenset(),
        )
        for row in range(rows)
    ]
    starts = [context - 1] * rows
    return StepPlan(0, list(range(rows)), starts, [1] * rows, [True] * rows, num_decode_rows=0, admissions=admissions)


def _decode(rows: int, count: int, config: EngineConfig, limits: Limits) -> StepPlan:
    """A step of `count` tokens a row."""
    drafts: dict[int, Sequence[int]] = {}
    if not config.speculation.has_draft_model:
        drafts = {row: [0] * (count - 1) for row in range(rows)}
    return StepPlan(
        0,
        list(range(rows)),
        [_context(config, limits) - 1] * rows,
        [count] * rows,
        [True] * rows,
        num_decode_rows=rows,
        drafts=drafts,
        num_drafts=rows * (count - 1),
    )
