"""What the stages of a pipeline send each other: hidden states to the next one, and from the last one what it sampled.

    stage 0  --hidden-->  stage 1  --hidden-->  stage 2
       ^                     ^                    |
       '------- tokens ------'------- tokens -----'

Whoever sends goes on: NCCL sends on a stream of its own, gloo in a thread of its own. Whoever receives waits: on a GPU
the stream does, and the host goes on. Where ranks share a stage's layers, each has the whole of what is sent, and talks
to the ranks of its own place in the other stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mini_infer.parallel.all_reduce import exchange, host_group, nccl_group

if TYPE_CHECKING:
    from mini_infer.parallel.context import ParallelContext

NEVER = timedelta(days=1000)  # what a stage is told may lie there as long as there is nothing to do
_HIDDEN, _TOKENS = 0, 1  # tags of gloo


class Pipe:
    """
    Args:
        store: through which all ranks of all stages find each other.
        parallel: this process's place among them.
        device: its own.

    Attributes:
        over_nccl: as of Collectives.
    """

    def __init__(self, store: dist.Store, parallel: ParallelContext, device: torch.device) -> None:
        self._stage, self._last, self._device = parallel.stage, parallel.stages - 1, device
        self._num_ranks = parallel.num_ranks
        self._everybody = host_group(dist.PrefixStore("all stages", store), parallel.number, parallel.num_ranks)
        own = dist.PrefixStore(f"rank {parallel.rank} of all stages", store)
        if device.type == "cuda":  # a group orders what is sent in it, and these two must not wait for each other
            names = ("hidden", "tokens")
            self._groups = [nccl_group(name, own, parallel.stage, parallel.stages, NEVER) for name in names]
            self.over_nccl = self._groups
        else:
            self.over_nccl = []
            self._groups = [host_group(own, parallel.stage, parallel.stages)] * 2
        self._sent: deque[tuple[Any, Tensor]] = deque()  # which must stay where it is until it has arrived
        self._most_sent = 2 * parallel.stages * parallel.stages  # more than there can be whom nobody waits for

    def send(self, hidden: Tensor) -> None:
        """To the next stage. Nobody may write to it any more."""
        self._send(hidden, _HIDDEN, self._stage + 1)

    def receive(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """From the stage before."""
        return self._receive(torch.empty(shape, dtype=dtype, device=self._device), _HIDDEN, self._stage - 1)

    def tell(self, token_ids: Tensor) -> None:
        """To all earlier stages, of the last one: token_ids [S] int64. Nobody may write to them any more."""
        for stage in range(self._last):
            self._send(token_ids, _TOKENS, stage)

    def hear(self, count: int) -> Tensor:
        """What the last stage tells: [count] int64."""
        return self._receive(torch.empty(count, dtype=torch.int64, device=self._device), _TOKENS, self._last)

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """As ParallelContext."""
        return exchange(self._everybody, values, self._num_ranks)

    def _send(self, x: Tensor, kind: int, stage: int) -> None:
        self._sent.append((self._groups[kind].send([x], stage, kind), x))
        if len(self._sent) > self._most_sent:
            self._sent.popleft()[0].wait()

    def _receive(self, x: Tensor, kind: int, stage: int) -> Tensor:
        self._groups[kind].recv([x], stage, kind).wait()
        return x
