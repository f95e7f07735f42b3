from __future__ import annotations

import pytest
import torch

from mini_infer.kernels.decode_input import decode_input, decode_input_reference


@pytest.mark.parametrize(
    ("num_rows", "table_width", "num_params", "block_size"), [(1, 1, 1, 1), (5, 37, 6, 16), (9, 1500, 8, 5)]
)
def test_equals_the_reference(
    device: torch.device, num_rows: int, table_width: int, num_params: int, block_size: int
) -> None:
    torch.manual_seed(0)
    max_len = table_width * block_size
    table, params = max_len + 1, max_len + 1 + table_width
    state = torch.randint(0, 1000, (num_rows + 3, params + num_params), dtype=torch.int32, device=device)
    slots = torch.randperm(num_rows + 3)[:num_rows]
    seq_lens = torch.randint(1, max_len + 1, (num_rows,))
    grown = torch.where(torch.arange(num_rows) % 2 == 0, (seq_lens - 1) // block_size, -1)
    blocks = torch.randint(0, 1000, (num_rows,))
    packed = torch.stack((slots, seq_lens, grown, blocks)).int().to(device)
    expected_state = state.clone()
    expected = decode_input_reference(expected_state, packed, table=table, params=params, block_size=block_size)
    got = decode_input(state, packed, table=table, params=params, block_size=block_size)
    for name, a, b in zip(got._fields, got, expected, strict=True):
        assert torch.equal(a, b), name
        assert a.dtype == b.dtype, name
    assert torch.equal(state, expected_state), "the grown blocks are entered, and nothing else"
