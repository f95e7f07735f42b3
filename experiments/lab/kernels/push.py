"""KV blocks of all layers into another engine's memory (mini_infer/transfer/memory.py), by tokens: of two GPUs into the
other one's, over NVLink where there is any. Blocks lie scattered on both sides.

Bytes are those that arrive. Nothing is computed beside.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from experiments.lab.kernels.case import Case, Implementation, Work
from mini_infer.transfer.memory import MemoryTarget, plane_copies

AT_ONCE, GROUPS, BY_LAYER, COPIES = "at_once", "groups", "by_layer", "copies"
WORD = torch.int64  # that kernels move
FREE = 2  # times the blocks that go: the others are those of other requests

_Sent: TypeAlias = tuple[Tensor, Tensor, Tensor]  # all blocks there, which ones were sent, and where they are there


class KVPush(Case, tokens=None, layers=28, kv_heads=4, head_size=128, block_size=16):
    """Of Qwen2.5-7B's layers unless said."""

    name = "kv_push"
    variants = (BY_LAYER, GROUPS, AT_ONCE, COPIES)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        tokens, size = self.shape["tokens"], self.shape["block_size"]
        self._blocks = -(-tokens // size)
        self._block_bytes = size * self.shape["kv_heads"] * self.shape["head_size"] * self.dtype.itemsize
        self._planes = 2 * self.shape["layers"]  # keys, and values

    def work(self, variant: str = "") -> Work:
        return Work(self._planes * self._blocks * self._block_bytes)

    def allocate(self, copies: int) -> None:
        target = self.device
        if self.device.type == "cuda" and torch.cuda.device_count() > 1:
            own = torch.cuda.current_device()
            target = torch.device("cuda", (own + 1) % torch.cuda.device_count())
        shape = self._planes, FREE * self._blocks, 1, self._block_bytes // WORD.itemsize
        here = [torch.randint(2**40, shape, device=self.device, dtype=WORD) for _ in range(copies)]
        self.sets = [(mine, torch.empty(shape, device=target, dtype=WORD)) for mine in here]
        for mine, there in self.sets:
            there.copy_(mine)  # after which kernels may write there, too
        self._from, self._to = (torch.randperm(shape[1], device=self.device)[: self._blocks] for _ in range(2))

    def implementation(self, variant: str) -> Implementation:
        for _, there in self.sets:
            there.zero_()
            if there.is_cuda:
                torch.cuda.synchronize(there.device)  # whose streams the launches on the first one do not wait for
        if variant == COPIES:
            return self.on_sets(self._copy, graph_safe=False)  # which two devices' streams wait for
        make = plane_copies(self.device)
        copies = [make(list(zip(*both, strict=True))) for both in self.sets]
        layer_bytes = 2 * self._blocks * self._block_bytes
        layers = {BY_LAYER: 1, GROUPS: -(-MemoryTarget.group_bytes // layer_bytes), AT_ONCE: self._planes}[variant]
        starts = range(0, self._planes, 2 * layers)

        def run(copy: int) -> _Sent:
            for start in starts:
                copies[copy].push(start, min(start + 2 * layers, self._planes), self._from, self._to)
            return self.sets[copy][1], self._from, self._to

        return Implementation(run)

    def _copy(self, here: Tensor, there: Tensor) -> _Sent:
        """As many blocks that are neighbours, by a copy engine: a copy a plane."""
        for plane in range(self._planes):
            there[plane, : self._blocks].copy_(here[plane, : self._blocks], non_blocking=True)
        first = torch.arange(self._blocks, device=self.device)
        return there, first, first

    def checked(self, output: _Sent) -> Iterable[tuple[Tensor, Tensor]]:
        there, sent, arrived = output
        found = there[:, arrived.to(there.device)].to(self.device)
        return zip(found, self.sets[0][0][:, sent], strict=True)  # plane by plane
