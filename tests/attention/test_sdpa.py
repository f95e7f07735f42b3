"""The reference backend against the formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_cache import Geometry, make_step

from mini_infer.attention import torch_sdpa
from mini_infer.attention.torch_sdpa import SdpaBackend

DEVICES = [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_available() else [])
# The last window of two is wider than any sequence.
WINDOWS = (None, 5, 1, 1000)


@pytest.fixture(params=DEVICES, ids=str)
def device(request: pytest.FixtureRequest) -> torch.device:
    return request.param


def test_rows_of_like_lengths_share_a_call() -> None:
    def groups(*lens: int) -> list[list[int]]:
        return [rows.tolist() for rows in torch_sdpa._alike(np.array(lens))]

    assert groups(10, 12, 9) == [[1, 0, 2]]
    assert groups(32, 2000, 30, 1900) == [[1, 3], [0, 2]]
    assert groups(600, 32) == [[0, 1]], "too little to save"
    assert groups(100, 3000, 1400, *[90] * 20) == [[1], [2], [0, *range(3, 23)]]


# (tokens already in the cache, tokens of this step) of each row, and how many are decode rows
BATCHES = {
    "one decode": ([(9, 1)], 1),
    "first token": ([(0, 1)], 1),
    "decodes of one length": ([(11, 1), (11, 1), (11, 1)], 3),
    "decodes of many lengths": ([(0, 1), (22, 1), (3, 1), (4, 1)], 4),
    "decodes of three tokens": ([(8, 3), (21, 3)], 2),
    "prompt": ([(0, 13)], 0),
    "prompts": ([(0, 13), (0, 1), (0, 24)], 0),
    "chunks": ([(4, 9), (13, 1), (1, 20)], 0),
    "everything": ([(7, 1), (16, 1), (0, 10), (5, 8)], 2),
    "drafts and chunks": ([(7, 2), (16, 2), (0, 10), (5, 8)], 2),
}


@pytest.mark.parametrize("worth_a_call", [1, 1024])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_equals_the_formula(
    name: str, kv_heads: int, worth_a_call: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_sdpa, "_WORTH_A_CALL", worth_a_call)
    rows, num_decode_rows = BATCHES[name]
    step = make_step(rows, num_decode_rows, Geometry(4, kv_heads, 8, 4), WINDOWS, device)
    context = step.context(SdpaBackend())
    for layer in range(len(WINDOWS)):
        out = context.attend(layer, step.queries[layer])
        assert out.shape == step.queries[layer].shape
        torch.testing.assert_close(out.double(), step.expected(layer), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    step = make_step([(14, 1), (6, 1), (3, 8)], 2, Geometry(4, 2, 8, 4), WINDOWS, device, dtype)
    out = step.context(SdpaBackend()).attend(1, step.queries[1])
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), step.expected(1), atol=0.02, rtol=0.02)


def test_scratch_memory_is_shared_between_steps_of_growing_length(device: torch.device) -> None:
    """A context made earlier still computes the right thing after a later one took a larger buffer."""
    backend = SdpaBackend()
    steps = [make_step([(length - 1, 1)], 1, Geometry(4, 2, 8, 4), WINDOWS, device) for length in (3, 30, 90)]
    contexts = [step.context(backend) for step in steps]
    for step, context in zip(steps, contexts, strict=True):
        out = context.attend(0, step.queries[0])
        torch.testing.assert_close(out.double(), step.expected(0), atol=1e-5, rtol=1e-5)
