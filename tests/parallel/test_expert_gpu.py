"""Experts that GPUs share: every form over NCCL and over peer memory, called and replayed. They need two."""

from __future__ import annotations

import functools
import os
import random
import signal
import statistics
import threading
import time
from typing import Any

import pytest
import torch
from test_ranks_gpu import PARAMS, PROMPTS, answers, let_go, on_two_gpus

from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.core.config import Dispatch, KernelChoice
from mini_infer.core.errors import RankError
from mini_infer.kernels.interface import ExpertWeights, RouterSpec, Routes, TokenPlaces
from mini_infer.kernels.moe.reference import experts_reference, route_reference
from mini_infer.kernels.ops import select_kernels
from mini_infer.parallel.all_reduce import Collectives, join_store
from mini_infer.parallel.context import ParallelContext
from mini_infer.parallel.expert import ExpertExchange, ExpertRanks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

EXPERTS, CHOSEN, HIDDEN, INNER, DTYPE = 32, 4, 512, 128, torch.bfloat16
COUNTS = [1, 2, 3, 7, 64, 255, 256, 1024]


def layers(rank: int, port: int, store: Any = None) -> None:
    """A layer's experts of any number of tokens, now and then late, in every form; the direct one called and captured
    by turns."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    context = ParallelContext(rank, 2, Collectives(store or join_store(port), rank, 2, device))
    kernels = select_kernels(KernelChoice.triton, device)
    late_end = threading.Timer(100, context.abort)  # whoever fails leaves the other waiting
    late_end.daemon = True
    late_end.start()
    ranks = {
        form: ExpertRanks(context, form).opened(kernels, device, DTYPE, HIDDEN, CHOSEN, max(COUNTS))
        for form in Dispatch
    }
    exchanges = {form: ExpertExchange(own, EXPERTS, kernels) for form, own in ranks.items()}
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    whole = ExpertWeights(drawn(EXPERTS, 2 * INNER, HIDDEN) * HIDDEN**-0.5, drawn(EXPERTS, HIDDEN, INNER) * INNER**-0.5)
    mine = context.rows_of(range(EXPERTS))
    weights = ExpertWeights(*(part[mine.start : mine.stop].to(DTYPE) for part in whole[:2]))
    draw, late, graphs = random.Random(0), random.Random(rank), dict[int, Any]()
    x, shares = torch.empty(max(COUNTS), HIDDEN, device=device, dtype=DTYPE), drawn(max(COUNTS), CHOSEN).abs()
    ids = torch.zeros(max(COUNTS), CHOSEN, device=device, dtype=torch.int32)

    def once(form: Dispatch, count: int) -> list[torch.Tensor]:
        own = [context.rows_of(part[:count]).contiguous() for part in (x, ids, shares)]
        arguments = own[0], Routes(*own[1:]), weights, own[0], count
        return [exchanges[form].experts(*arguments) for _ in range(3)]  # an odd number a graph

    for step in range(120):
        count = draw.choice(COUNTS)
        x.normal_(generator=generator)
        logits = torch.randn(count, EXPERTS, device=device, generator=generator)
        if step % 5 == 0:
            logits[:, 3:] -= 100  # nearly all go to the first rank
        places = torch.arange(count, device=device)
        ids[:count] = route_reference(logits, None, RouterSpec(EXPERTS, CHOSEN), TokenPlaces(places, places)).ids
        if late.random() < 0.1:
            time.sleep(late.random() * 0.02)
        form = list(Dispatch)[step % 8 % 4] if step % 8 < 4 else Dispatch.direct
        if step % 8 < 6:
            found = once(form, count)
        else:
            if count not in graphs:
                once(form, count)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    graphs[count] = graph, once(form, count)
            graph, found = graphs[count]
            graph.replay()
        exact = ExpertWeights(*(part.to(DTYPE).float() for part in whole[:2]))
        some = places[:: max(1, count // 16)]
        expected = experts_reference(x[some].float(), Routes(ids[some], shares[some]), exact, x[some].float())
        for got in found:
            torch.testing.assert_close(got[some].float(), expected, rtol=0.03, atol=0.05)
            assert torch.equal(got, found[0])
    let_go(context, late_end, graphs)


def test_every_form_called_and_replayed() -> None:
    on_two_gpus(layers)


MODEL = {"path": "tiny-moe", "max_model_len": 128}


@functools.cache
def of_one_gpu() -> list[Any]:
    return answers({}, numerics="batch_invariant", model=MODEL)


@pytest.mark.parametrize("form", Dispatch)
def test_two_gpus_give_the_bits_of_one(form: Dispatch) -> None:
    parallel: dict[str, Any] = {"expert": 2, "dispatch": form.value}
    assert answers(parallel, numerics="batch_invariant", model=MODEL) == of_one_gpu()


def engine_of(timeout_s: float = 60.0, **model: Any) -> LLMEngine:
    parallel = {"expert": 2, "dispatch": "direct", "timeout_s": timeout_s}
    values = {"model": {**MODEL, **model}, "seed": 0, "cache": {"num_blocks": 4096}, "parallel": parallel}
    return LLMEngine(EngineConfig.from_dict(values))


def test_steps_in_graphs_are_counted() -> None:
    engine = engine_of(count_experts=True, routing="uniform")
    assert engine.startup.graphs.batch_sizes
    try:
        engine.generate(PROMPTS, PARAMS)
        traffic = [record.expert_traffic for record in engine.records if record.decode_tokens == 3]
        assert len(traffic) > 20
        for step in traffic:
            assert step.sent_bytes >= step.ideal_bytes > 0
            assert min(step[2:]) > 0
        assert statistics.median(step.dispatch_s for step in traffic) < 0.01  # a single one may wait for the other rank
    finally:
        engine.close()


def test_a_lost_rank_does_not_keep_the_gpu_waiting() -> None:
    engine = engine_of(timeout_s=3.0, max_model_len=2048)
    (process,) = engine.executor._ranks.processes
    threading.Timer(0.3, os.kill, (process.pid, signal.SIGKILL)).start()
    with pytest.raises(RankError, match="rank 1"):
        engine.generate(PROMPTS * 20, SamplingParams(temperature=0, max_tokens=1200, ignore_eos=True))
    engine.close()
