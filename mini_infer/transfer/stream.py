"""A connector: blocks go through a link's socket, and through host memory on both sides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mini_infer.cache.kv_store import KVStore
from mini_infer.transfer.blocks import Pairs, Target, gather, scatter, words_of
from mini_infer.transfer.protocol import Blocks

if TYPE_CHECKING:  # it is handed one; it needs msgspec, which an engine alone does without
    from mini_infer.transfer.link import Link


class StreamTarget(Target):
    """Sends a layer's blocks behind a message that says which they are. Nobody waits for the socket."""

    def __init__(self, link: Link, transfer_id: int, store: KVStore) -> None:
        self._link, self._transfer_id, self._store = link, transfer_id, store

    def write_layer(self, layer: int, pairs: Pairs) -> int:
        data, done = gather(words_of(self._store, layer), pairs.here), None
        if data.is_cuda:
            host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
            data = host.copy_(data, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        self._link.send(Blocks(self._transfer_id, layer, [block for _, block in pairs.numbers]), data.numpy(), done)
        return data.nbytes


@torch.inference_mode()
def take_blocks(store: KVStore, message: Blocks, payload: bytearray, stream: Any) -> None:
    """Puts what has come where it belongs. `stream`: a CUDA stream, which this waits for; None on a CPU."""
    index, data = torch.tensor(message.blocks), torch.frombuffer(payload, dtype=torch.uint8)
    words = words_of(store, message.layer)
    if stream is None:
        scatter(words, index, data)
        return
    with torch.cuda.stream(stream):
        scatter(words, index.to(store.device), data.to(store.device))
    stream.synchronize()
