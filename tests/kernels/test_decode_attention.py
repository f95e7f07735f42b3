"""paged_decode and flash_decode against the reference. What no row owns is NaN, so that it shows where it is read."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mini_infer.kernels.flash_decode import flash_decode
from mini_infer.kernels.paged_decode import paged_decode, paged_decode_reference

# Queries that pad a pack, and those that see nothing of a part, divide by zero and are dropped or have no weight.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered:RuntimeWarning")

KERNELS = [paged_decode, flash_decode]


@dataclass
class Case:
    q: Tensor
    keys: Tensor
    values: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    scale: float
    window: int | None
    query_len: int

    def __call__(self, function: Callable[..., Tensor]) -> Tensor:
        return function(**vars(self))

    def check(self, function: Callable[..., Tensor]) -> None:
        out, expected = self(function), self(paged_decode_reference)
        assert out.shape == expected.shape
        assert out.dtype == expected.dtype
        error = (out.double() - expected.double()).norm(dim=(1, 2)) / expected.double().norm(dim=(1, 2))
        # Each token on its own: a wrong short row must not drown in the others. NaN compares false.
        assert (error < (1e-5 if out.dtype is torch.float32 else 1e-2)).all(), error


def make_case(
    device: torch.device,
    seq_lens: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 32,
    value_dim: int | None = None,
    block_size: int = 16,
    query_len: int = 1,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    needed = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
    tables = torch.full((len(seq_lens), max(needed) + 2), int(order[-1]), dtype=torch.int32)
    shape = (num_blocks, block_size, num_kv_heads)
    sizes = head_dim, value_dim or head_dim
    keys, values = (torch.randn(*shape, size, generator=generator).to(dtype) for size in sizes)
    keys[order[-3:].long()] = values[order[-3:].long()] = math.nan
    at = 0
    for row, (length, count) in enumerate(zip(seq_lens, needed, strict=True)):
        tables[row, :count] = order[at : at + count]
        at += count
        filled = length - (count - 1) * block_size
        for store in (keys, values):
            store[tables[row, count - 1], filled:] = math.nan
            if window is not None:  # blocks before the window may have been given away
                store[tables[row, : max(length - query_len - window + 1, 0) // block_size].long()] = math.nan
    q = torch.randn(len(seq_lens) * query_len, num_heads, head_dim, generator=generator).to(dtype)
    q, keys, values, tables = (x.to(device) for x in (q, keys, values, tables))
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    return Case(q, keys, values, tables, lens, head_dim**-0.5, window, query_len)


CASES: dict[str, dict[str, Any]] = {
    "one token": {"seq_lens": [1]},
    "odd lengths": {"seq_lens": [63, 64, 65, 1, 127, 200]},
    "one long row": {"seq_lens": [777]},
    "a long row among short ones": {"seq_lens": [3, 17, 900, 5, 64, 1, 33], "heads": (2, 2)},
    "rows of equal length": {"seq_lens": [130] * 5},
    "no group": {"seq_lens": [50, 300], "heads": (3, 3)},
    "group of 7": {"seq_lens": [50, 300], "heads": (14, 2), "head_dim": 64},
    "many queries a KV head": {"seq_lens": [200, 12], "heads": (11, 1), "query_len": 4},
    "block size 1": {"seq_lens": [150, 9], "block_size": 1},
    "block size 5": {"seq_lens": [203, 66], "block_size": 5},
    "block size 32": {"seq_lens": [203, 66], "block_size": 32},
    "block size 100": {"seq_lens": [203, 66], "block_size": 100},
    "head size 128": {"seq_lens": [300, 10], "head_dim": 128},
    "head size 80": {"seq_lens": [300, 10], "head_dim": 80},
    "head size 100": {"seq_lens": [300, 10], "head_dim": 100},
    "head size 33, 4 tokens": {"seq_lens": [300, 10], "head_dim": 33, "query_len": 4},
    "head size 8": {"seq_lens": [300, 10], "head_dim": 8},
    "head size 256": {"seq_lens": [70, 10], "head_dim": 256, "heads": (2, 1)},
    "head size 24, values 16": {"seq_lens": [70, 10, 300], "head_dim": 24, "value_dim": 16},
    "head size 12, values 40, 4 tokens": {"seq_lens": [70, 10], "head_dim": 12, "value_dim": 40, "query_len": 4},
    "4 tokens": {"seq_lens": [4, 5, 66, 300, 64], "query_len": 4},
    "4 tokens, split between them": {"seq_lens": [66, 130, 194], "query_len": 4},
    "4 tokens, group of 7": {"seq_lens": [4, 200], "query_len": 4, "heads": (7, 1)},
    "window": {"seq_lens": [5, 300, 64, 65], "window": 64},
    "window of 1": {"seq_lens": [5, 300, 64, 65], "window": 1},
    "window, 4 tokens": {"seq_lens": [5, 300, 64, 67], "window": 50, "query_len": 4, "block_size": 5},
    "window, longer than all": {"seq_lens": [5, 300], "window": 1000},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("function", KERNELS)
def test_equals_the_reference(name: str, function: Callable[..., Tensor], device: torch.device) -> None:
    make_case(device, **CASES[name]).check(function)


@pytest.mark.parametrize(("sms", "rows"), [(1, 32), (1000, 16)])
@pytest.mark.parametrize("function", KERNELS)
def test_queries_of_several_tokens_are_packed_by_what_sms_there_are(
    function: Callable[..., Tensor], sms: int, rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("mini_infer.kernels.paged_decode")
    monkeypatch.setattr(module, "num_sms", lambda device: sms)
    case = make_case(device, [4, 200, 65], heads=(7, 1), query_len=3)
    assert module.decode_shape(case.q, case.keys, case.values, case.query_len)[0].rows == rows
    case.check(function)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", KERNELS)
def test_half_precision(function: Callable[..., Tensor], dtype: torch.dtype, device: torch.device) -> None:
    make_case(device, [300, 1, 64, 129], heads=(4, 2), head_dim=64, dtype=dtype).check(function)


@pytest.mark.parametrize("function", KERNELS)
def test_no_rows(function: Callable[..., Tensor], device: torch.device) -> None:
    case = make_case(device, [3])
    empty = Case(case.q[:0], case.keys, case.values, case.block_tables[:0], case.seq_lens[:0], 1.0, None, 1)
    assert empty(function).shape == (0, 4, 32)


@pytest.mark.parametrize("function", KERNELS)
def test_shapes_that_are_refused(function: Callable[..., Tensor], device: torch.device) -> None:
    with pytest.raises(ValueError, match="head sizes 1 to 256, not 264"):
        make_case(device, [3], head_dim=264)(function)
    with pytest.raises(ValueError, match=r"num_heads \(3\) must be a multiple of num_kv_heads \(2\)"):
        make_case(device, [3], heads=(3, 2))(function)


@pytest.mark.parametrize("lengths", [[5, 0, 40, 0], [0, 0, 0, 0], [0, 2000, 0, 3]])
def test_rows_without_tokens_are_left_alone(lengths: list[int], device: torch.device) -> None:
    """Whatever stands there, as it is another's: a captured step has prompts behind its decode rows."""
    case = make_case(device, [max(1, length) for length in lengths])
    case.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    expected, there = case(paged_decode_reference), case.seq_lens > 0
    out = torch.full_like(case.q, 7.0)
    flash_decode(**vars(case), out=out)
    assert (out[~there] == 7.0).all()
    torch.testing.assert_close(out[there], expected[there], rtol=1e-4, atol=1e-5)


def test_a_launch_leaves_its_tickets_at_zero(device: torch.device) -> None:
    module = importlib.import_module("mini_infer.kernels.flash_decode")
    case = make_case(device, [500, 3, 300])
    first = case(flash_decode)
    assert not module.tickets_of(device).any()
    assert torch.equal(case(flash_decode), first)


def test_large_batches_take_the_single_pass(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("mini_infer.kernels.flash_decode")
    case = make_case(device, [300, 20, 7])
    monkeypatch.setattr(module, "MAX_ROWS", 2)
    assert torch.equal(case(flash_decode), case(paged_decode))
    assert module.split_rows(case.q, case.keys, case.values, case.seq_lens, window=None, query_len=1) is None


@pytest.mark.parametrize("window", [None, 700])
def test_rows_are_split_into_parts_of_which_the_longest_come_first(window: int | None, device: torch.device) -> None:
    """Each position that a row sees is in one part, a row's parts lie side by side, and places left over are empty."""
    module = importlib.import_module("mini_infer.kernels.flash_decode")
    decode_shape = importlib.import_module("mini_infer.kernels.paged_decode").decode_shape
    lengths = [3, 5000, 0, 900, 17, 901, 2500, 400]
    case = make_case(device, [max(1, length) for length in lengths])
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    fields = module.split_rows(case.q, case.keys, case.values, lens, window=window, query_len=1).fields.tolist()
    parts = [each for each in fields if each[0] >= 0]
    assert [each[0] for each in fields[len(parts) :]] == [-1] * (len(fields) - len(parts))
    for row, length in enumerate(lengths):
        own = [place for place, each in enumerate(parts) if each[0] == row]
        at = 0 if window is None else max(0, length - window)
        for place in own:
            assert parts[place][1] == length
            assert parts[place][2] == at < parts[place][3]
            assert parts[place][4:6] == [own[0], len(own)]
            at = parts[place][3]
        assert at == length
        assert own == list(range(own[0], own[0] + len(own))) if length else not own
    shape, _ = decode_shape(case.q, case.keys, case.values, 1)
    tile = shape.slices * shape.slice
    longest = {each[0]: max(-(-(p[3] - p[2]) // tile) for p in parts if p[0] == each[0]) for each in parts}
    assert list(longest.values()) == sorted(longest.values(), reverse=True)
    assert len(set(longest.values())) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("function", KERNELS)
@pytest.mark.parametrize("heads", [(28, 4), (16, 8)])
@pytest.mark.parametrize("query_len", [1, 4])
def test_long_rows(
    function: Callable[..., Tensor], heads: tuple[int, int], query_len: int, device: torch.device
) -> None:
    lens = [32768, 40001, 77, 200, 4, 1023] + [130 + 7 * i for i in range(58)]
    shape: dict[str, Any] = {"heads": heads, "head_dim": 128, "query_len": query_len, "dtype": torch.bfloat16}
    make_case(device, lens[:1], **shape).check(function)
    make_case(device, lens, **shape).check(function)
    make_case(device, lens, window=4096, **shape).check(function)


@pytest.mark.gpu
def test_many_rows(device: torch.device) -> None:
    lens = torch.randint(1, 1500, (256,), generator=torch.Generator().manual_seed(1)).tolist()
    make_case(device, lens, heads=(16, 8), head_dim=128, dtype=torch.bfloat16).check(flash_decode)
    make_case(device, lens * 3, heads=(12, 2), head_dim=128, dtype=torch.bfloat16).check(flash_decode)


@pytest.mark.gpu
@pytest.mark.parametrize("function", KERNELS)
def test_a_graph_follows_the_lengths(function: Callable[..., Tensor], device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    shape: dict[str, Any] = {"heads": (14, 2), "head_dim": 128, "dtype": torch.bfloat16}
    batches = [[1] * 8, [9000] + [5] * 7, torch.randint(1, 9000, (8,), generator=generator).tolist(), [4096] * 8]
    cases = [make_case(device, lens, **shape) for lens in batches]
    width = max(case.block_tables.shape[1] for case in cases)
    num_blocks = max(case.keys.shape[0] for case in cases)
    static = make_case(device, [9000] * 8, **shape)
    assert static.block_tables.shape[1] >= width
    assert static.keys.shape[0] >= num_blocks
    static(function)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = static(function)
    for case in cases * 2:
        static.q.copy_(case.q)
        for store, content in ((static.keys, case.keys), (static.values, case.values)):
            store.fill_(math.nan)
            store[: len(content)] = content
        static.block_tables.zero_()
        static.block_tables[:, : case.block_tables.shape[1]] = case.block_tables
        static.seq_lens.copy_(case.seq_lens)
        out.fill_(math.nan)
        graph.replay()
        case.check(lambda out=out, **_: out)
        assert torch.equal(out, static(function))


@pytest.mark.gpu
@pytest.mark.parametrize("function", KERNELS)
def test_a_store_of_more_than_2_to_the_31_elements(function: Callable[..., Tensor], device: torch.device) -> None:
    small = make_case(device, [300, 40], heads=(4, 4), head_dim=128, dtype=torch.bfloat16)
    count = small.keys.shape[0]
    num_blocks = 2**31 // small.keys[0].numel() + 2 * count
    keys = torch.full((num_blocks, *small.keys.shape[1:]), math.nan, dtype=torch.bfloat16, device=device)
    values = torch.full_like(keys, math.nan)
    keys[-count:], values[-count:] = small.keys, small.values
    tables = small.block_tables + (num_blocks - count)
    large = Case(small.q, keys, values, tables, small.seq_lens, small.scale, None, 1)
    assert torch.equal(large(function), small(function))
