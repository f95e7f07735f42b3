"""Fixtures that tests of several packages share."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    # Read when triton is imported, by whichever test comes first: kernels then run on the CPU, slowly.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def step_rows() -> Callable[..., SimpleNamespace]:
    """Makes the host side of a step's input from each row's (start, count, block table)."""

    def make(
        rows: list[tuple[int, int, list[int]]], num_decode_rows: int, block_size: int, unused_block: int = 0
    ) -> SimpleNamespace:
        width = max(-(-(start + count) // block_size) for start, count, _ in rows)
        tables = np.full((len(rows), width), unused_block, dtype=np.int32)
        positions, slots = [], []
        for row, (start, count, table) in enumerate(rows):
            used = table[: -(-(start + count) // block_size)]
            tables[row, : len(used)] = used
            for position in range(start, start + count):
                positions.append(position)
                slots.append(table[position // block_size] * block_size + position % block_size)
        return SimpleNamespace(
            starts=np.array([start for start, _, _ in rows]),
            counts=np.array([count for _, count, _ in rows]),
            num_decode_rows=num_decode_rows,
            positions=np.array(positions),
            slot_mapping=np.array(slots),
            block_tables=tables,
        )

    return make
