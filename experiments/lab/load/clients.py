"""All processes of the load client, as the one that measures sees them; where requests go, and what they look like."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from experiments.lab.measure import hardware
from experiments.lab.measure.schedule import lead_s
from experiments.lab.measure.traces import HostUse, RequestTrace, Served
from experiments.lab.peers.process import PeerProcess
from experiments.lab.peers.settings import ClientSettings
from experiments.lab.workloads import Item
from mini_infer.core.config import EngineConfig

MODULE = "experiments.lab.load.client"
STREAMS_EACH = 64  # of a process, before there is another one
LEAD_S = 0.05  # from the word to go to the start, which all processes share

# Of every request. A model without a tokenizer has no text to tell: with ids each of its tokens has an event anyway.
ASKED = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


@dataclass(frozen=True)
class Target:
    host: str
    port: int
    path: str  # of the completions
    model: str
    ours: bool = False  # a server that knows what others may not

    def request(self, prompt: Sequence[int], item: Item, salt: str) -> bytes:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": item.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **ASKED,
            **({"return_spans": True} if self.ours else {}),
            **({"priority": item.priority} if item.priority else {}),
            **({"cache_salt": salt} if salt else {}),
        }
        data = json.dumps(body, separators=(",", ":")).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


@dataclass(frozen=True)
class Share:
    """What one process sends: indices of the pass's items, those items, and its places of the closed loop."""

    indices: tuple[int, ...]
    items: tuple[Item, ...]
    places: int


class Clients:
    def __init__(self, target: Target, settings: ClientSettings) -> None:
        self._target = target
        self._settings = settings
        self._processes: list[PeerProcess] = []

    def serve(self, items: Sequence[Item], concurrency: int, salt: str) -> Served:
        """Raises PeerError where a process fails. A request that fails is in its trace."""
        shares = split(items, concurrency, self._count(min(concurrency, len(items))))
        while len(self._processes) < len(shares):
            self._processes.append(self._start())
        processes = self._processes[: len(shares)]
        self._together(
            [
                partial(process.call, "connect", "prepare", items=share.items, salt=salt, places=share.places)
                for process, share in zip(processes, shares, strict=True)
            ]
        )
        start = time.perf_counter() + LEAD_S
        self._together([partial(process.call, "serve", "go", start=start) for process in processes])
        took = time.perf_counter() - start - lead_s(items)  # by this clock, whatever they say of theirs
        replies = self._together([partial(process.call, "read the answers", "outcome") for process in processes])
        return replace(_joined(shares, replies, start), outside_s=took)

    def close(self) -> None:
        while self._processes:
            self._processes.pop().close()

    def _count(self, in_flight: int) -> int:
        """Processes for so many streams; without a setting never more than half of the CPUs, which others need."""
        wanted = self._settings.processes
        if wanted is None:
            wanted = min(math.ceil(in_flight / STREAMS_EACH), max(1, hardware.cores() // 2))
        return min(wanted, in_flight)

    def _start(self) -> PeerProcess:
        return PeerProcess("the load client", MODULE, EngineConfig(), self._settings, target=self._target)

    def _together(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """All at once. What ends it early, Ctrl-C included, ends the processes, which their threads notice."""
        with ThreadPoolExecutor(len(calls)) as pool:
            waiting = [pool.submit(call) for call in calls]
            try:
                return [future.result() for future in waiting]
            except BaseException:
                self.close()
                raise


def split(items: Sequence[Item], concurrency: int, processes: int) -> list[Share]:
    """Deals requests out in turns, those of one conversation together, and the places evenly. A process keeps its own
    places filled: at the end of a closed loop one may have none left to send while another still has."""
    owner: list[int] = []
    first = 0
    for item in items:
        if item.follows is None:
            owner.append(first % processes)
            first += 1
        else:
            owner.append(owner[item.follows])
    shares = []
    for process in range(processes):
        indices = tuple(index for index, its in enumerate(owner) if its == process)
        new = {index: position for position, index in enumerate(indices)}
        own = tuple(
            replace(items[i], follows=None if (before := items[i].follows) is None else new[before]) for i in indices
        )
        places = concurrency // processes + (process < concurrency % processes)
        shares.append(Share(indices, own, places))
    return [share for share in shares if share.items]


def _joined(shares: Sequence[Share], replies: Sequence[tuple[Served, float, bool]], start: float) -> Served:
    traces: dict[int, RequestTrace] = {}
    parts, cpu, tells_cached = zip(*replies, strict=True)
    for share, part in zip(shares, parts, strict=True):
        traces |= {
            index: replace(trace, request_id=f"{trace.name or 'request'}-{index}")
            for index, trace in zip(share.indices, part.requests, strict=True)
        }
    return Served(
        tuple(traces[index] for index in sorted(traces)),
        min((trace.arrival for trace in traces.values()), default=start),
        max(part.end for part in parts),
        in_flight_s=sum(part.in_flight_s or 0.0 for part in parts),
        host=HostUse(
            client_s=sum(cpu),
            client_busy=max(used / part.seconds for used, part in zip(cpu, parts, strict=True)),
            tells_cached=all(tells_cached),
        ),
    )
