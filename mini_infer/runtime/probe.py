"""Teacher-forced logits out of an engine's own steps, to compare one way of computing with another."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mini_infer.core.config import EngineConfig
from mini_infer.core.plan import Admission, StepPlan
from mini_infer.core.request import SamplingParams
from mini_infer.runtime.runner import Runner


def probe(runner: Runner, token_ids: list[int], split: int, config: EngineConfig) -> Tensor:
    """[len(token_ids) - split + 1, vocab_size] float32 on the CPU. Takes slot 0 and the first blocks of the cache."""
    logits = []
    for plan in _plans(token_ids, split, config):
        start = plan.starts[0]
        if start >= split:  # the step before wrote its own choice there
            runner.force_token(slot=0, position=start, token_id=token_ids[start])
        step = runner.launch(plan)
        if step.logits is not None:
            logits.append(step.logits.float().cpu())
        runner.collect(step)
    return torch.cat(logits)


def _plans(token_ids: list[int], split: int, config: EngineConfig) -> Iterator[StepPlan]:
    blocks = list(range(len(token_ids) // config.cache.block_size + 1))
    admission = Admission(0, "probe", token_ids[:split], split, blocks, SamplingParams(temperature=0), 0, frozenset())
    budget = config.scheduler.max_num_batched_tokens
    for start in range(0, split, budget):
        count = min(budget, split - start)
        samples = [start + count == split]
        yield StepPlan(0, [0], [start], [count], samples, 0, admissions=[] if start else [admission])
    for start in range(split, len(token_ids)):
        yield StepPlan(0, [0], [start], [1], [True], num_decode_rows=1)
