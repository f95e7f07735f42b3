"""The gate where numbers are rounded: logits of a variant against those of a reference that rounds nothing.

Both are models of the variant's shape with two layers and the same random weights, on the same device. The variant
computes as it is configured: its dtype, its kernels and attention backends, its CUDA graphs. The reference computes in
fp32 with plain torch operations and sdpa. Prompts of several lengths are prefilled, and the tokens that the reference
generates greedily are decoded one by one, by both alike:

    prompt of n tokens | t1 t2 ... tk        both prefill n tokens, then decode t1 ... tk
                       ^  ^       ^          and are compared after each: ||x - reference|| / ||reference||

Where a scheme rounds activations before each product, both do, and where theirs lie on two sides of a tie their codes
differ. Rounded to steps of D, x and x + d differ by d^2 + f (1 - f) D^2 in the mean square, where f is what |d| has
beyond whole steps: at most d^2 + D^2 / 4. Rounding itself has a mean square of D^2 / 12. So the square of the error may
be larger by three times the square of what rounding activations changes, which the reference shows, with and without.

Logits are teacher-forced, out of an engine's own steps: `probe_batch`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from experiments.lab.judge.gate import ErrorGate
from experiments.lab.kernels.case import row_error
from mini_infer import LLMEngine, SamplingParams
from mini_infer.core.config import CacheConfig, EngineConfig, LoadFormat, LoraConfig, ModelConfig, When
from mini_infer.core.config import replace as changed
from mini_infer.core.errors import RequestError
from mini_infer.core.plan import Admission, StepPlan
from mini_infer.core.speculation_config import DraftConfig, SpeculationConfig
from mini_infer.modeling.layers import Linear
from mini_infer.modeling.linear_methods.quantized import QuantizedLinear
from mini_infer.modeling.model_files import read_json, resolve_folder
from mini_infer.runtime.worker.torch_model import TorchModel

LAYERS = 2
PROMPTS = (7, 40, 250, 1100)  # tokens: below a block, some blocks, within a chunk, more than a chunk of 512 or 1,024
STEPS = 12  # decoded after each prompt: some cross the end of a block
LENGTH = 2048  # tokens that the model takes, at most
SEQUENCES = 4  # that the engine could hold at once

Probed = tuple[Sequence[int], int]  # tokens, and how many of them are the prompt
Shaped = TypeVar("Shaped", ModelConfig, DraftConfig)


@dataclass(frozen=True, eq=False)
class Expected:
    rows: Sequence[Probed]  # behind each prompt what the reference generated
    logits: Tensor  # [n, vocab_size] float32, of the rows one after the other
    rounding: float  # the largest relative error of a row without the rounding of activations; 0 where nothing is


def gates(variants: Mapping[str, EngineConfig], allowed: float | None) -> list[ErrorGate]:
    """One a variant, and none without a bound. What variants have in common is computed once: their logits, or those of
    their reference."""
    if allowed is None:
        return []
    known: dict[str, ErrorGate] = {}
    references: dict[str, Expected] = {}
    found = []
    for variant, config in variants.items():
        small = shrunk(config)
        if repr(small) not in known:
            exact = reference(small)
            if repr(exact) not in references:
                references[repr(exact)] = expect(exact)
            known[repr(small)] = measure(small, references[repr(exact)], allowed)
        found.append(replace(known[repr(small)], variant=variant))
    return found


def shrunk(config: EngineConfig) -> EngineConfig:
    """The same shape and settings with few layers, random weights, memory for few sequences, and a length that does not
    depend on what the run needs; without what `probe_batch` goes past: hits, overlap, drafts and adapters."""
    length = min(LENGTH, int(shape_of(config.model).get("max_position_embeddings", LENGTH)))
    if not config.scheduler.chunked_prefill:
        length = min(length, config.scheduler.max_num_batched_tokens)
    blocks = SEQUENCES * math.ceil(length / config.cache.block_size)
    return replace(
        config,
        model=replace(few_layers(config.model), max_model_len=length),
        cache=replace(bare(config.cache, blocks), prefix_caching=False),
        scheduler=replace(config.scheduler, max_num_seqs=SEQUENCES, overlap=When.never),
        speculation=SpeculationConfig(),
        lora=LoraConfig(),
    )


def bare(cache: CacheConfig, num_blocks: int) -> CacheConfig:
    on_host_or_disk = ("num_host_blocks", "host_memory_gib", "host_prefix_gib", "disk_prefix_path", "disk_prefix_gib")
    nothing: dict[str, Any] = dict.fromkeys(("memory_gib", *on_host_or_disk))
    return replace(cache, num_blocks=num_blocks, **nothing)


def reference(config: EngineConfig) -> EngineConfig:
    """Of a shrunk config: the same for all that differ in what changes no logits, such as chunks."""
    exact = changed(config, model={"dtype": "float32", "kernels": "torch"}).to_dict()
    plain = {"attention": {"prefill": "sdpa", "decode": "sdpa"}, "graphs": {"capture": "never"}, "parallel": {}}
    steps = {"max_num_seqs": SEQUENCES, "overlap": "never"}
    return EngineConfig.from_dict({**exact, **plain, "scheduler": steps, "numerics": "fast"})


def expect(config: EngineConfig) -> Expected:
    with closing(LLMEngine(config)) as exact:
        rng = np.random.default_rng(config.model.seed)
        lengths = [length for length in PROMPTS if length + STEPS < exact.max_model_len]
        prompts = [rng.integers(exact.vocab_size, size=length).tolist() for length in lengths]
        params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
        answers = [output.outputs[0].token_ids for output in exact.generate(prompts, params)]
        rows = [([*prompt, *answer], len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)]
        logits, rounding = torch.cat([probe_logits(exact, *row) for row in rows]), 0.0
        if leave_activations(exact):
            rounding = row_error(torch.cat([probe_logits(exact, *row) for row in rows]), logits)
    return Expected(rows, logits, rounding)


def leave_activations(engine: LLMEngine) -> bool:
    """From now on its activations stay as they are. Whether any were rounded."""
    model = engine.executor.runner.model
    assert isinstance(model, TorchModel)  # a dry one has no logits, and so no gate
    methods = [layer.method for layer in model.module.modules() if isinstance(layer, Linear)]
    rounds = [m for m in methods if isinstance(m, QuantizedLinear) and m.activations is not None]
    for method in rounds:
        method.activations = None
    return bool(rounds)


def measure(config: EngineConfig, expected: Expected, allowed: float) -> ErrorGate:
    rows = expected.rows
    with closing(LLMEngine(config)) as engine:
        alone = torch.cat([probe_logits(engine, *row) for row in rows])
        together = torch.cat(probe_batch(engine, rows))
    told = ", ".join(f"{length:,}" for _, length in rows)
    steps = f"{STEPS} decode steps of 1 row and of {len(rows)} rows"
    against = f"sdpa in fp32 ({LAYERS} layers; prefill of {told} tokens, then {steps})"
    allowed = math.hypot(allowed, math.sqrt(3) * expected.rounding)
    return compare(torch.cat((alone, together)), expected.logits.repeat(2, 1), allowed, against)


def compare(found: Tensor, expected: Tensor, allowed: float, against: str) -> ErrorGate:
    """Logits [n, vocab_size] of each."""
    equal = int((found.argmax(-1) == expected.argmax(-1)).sum())
    return ErrorGate("", None, row_error(found, expected), allowed, against, equal, len(found))


def shape_of(model: ModelConfig | DraftConfig) -> dict[str, Any]:
    """Of a model or a draft whose path or hf_config is given."""
    shape: dict[str, Any] = model.hf_config or read_json(resolve_folder(str(model.path), weights=False) / "config.json")
    return shape


def few_layers(model: Shaped) -> Shaped:
    """With random weights."""
    shape = shape_of(model)
    layers = min(LAYERS, int(shape["num_hidden_layers"]))
    kinds = {"layer_types": shape["layer_types"][:layers]} if shape.get("layer_types") else {}
    return replace(model, hf_config={**shape, "num_hidden_layers": layers, **kinds}, load_format=LoadFormat.dummy)


def probe_logits(engine: LLMEngine, token_ids: Sequence[int], split: int) -> Tensor:
    return probe_batch(engine, [(token_ids, split)])[0]


def probe_batch(engine: LLMEngine, rows: Sequence[Probed]) -> list[Tensor]:
    """The logits that an engine's own steps give, through whatever kernels, attention and CUDA graphs it runs: of each
    (token_ids, split) the prompt token_ids[:split], alone; and then each further token in a decode step together with
    those of the other rows. It takes the first blocks of the cache, which is empty afterwards.

    Returns of each row [len(token_ids) - split + 1, vocab_size] float32 on the CPU: of the token behind
    token_ids[:split], and so on. Raises RuntimeError where requests are unfinished, RequestError where there are too
    many rows or tokens."""
    engine.core.require_idle()
    config, most, runner = engine.config, engine.config.scheduler.max_num_seqs, engine.executor.runner
    if not 0 < len(rows) <= most:
        raise RequestError(f"a probe takes from 1 to {most} rows (scheduler.max_num_seqs), not {len(rows)}")
    for token_ids, split in rows:
        if not 0 < split <= len(token_ids) < engine.max_model_len:
            most = engine.max_model_len - 1
            raise RequestError(f"a probe takes from 1 to {most} tokens, of which {split} come first")
    needed, there = sum(_blocks_of(ids, config) for ids, _ in rows), engine.startup.num_kv_blocks
    if needed > there:
        raise RequestError(f"the rows of a probe take {needed} KV blocks, and there are {there}")
    logits: list[list[Tensor]] = [[] for _ in rows]
    try:
        for plan in _plans(rows, config):
            for req_index, start in zip(plan.req_indices, plan.starts, strict=True):
                token_ids, split = rows[req_index]
                if start >= split:  # the step before wrote its own choice there
                    runner.force_token(req_index, position=start, token_id=token_ids[start])
            runner.collect(runner.launch(plan))
            if runner.logits is not None:
                for req_index, row in zip(plan.req_indices, runner.logits.float().cpu(), strict=True):
                    logits[req_index].append(row)
    finally:
        engine.core.reset()
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
    return len(token_ids) // config.cache.block_size + 1
