"""How peers are started: `peers.*` of the config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from experiments.lab.measure.kinds import Kind
from experiments.lab.spec import Checked, Count, Natural, Positive


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
