"""The peers of a run that have processes of their own.

A process is started when its peer's first turn comes, and stays for all its passes with the same settings: starting
vLLM takes most of a minute, and a pass a few seconds. It forgets its prefix cache before each. While others are
measured it is idle, but holds its memory. Where not all fit on the GPU, the peer that was started first is stopped, and
started again when its turn comes; where it is known that they do, all are begun together, and load while the gates are
asked.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TypeAlias

import torch

from experiments.lab.load import subject as over_http
from experiments.lab.measure import hardware
from experiments.lab.measure.kinds import Kind, PeerAbsent, PeerError, PeerSettings
from experiments.lab.peers.process import PeerProcess
from mini_infer.core.config import Device, EngineConfig, LoadFormat, replace
from mini_infer.core.errors import MiniInferError
from mini_infer.modeling.loader import load_spec, outline, resolve_device, resolve_dtype
from mini_infer.modeling.model_files import resolve_folder

CUDA = "cuda"
RELEASE_S = 10.0  # the driver needs a second or two
RELEASED = 0.9  # of what a process took: others may have taken some meanwhile
BESIDE_GIB = 8.0  # of a process, beside its weights and its KV: activations, graphs, CUDA's own
Living: TypeAlias = PeerProcess | over_http.OverHTTP | over_http.Bench  # have processes that stay for later passes


class Peers:
    def __init__(self, settings: PeerSettings, keep: bool = False) -> None:
        """`keep`: none is stopped to make room for another."""
        self._settings, self._keep = settings, keep
        self._processes: dict[str, PeerProcess | over_http.OverHTTP] = {}
        self._held: dict[str, int] = {}  # bytes of the GPU that they took when they started
        self._absent: dict[Kind, str] = {}
        self._begun: dict[str, PeerProcess | PeerAbsent | PeerError] = {}  # or why they did not start
        self._bench: PeerProcess | None = None  # of `vllm bench serve`

    def close(self) -> None:
        for process in (*self._begun.values(), self._bench):
            if isinstance(process, PeerProcess):
                process.close()
        for key in list(self._processes):
            self._stop(key)

    def begin(self, kind: Kind, config: EngineConfig) -> None:
        """Starts a peer, or a server, whose turn will come and that has room beside all others on a GPU."""
        device, elsewhere = hardware.resolve(config.model.device), kind.can.elsewhere or kind.can.client_of is not None
        if device != CUDA or elsewhere or not _has_own_process(kind, device):
            return
        config = settled(config)
        key = _key(kind, config)
        if key not in self._begun:
            self._begun[key] = self._process(kind, config, wait=False)

    @property
    def begun(self) -> bool:
        """Whether any is loading, or waits for its first turn."""
        return bool(self._begun)

    def await_begun(self) -> None:
        """Until what was begun has started, or has failed, which is told when its turn comes."""
        for key, begun in self._begun.items():
            try:
                if isinstance(begun, PeerProcess):
                    begun.ready()
            except (PeerAbsent, PeerError) as why:
                self._begun[key] = why

    def open(self, kind: Kind, config: EngineConfig) -> Living | None:
        """The peer, ready for a pass, which stays when that is over; None where `kind` runs in this process, for which
        there is room on the GPU now.

        Raises PeerAbsent, ConfigError and PeerError, as PeerProcess does.
        """
        device = hardware.resolve(config.model.device)
        if device == CUDA:
            hardware.give_back()
        if kind.can.client_of is not None:
            server = self.open(kind.can.client_of, config)
            assert isinstance(server, over_http.OverHTTP)
            if self._bench is None or not self._bench.alive:
                self._bench = PeerProcess(kind.label, over_http.BENCH, EngineConfig(), self._settings.vllm)
            return over_http.Bench(server, self._bench)
        if not _has_own_process(kind, device):
            self._make_room(config, device)
            return None
        require_device(kind, config.model.device)
        if kind in self._absent:
            raise PeerAbsent(self._absent[kind])
        if kind.can.over_http:
            over_http.require_client()
        config = settled(config)
        key = _key(kind, config)
        process, begun = self._processes.get(key), self._begun.pop(key, None)
        if process is not None and process.alive:
            process.forget()
        elif isinstance(begun, MiniInferError):
            raise begun
        else:
            if begun is None and not kind.can.elsewhere:
                self._make_room(config, device)
            free = _free(device)
            try:
                own = None if kind.can.elsewhere else begun or self._process(kind, config, wait=True)
                process = over_http.open_subject(kind, self._settings, own) if kind.can.over_http else own
                assert process is not None
            except PeerAbsent as error:
                self._absent[kind] = str(error)
                raise
            self._processes[key], self._held[key] = process, 0 if begun else free - _free(device)
        return process

    def _process(self, kind: Kind, config: EngineConfig, wait: bool) -> PeerProcess:
        settings, threads = self._settings.of(kind), torch.get_num_threads()
        return PeerProcess(kind.label, kind.can.module, config, settings, wait=wait, threads=threads)

    def _make_room(self, config: EngineConfig, device: str) -> None:
        """Stops peers until the GPU has as much memory as `config` will take, first those started first."""
        while device == CUDA and self._processes and not self._keep and _free(CUDA) < gpu_memory(config):
            name = self._stop(next(iter(self._processes)))
            print(
                f"{name} is stopped to make room on the GPU, and starts again at its next turn; with less "
                "cache.gpu_memory_utilization or cache.memory_gib it could stay",
                file=sys.stderr,
            )

    def _stop(self, key: str) -> str:
        """Returns the peer's name, once the driver has taken its memory back: after the process's end."""
        process, held = self._processes.pop(key), self._held.pop(key, 0)
        if held <= 0:
            process.close()
            return process.name
        expected, end = _free(CUDA) + RELEASED * held, time.monotonic() + RELEASE_S
        process.close()
        while _free(CUDA) < expected and time.monotonic() < end:
            time.sleep(0.02)
        return process.name


def require_device(kind: Kind, device: Device) -> None:
    """Raises PeerAbsent where that is none of the peer's."""
    if kind.can.needs_gpu and hardware.resolve(device) != CUDA:
        raise PeerAbsent(f"{kind.label} is measured on a CUDA device, and this run is on the CPU")


def _has_own_process(kind: Kind, device: str) -> bool:
    """What can run in this one does so on a CPU: another would cost transformers the time of its imports."""
    can = kind.can
    return can.over_http or can.client_of is not None or can.needs_gpu or (bool(can.module) and device == CUDA)


def _key(kind: Kind, config: EngineConfig) -> str:
    return json.dumps([kind, config.to_dict()], sort_keys=True)


def _free(device: str) -> int:
    """Bytes of the GPU that nobody holds."""
    return int(torch.cuda.mem_get_info()[0]) if device == CUDA else 0


def settled(config: EngineConfig) -> EngineConfig:
    """With the device, the dtype and the folder that the engine finds, for a process that might find others."""
    model = config.model
    if model.load_format is LoadFormat.dry:
        return config  # which no peer takes
    device = resolve_device(model)
    dtype = resolve_dtype(model, load_spec(model), device)
    found = {"device": device.type, "dtype": str(dtype).removeprefix("torch.")}
    if model.hf_config is None:
        found["path"] = str(resolve_folder(model.path, weights=model.load_format is LoadFormat.auto))
    return replace(config, model=found)


def gpu_memory(config: EngineConfig) -> float:
    """Bytes that an engine or a peer with these settings takes on the GPU, about."""
    cache, model = config.cache, config.model
    if model.load_format is LoadFormat.dry:
        return 0.0
    if cache.memory_gib is None:
        return cache.gpu_memory_utilization * torch.cuda.mem_get_info()[1]
    spec = load_spec(model)
    dtype = resolve_dtype(model, spec, resolve_device(model))
    weights = outline(spec, dtype).weight_bytes() / config.parallel.ranks
    return weights + (cache.memory_gib + BESIDE_GIB) * 2**30
