"""Requests on their way into the engine: how many may wait, counted where they wait, and so exactly, whichever process
they come from; and those with a new grammar, which wait until that is compiled. Nobody else does."""

from __future__ import annotations

import contextlib
import hashlib
import math
import socket
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from mini_infer.core.errors import RequestError
from mini_infer.core.sampling_params import Grammar
from mini_infer.runtime.scheduler.scheduler import Scheduler
from mini_infer.runtime.text.grammar import CompiledGrammar, GrammarCompiler
from mini_infer.serving.link.connection import Connection
from mini_infer.serving.link.wire import Add, Refused
from mini_infer.serving.processes.grammar_trials import GrammarTrials, Trial

NEW_GRAMMARS = 64  # that may wait for their compilation, each with a thread
REFUSED_KEPT = 1024  # grammars whose failure is known
RATE_WINDOW_S = 30.0
LONGEST_RETRY_S = 60.0


class QueueBound:
    """
    Args:
        max_queued: completions that may wait beyond those that run.
        max_running: completions that can run at once, if the KV memory suffices.
    """

    def __init__(self, max_queued: int, max_running: int) -> None:
        self._max_queued = max_queued
        self._max_running = max_running
        self._left_over = False  # the last step could not take in everybody
        self._finish_times: deque[float] = deque(maxlen=256)

    def stepped(self, scheduler: Scheduler) -> None:
        self._left_over = scheduler.num_waiting + scheduler.num_swapped > 0

    def finished(self, now: float) -> None:
        """A completion has ended."""
        self._finish_times.append(now)

    def refusal(self, number: int, num_completions: int, scheduler: Scheduler, num_newcomers: int) -> Refused | None:
        """Why a request must come again later; None where it may stay.

        Args:
            number: the request's, for the answer.
            num_newcomers: completions that the scheduler does not know yet.
        """
        queued = scheduler.num_waiting + scheduler.num_swapped + num_newcomers
        unfinished = scheduler.num_unfinished + num_newcomers
        if self._left_over and queued:
            waiting = would_wait = queued
        else:  # who has come since the last step finds a place in the next one, while there are any
            would_wait = unfinished - self._max_running
            waiting = max(would_wait, 0)
        # A request for more completions than may ever wait is served when nobody else is there.
        if would_wait + num_completions <= self._max_queued or not unfinished:
            return None
        message = f"{waiting} requests wait, and {self._max_queued} may: try again later"
        return Refused(number, message, retry_after=self._retry_after(waiting))

    def _retry_after(self, waiting: int) -> float:
        """Seconds in which about as many as wait now will have been served."""
        now = time.perf_counter()
        recent = [moment for moment in self._finish_times if now - moment < RATE_WINDOW_S]
        if not recent:
            return 1.0
        per_second = len(recent) / max(now - recent[0], 0.001)
        return float(min(max(1, math.ceil(waiting / per_second)), LONGEST_RETRY_S))


class Owner(NamedTuple):
    connection: Connection
    number: int


class Newcomer(NamedTuple):
    owner: Owner
    add: Add
    failure: Exception | None  # what preparing it came to
    grammar: CompiledGrammar | None  # held until the engine has the request: others may push it out


@dataclass
class _Preparation:
    trial: Trial
    waiting: dict[Owner, Add] = field(default_factory=dict)
    failure: Exception | None = None
    compiled: CompiledGrammar | None = None


class Newcomers:
    """`grammars` are LLMEngine.grammars."""

    def __init__(self, grammars: GrammarCompiler) -> None:
        self._grammars = grammars
        self._trials = GrammarTrials(grammars)
        self._ready: dict[Owner, Newcomer] = {}  # oldest first
        self._preparing: dict[Grammar, _Preparation] = {}
        self._waits_for: dict[Owner, Grammar] = {}
        self._refused: dict[bytes, Exception] = {}  # by the grammar's digest
        self._prepared: deque[tuple[Grammar, _Preparation]] = deque()  # the threads append; that needs no lock
        self._threads = ThreadPoolExecutor(NEW_GRAMMARS, "grammar")
        self.wakes, self._waker = socket.socketpair()  # readable when a thread is done: for `select`
        self.wakes.setblocking(False)
        self._waker.setblocking(False)
        self.num_completions = 0

    def __bool__(self) -> bool:
        """Whether `pop` has one."""
        return bool(self._ready)

    def put(self, owner: Owner, add: Add) -> bool:
        """False where too many new grammars wait already."""
        given = add.params.get("grammar")
        preparation, failure, compiled = None, None, None
        try:
            if given is not None:
                grammar = Grammar.of(given)
                failure = self._refused.get(_digest(grammar))
                compiled = self._grammars.known(grammar)
                if failure is None and compiled is None:
                    if grammar not in self._preparing and len(self._preparing) >= NEW_GRAMMARS:
                        return False
                    preparation = self._preparation(grammar)
                    self._waits_for[owner] = grammar
        except Exception as error:  # whatever it is, it is this request's alone
            failure = error
        if preparation is None:
            self._ready[owner] = Newcomer(owner, add, failure, compiled)
        else:
            preparation.waiting[owner] = add
        self.num_completions += num_completions(add)
        return True

    def _preparation(self, grammar: Grammar) -> _Preparation:
        """One for all who wait for it."""
        if grammar not in self._preparing:
            self._preparing[grammar] = _Preparation(Trial(self._trials, grammar))
            self._threads.submit(self._work, grammar, self._preparing[grammar])
        return self._preparing[grammar]

    def fetch_prepared(self) -> None:
        """For when `wakes` is readable."""
        with contextlib.suppress(BlockingIOError):
            self.wakes.recv(4096)
        while self._prepared:
            grammar, preparation = self._prepared.popleft()
            if self._preparing.get(grammar) is not preparation:  # given up meanwhile
                continue
            del self._preparing[grammar]
            if isinstance(failure := preparation.failure, RequestError):
                # Without a traceback, whose frames hold requests.
                self._refused[_digest(grammar)] = RequestError(str(failure), failure.param)
                if len(self._refused) > REFUSED_KEPT:
                    del self._refused[next(iter(self._refused))]
            for owner, add in preparation.waiting.items():
                del self._waits_for[owner]
                self._ready[owner] = Newcomer(owner, add, preparation.failure, preparation.compiled)

    def pop(self) -> Newcomer:
        """The oldest that is ready."""
        newcomer = self._ready.pop(next(iter(self._ready)))
        self.num_completions -= num_completions(newcomer.add)
        return newcomer

    def discard(self, owner: Owner) -> bool:
        """Whether it was here. A grammar that nobody waits for any more is given up."""
        newcomer = self._ready.pop(owner, None)
        add = None if newcomer is None else newcomer.add
        grammar = self._waits_for.pop(owner, None)
        if grammar is not None:
            preparation = self._preparing[grammar]
            add = preparation.waiting.pop(owner)
            if not preparation.waiting:
                del self._preparing[grammar]
                preparation.trial.give_up()
        if add is not None:
            self.num_completions -= num_completions(add)
        return add is not None

    def discard_all(self, connection: Connection) -> None:
        for owner in [o for o in (*self._ready, *self._waits_for) if o.connection is connection]:
            self.discard(owner)

    def close(self) -> None:
        for preparation in self._preparing.values():
            preparation.trial.give_up()
        self._threads.shutdown(cancel_futures=True)
        self._trials.close()
        self.wakes.close()
        self._waker.close()

    def _work(self, grammar: Grammar, preparation: _Preparation) -> None:
        try:
            preparation.compiled = self._grammars.compile(grammar, num_bytes=preparation.trial.wait())
        except Exception as error:
            preparation.failure = error
        self._prepared.append((grammar, preparation))
        with contextlib.suppress(OSError):  # full: it is readable then
            self._waker.send(b".")


def _digest(grammar: Grammar) -> bytes:
    return hashlib.sha256(f"{grammar.kind.value}:{grammar.text}".encode()).digest()


def num_completions(add: Add) -> int:
    """As far as can be said of what nobody has checked yet."""
    n = add.params.get("n", 1)
    return n if isinstance(n, int) else 1
