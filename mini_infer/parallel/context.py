"""ParallelContext: who this process is among the ranks that compute one model, and what they say to each other.

It is passed to whoever builds or computes a part of a model. With one rank it does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # one rank says nothing
    from mini_infer.parallel.all_reduce import Collectives


@dataclass(frozen=True, eq=False)
class ParallelContext:
    """Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053): every rank has a part of each layer.

    All ranks make the same calls in the same order, and each gets the same result, to the bit.
    """

    rank: int = 0
    size: int = 1
    collectives: Collectives | None = None  # None where size is 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, contiguous, which may be written to."""
        return x if self.collectives is None else self.collectives.all_reduce(x)

    def tree_sum(self, x: Tensor) -> Tensor:
        """As all_reduce, added up as a balanced tree over the ranks in their order. The number of ranks is a power of
        two."""
        return x if self.collectives is None else tree_sum(self.collectives.all_gather(x))

    def gather_columns(self, x: Tensor) -> Tensor:
        """Every rank's x [N, columns], side by side in the order of ranks: [N, columns * size]."""
        if self.collectives is None:
            return x
        return self.collectives.all_gather(x).transpose(0, 1).flatten(1)

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's values, 64 bits each, on the host. Waits for all ranks."""
        return [list(values)] if self.collectives is None else self.collectives.exchange(values)

    def part(self, whole: int, own: int) -> slice:
        """Which `own` of `whole` neighbours are this rank's. Where there are fewer parts than ranks, neighbouring ranks
        have the same one."""
        start = self.rank * (whole // own) // self.size * own
        return slice(start, start + own)


ONE_RANK = ParallelContext()


def tree_sum(parts: Tensor) -> Tensor:
    """parts [n, ...], n a power of two -> their sum: neighbours first, then neighbours of these."""
    while len(parts) > 1:
        parts = torch.add(parts[0::2], parts[1::2])
    return parts[0]
