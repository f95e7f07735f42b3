"""Several engines of a peer side by side, each in a process and on GPUs of its own, that take requests in turns."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from experiments.lab.measure.kinds import Kind, ProcessSettings
from experiments.lab.measure.traces import Served
from experiments.lab.peers.base import PeerAbsent, PeerError, why_lost
from experiments.lab.peers.pool import require_device, settled
from experiments.lab.peers.process import PeerProcess, ask_all
from experiments.lab.workloads import Item
from mini_infer.core.config import EngineConfig
from mini_infer.serving.processes.gpus import count_gpus, environments


class PeerReplicas:
    """As many as the config's parallel.replicas. They start while others work, and `ready` waits. One that is lost
    takes the others with it."""

    def __init__(self, kind: Kind, config: EngineConfig, settings: ProcessSettings) -> None:
        """Raises ConfigError where there are too few GPUs."""
        self.about: Mapping[str, Any] = {}  # version and settings, once they are ready
        self.absent = ""  # why they are not asked, or not any more; empty while they are
        self._each: list[PeerProcess] = []
        options: dict[str, Any] = {"wait": False, "threads": torch.get_num_threads()}
        with self._asked():
            require_device(kind, config.model.device)
            each = zip(config.parallel.of_engines, environments(config, os.environ, count_gpus), strict=True)
            for parallel, environment in each:
                own, of = settled(replace(config, parallel=parallel)), (kind.label, kind.can.module)
                self._each.append(PeerProcess(*of, own, settings, environment=environment, **options))

    def ready(self) -> None:
        """Raises ConfigError where they cannot work with these settings."""
        with self._asked():
            for process in self._each:
                process.ready()
                self.about = {**process.about, "engines": len(self._each)}

    def serve(self, items: Sequence[Item], concurrency: int) -> Served | None:
        """One item after the other goes to the next engine, each of which begins when all of its items are there: some
        tens of milliseconds apart. All times are of one clock. `concurrency` is of each; no item may follow another.
        None where they are absent."""
        number, found = len(self._each), list[Served]()
        with self._asked():
            asked = [{"items": tuple(items[first::number]), "concurrency": concurrency} for first in range(number)]
            found = ask_all(self._each, "serve", "serve", asked)
        if not found:
            return None
        own = [iter(served.requests) for served in found]
        traces = tuple(next(own[index % number]) for index in range(len(items)))
        return Served(traces, min(served.start for served in found), max(served.end for served in found))

    def close(self) -> None:
        while self._each:
            self._each.pop().close()

    @contextmanager
    def _asked(self) -> Iterator[None]:
        with ExitStack() as failed:
            failed.callback(self.close)
            try:
                yield
                failed.pop_all()
            except (PeerAbsent, PeerError) as lost:
                self.absent = why_lost(lost)
