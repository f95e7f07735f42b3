"""mla_decode against the reference. What no row owns is NaN, so that it shows where it is read."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from mini_infer.kernels.mla_decode import mla_decode, mla_decode_reference, split_latent_rows

# Queries that pad a pack, and those that see nothing of a part, divide by zero and are dropped or have no weight.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered:RuntimeWarning")


def make_case(
    device: torch.device,
    seq_lens: list[int],
    *,
    heads: int = 4,
    rank: int = 32,
    rope_dim: int = 16,
    block_size: int = 16,
    query_len: int = 1,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    size, needed = rank + rope_dim, [-(-length // block_size) for length in seq_lens]
    order = torch.randperm(sum(needed) + 2, generator=generator, dtype=torch.int32)
    tables = torch.full((len(seq_lens), max(needed) + 2), int(order[-1]), dtype=torch.int32)
    latents = torch.randn(len(order), block_size, size, generator=generator).to(dtype)
    latents[order[-2:].long()] = math.nan
    at = 0
    for row, (length, count) in enumerate(zip(seq_lens, needed, strict=True)):
        tables[row, :count] = order[at : at + count]
        latents[tables[row, count - 1], length - (count - 1) * block_size :] = math.nan
        at += count
    q = torch.randn(len(seq_lens) * query_len, heads, size, generator=generator).to(dtype)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    tensors = {"q": q, "latents": latents, "block_tables": tables, "seq_lens": lens}
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    return {**moved, "rank": rank, "scale": size**-0.5, "query_len": query_len}


def split_decode(
    q: torch.Tensor, latents: torch.Tensor, rank: int, seq_lens: torch.Tensor, **more: Any
) -> torch.Tensor:
    parts = split_latent_rows(q, latents, rank, seq_lens, query_len=more["query_len"])
    assert parts is not None
    return mla_decode(q, latents, rank, seq_lens=seq_lens, parts=parts, **more)


def check(case: dict[str, Any]) -> None:
    out, expected = split_decode(**case), mla_decode_reference(**case)
    assert out.shape == (len(case["q"]), case["q"].shape[1], case["rank"]) == expected.shape
    assert out.dtype == case["q"].dtype
    error = (out.double() - expected.double()).norm(dim=(1, 2)) / expected.double().norm(dim=(1, 2))
    # Each token on its own: a wrong short row must not drown in the others. NaN compares false.
    assert (error < (1e-5 if out.dtype is torch.float32 else 1e-2)).all(), error


CASES: dict[str, dict[str, Any]] = {
    "one token": {"seq_lens": [1]},
    "odd lengths": {"seq_lens": [15, 16, 17, 1, 127, 200]},
    "a long row among short ones": {"seq_lens": [3, 17, 700, 5, 64, 1, 33]},
    "one head": {"seq_lens": [50, 130], "heads": 1},
    "16 heads": {"seq_lens": [50, 130], "heads": 16},
    "22 heads": {"seq_lens": [50, 130], "heads": 22},
    "70 heads": {"seq_lens": [20, 330], "heads": 70},
    "block size 1": {"seq_lens": [150, 9], "block_size": 1},
    "block size 5": {"seq_lens": [203, 66], "block_size": 5},
    "block size 100": {"seq_lens": [203, 66], "block_size": 100},
    "rank 24, 8 rotated": {"seq_lens": [100, 10], "rank": 24, "rope_dim": 8},
    "rank 100, 2 rotated": {"seq_lens": [100, 10], "rank": 100, "rope_dim": 2},
    "DeepSeek's sizes": {"seq_lens": [70, 10], "rank": 512, "rope_dim": 64, "heads": 16},
    "4 tokens": {"seq_lens": [4, 5, 66, 300, 64], "query_len": 4},
    "3 tokens, 7 heads": {"seq_lens": [3, 200], "query_len": 3, "heads": 7},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str, device: torch.device) -> None:
    check(make_case(device, **CASES[name]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["odd lengths", "70 heads", "DeepSeek's sizes", "3 tokens, 7 heads"])
def test_half_precision(name: str, dtype: torch.dtype, device: torch.device) -> None:
    check(make_case(device, dtype=dtype, **CASES[name]))


@pytest.mark.parametrize("name", ["odd lengths", "70 heads"])
def test_latents_in_8_bits(name: str, device: torch.device) -> None:
    case = make_case(device, **CASES[name])
    check(case | {"latents": case["latents"].to(torch.float8_e4m3fn)})


@pytest.mark.parametrize("apart", [0, 32])
@pytest.mark.parametrize("name", ["a long row among short ones", "70 heads", "3 tokens, 7 heads"])
def test_parts_are_merged_by_their_last_program_or_by_others(
    name: str, apart: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("mini_infer.kernels.mla_decode"), "MERGED_APART", apart)
    check(make_case(device, **CASES[name]))


def test_rows_that_are_left_whole_are_the_same(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(device, [300, 20, 7])
    torch.testing.assert_close(mla_decode(**case), split_decode(**case), atol=1e-5, rtol=1e-5)
    arguments = case["q"], case["latents"], case["rank"], case["seq_lens"]
    monkeypatch.setattr(importlib.import_module("mini_infer.kernels.mla_decode"), "MAX_TICKETS", 2)
    assert split_latent_rows(*arguments, query_len=1) is None


def test_what_it_does_not_take_is_refused(device: torch.device) -> None:
    case = make_case(device, [5], rank=640)
    with pytest.raises(ValueError, match="it takes head sizes 2 to 576, not 656"):
        mla_decode(**case)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("query_len", [1, 4])
def test_deepseeks_shapes_on_a_gpu(heads: int, query_len: int) -> None:
    lens = [1000, 4096, 33, 64, 20_000, query_len]
    check(
        make_case(
            torch.device("cuda"), lens, heads=heads, rank=512, rope_dim=64, query_len=query_len, dtype=torch.bfloat16
        )
    )


@pytest.mark.gpu
def test_it_can_be_captured_and_replayed_with_other_lengths() -> None:
    case = make_case(torch.device("cuda"), [3000, 4000, 64], heads=16, rank=512, rope_dim=64, dtype=torch.bfloat16)
    split_decode(**case)
    out, graph = torch.empty_like(case["q"][..., :512]).contiguous(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        split_decode(**case, out=out)
    case["seq_lens"].copy_(torch.tensor([17, 3999, 1]))
    graph.replay()
    torch.testing.assert_close(out, split_decode(**case), atol=0, rtol=0)
