"""The systems that can be measured: what each of them can do, how their processes are started (`peers.*` of the
config), what they are to who measures them, and how they fail."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from experiments.lab.config.points import keys
from experiments.lab.config.spec import Checked, Count, Natural, Positive
from mini_infer.core.errors import MiniInferError

if TYPE_CHECKING:
    from experiments.lab.measure.profile import KernelRow, StepProfile
    from experiments.lab.measure.traces import BlockRow, Served
    from experiments.lab.workloads import Item


class Kind(str, Enum):
    engine = "engine"  # mini-infer
    hf = "hf"  # transformers.generate over static, left-padded batches
    hf_continuous = "hf_continuous"  # transformers' continuous batching
    vllm = "vllm"
    served = "served"  # mini-infer behind its own HTTP server
    vllm_served = "vllm_served"  # vLLM behind its own
    served_bench = "served_bench"  # the load of `vllm bench serve` on `served`
    vllm_bench = "vllm_bench"  # and on `vllm_served`
    simulated = "simulated"  # mini-infer on a virtual clock, whose steps take what they are known to take
    http = "http"  # any server that speaks the OpenAI API, at peers.http.url

    @property
    def label(self) -> str:
        return SYSTEMS[self].label

    @property
    def can(self) -> System:
        return SYSTEMS[self]


@dataclass(frozen=True)
class System:
    label: str
    module: str = ""  # with its `open_peer`, of those that can run in a process of their own; "" of others
    over_http: bool = False  # the load client talks to it
    client_of: Kind | None = None  # the system with the server that it loads, of those that are a load client
    ours: bool = False  # it is this engine, which gates check before it is timed
    steps: bool = False  # it tells StepRecords
    profiled: bool = False  # its decode steps can be profiled
    mapped: bool = False  # it tells whose KV blocks are which
    own_weights: bool = False  # of random weights it makes its own; else it has the engine's
    caches: bool = False  # it has the engine's switch for a prefix cache
    open_loop: bool = True  # it takes requests at their times
    chains: bool = True  # it takes requests that follow others, and priorities
    virtual: bool = False  # nothing of it runs: its clock is its own, and what it says is a prediction
    elsewhere: bool = False  # somebody else has started it: it has an address, and its memory is not ours
    needs_gpu: bool = False  # it is measured on a CUDA device alone
    reads: tuple[str, ...] = ()  # settings, or sections of them, beside those that every system has


_OURS = ("engine", "measure.gates")
_SERVED = (*_OURS, "peers.served", "peers.client")
_MODEL = keys("engine.model", "path hf_config load_format tokenizer dtype device max_model_len")
_ROOM = keys("engine.cache", "gpu_memory_utilization memory_gib")
_HF = (*_MODEL, *_ROOM, "engine.model.seed", "peers.hf")
_VLLM = (
    *(*_MODEL, *_ROOM, "engine.parallel.tensor", "engine.seed", "engine.speculation", "peers.vllm"),
    *keys("engine.model", "quantization quantization_group quantization_symmetric routing"),
    *keys("engine.cache", "block_size dtype layout num_blocks prefix_caching"),
    *keys("engine.scheduler", "batching chunked_prefill max_num_batched_tokens max_num_seqs policy preemption"),
)
_HF_CONTINUOUS = (
    *(*_HF, *keys("engine.cache", "block_size num_blocks")),
    *keys("engine.scheduler", "max_num_batched_tokens max_num_seqs"),
)
_VLLM_SERVER = (*_VLLM, "engine.parallel.replicas")
_VLLM_SERVED = (*_VLLM_SERVER, "peers.client")
_BENCH = ("engine", "peers.served", "peers.vllm")
_HTTP = (*_MODEL, "peers.http", "peers.client")
LAB = "experiments.lab"
_ours = partial(System, ours=True, caches=True)
_of_vllm = partial(System, own_weights=True, needs_gpu=True)
SYSTEMS = {
    Kind.engine: _ours("mini-infer", steps=True, profiled=True, mapped=True, reads=_OURS),
    Kind.hf: System("transformers.generate", f"{LAB}.peers.hf", open_loop=False, chains=False, reads=_HF),
    Kind.hf_continuous: System(
        "transformers continuous batching", f"{LAB}.peers.hf_continuous", chains=False, reads=_HF_CONTINUOUS
    ),
    Kind.vllm: _of_vllm("vLLM", f"{LAB}.peers.vllm", profiled=True, caches=True, reads=_VLLM),
    Kind.served: _ours("mini-infer over HTTP", f"{LAB}.load.subject", over_http=True, reads=_SERVED),
    Kind.vllm_served: _of_vllm(
        "vLLM over HTTP", f"{LAB}.load.vllm_server", over_http=True, caches=True, reads=_VLLM_SERVED
    ),
    Kind.served_bench: System("vllm bench serve", client_of=Kind.served, open_loop=False, chains=False, reads=_BENCH),
    Kind.vllm_bench: _of_vllm(
        "vllm bench serve on vLLM", client_of=Kind.vllm_served, open_loop=False, chains=False, reads=_VLLM_SERVER
    ),
    Kind.simulated: System(
        "mini-infer, simulated", steps=True, caches=True, virtual=True, reads=("engine", "measure.costs")
    ),
    Kind.http: System("an OpenAI server", over_http=True, own_weights=True, elsewhere=True, reads=_HTTP),
}
SERVED = {Kind.engine: Kind.served, Kind.vllm: Kind.vllm_served}  # behind its own HTTP server


@dataclass(frozen=True)
class ProcessSettings(Checked, section="peers.*"):
    # The peer's interpreter, such as that of a virtual environment; default: this process's own.
    python: str | None = None
    # Folders with the peer's packages, instead of this process's PYTHONPATH: so it can live beside another version of
    # torch.
    pythonpath: str | None = None
    timeout_s: Positive = 900.0  # the longest wait for its start, and for each pass


@dataclass(frozen=True)
class HFSettings(ProcessSettings, section="peers.hf"):
    # So many of measure.processes measure it, the first ones, whatever peers.processes says: it is slow.
    processes: Natural | None = None


@dataclass(frozen=True)
class VLLMSettings(ProcessSettings, section="peers.vllm"):
    args: dict[str, Any] = field(default_factory=dict)  # more arguments of its EngineArgs, by name
    api_processes: Count = 1  # of its server


@dataclass(frozen=True)
class ServedSettings(ProcessSettings, section="peers.served"):
    api_processes: Count = 1  # of mini-infer's server


@dataclass(frozen=True)
class HTTPSettings:
    # Of any server with the completions API, such as http://localhost:8000; a final /v1 may be left out.
    url: str | None = None
    model: str | None = None  # the name that requests give; default: the first that the server lists


@dataclass(frozen=True)
class ClientSettings(ProcessSettings, section="peers.client"):
    # Of the load client; default: one for every 64 requests in flight, on at most half of the CPUs.
    processes: Count | None = None


@dataclass(frozen=True)
class PeerSettings(Checked, section="peers"):
    # So many of measure.processes measure peers, the first ones; default: all. Each starts its peers anew, which of
    # vLLM takes a minute.
    processes: Natural | None = None
    hf: HFSettings = field(default_factory=HFSettings)  # of hf and hf_continuous
    vllm: VLLMSettings = field(default_factory=VLLMSettings)  # its engine, its server and its load client
    served: ServedSettings = field(default_factory=ServedSettings)  # mini-infer's own server
    http: HTTPSettings = field(default_factory=HTTPSettings)
    client: ClientSettings = field(default_factory=ClientSettings)  # the load on servers

    def of(self, kind: Kind) -> ProcessSettings:
        """Of the process that a kind of peer, or its server, has."""
        return {Kind.served: self.served, Kind.vllm: self.vllm, Kind.vllm_served: self.vllm}.get(kind, self.hf)

    def processes_of(self, kind: Kind) -> int | None:
        """How many processes measure a kind of peer; None: all."""
        own = self.hf.processes if kind in (Kind.hf, Kind.hf_continuous) else None
        return self.processes if own is None else own


class PeerAbsent(MiniInferError):
    """A peer cannot be measured on this machine. The message says why: it stands in the report, and is no error."""


class PeerError(MiniInferError):
    """A peer's process has failed. The message holds the last lines of its log."""


def why_lost(lost: PeerAbsent | PeerError) -> str:
    """In a sentence, for the report. A log goes to the terminal."""
    why, _, log = str(lost).partition("\n")
    if isinstance(lost, PeerError):
        print(log, file=sys.stderr)
        why = f"it has failed, and is not asked again: {why}"
    return why


class Subject:
    """What can be measured: the engine, or a peer that serves the same requests."""

    # A peer's version and settings, in plain values, which are stored with the results; of an engine on a GPU what it
    # chose, fell back to, and took to start.
    about: Mapping[str, Any]

    def serve(self, items: Sequence[Item], concurrency: int) -> Served:
        """Greedy tokens for every item, in the items' order. Requests of the closed loop: at most `concurrency` in
        flight. A token's time is when the process that asks could read it."""
        raise NotImplementedError

    def forget(self) -> None:
        """What comes finds nothing of what came before: no cached prefix, and no text to draft from. Of one that shares
        nothing between requests there is nothing to forget."""

    @property
    def alive(self) -> bool:
        """Whether it can be asked again: a process of its own may have ended."""
        return True

    def reserve_memory(self) -> None:
        """Once more, where what was opened since its last turn has emptied the allocator."""

    def profile(self, items: Sequence[Item], variant: str, point: str) -> tuple[StepProfile, list[KernelRow]]:
        """Decodes all items together, with a profiler and without it; asked of kinds that can be `profiled`. Raises
        NoProfile where nothing is to be seen."""
        raise NotImplementedError

    def map_blocks(self, items: Sequence[Item], concurrency: int, variant: str, point: str) -> list[BlockRow]:
        """Serves them, and looks after each step at whose KV blocks are which; asked of kinds that can be `mapped`.
        Raises NoMap where requests fail."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends what would not end with the process that it lives in."""
