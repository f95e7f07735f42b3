"""An executor over ranks: processes that share a model, each with a worker of its own. Rank 0 is this process.

    EngineCore -> RankedRunner.launch(plan) -- PlanRing --> rank 1: Runner.launch(plan) --> tokens
                                 |                     '--> rank 2: Runner.launch(plan) --> tokens
                                 '-> Runner.launch(plan) --> tokens, which are the ones that count

Logits are whole on every rank and randomness is a hash, so all of them sample the same tokens, and nothing comes back
but a hash of these. Whatever is wrong with one rank ends the engine: the others wait for it in the middle of a sum.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import MiniInferError, RankError
from mini_infer.core.plan import StepPlan, StepResult
from mini_infer.modeling.loader import resolve_device
from mini_infer.parallel.all_reduce import Collectives, open_store, wait_for
from mini_infer.parallel.context import ParallelContext
from mini_infer.runtime.executor.local import LocalExecutor
from mini_infer.runtime.executor.plan_ring import PlanRing, RingFiles
from mini_infer.runtime.executor.rank_process import RankProcess, tokens_sum
from mini_infer.runtime.graphs.step_graphs import StepGraphs
from mini_infer.runtime.worker.model_runner import LaunchedStep, Runner

LOOK_S = 0.1  # between two looks at the other ranks
SAY_S = 2.0  # that a rank which fails has to say so, once others have noticed
_WAITING = "all_reduce.py"  # in the trace of a rank that waits for others


class RanksExecutor(LocalExecutor):
    def __init__(self, config: EngineConfig) -> None:
        """Raises RankError where another rank cannot start, and else as LocalExecutor."""
        size = config.parallel.tensor
        device = resolve_device(config.model, ParallelContext(0, size))
        store = open_store()
        files = RingFiles.create(size)
        self._ranks = ranks = Ranks(config, store.port, files)
        self._end = weakref.finalize(self, ranks.stop)
        with ranks.blamed():
            for rank in range(1, size):
                wait_for(store, f"rank {rank} is there", ranks.require_alive)
            ranks.collectives = Collectives(store, 0, size, device)
            super().__init__(config, ParallelContext(0, size, ranks.collectives))
        ranks.watch()
        runner: Any = RankedRunner(self.runner, PlanRing(files, 0, size), ranks)
        self.runner = self._worker.runner = runner

    def close(self) -> None:
        self._end()


class Ranks:
    """The other ranks: started, watched, blamed and ended."""

    def __init__(self, config: EngineConfig, port: int, files: RingFiles) -> None:
        self.collectives: Collectives | None = None
        self._timeout_s = config.parallel.timeout_s
        weakref.finalize(self, files.close)  # who sends plans knows this one, too
        self._busy_since: float | None = None  # of rank 0, which is in a step
        self._failure: str | None = None
        self._finding = threading.Lock()
        self._stopping = threading.Event()
        size = config.parallel.tensor
        self.processes = [RankProcess(rank, size, config, port, files) for rank in range(1, size)]

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """What goes wrong inside is the fault of a rank that has ended, where one has; and the end of the engine."""
        self._require_working()
        self._busy_since = time.monotonic()
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, MiniInferError):
                self._listen()  # it may be that nobody is at the other end
            if self._failure is None:
                self._failure = f"rank 0 failed: {type(error).__name__}: {error}"
                self.stop()
                raise
            self.stop()
            raise RankError(self._failure) from error
        finally:
            self._busy_since = None
        self._require_working()  # a device that was told to stop waiting has computed nothing

    def fail(self, failure: str) -> None:
        """Ends the engine. Raises RankError."""
        self._failure = failure
        self.stop()
        raise RankError(failure)

    def require_alive(self) -> None:
        """Raises RankError where a rank has ended."""
        for process in self.processes:
            if (ending := process.ending()) is not None:
                self.fail(ending)

    def _require_working(self) -> None:
        if self._failure is not None:
            raise RankError(self._failure)

    def _listen(self) -> None:
        """Gives a rank that has failed the time to say so. Who fails first may bring others down, who end later."""
        until = time.monotonic() + SAY_S
        while not self._find_ended() and time.monotonic() < until:
            time.sleep(LOOK_S / 10)

    def _find_ended(self) -> bool:
        """Whether the failure is known. Of several ranks that have ended, who failed in a sum was brought down by
        somebody else."""
        with self._finding:
            if self._failure is None and any(process.ending() for process in self.processes):
                time.sleep(LOOK_S)
                ended = [ending for process in self.processes if (ending := process.ending()) is not None]
                self._failure = min(ended, key=lambda ending: _WAITING in ending and "was killed" not in ending)
            return self._failure is not None

    # --- a thread of rank 0 ---------------------------------------------------------------------------------------

    def watch(self) -> None:
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._stopping.wait(LOOK_S):
            since = self._busy_since
            if since is None:
                continue
            if self._find_ended() or (time.monotonic() - since > self._timeout_s and self._find_hanging()):
                self._unblock()
                return

    def _find_hanging(self) -> bool:
        """Ends the other ranks. Who is in no sum is the one that the others wait for."""
        with self._finding:
            places = {process: process.where() for process in self.processes}
            culprit = min(places, key=lambda process: _WAITING in places[process])
            who = f"rank {culprit.rank} (process {culprit.pid}) hangs"
            if _WAITING in places[culprit]:
                who = f"rank 0 or its device hangs; rank {culprit.rank} waits"
            where = places[culprit] or ", and does not say where"
            self._failure = f"a step took longer than parallel.timeout_s={self._timeout_s:g}: {who}{where}"
        return True

    def _unblock(self) -> None:
        """Ends rank 0's waiting: on a CPU when there is nobody at the other end, on a GPU by NCCL's abort."""
        for process in self.processes:
            if process.ending() is None:
                process.stop()
        if self.collectives is not None:
            self.collectives.abort()

    def stop(self) -> None:
        """Returns when no rank is left."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        for process in self.processes:
            process.stop()


class RankedRunner:
    """Rank 0's Runner, as far as others use it: whatever is done there is done on all ranks."""

    def __init__(self, runner: Runner, ring: PlanRing, ranks: Ranks) -> None:
        self._runner, self._ring, self._ranks = runner, ring, ranks
        self._transfers_done = 0
        self._sums: deque[tuple[int, int]] = deque()  # (record, hash of its tokens), until all have reported theirs

    def launch(self, plan: StepPlan) -> LaunchedStep:
        with self._ranks.blamed():
            number = self._ring.send((plan, self._transfers_done))
            return self._runner.launch(plan)._replace(number=number)

    def force_token(self, req_index: int, position: int, token_id: int) -> None:
        self._ring.send(((req_index, position, token_id), self._transfers_done))
        self._runner.force_token(req_index, position, token_id)

    @property
    def graphs(self) -> StepGraphs:
        return self._runner.graphs

    def collect(self, launched: LaunchedStep) -> StepResult:
        with self._ranks.blamed():
            result = self._runner.collect(launched)
        self._transfers_done += len(result.transfers_done)
        self._sums.append((launched.number, tokens_sum(result.tokens)))
        self._compare()
        return result

    def _compare(self) -> None:
        while self._sums:
            number, own = self._sums[0]
            for process in self._ranks.processes:
                reported = self._ring.reported(process.rank, number)
                if reported is None:
                    if self._sums[-1][0] - number < 8:  # steps; it may still be at it
                        return
                elif reported != own:
                    self._ranks.fail(
                        f"rank {process.rank} (process {process.pid}) disagrees: it sampled other tokens than rank 0 "
                        f"in step {number}. Its device or its memory may be faulty, or its model's files have changed"
                    )
            self._sums.popleft()
