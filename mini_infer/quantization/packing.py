"""int4 codes, several in one number: as the kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_int4(codes: Tensor, symmetric: bool) -> Tensor:
    """codes [N, K] int8, -8 to 7 where symmetric and else 0 to 15, K a multiple of 128 -> [N, K / 2] uint8.

    Byte j of the 64 for columns [128c, 128c + 128) holds column 128c + j in its low and column 128c + 64 + j in its
    high half, symmetric codes plus 8 (kernels/quant_linear.py).
    """
    rows, columns = codes.shape
    if columns % 128:
        raise ValueError(f"packed int4 weights have a multiple of 128 columns, not {columns}")
    low, high = (codes + (8 if symmetric else 0)).to(torch.uint8).view(rows, -1, 2, 64).unbind(2)
    return (low | high << 4).reshape(rows, columns // 2)


def unpack_int4(packed: Tensor, symmetric: bool) -> Tensor:
    """What `pack_int4` took, int8."""
    rows, size = packed.shape
    parts = packed.view(rows, -1, 64)
    codes = torch.stack((parts & 15, parts >> 4), 2).reshape(rows, 2 * size).to(torch.int8)
    return codes - 8 if symmetric else codes
