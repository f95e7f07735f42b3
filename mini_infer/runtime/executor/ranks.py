"""An executor over ranks: processes that share a model, each with a worker of its own. Rank 0 is this process.

    EngineCore -> RankedRunner.launch(plan) -- PlanRing --> rank 1: Runner.launch(plan) --> tokens
                                 |                     '--> rank 2: Runner.launch(plan) --> tokens
                                 '-> Runner.launch(plan) --> tokens, which are the ones that count

Logits are whole on every rank and randomness is a hash, so all of them sample the same tokens, and nothing comes back
but a hash of these. Whatever is wrong with one rank ends the engine: the others wait for it in the middle of a sum.

In a pipeline rank 0 is of the last stage, which samples, and where everything that a step results in is. Ranks of the
stages before compute later steps meanwhile (runtime/worker/stage.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import MiniInferError, ModelError, RankError
from mini_infer.core.plan import StepPlan, StepResult
from mini_infer.modeling.loader import resolve_device
from mini_infer.parallel.all_reduce import listen, open_store, wait_for
from mini_infer.parallel.context import ParallelContext
from mini_infer.runtime.executor.local import LocalExecutor
from mini_infer.runtime.executor.plan_ring import KEPT, Call, PlanRing, RingFiles
from mini_infer.runtime.executor.rank_process import RankProcess, tokens_sum
from mini_infer.runtime.graphs.step_graphs import StepGraphs
from mini_infer.runtime.worker.model_runner import LaunchedStep, Runner
from mini_infer.transfer.pusher import LOST

T = TypeVar("T")

LOOK_S = 0.1  # between two looks at the other ranks
HEAR_S = 50e-6  # between two looks whether a rank has done what it was told
ABORT_S = 10.0  # that a group may take to end
SAY_S = 2.0  # that a rank which fails has to say so, once others have noticed
# In the trace of a rank that waits for others.
_WAITING = ("all_reduce.py", "pipeline.py", "plan_ring.py", "streams.py")


def _waits(trace: str) -> bool:
    return any(file in trace for file in _WAITING)


class RanksExecutor(LocalExecutor):
    def __init__(self, config: EngineConfig) -> None:
        """Raises RankError where another rank cannot start, and else as LocalExecutor."""
        size, parallel = config.parallel.ranks, ParallelContext.of(0, config.parallel)
        device = resolve_device(config.model, parallel)
        listener = listen()
        files = RingFiles.create(size)
        self._ranks = ranks = Ranks(config, listener.getsockname()[1], files)
        self._end = weakref.finalize(self, ranks.stop)
        with ranks.blamed():
            store = open_store(listener)
            ranks.watch()
            for rank in range(1, size):
                wait_for(store, f"rank {rank} is there", ranks.require_alive)
            ranks.parallel = ranks.while_alive(lambda: parallel.connected(store, device))
            super().__init__(config, ranks.parallel)
        ranks.started = True
        late = parallel.stages if device.type == "cpu" and parallel.stages > 1 else 0
        self._ranked = RankedRunner(self.runner, PlanRing(files, 0, size), ranks, late)
        runner: Any = self._ranked
        self.runner = self._worker.runner = runner
        ranks.release = self._worker.release_graphs

    def load_adapter(self, path: str) -> str:
        assert self._worker.adapters is not None, "it was read"
        key, _ = self._worker.adapters.reading[path].result()  # what is wrong with layers that are here comes first
        known = key in self._worker.adapters
        if not self.runner.load_adapter(path, key):
            if not known:
                self.runner.forget_adapter(key)
            raise ModelError(
                f"adapter {path} does not fit layers that ranks of other stages have, or another rank cannot read what "
                "this one can: their log, above, says which"
            )
        return key

    def require_alive(self) -> None:
        self._ranks.require_alive()

    def reserve_memory(self) -> None:
        with self._ranked.not_compared():  # such steps attend to what no request has written, and ranks have that apart
            super().reserve_memory()

    def close(self) -> None:
        if self._end.alive:
            with contextlib.suppress(RankError):  # those of a rank that has ended have ended with it
                super().close()
        self._end()


class Ranks:
    """The other ranks: started, watched, blamed and ended."""

    def __init__(self, config: EngineConfig, port: int, files: RingFiles) -> None:
        self.parallel: ParallelContext | None = None  # of rank 0, once all are connected
        self.started = False
        self.release: Callable[[], None] = lambda: None  # rank 0's graphs, once it has any
        self._aborts: list[threading.Thread] = []
        self._limits = config.parallel
        weakref.finalize(self, files.close)  # who sends plans knows this one, too
        self._busy_since: float | None = None  # of rank 0, which is in a step
        self._failure: str | None = None
        self._finding = threading.Lock()
        self._stopping = threading.Event()
        self.processes = [RankProcess(rank, config, port, files) for rank in range(1, config.parallel.ranks)]
        of_stage = config.parallel.ranks // config.parallel.pipeline
        self.of_last_stage = self.processes[: of_stage - 1]  # they sample what rank 0 does

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
        if self.find_ended():
            self.stop()
            self._require_working()

    def while_alive(self, work: Callable[[], T]) -> T:
        """Its result. Where a rank ends that it waits for without end, it is left to itself. Raises RankError then."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        while not wait([future], LOOK_S).done:
            self.require_alive()
        return future.result()

    def _require_working(self) -> None:
        if self._failure is not None:
            raise RankError(self._failure)

    def _listen(self) -> None:
        """Gives a rank that has failed the time to say so. Who fails first may bring others down, who end later."""
        until = time.monotonic() + SAY_S
        while not self.find_ended() and time.monotonic() < until:
            time.sleep(LOOK_S / 10)

    def find_ended(self) -> bool:
        """Whether the failure is known. Of several ranks that have ended, who failed in a sum was brought down by
        somebody else."""
        with self._finding:
            if self._failure is None and any(process.ending() for process in self.processes):
                time.sleep(LOOK_S)
                ended = [ending for process in self.processes if (ending := process.ending()) is not None]
                self._failure = min(ended, key=lambda ending: _waits(ending) and "was killed" not in ending)
            return self._failure is not None

    # --- a thread of rank 0 ---------------------------------------------------------------------------------------

    def watch(self) -> None:
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._stopping.wait(LOOK_S):
            if not self.started and any(process.ending() for process in self.processes):
                # A device may wait for a rank that has ended. The host finds out by itself, once it does not.
                if not self._stopping.wait(SAY_S):
                    self._abort()
                return
            what, limit_s = self._limit  # first: once the start has ended, the time since is another one
            since = self._busy_since
            if since is None:
                continue
            if (self.started and self.find_ended()) or time.monotonic() - since > limit_s:
                self._find_hanging(f"{what}={limit_s:g}, which may be raised")
                self._unblock()
                return

    @property
    def _limit(self) -> tuple[str, float]:
        """What has taken too long after so many seconds."""
        if self.started:
            return "a step took longer than parallel.timeout_s", self._limits.timeout_s
        return "the start took longer than parallel.start_timeout_s", self._limits.start_timeout_s

    def _find_hanging(self, what: str) -> None:
        """Ends the other ranks, unless the failure is known. Who is in no sum is the one that the others wait for."""
        with self._finding:
            if self._failure is not None:
                return
            places = {process: process.where() for process in self.processes}
            culprit = min(places, key=lambda process: _waits(places[process]))
            who = f"rank {culprit.rank} (process {culprit.pid}) hangs"
            if _waits(places[culprit]):
                who = f"rank 0 or its device hangs; rank {culprit.rank} waits"
            where = places[culprit] or ", and does not say where"
            self._failure = f"{what}: {who}{where}"

    def _unblock(self) -> None:
        """Ends rank 0's waiting: on a CPU when there is nobody at the other end, on a GPU by NCCL's abort."""
        for process in self.processes:
            if process.ending() is None:
                process.stop()
        self._abort()

    def _abort(self) -> None:
        with self._finding:
            parallel, self.parallel = self.parallel, None
            if parallel is not None:
                self._aborts = parallel.abort()

    def stop(self) -> None:
        """Returns when no rank is left, and nothing on rank 0's device that waits for one."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        for process in self.processes:
            process.stop()
        self._abort()
        self.release()
        for abort in self._aborts:
            if abort.ident is not None:
                abort.join(ABORT_S)


@dataclass(eq=False)
class RankedStep:
    """A step that the other ranks know of."""

    plan: StepPlan
    number: int  # of the record that told the others
    launched: LaunchedStep | None = None  # None: not here yet


class RankedPusher:
    """Every rank's Pusher, as a Sender uses one.

    Attributes:
        seconds: that the copies of the transfer closed last took where they took longest; bytes are of all ranks.
    """

    def __init__(self, everywhere: Callable[..., list[int]]) -> None:
        self._everywhere = everywhere
        self.seconds = 0.0

    def connect(self, link: int, memories: Sequence[Sequence[Any]]) -> bool:
        return all(self._everywhere("pusher.connect", link, memories))

    def disconnect(self, link: int) -> None:
        self._everywhere("pusher.disconnect", link)

    def open(self, transfer_id: int, link: int, theirs: int) -> None:
        self._everywhere("pusher.open", transfer_id, link, theirs)

    def close(self, transfer_id: int) -> int:
        every = self._everywhere("pusher.close", transfer_id)
        if LOST in every:
            return LOST
        self.seconds = max(self._everywhere("pusher.took_ns")) / 1e9
        return sum(every)


class RankedRunner:
    """Rank 0's Runner, as far as others use it: whatever is done there is done on all ranks.

    `late` steps are told to the others, and not run here before they are collected: on a CPU running one takes this
    thread, which has to plan the next one for the stages before. 0: each is launched at once.
    """

    def __init__(self, runner: Runner, ring: PlanRing, ranks: Ranks, late: int = 0) -> None:
        self._runner, self._ring, self._ranks = runner, ring, ranks
        self._most_late = late
        self._late: deque[RankedStep] = deque()  # oldest first; some of them may have been dropped
        self._ended: list[int] = []  # transfers, of which the others have not been told
        self._reads: dict[int, list[int]] = {}  # transfers that read files -> the host blocks, in the order of a prompt
        self._sums: deque[tuple[int, int]] = deque()  # (record, hash of its tokens), until all have reported theirs
        self._compared = True

    def launch(self, plan: StepPlan) -> RankedStep:
        with self._ranks.blamed():
            ended, self._ended = tuple(self._ended), []
            step = RankedStep(plan, self._ring.send((plan, ended)))
            self._late.append(step)
            for transfer in plan.transfers:
                if transfer.files and not transfer.to_host:
                    self._reads[transfer.transfer_id] = [block for block, _ in transfer.files]
            self._run(len(self._late) - self._most_late)
        return step

    def _run(self, count: int) -> None:
        for _ in range(count):
            step = self._late.popleft()
            step.launched = self._runner.launch(step.plan)

    @property
    def logits(self) -> Tensor | None:
        return self._runner.logits

    def force_token(self, req_index: int, position: int, token_id: int) -> None:
        self.everywhere("force_token", req_index, position, token_id)

    def read_adapter(self, path: str) -> None:
        self.everywhere("read_adapter", path)

    def load_adapter(self, path: str, key: str) -> bool:
        return all(self.everywhere("load_adapter", path, key))

    def forget_adapter(self, key: str) -> None:
        self.everywhere("forget_adapter", key)

    def close(self) -> None:
        """This rank's, too, where another one has ended."""
        try:
            if self._runner.transfers is not None:
                self.everywhere("close")
        finally:
            self._runner.close()

    def everywhere(self, method: str, *arguments: Any) -> list[int]:
        """Calls a method of Runner, or of a part of it, on every rank, behind the steps launched so far. What it gives
        on each, a number or None, which is 0."""
        with self._ranks.blamed():
            self._run(len(self._late))
            call = Call(method, arguments)
            number = self._ring.send(call)
            own = call.of(self._runner)
            return [own, *(self._hear(process.rank, number) for process in self._ranks.processes)]

    def _hear(self, rank: int, number: int) -> int:
        while (told := self._ring.reported(rank, number)) is None:
            if self._ranks.find_ended():
                raise ConnectionError(f"rank {rank} has ended")
            time.sleep(HEAR_S)
        return told

    @property
    def pusher(self) -> RankedPusher | None:
        return None if self._runner.pusher is None else RankedPusher(self.everywhere)

    @property
    def graphs(self) -> StepGraphs:
        return self._runner.graphs

    def collect(self, step: RankedStep) -> StepResult:
        with self._ranks.blamed():
            if step.launched is None:
                self._run(1 + self._late.index(step))
            assert step.launched is not None, "it has just been run"
            result = self._runner.collect(step.launched)
        failed = dict(result.failed)
        for number in result.transfers_done:
            if (blocks := self._reads.pop(number, None)) is not None:
                # Each rank has read its part of every block: there is what is there on all of them.
                failed[number] = blocks[min(self.everywhere("transfers.num_read", number, blocks)) :]
        self._ended += result.transfers_done
        if self._compared:
            self._sums.append((step.number, tokens_sum(result.tokens)))
            self._compare()
        return result._replace(failed={number: blocks for number, blocks in failed.items() if blocks})

    @contextlib.contextmanager
    def not_compared(self) -> Iterator[None]:
        """Inside, ranks may sample different tokens."""
        self._compared = False
        try:
            yield
        finally:
            self._compared = True

    def _compare(self) -> None:
        while self._sums:
            number, own = self._sums[0]
            for process in self._ranks.of_last_stage:
                reported = self._ring.reported(process.rank, number)
                if reported is None:
                    if self._sums[-1][0] - number < KEPT // 2:  # steps; it may still be at it
                        return
                elif reported != own:
                    self._ranks.fail(
                        f"rank {process.rank} (process {process.pid}) disagrees: it sampled other tokens than rank 0 "
                        f"in step {number}. Its device or its memory may be faulty, or its model's files have changed"
                    )
            self._sums.popleft()
