"""Kernels of other packages, timed in a process that has them: `open_peer` runs there, `Apart` here."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from experiments.lab.kernels.case import Case, Timer, VariantAbsent, copies_needed, prepare, worst
from experiments.lab.measure.kinds import PeerAbsent, ProcessSettings
from experiments.lab.measure.witness import Timed
from experiments.lab.peers.process import PeerProcess
from experiments.lab.peers.vllm import import_vllm
from mini_infer.core.config import EngineConfig

NEEDS = "cuda"


class KernelPeer:
    about: Mapping[str, Any] = {}

    @torch.inference_mode()
    def prepare(self, make: Callable[[], Case], variant: str, seed: int) -> tuple[bool, float]:
        """Makes the inputs that the other implementations get. Returns whether the calls are captured, and the largest
        error of a row, before they were timed and after it."""
        self._timer: Timer | None = None  # and the inputs of the shape before
        gc.collect()
        torch.manual_seed(seed)
        case = make()
        copies = copies_needed(case.work().bytes, case.device)
        case.allocate(copies)
        implementation = case.implementation(variant)
        first = implementation.run(0)
        error = case.error(first)
        self._timer = prepare(implementation, copies, case.device)
        self._timer.sample()
        first.zero_()  # a plan that is used up computes nothing from the second call on
        return self._timer.captured, worst((error, case.error(implementation.run(0))))

    @torch.inference_mode()
    def sample(self) -> Timed:
        assert self._timer is not None
        return self._timer.sample()


def open_peer(config: EngineConfig, settings: Mapping[str, Any]) -> KernelPeer:
    """Raises PeerAbsent where vLLM's kernels cannot be imported."""
    import_vllm("vllm_flash_attn")
    return KernelPeer()


class Apart:
    """The process is started for the first shape that needs it, and holds one shape's inputs at a time."""

    def __init__(self, settings: ProcessSettings) -> None:
        self._settings = settings
        self._process: PeerProcess | None = None
        self._absent = ""

    def prepare(self, case: Case, variant: str, seed: int) -> tuple[Timer, float]:
        """A timer and the largest error. Raises VariantAbsent, and PeerError where it fails."""
        if case.device.type != NEEDS:
            raise VariantAbsent(f"it runs on {NEEDS}, not {case.device.type}")
        if self._process is None and not self._absent:
            try:
                self._process = PeerProcess("vLLM", __name__, EngineConfig(), self._settings)
            except PeerAbsent as why:
                self._absent = str(why)
        if self._process is None:
            raise VariantAbsent(self._absent)
        if not self._process.alive:
            raise VariantAbsent("its process has failed, and is not asked again")
        make = partial(type(case), case.shape, case.dtype, case.device)
        captured, error = self._process.call("prepare a kernel", "prepare", make=make, variant=variant, seed=seed)
        return Timer(partial(self._process.call, "time a kernel", "sample"), captured), error

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
