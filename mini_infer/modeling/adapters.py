"""Adapters of a model: which are loaded, which of them are in slots on the device, and which tokens have which.

    loaded    key --> A and B of every product, this rank's part, in host memory
    slots     [ 9f3a | 07c1 | .... | e55d ]    as many as config.max_adapters, on the device
    a step    requests --> slots --> groups of tokens (kernels/lora.py), where every product finds them

Which slot an adapter gets is the scheduler's to say (runtime/scheduler/adapter_slots.py), and comes with a request's
admission: so ranks agree, and what a slot held is written over behind the steps that read it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mini_infer.core.config import LoraConfig
from mini_infer.core.errors import ModelError
from mini_infer.core.plan import StepPlan
from mini_infer.core.request import NO_ADAPTER
from mini_infer.kernels.interface import Kernels
from mini_infer.kernels.lora import FEW_TOKENS, LoraWeights, new_groups
from mini_infer.kernels.pinned import to_device
from mini_infer.modeling.linear_methods.adapted import AdaptedLinear
from mini_infer.modeling.linear_methods.base import Build, LinearMethod, LinearShape
from mini_infer.modeling.peft_folder import PeftFolder

_PREFIX = "base_model.model."  # of what PEFT calls the model's own modules
_LEAST_RANK = 16  # that a tensor core multiplies
_DUMMY_SCALE = 0.1  # of what random adapters add, by what they read


class Fork(NamedTuple):
    branch: Tensor | None  # [T, N], room for B A x; None of many tokens, where it costs more traffic than it saves time
    event: torch.cuda.Event | None


class Adapters:
    """
    Args:
        num_requests: at a time; one more is padding.
        most_tokens: of a step.

    Attributes:
        active: some tokens of the step have adapters; in numerics where it must not matter, always.
        keys: name -> key of those that the config names, from `load_named` on.
        reading: by folder, what `read` was told and `load` has not taken: its key, and what is in it.
    """

    def __init__(
        self, config: LoraConfig, num_requests: int, most_tokens: int, device: torch.device, kernels: Kernels
    ) -> None:
        self.num_slots = config.max_adapters
        self.rank = max(_LEAST_RANK, 1 << (config.max_rank - 1).bit_length())
        self.active = self._always = kernels.invariant
        self.keys: dict[str, str] = {}
        self.reading: dict[str, Future[tuple[str, list[LoraWeights]]]] = {}
        self._config, self._device, self._kernels = config, device, kernels.lora
        self._layers: list[AdaptedLinear] = []
        self._places: dict[str, tuple[int, int]] = {}  # module -> its layer, and the part that it is of that
        self._loaded: dict[str, list[LoraWeights]] = {}  # by key: of each layer, with one slot, on the host
        self._slots: list[str | None] = [None] * self.num_slots  # what is in each
        self._of_request = np.full(num_requests + 1, NO_ADAPTER, dtype=np.int32)
        self._on_device = torch.from_numpy(self._of_request).to(device, copy=True)
        self._groups = new_groups(self.num_slots, most_tokens, device)
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        own = () if self._beside is None else (torch.cuda.set_device, (self._beside.device,))  # a thread has its own
        self._reader = ThreadPoolExecutor(1, "adapters", *own)

    @property
    def num_bytes(self) -> int:
        """Of all slots."""
        return sum(layer.stack.a.nbytes + layer.stack.b.nbytes for layer in self._layers)

    def modes(self) -> Iterator[bool]:
        """What `active` can be, one after the other, for those who compile, measure and capture: until the next one
        all steps are computed so."""
        own = self._always
        try:
            for self._always in [True] if own else [False, True]:
                self.active = self._always
                yield self.active
        finally:
            self.active = self._always = own

    def adapt(self, name: str, shape: LinearShape, base: LinearMethod, build: Build) -> LinearMethod:
        """The method of a layer (as in LinearMethodFactory), with adapters beside it."""
        layer = AdaptedLinear(base, shape, build, self)
        if build.device.type != "meta":
            for part, own in enumerate(shape.parts):
                self._places[f"{name}.{own}" if name else own] = len(self._layers), part
            self._layers.append(layer)
        return layer

    # --- adapters come and go ---------------------------------------------------------------------------------------

    def load_named(self, others: Sequence[int]) -> None:
        """Those that the config names. `others` are layers of the model that other stages have."""
        self._others = tuple(f"model.layers.{layer}." for layer in others)
        for name, path in self._config.adapters.items():
            self.keys[name] = self.load(path)
        for name in self._config.dummy_names:
            self.keys[name] = key = f"{name} of rank {self._config.max_rank}"  # others are drawn for another
            self._loaded[key] = self._draw(name)

    def read(self, path: str) -> None:
        """Begins to read a PEFT folder to host memory, unless an equal one is there. Steps go on meanwhile."""

        def fetch() -> tuple[str, list[LoraWeights]]:
            folder = PeftFolder.read(path, self._config.max_rank)
            layers = self._loaded.get(folder.key) or self._read(folder)
            folder.require_unchanged()
            return folder.key, layers

        self.reading[path] = self._reader.submit(fetch)

    def load(self, path: str, expected: str | None = None) -> str:
        """Takes in what was read; waits for it, or reads it now. Returns its key. Raises ModelError, and keeps nothing,
        where it cannot be served, or is not the key that another rank expects."""
        if path not in self.reading:
            self.read(path)
        key, layers = self.reading.pop(path).result()
        if expected not in (None, key):
            raise PeftFolder.changed(path)
        self._loaded[key] = layers
        return key

    def __contains__(self, key: str) -> bool:
        return key in self._loaded

    def forget(self, key: str) -> None:
        """Nobody asks for it any more."""
        self._loaded.pop(key, None)
        self._slots = [None if held == key else held for held in self._slots]

    def _empty(self, device: torch.device) -> list[LoraWeights]:
        stacks = [(layer, layer.stack.a) for layer in self._layers]
        return [layer.empty(1, a.shape[3], self.rank, a.dtype, device) for layer, a in stacks]

    def _draw(self, name: str) -> list[LoraWeights]:
        """Random weights, the same from run to run and on any number of ranks. They stay on the device, since thousands
        of page-locked tensors would take their time."""
        layers, rank = self._empty(self._device), self._config.max_rank
        for module, (index, part) in self._places.items():
            generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{module} {name}".encode()))
            for kind in ("A", "B"):
                shape = self._layers[index].shape_of(part, kind, rank)
                drawn = torch.randn(shape, generator=generator, device=self._device) / shape[1] ** 0.5
                self._layers[index].take(layers[index], part, kind, drawn * (_DUMMY_SCALE if kind == "B" else 1.0))
        return layers

    def _read(self, folder: PeftFolder) -> list[LoraWeights]:
        layers = self._empty(torch.device("cpu"))
        missing: set[str] = set()
        try:
            with safe_open(folder.weights, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                    module, kind = _parsed(name)
                    if module.startswith(self._others) and kind is not None:
                        continue
                    place = self._places.get(module)
                    if place is None or kind is None:
                        raise ModelError(
                            f"adapter {folder.path} holds {name}, which is of no product that adapters can be added "
                            "to here: of attention and dense feed-forward layers, not of experts, embeddings, the head "
                            "or, where latents are cached, kv_b_proj. Train it with other target_modules, or merge it "
                            "into the model"
                        )
                    index, part = place
                    layer, tensor = self._layers[index], tensors.get_tensor(name)
                    if (shape := layer.shape_of(part, kind, folder.rank)) != tuple(tensor.shape):
                        raise ModelError(
                            f"{name} in {folder.weights} has shape {tuple(tensor.shape)}; of this model it would be "
                            f"{shape}: the adapter is another model's"
                        )
                    layer.take(layers[index], part, kind, tensor.float() * (folder.scaling if kind == "B" else 1.0))
                    missing ^= {module}  # it comes with A and with B
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {folder.weights}: {error}") from error
        if missing:
            raise ModelError(
                f"{folder.weights} has lora_A and not lora_B, or the other, of {', '.join(sorted(missing))}"
            )
        if self._beside is not None:
            layers = [LoraWeights(own.a.pin_memory(), own.b.pin_memory(), own.parts) for own in layers]
        return layers

    # --- steps ------------------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Takes in the plan's admissions, and whether any of its rows has an adapter."""
        of_request = self._of_request.copy()
        for admission in plan.admissions:
            if (slot := admission.adapter_slot) != NO_ADAPTER and self._slots[slot] != admission.adapter:
                self._slots[slot] = None  # before it is whole
                self._fill(slot, self._loaded[admission.adapter])
                self._slots[slot] = admission.adapter
            of_request[admission.req_index] = slot
        if not np.array_equal(of_request, self._of_request):
            to_device(of_request, self._on_device.device, out=self._on_device)
            self._of_request = of_request
        self.active = self._always or bool((self._of_request[list(plan.req_indices)] != NO_ADAPTER).any())

    def _fill(self, slot: int, layers: Sequence[LoraWeights]) -> None:
        for layer, own in zip(self._layers, layers, strict=True):
            layer.stack.a[slot].copy_(own.a[0], non_blocking=True)
            layer.stack.b[slot].copy_(own.b[0], non_blocking=True)

    def group(self, owners: Tensor, num_tokens: int) -> None:
        """Of the step that is computed next: owners [R] have num_tokens / R neighbours each. Can be captured."""
        if self.active:
            self._kernels.group(self._groups, self._on_device, owners, num_tokens)

    def fork(self, x: Tensor, weights: LoraWeights) -> Fork:
        """From here on a product of x [T, K] and what `add` adds to it go side by side, which both wait for memory most
        of their time."""
        # Taken before the product, or it might be what that has given back and its kernels still use.
        branch = x.new_empty(len(x), weights.b.shape[1]) if len(x) <= FEW_TOKENS else None
        return Fork(branch, None if self._beside is None else torch.cuda.current_stream().record_event())

    def add(self, y: Tensor, x: Tensor, weights: LoraWeights, fork: Fork) -> tuple[Tensor, Tensor | None]:
        """(y [T, N], B A x, 0 of tokens without an adapter), the latter since `fork`; or (their sum, None)."""
        with self._since(fork.event):
            shrunk = self._kernels.shrink(x, weights, self._groups, clear=fork.branch)
            if fork.branch is not None:
                self.expand(fork.branch, shrunk, weights)
        if fork.branch is None:
            self._kernels.expand(y, shrunk, weights, self._groups, joins=True)
        return y, fork.branch

    @contextmanager
    def _since(self, event: torch.cuda.Event | None) -> Iterator[None]:
        if self._beside is None or event is None:
            yield
            return
        self._beside.wait_event(event)
        with torch.cuda.stream(self._beside):
            yield
        torch.cuda.current_stream().wait_stream(self._beside)

    def shrink(self, x: Tensor, weights: LoraWeights, chunk: int | None = None) -> Tensor:
        """As kernels/lora.py has it."""
        return self._kernels.shrink(x, weights, self._groups, chunk)

    def expand(self, y: Tensor, shrunk: Tensor, weights: LoraWeights) -> None:
        """As kernels/lora.py has it."""
        self._kernels.expand(y, shrunk, weights, self._groups)


def _parsed(name: str) -> tuple[str, str | None]:
    """base_model.model.model.layers.0.mlp.up_proj.lora_A.weight -> (model.layers.0.mlp.up_proj, A)"""
    for kind in ("A", "B"):
        if name.startswith(_PREFIX) and name.endswith(f".lora_{kind}.weight"):
            return name.removeprefix(_PREFIX).removesuffix(f".lora_{kind}.weight"), kind
    return name, None
