"""Prints which variants of Triton's kernels are met while an engine serves that its start has not called. To be run
without Triton's interpreter; nothing is compiled, and no GPU is needed: of a kernel's call Triton is asked only what it
would compile.

    variants_met.py '{"model": {...}, ...}' ...      settings of an engine each
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from h200 import H200
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import mini_infer.attention.invariant as invariant
import mini_infer.attention.mla_triton as latents
import mini_infer.attention.triton as heads
from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.kernels import compile_ahead, ops, row_kernels
from mini_infer.runtime import preflight
from mini_infer.runtime.worker.request_states import RequestStates


class Uncomputed(compile_ahead._ZerosForNew):
    """Nobody looks at what torch computes: zeros take the place of what takes long."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x, aten = args[0] if args else None, torch.ops.aten
        if func is aten.linear.default:
            return x.new_zeros(*x.shape[:-1], len(args[1]))
        if func is aten.contiguous.default and x.is_floating_point():
            return x.new_zeros(x.shape)
        if func is aten.bmm.out:
            return kwargs["out"]
        if func is aten.normal_.default:
            return x
        return super().__torch_dispatch__(func, types, args, kwargs)


class Met:
    """In place of JITFunction.run. A variant is what Triton specializes on, constants and launch options."""

    def __init__(self) -> None:
        self.variants: set[tuple[str, str, str]] = set()
        self.new: list[str] = []
        self.started = False

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kwargs |= {"debug": False, "instrumentation_mode": ""}
        _, specialization, options = kernel.device_caches[0][-1](*args, **kwargs)
        name = kernel.fn.__name__
        variant = name, str(specialization), str(sorted(options.items(), key=str))
        if self.started and variant not in self.variants:
            told = dict(zip((param.name for param in kernel.params), specialization, strict=True))
            self.new.append(f"{name} {told} {options}")
        self.variants.add(variant)


def pretend() -> None:
    """A CPU that takes what is for a GPU."""
    torch.nn.functional.scaled_dot_product_attention = lambda q, k, v, **_: q.new_zeros(*q.shape[:-1], v.shape[-1])
    driver.set_active(H200())
    preflight.require_device = lambda config: None
    ops._interpreted = lambda: True
    RequestStates._kernels = row_kernels  # type: ignore[assignment]
    backends = (
        heads.TritonBackend,
        invariant.InvariantBackend,
        latents.LatentTritonBackend,
        latents.LatentInvariantBackend,
    )
    for backend in backends:
        backend.capabilities = dataclasses.replace(backend.capabilities, devices=frozenset({"cpu"}))
    for checked in (*backends, ops.TritonKernels, ops.InvariantKernels):
        checked.check = lambda self, device: None  # type: ignore[attr-defined,method-assign]
    for name in ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        setattr(torch.cuda, name, lambda device: 0)


def serve(settings: dict[str, Any]) -> list[str]:
    met = Met()
    JITFunction.run = lambda kernel, *args, **kwargs: met.run(kernel, *args, **kwargs)
    with Uncomputed():
        engine = LLMEngine(EngineConfig.from_dict(settings))
        worker: Any = engine.executor._worker  # type: ignore[attr-defined]
        worker._try_largest_step(worker.limits)
        met.started = True
        rng = np.random.default_rng(1)
        most = engine.max_model_len - 40
        arrivals = {0: 1, 3: 1, 5: 2, 9: 17, 13: 5, 20: 9, 24: 40}  # step -> requests
        for step in range(40):
            for index in range(arrivals.get(step, 0)):
                length = int(np.exp(rng.uniform(0, np.log(most))))
                drawn = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 5} if index % 3 == 0 else {}
                params = SamplingParams(**({"temperature": 0} | drawn), max_tokens=4 + index % 3, ignore_eos=True)
                engine.add_request(rng.integers(0, 90, length).tolist(), params)
            if engine.has_unfinished_requests():
                engine.step()
        assert not engine.has_unfinished_requests()
        engine.close()
    return met.new


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") != "1"
    sys.path.insert(0, str(Path(__file__).parents[1]))
    pretend()
    print(json.dumps([serve(json.loads(settings)) for settings in sys.argv[1:]]))
