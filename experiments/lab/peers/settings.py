"""How peers are started: `peers.*` of the config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mini_infer.core.errors import ConfigError


@dataclass(frozen=True)
class ProcessSettings:
    """
    Attributes:
        python: the peer's interpreter, such as that of a virtual environment; default: this process's own.
        pythonpath: folders with the peer's packages, instead of this process's PYTHONPATH: so it can live beside
            another version of torch.
        timeout_s: the longest wait for its start, and for each pass.
    """

    python: str | None = None
    pythonpath: str | None = None
    timeout_s: float = 900.0

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ConfigError(f"peers.*.timeout_s must be above 0, got {self.timeout_s}")


@dataclass(frozen=True)
class HFSettings(ProcessSettings):
    """
    Attributes:
        own_process: default: on a GPU. On a CPU a process more would only cost the time of its imports.
    """

    own_process: bool | None = None


@dataclass(frozen=True)
class VLLMSettings(ProcessSettings):
    """
    Attributes:
        multiprocessing: its engine core runs beside its client in another process, which is its default; false: both
            in one.
        args: more arguments of its EngineArgs, by name.
        api_processes: of its server.
    """

    multiprocessing: bool = True
    args: dict[str, Any] = field(default_factory=dict)
    api_processes: int = 1


@dataclass(frozen=True)
class ServedSettings(ProcessSettings):
    """
    Attributes:
        api_processes: of mini-infer's server.
    """

    api_processes: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.api_processes < 1:
            raise ConfigError(f"peers.served.api_processes must be at least 1, got {self.api_processes}")


@dataclass(frozen=True)
class HTTPSettings:
    """
    Attributes:
        url: of any server with the completions API, such as http://localhost:8000; a final /v1 may be left out.
        model: the name that requests give; default: the first that the server lists.
    """

    url: str | None = None
    model: str | None = None


@dataclass(frozen=True)
class ClientSettings(ProcessSettings):
    """
    Attributes:
        processes: of the load client; default: one for every 64 requests in flight, on at most half of the CPUs.
    """

    processes: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.processes is not None and self.processes < 1:
            raise ConfigError(f"peers.client.processes must be at least 1, got {self.processes}")


@dataclass(frozen=True)
class PeerSettings:
    """
    Attributes:
        processes: so many of measure.processes measure peers, the first ones; default: all. Each starts its peers anew,
            which of vLLM takes a minute.
    """

    processes: int | None = None
    hf: HFSettings = field(default_factory=HFSettings)  # of hf and hf_continuous
    vllm: VLLMSettings = field(default_factory=VLLMSettings)  # its engine, its server and its load client
    served: ServedSettings = field(default_factory=ServedSettings)  # mini-infer's own server
    http: HTTPSettings = field(default_factory=HTTPSettings)
    client: ClientSettings = field(default_factory=ClientSettings)  # the load on servers

    def __post_init__(self) -> None:
        if self.processes is not None and self.processes < 0:
            raise ConfigError(f"peers.processes must be 0 or more, got {self.processes}")
