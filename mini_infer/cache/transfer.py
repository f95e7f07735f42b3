"""Host memory for the blocks of preempted requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mini_infer.cache.kv_store import KVStore

# Blocks travel through a contiguous device buffer, because a block's layers lie apart in the store. This many at a
# time bounds that buffer: 32 blocks of 16 tokens of a 7B model are about 30 MB.
_STAGED_BLOCKS = 32


class HostStore:
    """`num_host_blocks` blocks in host memory, page-locked where the store is on a GPU.

    Copies are queued on the current CUDA stream and never waited for: a block swapped out may be given to another
    request at once, since what overwrites it is queued behind the copy, and a block swapped in is read behind it.
    """

    def __init__(self, store: KVStore, num_host_blocks: int) -> None:
        self._store = store
        self.num_host_blocks = num_host_blocks
        num_layers, two, _, *block = store.tensors[0].shape
        self._host = torch.empty(
            (num_host_blocks, num_layers, two, *block),
            dtype=store.tensors[0].dtype,
            pin_memory=store.device.type == "cuda",
        )

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (device block, host block) pairs to the host."""
        for part in _parts(pairs):
            blocks = self._index([device for device, _ in part])
            staged = self._store.tensors[0].index_select(2, blocks).movedim(2, 0).contiguous()
            for row, (_, host) in enumerate(part):
                self._host[host].copy_(staged[row], non_blocking=True)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (host block, device block) pairs to the device."""
        for part in _parts(pairs):
            blocks = self._index([device for _, device in part])
            staged = torch.empty((len(part), *self._host.shape[1:]), dtype=self._host.dtype, device=self._store.device)
            for row, (host, _) in enumerate(part):
                staged[row].copy_(self._host[host], non_blocking=True)
            self._store.tensors[0].index_copy_(2, blocks, staged.movedim(0, 2))

    def _index(self, blocks: list[int]) -> torch.Tensor:
        # torch keeps page-locked memory for its next user until the copy is done.
        pinned = torch.tensor(blocks, dtype=torch.int64, pin_memory=self._store.device.type == "cuda")
        return pinned.to(self._store.device, non_blocking=True)


def _parts(pairs: Sequence[tuple[int, int]]) -> list[Sequence[tuple[int, int]]]:
    return [pairs[i : i + _STAGED_BLOCKS] for i in range(0, len(pairs), _STAGED_BLOCKS)]
