"""How small codes lie in memory: in the kernels' layout of int4, and in the words of other people's files.

All of them hold unsigned numbers: a signed int4 code is kept as code + 8, an int8 code as code + 128.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# AWQ's words hold the columns 0, 2, 4, 6, 1, 3, 5, 7 of eight: column j is the number AWQ_PLACES[j] of its word.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)

_TILE = 128  # columns


def pack_int4(codes: Tensor, symmetric: bool) -> Tensor:
    """codes [N, K] int8, -8 to 7 where symmetric and else 0 to 15 -> [N, ceil(K / 128) * 64] uint8, as products read
    them (kernels/quantized/linear.py); symmetric codes plus 8.

    Of each 128 columns a pair of bytes has four, of four planes of 32:

        bytes                      0, 1       2, 3           62, 63
            first's low half    column 0     column 1       column 31
            first's high half   column 32    column 33      column 63
            second's low half   column 64    column 65      column 95
            second's high half  column 96    column 97      column 127

    What fills the last columns stands for nothing.
    """
    rows, columns = codes.shape
    padded = torch.nn.functional.pad((codes + 8 if symmetric else codes).to(torch.uint8), (0, -columns % _TILE))
    a, b, c, d = padded.view(rows, -1, 4, _TILE // 4).unbind(2)
    return torch.stack((a | b << 4, c | d << 4), 3).flatten(1)


def unpack_int4(packed: Tensor, symmetric: bool, columns: int | None = None) -> Tensor:
    """What `pack_int4` took, int8: [N, columns], by default of a multiple of 128 columns."""
    first, second = packed.view(packed.shape[0], -1, _TILE // 4, 2).unbind(3)
    planes = torch.stack((first & 15, first >> 4, second & 15, second >> 4), 2)
    codes = planes.flatten(1)[:, :columns].to(torch.int8)
    return codes - 8 if symmetric else codes


def pack_words(codes: Tensor, bits: int, places: Sequence[int] | None = None) -> Tensor:
    """codes [R, C] unsigned numbers of 4 or 8 bits -> [R, ceil(C * bits / 32)] int32; what fills the last word is 0.

    Args:
        places: number j of a word has the bits from bits * places[j] up; default: j.
    """
    count = 32 // bits
    padded = torch.nn.functional.pad(codes.to(torch.int64), (0, -codes.shape[1] % count))
    words = (padded.unflatten(1, (-1, count)) << _shifts(bits, places, codes.device)).sum(2)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def unpack_words(words: Tensor, bits: int, places: Sequence[int] | None = None) -> Tensor:
    """words [R, W] int32 -> [R, W * 32 / bits] uint8, as `pack_words` was given them."""
    return (words[..., None] >> _shifts(bits, places, words.device) & (1 << bits) - 1).to(torch.uint8).flatten(1)


def _shifts(bits: int, places: Sequence[int] | None, device: torch.device) -> Tensor:
    return torch.tensor(places or range(32 // bits), dtype=torch.int32, device=device) * bits
