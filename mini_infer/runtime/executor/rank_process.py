"""The process of a rank other than 0: rank 0's half, and its own.

It does what rank 0 does: the same start, with a worker of its own, and then every plan that comes through the ring. It
ends with rank 0's process, however that one ends, and what it has to say of its own end is in a memory file.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mini_infer
from mini_infer.core.config import EngineConfig
from mini_infer.core.logs import install
from mini_infer.runtime.executor.plan_ring import Call, PlanRing, RingFiles

if TYPE_CHECKING:
    from mini_infer.runtime.worker.model_runner import Runner

AWAKE_S = 0.01  # with a GPU, that a rank looks for the next plan before it sleeps
DUMP_S = 1.0  # for a rank that hangs to say where


class RankProcess:
    """Another rank, as rank 0 sees it."""

    def __init__(self, rank: int, config: EngineConfig, port: int, ring: RingFiles) -> None:
        self.rank = rank
        self._story = os.memfd_create(f"mini-infer-rank-{rank}")
        weakref.finalize(self, os.close, self._story)
        given = [ring.memory, *ring.events, self._story]
        root = str(Path(mini_infer.__file__).parents[1])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            pass_fds=given,
            env={**os.environ, "PYTHONPATH": path},
        )
        about = {
            "config": config.to_dict(),
            "rank": rank,
            "port": port,
            "ring": ring,
            "story": self._story,
        }
        assert self._process.stdin is not None
        self._stdin = self._process.stdin  # its end tells the process that this one is gone
        with contextlib.suppress(BrokenPipeError):  # it has died already
            self._stdin.write(json.dumps(about).encode() + b"\n")
            self._stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ending(self) -> str | None:
        """How it ended and what it said, None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"rank {self.rank} (process {self.pid}) {how}{self._said()}"

    def where(self) -> str:
        """Ends it, and says where it was."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(DUMP_S)
        said = self._said()
        self.stop()
        return said

    def _said(self) -> str:
        said = os.pread(self._story, 2**16, 0).decode(errors="replace").strip()
        return f":\n{said}" if said else ""

    def stop(self) -> None:
        """Returns when it is gone."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        self._process.kill()
        self._process.wait()


def main() -> None:
    """The rank's half. stdin holds a line of settings and no end."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # a terminal's Ctrl-C is for rank 0, which decides
        signal.signal(ignored, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:
        return  # rank 0 has ended meanwhile
    install()
    about = json.loads(line)
    faulthandler.enable(os.dup(about["story"]))
    threading.Thread(target=_exit_with_rank_0, daemon=True).start()
    try:
        _serve(about)
    except BaseException:
        os.write(about["story"], traceback.format_exc().encode())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # nothing that still waits for other ranks is waited for


def _exit_with_rank_0() -> None:
    """Rank 0 never writes again: a read returns when its end of the pipe is gone, however it ended."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(0)


def _serve(about: dict[str, Any]) -> None:
    import torch  # it takes seconds, in which rank 0 may end

    from mini_infer.modeling.loader import resolve_device
    from mini_infer.parallel.all_reduce import join_store
    from mini_infer.parallel.context import ParallelContext
    from mini_infer.runtime.executor.local import LocalExecutor

    config, rank = EngineConfig.from_dict(about["config"]), about["rank"]
    store, parallel = join_store(about["port"]), ParallelContext.of(rank, config.parallel)
    device = resolve_device(config.model, parallel)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    store.set(f"rank {rank} is there", "")
    executor = LocalExecutor(config, parallel.connected(store, device))
    ring = PlanRing(RingFiles(*about["ring"]), rank, parallel.num_ranks, awake_s=AWAKE_S if on_gpu else 0.0)
    follow(executor.runner, ring, parallel.stages)


def follow(runner: Runner, ring: PlanRing, stages: int) -> None:
    """Runs what rank 0 runs. A step is collected when as many more are launched as there are stages, as rank 0 does
    where steps overlap."""
    launched: deque[tuple[int, Any]] = deque()
    ended: set[int] = set()  # transfers, of which rank 0 has not said that they have ended there
    while True:
        number, record = ring.receive()
        if isinstance(record, Call):
            ring.report(number, record.of(runner))
            continue
        plan, ended_there = record
        waits = False
        while not ended.issuperset(ended_there):  # the plan may write where these read
            ended.update(runner.end_transfers(waits))
            waits = True
        ended.difference_update(ended_there)
        launched.append((number, runner.launch(plan)))
        if len(launched) > stages:
            number, step = launched.popleft()
            result = runner.collect(step)
            ended.update(result.transfers_done)
            ring.report(number, tokens_sum(result.tokens))


def tokens_sum(tokens: Sequence[Sequence[int]]) -> int:
    """A hash of a step's tokens, the same in every process."""
    return hash(tuple([token for row in tokens for token in row]))


if __name__ == "__main__":
    main()
