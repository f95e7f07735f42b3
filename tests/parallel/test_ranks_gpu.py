"""Ranks on GPUs: tokens, graphs and faults as on a CPU. They need two."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.assets.adapters import random_adapter, write_adapter
from mini_infer.core.config import KernelChoice
from mini_infer.core.errors import RankError
from mini_infer.core.model_config import ModelConfig
from mini_infer.kernels.interface import Norm, Part, Stream
from mini_infer.kernels.ops import TorchKernels, select_kernels
from mini_infer.parallel.all_reduce import Collectives, join_store, listen, open_store
from mini_infer.parallel.context import ParallelContext

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

PROMPTS = ["def read(path):\n    with open(", "import os\n\nclass Cache:", "for i in range("]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=48, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, prompt_logprobs=1, logprobs=3),
]


WIDTH, DTYPE = 3584, torch.bfloat16


def sums(rank: int, port: int, store: Any = None) -> None:
    """Sums of any number of rows, now and then late, called and captured by turns: an odd number of them a graph."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    context = ParallelContext(rank, 2, Collectives(store or join_store(port), rank, 2, device))
    kernels = select_kernels(KernelChoice.triton, device)
    late_end = threading.Timer(90, context.abort)  # whoever fails leaves the other waiting
    late_end.daemon = True
    late_end.start()
    context.collectives.open(kernels, WIDTH, [DTYPE], most_rows=256, tokens=4096)  # whatever is faster beside others
    assert context.about.startswith("our kernel up to"), context.about
    assert context.about.endswith("by copies"), context.about
    draw, late = random.Random(0), random.Random(rank)
    norm = Norm(torch.rand(WIDTH, device=device, generator=torch.Generator(device).manual_seed(0)).to(DTYPE), 1e-6)
    inputs = torch.empty(3, 1024, WIDTH, device=device, dtype=DTYPE)

    def once(rows: int) -> list[torch.Tensor]:
        found = []
        for _ in range(3):
            residual = inputs[2, :rows].clone()
            normed, total = kernels.add_rms_norm(
                Stream(Part(inputs[rank, :rows].clone(), context, DTYPE), residual, norm)
            )
            found += [normed, total]
        return found

    graphs = {}
    for step in range(300):
        rows = draw.choice([1, 2, 7, 8, 64, 100, 256, 1024])
        inputs.normal_(generator=torch.Generator(device).manual_seed(step))
        if late.random() < 0.1:
            time.sleep(late.random() * 0.02)
        if step % 2:
            found = once(rows)
        else:
            if rows not in graphs:
                once(rows)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    graphs[rows] = graph, once(rows)
            graph, found = graphs[rows]
            graph.replay()
        whole = (inputs[0, :rows].float() + inputs[1, :rows].float()).to(DTYPE)
        expected = TorchKernels().add_rms_norm(Stream(whole, inputs[2, :rows], norm))
        for got, want in zip(found, expected * 3, strict=True):
            torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
    columns = torch.full((5, 1003), rank + 1.0, device=device, dtype=DTYPE)
    gathered = context.gather_columns(columns, torch.empty(5, 2001, device=device, dtype=DTYPE))
    assert gathered.float().sum(1).tolist() == [1003.0 + 2 * 998] * 5
    table = torch.full((10, WIDTH), rank + 1.0, device=device, dtype=DTYPE)
    found = context.look_up(torch.tensor([0, 9, 10, 18], device=device), table, 10 * rank, 10 - rank)
    assert found is not None
    assert found[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]
    for step in range(50):
        rows = draw.choice([1025, 1500, 2048])
        parts = torch.randn(2, 2, rows, WIDTH, device=device, generator=torch.Generator(device).manual_seed(step))
        own = parts[rank].to(DTYPE)
        if late.random() < 0.2:
            time.sleep(late.random() * 0.02)
        waits = [context.begin_all_reduce(half) for half in own]
        for half, wait in enumerate(waits):
            wait()
            whole = parts.to(DTYPE)[:, half].float().sum(0).to(DTYPE)
            assert torch.equal(own[half], whole), (step, half)
    let_go(context, late_end, graphs)


def let_go(context: ParallelContext, late_end: threading.Timer, graphs: dict[Any, Any]) -> None:
    """When both ranks are done. Threads of NCCL's that outlive the interpreter abort its process now and then."""
    torch.cuda.synchronize()
    context.exchange([])
    late_end.cancel()
    graphs.clear()
    for ending in context.abort():
        ending.join()


def on_two_gpus(work: Callable[..., None]) -> None:
    """`work` of a rank, the port of a store that the ranks find each other through, and rank 0's own."""
    processes, store = torch.multiprocessing.get_context("spawn"), open_store(listen())
    other = processes.Process(target=work, args=(1, store.port), daemon=True)
    other.start()
    work(0, store.port, store)
    other.join(60)
    assert other.exitcode == 0


def test_sums_of_any_size_called_and_replayed() -> None:
    on_two_gpus(sums)


def test_sums_are_our_own() -> None:
    values = {"model": {"path": "tiny-target"}, "parallel": {"tensor": 2}, "cache": {"num_blocks": 256}}
    engine = LLMEngine(EngineConfig.from_dict(values))
    assert engine.startup.all_reduce.startswith("our kernel up to"), engine.startup.all_reduce
    assert engine.startup.graphs.batch_sizes
    engine.close()


LAYOUTS: list[dict[str, int]] = [{"tensor": 2}, {"pipeline": 2}]


def answers(parallel: dict[str, int], adapters: list[str | None] | None = None, **sections: Any) -> list[Any]:
    small = {"max_batch": 8, "max_prefill_tokens": 256}  # graphs take most of a start
    values = {"model": {"path": "tiny-target"}, "seed": 0, "cache": {"num_blocks": 256}, "graphs": small, **sections}
    engine = LLMEngine(EngineConfig.from_dict({**values, "parallel": parallel}))
    try:
        outputs = engine.generate(PROMPTS, PARAMS, adapters=adapters)
    finally:
        engine.close()
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]


@functools.cache
def of_one_gpu(path: str = "tiny-target") -> list[Any]:
    return answers({}, numerics="batch_invariant", model={"path": path, "max_model_len": 128})


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"graphs": {"capture": "never"}},
        {"scheduler": {"max_num_batched_tokens": 64, "max_num_seqs": 4}},
        {"scheduler": {"overlap": "never"}},
        {"speculation": {"method": "ngram", "num_tokens": 3, "adaptive": False}},
        {"cache": {"num_blocks": 12, "num_host_blocks": 32}, "scheduler": {"preemption": "swap"}},
    ],
)
def test_two_gpus_give_the_bits_of_one(sections: dict[str, Any], parallel: dict[str, int]) -> None:
    if sections.get("scheduler", {}).get("preemption"):
        sections = {**sections, "model": {"path": "tiny-target", "max_model_len": 128}}
    assert answers(parallel, numerics="batch_invariant", **sections) == of_one_gpu()


@pytest.mark.parametrize(
    "parallel",
    [*LAYOUTS, {"tensor": 2, "expert": 2}, {"expert": 2}, {"expert": 2, "redundant_experts": 4}],
    ids=str,
)
def test_a_mixture_with_latents_gives_the_bits_of_one(parallel: dict[str, int]) -> None:
    model = {"path": "tiny-moe", "max_model_len": 128}
    assert answers(parallel, numerics="batch_invariant", model=model) == of_one_gpu("tiny-moe")


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_fast_numerics_in_fp32_give_the_tokens_of_one(parallel: dict[str, int]) -> None:
    model = {"path": "tiny-target", "dtype": "float32"}
    found, expected = answers(parallel, model=model), answers({}, model=model)
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in expected]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root, found = tmp_path_factory.mktemp("adapters"), {}
    for seed, name in enumerate(("one", "two")):
        tensors = random_adapter(ModelConfig(path="tiny-target"), rank=8, seed=seed, scale=0.7)
        found[name] = write_adapter(root / name, tensors, rank=8, alpha=8)
    return found


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
@pytest.mark.parametrize("capture", ["always", "never"])
@pytest.mark.parametrize("numerics", ["fast", "batch_invariant"])
def test_adapters_beside_requests_without_one_give_the_tokens_of_one_gpu(
    numerics: str, capture: str, parallel: dict[str, int], adapters: dict[str, str]
) -> None:
    model = {"path": "tiny-target", "dtype": "float32" if numerics == "fast" else "bfloat16"}
    sections = {"numerics": numerics, "model": model, "lora": {"max_adapters": 2, "adapters": adapters}}
    expected = answers({}, ["one", None, "two"], **sections)
    graphs = {"capture": capture, "max_batch": 8, "max_prefill_tokens": 256}
    found = answers(parallel, ["one", None, "two"], **sections, graphs=graphs)
    if numerics == "batch_invariant":
        assert found == expected
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in expected]
    without = answers({}, **sections)
    assert [own == other for (own, *_), (other, *_) in zip(expected, without, strict=True)] == [False, True, False]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_does_not_keep_the_gpu_waiting(number: int, parallel: dict[str, int]) -> None:
    values = {
        "model": {"path": "tiny-target"},
        "parallel": {**parallel, "timeout_s": 3.0},
        "cache": {"num_blocks": 4096},
    }
    engine = LLMEngine(EngineConfig.from_dict(values))
    (process,) = engine.executor._ranks.processes
    threading.Timer(0.3, os.kill, (process.pid, number)).start()
    params = SamplingParams(temperature=0, max_tokens=1800, ignore_eos=True)
    with pytest.raises(RankError, match="rank 1"):
        engine.generate(PROMPTS * 100, params)
    engine.close()
    assert not any(ending.is_alive() for ending in engine.executor._ranks._aborts)
