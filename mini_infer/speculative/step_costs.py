"""What steps cost on this machine, measured when the engine starts: decode steps with and without drafts, by rows."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from statistics import median

import numpy as np

from mini_infer.core.config import EngineConfig
from mini_infer.core.limits import Limits
from mini_infer.core.plan import Admission, StepPlan
from mini_infer.core.request import SamplingParams
from mini_infer.core.speculation_config import SpeculationMethod
from mini_infer.runtime.graphs.step_graphs import BatchDescriptor
from mini_infer.runtime.worker.model_runner import Runner
from mini_infer.speculative.policy.costs import StepCosts

CONTEXT_TOKENS = 256  # of each row, where requests may be as long
REPEATS = 7  # the first of them fills the pipeline, where steps overlap
PLAN_S = 0.1  # of timed runs of one plan, after which it is not repeated any more
BUDGET_S = 2.0  # of timed runs, beyond those of the smallest and the largest number of rows

logger = logging.getLogger(__name__)


def measure_costs(
    runner: Runner,
    config: EngineConfig,
    limits: Limits,
    vocab_size: int,
    overlap: bool,
    captured: Sequence[BatchDescriptor] = (),
) -> StepCosts:
    """Times steps of all numbers of tokens a row, with the fewest rows, with the most, and with as many numbers of rows
    in between as the budget allows. Overwrites the requests' state and KV: nobody may hold any. With `overlap` steps
    are launched before the one before is read, for which rows with drafts are padded; those that are looked up must
    wait.
    """
    method, has_draft_model = config.speculation.method, config.speculation.has_draft_model
    looked_up = method in (SpeculationMethod.ngram, SpeculationMethod.suffix)
    most = config.speculation.num_tokens
    widths = {d.query_len for d in captured if d.query_len <= 1 + most} or {2, 1 + (most + 1) // 2}
    drawn = np.random.default_rng(0)
    target: dict[tuple[int, int], float] = {}
    draft: dict[int, float] = {}
    waiting = spent = 0.0
    for number, rows in enumerate(_row_counts(config, captured)):
        if spent > BUDGET_S:
            break
        prompts = _prompts(rows, config, limits, vocab_size, drawn)
        runner.collect(runner.launch(prompts))
        for width in sorted({1, *widths, 1 + most}):
            drafts = {} if has_draft_model else dict(enumerate(_draw(drawn, vocab_size, rows, width - 1)))
            plan = StepPlan.alike(rows, prompts.starts[0], width, decode=True, drafts=drafts)
            seconds, drafting, took = _time(runner, plan, overlap and (width == 1 or not looked_up))
            spent += took if number > 1 else 0
            target[rows, width] = seconds - drafting
            if width > 1 and has_draft_model:
                draft[rows] = drafting / (width - 1)
            if width == 1 and overlap and looked_up:
                waiting = max(waiting, _time(runner, plan, overlap=False)[0] / seconds - 1)
    graphs = [(descriptor.num_rows, descriptor.query_len) for descriptor in captured]
    costs = StepCosts(target, draft or None, graphs, padded=overlap and not looked_up, waiting=waiting)
    logger.info("step costs: %s", costs)
    return costs


def _time(runner: Runner, plan: StepPlan, overlap: bool) -> tuple[float, float, float]:
    """Seconds of a step, of them those of the draft model, and what all runs took but the first. With `overlap` a step
    lasts from the reading of the one before it to its own, as in an engine that is busy."""
    runner.collect(runner.launch(plan))  # it compiles what is not compiled yet
    steps: list[float] = []
    drafting: list[float] = []
    started = last = time.perf_counter()
    in_flight = [runner.launch(plan)] if overlap else []
    while len(steps) < REPEATS and last - started < PLAN_S:
        in_flight.append(runner.launch(plan))
        drafting.append(runner.collect(in_flight.pop(0)).draft_s)
        now = time.perf_counter()
        steps.append(now - last)
        last = now
    for step in in_flight:
        runner.collect(step)
    # Whatever else the machine does makes a step longer; but one that is read late makes the next one shorter.
    return median(steps), median(drafting), time.perf_counter() - started


def _row_counts(config: EngineConfig, captured: Sequence[BatchDescriptor]) -> list[int]:
    """Numbers of rows to measure: the fewest, the most, and then so that the gaps get smaller and smaller."""
    scheduler = config.scheduler
    most = scheduler.max_num_batched_tokens // (1 + config.speculation.num_tokens)
    largest = max(1, min(scheduler.max_num_seqs, most))
    between = {d.num_rows for d in captured} or {2**i for i in range(largest.bit_length())}
    rows = sorted({1, *(r for r in between if r < largest), largest})
    order = [rows[0], rows[-1]]
    for halvings in range(1, 1 + len(rows).bit_length()):
        order += rows[:: max(1, len(rows) >> halvings)]
    return list(dict.fromkeys(order))


def _draw(drawn: np.random.Generator, vocab_size: int, rows: int, count: int) -> list[list[int]]:
    """So many tokens a row: of equal rows a GPU takes less power, and keeps a higher clock (256 of Qwen2.5-7B's on an
    H200: 7.2 ms, not 8.0)."""
    return drawn.integers(vocab_size, size=(rows, count)).tolist()


def _prompts(rows: int, config: EngineConfig, limits: Limits, vocab_size: int, drawn: np.random.Generator) -> StepPlan:
    """Admits so many requests at their prompts' last token. Nobody computes what is before it."""
    most = config.speculation.num_tokens
    context = max(1, min(CONTEXT_TOKENS, limits.max_model_len - 1 - most))
    width = -(-(context + 1 + most) // config.cache.block_size)
    params, admissions = SamplingParams(temperature=0), []
    for row, token_ids in enumerate(_draw(drawn, vocab_size, rows, context)):
        table = [(row * width + i) % limits.num_blocks for i in range(width)]
        admissions.append(Admission(row, "a measurement", token_ids, context, table, params, seed=row))
    return StepPlan.alike(rows, context - 1, 1, decode=False, admissions=admissions)
