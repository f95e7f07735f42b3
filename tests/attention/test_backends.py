"""Every backend against the formula, and against every other, on batches that mix decode rows, prompts and chunks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from small_cache import Geometry, Step, make_step

from mini_infer.attention.backend import AttentionBackend
from mini_infer.attention.context import ModelAttention
from mini_infer.attention.flash_attn import FlashAttnBackend
from mini_infer.attention.torch_sdpa import SdpaBackend

# The compiler of flash_attn warns about its own package.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Two decode rows, a prompt, a first token, a chunk.
MIXED = [(40, 1), (17, 1), (0, 37), (0, 1), (30, 21)]
WINDOWS = (None, 20, 1, 1000)


def flash_attn() -> FlashAttnBackend:
    pytest.importorskip("flash_attn.cute")
    return FlashAttnBackend()


def triton() -> AttentionBackend:
    return pytest.importorskip("mini_infer.attention.triton").TritonBackend()


def outputs(step: Step, backend: AttentionBackend) -> list[torch.Tensor]:
    context = step.context(backend)
    return [context.attend(layer, q) for layer, q in enumerate(step.queries)]


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    assert out.shape == expected.shape
    return ((out.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("head_dim", [16, 100])
@pytest.mark.parametrize("query_len", [1, 3])
def test_triton_in_float32(query_len: int, head_dim: int) -> None:
    """What no row owns is NaN, so that reading it shows."""
    rows = [(start, query_len) for start, _ in MIXED[:2]] + MIXED[2:]
    step = make_step(rows, 2, Geometry(6, 2, head_dim, 8), WINDOWS, DEVICE, blank=torch.nan)
    for layer, out in enumerate(outputs(step, triton())):
        assert relative_error(out, step.expected(layer)) < 1e-5


class Case(NamedTuple):
    geometry: Geometry
    dtype: torch.dtype = torch.bfloat16
    rows: int = 0  # further decode rows


@pytest.mark.parametrize("make_backend", [SdpaBackend, triton])
@pytest.mark.parametrize("rows", [MIXED, MIXED[:2], MIXED[2:]], ids=["mixed", "decode", "prompts"])
def test_a_result_lands_where_it_is_wanted(
    make_backend: Callable[[], AttentionBackend], rows: list[tuple[int, int]]
) -> None:
    num_decode_rows = sum(row in MIXED[:2] for row in rows)
    step = make_step(rows, num_decode_rows, Geometry(6, 2, 16, 8), (None,), DEVICE, dtype=torch.float32)
    space = torch.full((100, 6, 16), 7.0, device=DEVICE)
    tokens = step.batch.num_tokens
    out = step.context(make_backend()).attend(0, step.queries[0], out=space[1 : tokens + 1])
    assert out.data_ptr() == space[1].data_ptr()
    assert relative_error(out, step.expected(0)) < 1e-5
    assert (space[0] == 7).all()
    assert (space[tokens + 1 :] == 7).all()


GPU_CASES = {  # each compiles for ten seconds
    "qwen2.5-7b": Case(Geometry(28, 4, 128, 16)),
    "llama3-8b in float16": Case(Geometry(32, 8, 128, 32), torch.float16),
    "no groups, block of one": Case(Geometry(8, 8, 32, 1)),
    "one KV head, 300 rows": Case(Geometry(8, 1, 64, 16), rows=300),
    "head 80, block of five": Case(Geometry(8, 4, 80, 5)),
    "head 96, block of 256": Case(Geometry(12, 2, 96, 256)),
    "head 100": Case(Geometry(8, 4, 100, 16)),
    "head 33, block of seven": Case(Geometry(6, 3, 33, 7)),
    "head 256": Case(Geometry(8, 4, 256, 16)),
    "block of 128": Case(Geometry(16, 8, 128, 128)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_every_backend_against_every_other(name: str) -> None:
    case = GPU_CASES[name]
    rows = [(n * 7 % 50, 1) for n in range(case.rows)] + [(700, 1), (5, 1), (0, 300), (0, 1), (400, 150)]
    windows = (None, 200, 1, 10_000)
    step = make_step(rows, case.rows + 2, case.geometry, windows, DEVICE, case.dtype)
    g, found = case.geometry, {}
    for backend in (SdpaBackend(), triton(), flash_attn()):
        limits = backend.capabilities.prefill
        assert limits is not None
        if limits.refusal(g.head_dim, g.block_size, case.dtype) is None:
            found[type(backend)] = outputs(step, backend)
    assert len(found) == (2 if g.head_dim % 16 else 3)
    for layer in range(len(windows)):
        for one, outs in found.items():
            error = relative_error(outs[layer], step.expected(layer))
            assert error < 1e-2, f"{one.__name__}, window {windows[layer]}"
        for one, other in itertools.combinations(found, 2):
            error = relative_error(found[one][layer], found[other][layer])
            assert error < 1e-2, f"{one.__name__}, {other.__name__}, window {windows[layer]}"


@pytest.mark.gpu
@pytest.mark.parametrize("make_backend", [triton, flash_attn])
def test_what_no_row_owns_is_not_read(make_backend: type[AttentionBackend]) -> None:
    backend = make_backend()
    rows = [(700, 1), (5, 1), (0, 300), (0, 1), (400, 150)]
    step = make_step(rows, 2, Geometry(28, 4, 128, 16), (None, 200), DEVICE, torch.bfloat16, blank=torch.nan)
    for layer, out in enumerate(outputs(step, backend)):
        assert relative_error(out, step.expected(layer)) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("make_backend", [triton, flash_attn])
@pytest.mark.parametrize("query_len", [1, 4])
def test_a_captured_decode_follows_changing_lengths(make_backend: type[AttentionBackend], query_len: int) -> None:
    backend = make_backend()
    geometry, windows = Geometry(28, 4, 128, 16), (None, 300)
    rows = [(start, query_len) for start in (900, 3, 77, 500)]
    step = make_step(rows, 4, geometry, windows, DEVICE, torch.bfloat16)
    expected = outputs(step, backend)
    step.batch.seq_lens.fill_(query_len)
    outputs(step, backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = outputs(step, backend)
    step.batch.seq_lens.copy_(torch.tensor([start + query_len for start, _ in rows]))
    graph.replay()
    for out, eager in zip(captured, expected, strict=True):
        assert torch.equal(out, eager)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("make_backend", [triton, pytest.param(flash_attn, marks=pytest.mark.gpu)])
def test_warming_up_changes_nothing(make_backend: type[AttentionBackend], kind: str) -> None:
    backend = make_backend()
    dtype = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
    step = make_step([(3, 2)], 0, Geometry(4, 2, 16, 8), (None, 5), DEVICE, dtype)
    before = step.store.tensors[0].clone()
    backend.warm_up(kind, ModelAttention(step.store, step.windows, 0.1), 4, max_rows=1)
    assert torch.equal(step.store.tensors[0], before)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_attn_called_directly(dtype: torch.dtype) -> None:
    """From the second call of a variant on; for a step of many rows never."""
    backend = flash_attn()
    first = make_step([(3, 2)], 0, Geometry(28, 4, 128, 16), (None, 200), DEVICE, dtype)
    step = make_step([(700, 1), (5, 1), (0, 300), (400, 150)], 2, first.geometry, first.windows, DEVICE, dtype)
    many = make_step([(n, 3) for n in range(300)], 0, first.geometry, first.windows, DEVICE, dtype)
    expected = [outputs(one, flash_attn()) for one in (step, many)]
    outputs(first, backend)
    assert all(call is not None for call in backend._kernels._variants.values()) == on_hopper()
    for one, outs in zip((step, many, step), (*expected, expected[0]), strict=True):
        for out, other in zip(outputs(one, backend), outs, strict=True):
            assert torch.equal(out, other)


def on_hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


@pytest.mark.gpu
def test_flash_attn_takes_deepseeks_heads() -> None:
    """Keys of 192 and values of 128."""
    from mini_infer.kernels.paged_prefill import paged_prefill_reference

    backend = flash_attn()
    k, v = (torch.randn(20, 16, 4, size, device="cuda", dtype=torch.bfloat16) for size in (192, 128))
    q = torch.randn(300, 4, 192, device="cuda", dtype=torch.bfloat16)
    tables = torch.randperm(20, device="cuda").int()[None]
    rows = tables, torch.tensor([0, 300], device="cuda").int(), torch.tensor([310], device="cuda").int()
    expected = paged_prefill_reference(q, k, v, *rows, max_query_len=300, scale=0.07, window=None)
    for _ in range(2):  # the second call goes to the compiled kernel alone
        found = backend._kernels(q, k, v, *rows, scale=0.07, window=None)
        assert relative_error(found, expected) < 1e-2


@pytest.mark.gpu
def test_a_warm_flash_attn_compiles_nothing_more() -> None:
    backend = flash_attn()
    from flash_attn.cute import interface

    geometry, windows = Geometry(28, 4, 128, 16), (None, 200)
    warm = make_step([(0, 1)], 0, geometry, windows, DEVICE, torch.bfloat16)
    for kind in ("prefill", "decode"):
        backend.warm_up(kind, ModelAttention(warm.store, windows, 0.1), 28, max_rows=400)
    compiled = len(interface._flash_attn_fwd.compile_cache.cache)
    for rows, num_decode_rows in (
        ([(0, 1)], 0),
        ([(0, 3000)], 0),
        ([(n, 1) for n in range(300)] + [(4000, 100)] * 300, 300),
        ([(5, 1), (100, 64), (0, 70)], 1),
    ):
        outputs(make_step(rows, num_decode_rows, geometry, windows, DEVICE, torch.bfloat16), backend)
    assert len(interface._flash_attn_fwd.compile_cache.cache) == compiled
