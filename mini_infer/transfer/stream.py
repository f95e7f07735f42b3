"""A connector: blocks go through the link's socket, and through host memory on both sides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mini_infer.transfer.blocks import KVBlocks
from mini_infer.transfer.link import Link
from mini_infer.transfer.protocol import Blocks


class StreamTarget:
    """Sends a layer's blocks behind a message that says which they are. Nobody waits for the socket."""

    def __init__(self, link: Link, transfer_id: int) -> None:
        self._link, self._transfer_id = link, transfer_id

    def write(self, blocks: KVBlocks, layer: int, here: Tensor, there: Tensor, there_listed: list[int]) -> None:
        data, done = blocks.gather(layer, here), None
        if data.is_cuda:
            host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
            data = host.copy_(data, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        self._link.send(Blocks(self._transfer_id, layer, there_listed), data.numpy(), done)


@torch.inference_mode()
def take_blocks(blocks: KVBlocks, message: Blocks, payload: bytearray, stream: Any) -> None:
    """Puts what has come where it belongs. `stream`: a CUDA stream, which this waits for; None on a CPU."""
    index, data = torch.tensor(message.blocks), torch.frombuffer(payload, dtype=torch.uint8)
    if stream is None:
        blocks.scatter(message.layer, index, data)
        return
    with torch.cuda.stream(stream):
        blocks.scatter(message.layer, index.to(blocks.device), data.to(blocks.device))
    stream.synchronize()
