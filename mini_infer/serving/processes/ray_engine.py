"""Engine processes on the machines of a Ray cluster (Moritz et al. 2018, arXiv:1712.05889).

    supervisor and    Unix              TCP                   Unix
    API processes   -------- a relay  -------  an actor's  --------  engine process, the actor's child
                             here              relay

An actor has the CPUs and GPUs of all ranks of its engine, so that these are on one machine: on which, Ray decides. To
everybody else it is an EngineProcess that listens at a path here. One that dies, with its machine or without, is made
again as any other is, and Ray finds it a place. Each machine has this package, and the model at the same path.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from typing import Any

from mini_infer.core.config import Device, EngineConfig
from mini_infer.core.errors import ConfigError
from mini_infer.serving.processes.gpus import engines_asked, needs_no_gpu
from mini_infer.serving.processes.launch import BACKLOG, EngineProcess
from mini_infer.serving.processes.relay import Relay
from mini_infer.transfer.address import connect_with, listen, new_key

try:
    import ray
    from ray.exceptions import RayError
except ImportError as error:
    raise ConfigError("parallel.launcher=ray needs Ray: pip install -e '.[ray]'") from error

_LOOK_S = 0.2  # of an actor at its engine


class RayEngine:
    """As EngineProcess, somewhere in the cluster that `require_cluster` has found."""

    def __init__(self, config: EngineConfig, max_queued: int, socket_path: str) -> None:
        self.socket_path = socket_path
        needs = _needs(config)
        host = ray.remote(_Host).options(num_cpus=needs["CPU"], num_gpus=needs["GPU"], max_concurrency=4)
        key = new_key()
        self._actor = host.remote(config.to_dict(), max_queued, key)
        self._address = self._actor.address.remote()
        self._end = self._actor.end.remote()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(socket_path)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(socket_path)
        listener.listen(BACKLOG)
        self._relay = Relay(listener, lambda: connect_with(key, self._there()))

    def _there(self) -> tuple[str, int]:
        """Where the actor listens. Waits until it does; raises OSError where it is lost."""
        try:
            address: tuple[str, int] = ray.get(self._address)
        except RayError as error:
            raise ConnectionError("the engine's machine is lost") from error
        return address

    def ending(self) -> str | None:
        """As EngineProcess.ending."""
        if not ray.wait([self._end], timeout=0)[0]:
            return None
        try:
            return str(ray.get(self._end))
        except RayError as error:
            return f"is lost, or its machine is ({type(error).__name__})"

    def stop(self, timeout: float = 5.0) -> None:
        """As EngineProcess.stop."""
        if ray.wait([self._address], timeout=0)[0]:
            with contextlib.suppress(RayError):
                ray.get(self._actor.stop.remote(), timeout=timeout)
        ray.kill(self._actor)
        self._relay.close()


class _Host:
    """The actor."""

    def __init__(self, config: dict[str, Any], max_queued: int, key: bytes) -> None:
        here = ray.util.get_node_ip_address()
        self._engine = EngineProcess(EngineConfig.from_dict(config), max_queued, prompts_at=f"tcp://{here}")
        self._listener = listen(here)
        Relay(self._listener, self._connect, key)

    def address(self) -> tuple[str, int]:
        return self._listener.getsockname()[:2]

    def end(self) -> str:
        """Waits for the engine's, and says how it ended."""
        while (ending := self._engine.ending()) is None:
            time.sleep(_LOOK_S)
        return ending

    def stop(self) -> None:
        self._engine.stop()

    def _connect(self) -> socket.socket:
        near = socket.socket(socket.AF_UNIX)
        near.connect(self._engine.socket_path)
        return near


def require_cluster(config: EngineConfig) -> None:
    """Connects this process. Raises ConfigError where there is no cluster, or not one with room for all replicas."""
    asked = "parallel.launcher=ray"
    try:
        ray.init(address="auto", log_to_driver=False, ignore_reinit_error=True)
    except ConnectionError as error:
        raise ConfigError(
            f"{asked}: no Ray cluster is known here. `ray start --head` starts one, and RAY_ADDRESS names another"
        ) from error
    free = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    engines = [dataclasses.replace(config, parallel=own) for own in config.parallel.of_engines]
    for number, engine in enumerate(engines):
        needs = {name: number for name, number in _needs(engine).items() if number}
        fitting = [has for has in free if all(has.get(name, 0) >= wanted for name, wanted in needs.items())]
        if not fitting:
            each = " and ".join(f"{wanted} {name}s" for name, wanted in needs.items())
            raise ConfigError(
                f"{asked}: {engines_asked(config)} engines, of which one takes {each} of one machine, and the cluster "
                f"has room for {number} of {len(engines)}: ask for fewer, or add machines"
            )
        for name, wanted in needs.items():
            fitting[0][name] -= wanted


def _needs(config: EngineConfig) -> dict[str, int]:
    """Of one engine."""
    ranks = config.parallel.ranks
    on_cpu = needs_no_gpu(config)
    if config.model.device is Device.auto and not ray.cluster_resources().get("GPU"):
        on_cpu = True
    return {"CPU": ranks, "GPU": 0 if on_cpu else ranks}
