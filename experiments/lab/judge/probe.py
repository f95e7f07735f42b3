"""Teacher-forced logits out of an engine's own steps, to compare one way of computing with another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import RequestError
from mini_infer.core.plan import Admission, StepPlan
from mini_infer.core.request import SamplingParams
from mini_infer.runtime.llm_engine import LLMEngine
from mini_infer.runtime.worker.model_runner import Runner

Probed = tuple[Sequence[int], int]  # tokens, and how many of them are the prompt


def probe_logits(engine: LLMEngine, token_ids: Sequence[int], split: int) -> Tensor:
    """`probe_batch` of one row."""
    return probe_batch(engine, [(token_ids, split)])[0]


def probe_batch(engine: LLMEngine, rows: Sequence[Probed]) -> list[Tensor]:
    """The logits that an engine's own steps give, through whatever kernels, attention and CUDA graphs it runs: of each
    (token_ids, split) the prompt token_ids[:split], alone; and then each further token in a decode step together with
    those of the other rows. It takes the first blocks of the cache, which is empty afterwards.

    Returns:
        Of each row [len(token_ids) - split + 1, vocab_size] float32 on the CPU: of the token behind
        token_ids[:split], behind token_ids[: split + 1], and so on.

    Raises:
        RuntimeError: requests are unfinished.
        RequestError: there are too many rows, or too many tokens.
    """
    engine.core.require_idle()
    config, most = engine.config, engine.config.scheduler.max_num_seqs
    if not 0 < len(rows) <= most:
        raise RequestError(f"a probe takes from 1 to {most} rows (scheduler.max_num_seqs), not {len(rows)}")
    for token_ids, split in rows:
        if not 0 < split <= len(token_ids) < engine.max_model_len:
            raise RequestError(
                f"a probe takes from 1 to {engine.max_model_len - 1} tokens, of which {split} come first"
            )
    needed, there = sum(_blocks_of(ids, config) for ids, _ in rows), engine.startup.num_kv_blocks
    if needed > there:
        raise RequestError(f"the rows of a probe take {needed} KV blocks, and there are {there}")
    try:
        return _probe(engine.executor.runner, rows, config)
    finally:
        engine.core.reset()


def _probe(runner: Runner, rows: Sequence[Probed], config: EngineConfig) -> list[Tensor]:
    logits: list[list[Tensor]] = [[] for _ in rows]
    for plan in _plans(rows, config):
        for req_index, start in zip(plan.req_indices, plan.starts, strict=True):
            token_ids, split = rows[req_index]
            if start >= split:  # the step before wrote its own choice there
                runner.force_token(req_index, position=start, token_id=token_ids[start])
        step = runner.launch(plan)
        runner.collect(step)
        if step.logits is not None:
            for req_index, row in zip(plan.req_indices, step.logits.float().cpu(), strict=True):
                logits[req_index].append(row)
    return [torch.stack(own) for own in logits]


def _plans(rows: Sequence[Probed], config: EngineConfig) -> Iterator[StepPlan]:
    budget, first_block = config.scheduler.max_num_batched_tokens, 0
    for req_index, (token_ids, split) in enumerate(rows):
        blocks = range(first_block, first_block + _blocks_of(token_ids, config))
        first_block = blocks.stop
        prompt = list(token_ids[:split])
        admission = Admission(req_index, "probe", prompt, split, list(blocks), SamplingParams(temperature=0))
        for start in range(0, split, budget):
            count = min(budget, split - start)
            samples = [start + count == split]
            yield StepPlan(0, [req_index], [start], [count], samples, 0, admissions=[] if start else [admission])
    for step in range(max(len(token_ids) - split for token_ids, split in rows)):
        req_indices = [req_index for req_index, (token_ids, split) in enumerate(rows) if split + step < len(token_ids)]
        starts = [rows[req_index][1] + step for req_index in req_indices]
        n = len(req_indices)
        yield StepPlan(0, req_indices, starts, [1] * n, [True] * n, num_decode_rows=n)


def _blocks_of(token_ids: Sequence[int], config: EngineConfig) -> int:
    """Blocks that a row of these tokens takes."""
    return len(token_ids) // config.cache.block_size + 1
