"""ParallelContext: who this process is among the ranks that compute one model, and what they say to each other.

    number     3   2   |   1   0           of the process; 0 is the engine's own
    stage        0     |     1             of the pipeline: the last one samples, and so is the engine's
    rank       1   0   |   1   0           of those that share the stage's layers

It is passed to whoever builds or computes a part of a model. With one rank it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

Rows = TypeVar("Rows", Tensor, range)

if TYPE_CHECKING:  # one rank says nothing
    from threading import Thread

    import torch.distributed as dist

    from mini_infer.core.config import ParallelConfig
    from mini_infer.kernels.interface import Norm
    from mini_infer.parallel.all_reduce import Collectives
    from mini_infer.parallel.pipeline import Pipe


IN_HALVES = 1025  # rows, from which on a product hides the sum of the one before


@dataclass(frozen=True, eq=False)
class ParallelContext:
    """Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053): every rank of a stage has a part of each of its
    layers. All of them make the same calls in the same order, and each gets the same result, to the bit.

    Pipeline parallelism (Huang et al. 2019, arXiv:1811.06965): every stage has some layers.
    """

    rank: int = 0
    size: int = 1
    collectives: Collectives | None = None  # None where size is 1
    stage: int = 0
    stages: int = 1
    pipe: Pipe | None = None  # None where there is one stage

    @classmethod
    def of(cls, number: int, config: ParallelConfig) -> ParallelContext:
        """Of the process of this number, not connected yet."""
        size, stages = config.ranks_of_stage, config.pipeline
        return cls(number % size, size, stage=stages - 1 - number // size, stages=stages)

    def connected(self, store: dist.Store, device: torch.device) -> ParallelContext:
        """Through a store that all ranks have: all of them call it."""
        import torch.distributed as dist

        from mini_infer.parallel.all_reduce import Collectives
        from mini_infer.parallel.pipeline import Pipe

        own = dist.PrefixStore(f"stage {self.stage}", store)
        collectives = Collectives(own, self.rank, self.size, device) if self.size > 1 else None
        pipe = Pipe(store, self, device) if self.stages > 1 else None
        return replace(self, collectives=collectives, pipe=pipe)

    @property
    def alone(self) -> ParallelContext:
        """Of a rank that has its stage's layers for itself."""
        return ParallelContext(stage=self.stage, stages=self.stages)

    @property
    def number(self) -> int:
        return (self.stages - 1 - self.stage) * self.size + self.rank

    @property
    def num_ranks(self) -> int:
        """Of all stages."""
        return self.size * self.stages

    @property
    def about(self) -> str:
        """How sums are made, for a run's record."""
        return "none" if self.collectives is None else self.collectives.about

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, contiguous, which may be written to."""
        return x if self.collectives is None else self.collectives.all_reduce(x)

    def in_halves(self, rows: int) -> Sequence[slice]:
        """As Ranks (kernels/interface.py)."""
        if self.collectives is None or rows < IN_HALVES:
            return ()
        return slice(0, rows // 2), slice(rows // 2, rows)

    def begin_all_reduce(self, x: Tensor) -> Callable[[], object]:
        """As Ranks."""
        assert self.collectives is not None
        return self.collectives.begin_all_reduce(x)

    def tree_sum(self, x: Tensor) -> Tensor:
        """As all_reduce, added up as a balanced tree over the ranks in their order. The number of ranks is a power of
        two."""
        return x if self.collectives is None else self.collectives.tree_sum(x)

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor] | None:
        """As Ranks."""
        return None if self.collectives is None else self.collectives.add_rms_norm(x, residual, norm)

    def look_up(self, token_ids: Tensor, table: Tensor, first: int, known: int) -> Tensor | None:
        """Rows [T, H] of a table of which this rank has `known` rows from `first` on, [at least known, H], and others
        the others; None where that is better done one after the other."""
        return None if self.collectives is None else self.collectives.look_up(token_ids, table, first, known)

    def gather_columns(self, x: Tensor, out: Tensor) -> Tensor:
        """Every rank's x [N, columns] side by side, in the order of ranks, as far as `out` goes: [N, at most columns *
        size], contiguous."""
        return out.copy_(x[:, : out.shape[1]]) if self.collectives is None else self.collectives.gather_columns(x, out)

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x, of one shape: [size, *x.shape]."""
        return x[None] if self.collectives is None else self.collectives.all_gather(x)

    def all_to_all(self, x: Tensor, sent: Sequence[int], arrives: Sequence[int]) -> Tensor:
        """x [N, ...], rows for each rank in their order, `sent` to each -> those from each, of which `arrives` come."""
        return x if self.collectives is None else self.collectives.all_to_all(x, sent, arrives)

    def rows_of(self, x: Rows) -> Rows:
        """This rank's neighbours among the rows of x, which all ranks have: as many as others', or fewer."""
        each = -(-len(x) // self.size)
        return x[self.rank * each : (self.rank + 1) * each]

    def gather_rows(self, x: Tensor, count: int) -> Tensor:
        """Every rank's x, of `rows_of` something of `count` rows -> [count, ...]."""
        if self.collectives is None:
            return x
        padded = x.new_zeros(-(-count // self.size), *x.shape[1:])
        padded[: len(x)] = x
        return self.collectives.all_gather(padded).flatten(0, 1)[:count]

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """The values of every rank of every stage, 64 bits each, on the host. Waits for all of them."""
        everybody = self.pipe or self.collectives
        return [list(values)] if everybody is None else everybody.exchange(values)

    def tell(self, text: str) -> list[str]:
        """What every rank of every stage says. Waits for all of them."""
        data = text.encode()
        longest = max(length for (length,) in self.exchange([len(data)]))
        told = self.exchange([len(data), *data, *bytes(longest - len(data))])
        return [bytes(row[1 : 1 + row[0]]).decode() for row in told]

    def on_all_ranks(self, here: bool) -> bool:
        """Whether it is so on all ranks of this stage. Waits for them."""
        return here if self.collectives is None else all(there for (there,) in self.collectives.exchange([here]))

    def abort(self) -> list[Thread]:
        """Ends what a GPU waits for, and what ranks can say to each other. Returns at once, with what `abort_group` has
        begun. May be called in any thread."""
        from mini_infer.parallel.all_reduce import abort_group

        if self.collectives is not None:
            self.collectives.stop_kernels()
        groups = [group for part in (self.pipe, self.collectives) if part is not None for group in part.over_nccl]
        return [abort_group(group) for group in groups]

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
