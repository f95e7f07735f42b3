"""Engine processes on the machines of a Ray cluster (Moritz et al. 2018, arXiv:1712.05889).

    supervisor and    Unix              TCP                   Unix
    API processes   -------- a relay  -------  an actor's  --------  engine process, the actor's child
                             here              relay                 and the parent of its other ranks

A server has one placement group, and in it a bundle for each engine, with the CPUs and GPUs of all its ranks. A bundle
is of one machine, and bundles are of different ones as far as there are: of which, Ray decides. In each lives an actor,
as long as the server does: Ray starts it again when it dies, and elsewhere when its machine is lost. The engine process
in it is a RayEngine's; when it ends, the supervisor makes another RayEngine, as it makes another EngineProcess on one
machine. Each machine has this package, and the model at the same path.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from mini_infer.core.config import Device, EngineConfig
from mini_infer.core.errors import ConfigError
from mini_infer.serving.processes.gpus import engines_asked, needs_no_gpu
from mini_infer.serving.processes.launch import BACKLOG, EngineProcess
from mini_infer.serving.processes.relay import Relay
from mini_infer.transfer.address import connect_with, listen, new_key, reach

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ConfigError("parallel.launcher=ray needs Ray: pip install -e '.[ray]'") from error

_LOOK_S = 0.2  # of an actor at its engine
_ANSWER_S = 5.0  # for what answers at once
_ROOM_S = 10.0  # for Ray to reserve what the machines have, if nobody else uses it


class RayEngine:
    """As EngineProcess, in one of the actors that `place` has made.

    Calls of an actor that Ray is starting again wait for it: one of a machine that was lost, for room on another.
    """

    def __init__(self, actor: Any, socket_path: str) -> None:
        self.socket_path = socket_path
        self._actor = actor
        self._key = key = new_key()
        self._address = actor.start.remote(key, time.monotonic())
        self._end = actor.end.remote(key, self._address)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(socket_path)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(socket_path)
        listener.listen(BACKLOG)
        self._relay = Relay(listener, lambda: connect_with(key, self._there()))

    def _there(self) -> tuple[str, int]:
        """Where the actor listens. Waits until it does; raises OSError where it is lost."""
        try:
            address: tuple[str, int] | None = ray.get(self._address)
        except RayError as error:
            raise ConnectionError("the engine's machine is lost") from error
        if address is None:
            raise ConnectionError("another engine has its place")
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
        """As EngineProcess.stop. The actor stays for the next one, or another one in its place if it says nothing."""
        self._relay.close()
        started, ended = (ray.wait([each], timeout=0)[0] for each in (self._address, self._end))
        if ended or not started:  # one that starts after all ends with the next one's start
            return
        try:
            ray.get(self._actor.stop.remote(self._key, timeout), timeout=timeout + _ANSWER_S)
        except GetTimeoutError:
            ray.kill(self._actor, no_restart=False)
        except RayError:  # it was lost just now, and the engine with it
            pass


class _Host:
    """The actor: one engine process at a time, each known by the key that opens connections to it."""

    def __init__(self, config: dict[str, Any], max_queued: int) -> None:
        self._config, self._max_queued = EngineConfig.from_dict(config), max_queued
        self._lock = threading.Lock()
        self._asked = 0.0
        self._key: bytes | None = None
        self._engine: EngineProcess | None = None
        self._relay: Relay | None = None

    def start(self, key: bytes, asked: float) -> tuple[str, int] | None:
        """An engine process instead of the last one, and where it is to be reached.

        Args:
            asked: when, by the server's clock. Calls that have waited for this actor come in any order: None for one
                that is out of date.
        """
        here = ray.util.get_node_ip_address()
        with self._lock:
            if asked < self._asked:
                return None
            self._asked = asked
            self._stop(timeout=0)
            self._engine = engine = EngineProcess(self._config, self._max_queued, prompts_at=f"tcp://{here}")
            listener = listen(here)
            address: tuple[str, int] = listener.getsockname()[:2]
            self._relay = Relay(listener, lambda: reach(engine.socket_path), key)
            self._key = key
            return address

    @ray.method(max_task_retries=0)  # an actor in this one's place would know nothing of the engine
    def end(self, key: bytes, started: object) -> str:
        """Waits for the engine's, and says how it ended. `started`: what `start` has returned."""
        while (engine := self._engine) is not None and self._key == key:
            ending = engine.ending()
            if ending is not None:
                return ending
            time.sleep(_LOOK_S)
        return "was stopped"

    @ray.method(max_task_retries=0)
    def stop(self, key: bytes, timeout: float) -> None:
        with self._lock:
            if key == self._key:  # another engine may have its place by now
                self._stop(timeout)

    def _stop(self, timeout: float) -> None:
        if self._relay is not None and self._engine is not None:
            self._relay.close()
            self._engine.stop(timeout)
        self._relay = self._engine = self._key = None


def place(config: EngineConfig, max_queued: int) -> list[Any]:
    """An actor for each engine of a model, those for prompts first. Ray ends them, and takes back their places, when
    nobody here refers to them any more.

    Args:
        max_queued: completions that may wait, of each engine.

    Raises:
        ConfigError: there is no cluster, or not one with room for all.
    """
    _join_cluster()
    engines = [dataclasses.replace(config, parallel=own) for own in config.parallel.of_engines]
    bundles = [_needs(engine) for engine in engines]
    _require_machines(config, bundles)
    group = placement_group(bundles, strategy="SPREAD")
    if not group.wait(_ROOM_S):
        remove_placement_group(group)
        raise ConfigError(f"{_asked(config, bundles)}: the cluster has that, but others use it. Wait, or ask for fewer")
    actors = [
        ray.remote(_Host)
        .options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_concurrency=4,
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        )
        .remote(engine.to_dict(), max_queued)
        for index, (engine, bundle) in enumerate(zip(engines, bundles, strict=True))
    ]
    weakref.finalize(actors[0], remove_placement_group, group).atexit = False
    return actors


def _join_cluster() -> None:
    """Raises ConfigError where there is none."""
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdecimal():  # where nobody answers, Ray would try for four minutes
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
        ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING, ignore_reinit_error=True)
    except (OSError, RuntimeError, ValueError) as error:
        where = f"at RAY_ADDRESS={address}" if address else "here"
        reason = " ".join(str(error).partition(". ")[0].split())
        raise ConfigError(
            f"parallel.launcher=ray: no Ray cluster can be joined {where} ({reason}). `ray start --head` starts one, "
            "and RAY_ADDRESS names another"
        ) from error


def _require_machines(config: EngineConfig, bundles: Sequence[dict[str, int]]) -> None:
    """Raises ConfigError where there are too few, or too small ones, whoever uses them."""
    machines = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    found = 0
    for needs in sorted(bundles, key=lambda needs: needs["CPU"], reverse=True):
        fitting = [has for has in machines if all(has.get(name, 0) >= wanted for name, wanted in needs.items())]
        if fitting:
            found += 1
            for name, wanted in needs.items():
                fitting[0][name] -= wanted
    if found < len(bundles):
        no_gpu = any("GPU" in needs for needs in bundles) and not ray.cluster_resources().get("GPU")
        raise ConfigError(
            f"{_asked(config, bundles)}, and the cluster{', which has no GPU,' if no_gpu else ''} has room for "
            f"{found} of {len(bundles)}: ask for fewer, or add machines{', or set model.device=cpu' if no_gpu else ''}"
        )


def _asked(config: EngineConfig, bundles: Sequence[dict[str, int]]) -> str:
    largest = max(bundles, key=lambda needs: needs["CPU"])
    each = " and ".join(f"{wanted} {name}s" for name, wanted in largest.items())
    return f"parallel.launcher=ray: {engines_asked(config)} engines, of which one takes {each} of one machine"


def _needs(config: EngineConfig) -> dict[str, int]:
    """Of one engine: its bundle."""
    ranks = config.parallel.ranks
    on_cpu = needs_no_gpu(config)
    if config.model.device is Device.auto and not ray.cluster_resources().get("GPU"):
        on_cpu = True
    return {"CPU": ranks} if on_cpu else {"CPU": ranks, "GPU": ranks}
