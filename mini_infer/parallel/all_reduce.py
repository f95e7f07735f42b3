"""What ranks say to each other in a step: gloo between CPUs, NCCL between GPUs.

Process groups are made here as objects, not as torch.distributed's global one: two engines may live in a process.
Kernels over symmetric memory, for the sizes at which they beat NCCL, belong into `Collectives.all_reduce`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LOOK_S = 0.02  # between two looks at the store
START_TIMEOUT = timedelta(minutes=30)  # for the slowest rank's weights; steps are watched by the executor


class Collectives:
    """
    Args:
        store: through which the ranks find each other.
        device: this rank's.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        self._size = size
        self._host = host_group(store, rank, size)
        self._device: Any = self._host
        if device.type == "cuda":
            self._device = nccl_group("device", store, rank, size)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum, in x's place where that is contiguous."""
        x = x.contiguous()
        self._device.allreduce([x], dist.AllreduceOptions()).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x, [size, *x.shape]."""
        return gather(self._device, x.contiguous(), self._size)

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """As ParallelContext."""
        return gather(self._host, torch.tensor(values, dtype=torch.int64), self._size).tolist()

    def abort(self) -> None:
        """Ends what a GPU waits for. May be called in any thread."""
        if self._device is not self._host:
            self._device.abort()


def host_group(store: dist.Store, rank: int, size: int) -> Any:
    """Of `size` ranks over gloo, through a store of their own."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = START_TIMEOUT
    return gloo(dist.PrefixStore("host", store), rank, size, options)


def nccl_group(name: str, store: dist.Store, rank: int, size: int, timeout: timedelta | None = None) -> Any:
    """Of `size` ranks over NCCL, with a stream of its own."""
    options = dist.ProcessGroupNCCL.Options()
    if timeout is not None:
        options._timeout = timeout
    return dist.ProcessGroupNCCL(dist.PrefixStore(name, store), rank, size, options)


def gather(group: Any, x: Tensor, size: int) -> Tensor:
    """Every rank's x, [size, *x.shape]."""
    gathered = x.new_empty((size, *x.shape))
    group._allgather_base(gathered.view(-1), x.view(-1)).wait()
    return gathered


def open_store() -> dist.TCPStore:
    """A store on a free port of this machine, which nobody else's machine reaches. Others join it by its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    descriptor = listener.detach()
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def wait_for(store: dist.Store, key: str, still: Callable[[], None]) -> None:
    """Returns when somebody has set the key. `still` is called now and then, and raises where nobody will."""
    while not store.check([key]):
        still()
        time.sleep(LOOK_S)


def join_store(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
