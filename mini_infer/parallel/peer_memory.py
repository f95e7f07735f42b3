"""Memory that every rank of a machine reads and writes by its address: on GPUs by CUDA's inter-process handles, on CPUs
as files without a name. Nothing of it is left when the processes that have it are gone, however they ended."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

Exchange = Callable[[Sequence[int]], list[list[int]]]  # ParallelContext.exchange


class NoPeerAccess(Exception):
    """The ranks cannot reach each other's memory: all of them are told so."""


class PeerMemory:
    """`num_bytes` of every rank, at first all bits one, there as long as this is. Every rank makes it at once.

    Attributes:
        addresses: by rank, as this process sees them.

    Raises:
        NoPeerAccess
    """

    def __init__(self, num_bytes: int, rank: int, device: torch.device, exchange: Exchange) -> None:
        self._own = reachable_memory(device)
        handles = _agreed(exchange, lambda: self._own.allocate(num_bytes, 255))

        def reach() -> list[int]:
            return [self._own.address if peer == rank else self._own.open(h) for peer, h in enumerate(handles)]

        self.addresses = _agreed(exchange, reach)[rank][: len(handles)]


def _agreed(exchange: Exchange, work: Callable[[], list[int]]) -> list[list[int]]:
    """What `work` gives on every rank, up to `_WORDS` numbers each."""
    numbers, why = [], "another rank cannot"
    try:
        numbers, worked = work(), 1
    except OSError as error:
        worked, why = 0, str(error)
    told = exchange([worked, *numbers, *[0] * (_WORDS - len(numbers))])
    if not all(row[0] for row in told):
        raise NoPeerAccess(why)
    return [row[1:] for row in told]


_WORDS = 9  # of a handle


def reachable_memory(device: torch.device) -> ReachableMemory:
    return _OnGpu(device) if device.type == "cuda" else _OnCpu()


class ReachableMemory(Protocol):
    """What one process of a machine allocates and others open. It is there as long as this object.

    Attributes:
        address: of what was allocated last, as this process sees it.
    """

    address: int

    def allocate(self, num_bytes: int, fill: int) -> list[int]:
        """A handle, for `open` in another process. Every byte is `fill`. Raises OSError."""

    def open(self, handle: list[int]) -> int:
        """The address in this process. Raises OSError where it cannot be reached."""


class _OnCpu:
    """Its handle is a file of this process, which others of the same user find there."""

    def __init__(self) -> None:
        self._maps: list[Any] = []

    def allocate(self, num_bytes: int, fill: int) -> list[int]:
        file = os.memfd_create("mini-infer-inbox")
        os.ftruncate(file, num_bytes)
        self.address = self._map(file)
        if fill:  # it is zeros, and takes no memory before it is written to
            ctypes.memset(self.address, fill, num_bytes)
        return [os.getpid(), file]

    def open(self, handle: list[int]) -> int:
        process, file = handle[:2]
        return self._map(os.open(f"/proc/{process}/fd/{file}", os.O_RDWR))

    def _map(self, file: int) -> int:
        weakref.finalize(self, os.close, file)
        self._maps.append(mmap.mmap(file, 0))
        return ctypes.addressof(ctypes.c_char.from_buffer(self._maps[-1]))


class _OnGpu:
    """By the driver's calls: torch's allocator has handles of its own kind, and files that a killed process leaves."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, num_bytes: int, fill: int) -> list[int]:
        torch.cuda.synchronize(self._device)  # the driver's calls are about the device that this thread used last
        address = ctypes.c_uint64()
        _driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        weakref.finalize(self, _free, "cuMemFree_v2", address)
        self.address = address.value
        _driver("cuMemsetD8_v2", address, ctypes.c_ubyte(fill), ctypes.c_size_t(num_bytes))
        torch.cuda.synchronize(self._device)
        handle = _Handle()
        _driver("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return [*handle.words, self._device.index]

    def open(self, handle: list[int]) -> int:
        *words, peer = handle
        if peer != self._device.index and not torch.cuda.can_device_access_peer(self._device, peer):
            raise OSError(f"GPU {self._device.index} cannot reach the memory of GPU {peer}")
        address = ctypes.c_uint64()
        own = _Handle((ctypes.c_int64 * len(words))(*words))
        _driver("cuIpcOpenMemHandle_v2", ctypes.byref(address), own, ctypes.c_uint(_LAZY_PEER_ACCESS))
        weakref.finalize(self, _free, "cuIpcCloseMemHandle", address)
        return address.value


def wait_for_device(device: torch.device, seconds: float, stop: Callable[[], object]) -> None:
    """Until it has done all that it was given. After so many seconds kernels that wait for other ranks are told to
    `stop`, and what they compute is wrong."""
    if device.type != "cuda":
        return
    done, until = torch.cuda.Event(), time.monotonic() + seconds
    done.record()
    while not done.query():
        if time.monotonic() > until:
            stop()
            return
        time.sleep(0.001)


def copy_to(address: int, x: Tensor, flag: int, number: int, stream: torch.cuda.Stream | None) -> Callable[[], object]:
    """Copies x, contiguous, to an address, and then writes `number`, of 32 bits, to another one: on a GPU on `stream`,
    behind what the current one has to do. What is returned makes the current one wait until x has been read."""
    if stream is None:
        ctypes.memmove(address, x.data_ptr(), x.nbytes)
        ctypes.c_int32.from_address(flag).value = number
        return lambda: None
    stream.wait_stream(torch.cuda.current_stream(x.device))
    there, source = ctypes.c_uint64(address), ctypes.c_uint64(x.data_ptr())
    handle = ctypes.c_void_p(stream.cuda_stream)
    _driver("cuMemcpyDtoDAsync_v2", there, source, ctypes.c_size_t(x.nbytes), handle)
    _driver("cuStreamWriteValue32_v2", handle, ctypes.c_uint64(flag), ctypes.c_uint32(number), ctypes.c_uint(0))
    sent = stream.record_event()
    return lambda: torch.cuda.current_stream(x.device).wait_event(sent)


class _Handle(ctypes.Structure):  # CUipcMemHandle
    _fields_ = [("words", ctypes.c_int64 * 8)]


_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


@cache
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _driver(name: str, *arguments: Any) -> None:
    if error := getattr(_library(), name)(*arguments):
        raise OSError(f"{name} gave CUDA's error {error}")


def _free(name: str, address: ctypes.c_uint64) -> None:
    getattr(_library(), name)(address)  # an error says that the device is gone, and its memory with it
