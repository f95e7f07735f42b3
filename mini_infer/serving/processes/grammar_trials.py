"""New grammars are compiled where they can be killed, before the engine compiles them.

How much time and memory a grammar takes is up to who wrote it, and llguidance can be interrupted by nothing but the end
of its process; what it has compiled cannot leave that process either. So a grammar is compiled twice. First in a
process for it alone, with bounds on time and memory, forked from one that has read the vocabulary and does nothing
else. What comes through there, the engine compiles again in a thread, and knows what that will take.

    engine process ── a grammar and a channel ──► nursery ── fork ──► trial: compile, take in some tokens
                   ◄── the outcome, in the channel ── nursery ◄── how it ended

There are two queues, so that many bad grammars hold up few good ones: a trial begins in the quick one, and starts again
in the slow one if a quarter of a second was not enough. Who closes the channel before the outcome ends the trial.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from typing import IO, Any, NamedTuple

from mini_infer.core.errors import RequestError
from mini_infer.core.logs import install
from mini_infer.core.sampling_params import Grammar, GrammarKind
from mini_infer.runtime.text.grammar import GrammarCompiler, Vocabulary, make_matcher, refuse
from mini_infer.serving.processes.launch import child_environment

LIMITS_S = (0.25, 4.0)  # of CPU time, in the quick queue and in the slow one
NICENESS = (5, 15)  # of trials in each: what takes long takes what others leave
AT_ONCE = 2  # trials of each queue
MEMORY = 2**28  # bytes that a trial may take beyond what the vocabulary takes
TOKENS = 8  # that a trial takes in
COMMAND = ("-m", "mini_infer.serving.processes.grammar_trials")
KILLED_BY_TIME = -signal.SIGPROF


class Outcome(NamedTuple):
    failure: str | None  # why the grammar cannot be used
    num_bytes: int = 0  # that it takes when it is compiled


class GrammarTrials:
    """The engine process's end. The nursery is started by the first trial, and again by the first one after its end."""

    def __init__(self, grammars: GrammarCompiler) -> None:
        self._grammars = grammars
        self._lock = threading.Lock()
        self._nursery: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def send(self, grammar: Grammar, channel: socket.socket) -> None:
        """For a thread: starting the nursery takes a while. Raises OSError where it cannot be started."""
        with tempfile.TemporaryFile() as text:
            text.write(json.dumps([grammar.kind.value, grammar.text]).encode())
            text.flush()
            with self._lock:
                socket.send_fds(self._control(), [b"."], [channel.fileno(), text.fileno()])

    def close(self) -> None:
        with self._lock:
            if self._nursery is not None:
                process, control = self._nursery
                control.close()
                process.wait()
                self._nursery = None

    def _control(self) -> socket.socket:
        if self._nursery is not None and self._nursery[0].poll() is not None:
            self._nursery[1].close()
            self._nursery = None
        if self._nursery is None:
            ours, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, *COMMAND, str(theirs.fileno())],
                    stdin=subprocess.PIPE,
                    pass_fds=[theirs.fileno()],
                    env=child_environment(),
                )
            self._nursery = process, ours
            threading.Thread(target=_tell, args=[process.stdin, self._grammars], daemon=True).start()
        return self._nursery[1]


def _tell(stdin: IO[bytes], grammars: GrammarCompiler) -> None:
    with contextlib.suppress(OSError), stdin:
        pickle.dump(grammars.vocabulary, stdin)


class Trial:
    """Of a grammar, made in an instant: `wait` begins it."""

    def __init__(self, trials: GrammarTrials, grammar: Grammar) -> None:
        self._trials = trials
        self._grammar = grammar
        self._channel, self._theirs = socket.socketpair()

    def wait(self) -> int:
        """For a thread: how many bytes the compiled grammar takes.

        Raises:
            RequestError: it cannot be compiled within the bounds.
            RuntimeError: the trial was given up, or the nursery has ended.
            OSError: no process can be started.
        """
        with self._theirs:
            self._trials.send(self._grammar, self._theirs)
        said = b""
        with contextlib.suppress(OSError):
            while more := self._channel.recv(2**16):
                said += more
        self._channel.close()
        if not said:
            raise RuntimeError("a grammar's trial was broken off")
        outcome = Outcome(*json.loads(said))
        if outcome.failure is not None:
            raise RequestError(outcome.failure, "grammar")
        return outcome.num_bytes

    def give_up(self) -> None:
        """In any thread."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)


# --- the nursery ------------------------------------------------------------------------------------------------------


class _Job:
    def __init__(self, channel: socket.socket, text: int) -> None:
        self.channel = channel
        self.text = text  # a file's descriptor
        self.queue = 0
        self.pid = 0
        self.hears = 0  # a descriptor: of the pipe into which the trial says its outcome
        self.said = b""


class _Nursery:
    def __init__(self, control: socket.socket, vocabulary: Vocabulary) -> None:
        self._selector = selectors.DefaultSelector()
        self._control = control
        self._tokenizer: Any = None
        self._why_not = None
        try:
            self._tokenizer = vocabulary.read()
        except RequestError as error:
            self._why_not = str(error)
        self._waiting: tuple[deque[_Job], ...] = (deque(), deque())
        self._running: list[set[_Job]] = [set(), set()]
        self._selector.register(control, selectors.EVENT_READ)

    def serve(self) -> None:
        """Until the engine process has ended."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    if not self._take():
                        for job in [*self._running[0], *self._running[1]]:
                            os.kill(job.pid, signal.SIGKILL)
                        return
                elif key.fileobj is key.data.channel:
                    self._end(key.data)
                elif key.data in self._running[key.data.queue]:  # else it was given up in this very round
                    self._hear(key.data)
            for queue, running in zip(self._waiting, self._running, strict=True):
                while queue and len(running) < AT_ONCE:
                    self._start(queue.popleft())

    def _take(self) -> bool:
        data, descriptors, *_ = socket.recv_fds(self._control, 1, 2)
        if data:
            channel, text = descriptors
            job = _Job(socket.socket(fileno=channel), text)
            self._selector.register(job.channel, selectors.EVENT_READ, job)  # readable: the other end is closed
            if self._why_not is None:
                self._waiting[0].append(job)
            else:
                self._end(job, Outcome(self._why_not))
        return bool(data)

    def _start(self, job: _Job) -> None:
        job.hears, says = os.pipe()
        job.pid = os.fork()
        if not job.pid:
            try:
                _bound(LIMITS_S[job.queue], NICENESS[job.queue])
                os.write(says, json.dumps(_try(job.text, self._tokenizer)).encode())
            finally:
                os._exit(0)  # without an outcome: something has gone wrong, for want of memory most likely
        os.close(says)
        self._running[job.queue].add(job)
        self._selector.register(job.hears, selectors.EVENT_READ, job)

    def _hear(self, job: _Job) -> None:
        said = os.read(job.hears, 2**16)
        job.said += said
        if said:
            return
        code = self._reap(job)
        if job.said:
            self._end(job, Outcome(*json.loads(job.said)))
        elif code != KILLED_BY_TIME:
            self._end(job, Outcome(f"grammar: compiling it takes more than {MEMORY >> 20} MB: simplify it"))
        elif job.queue + 1 < len(LIMITS_S):
            job.queue += 1
            self._waiting[job.queue].append(job)
        else:
            self._end(job, Outcome(f"grammar: compiling it takes more than {LIMITS_S[job.queue]:g} s: simplify it"))

    def _reap(self, job: _Job) -> int:
        self._running[job.queue].discard(job)
        self._selector.unregister(job.hears)
        os.close(job.hears)
        _, status = os.waitpid(job.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def _end(self, job: _Job, outcome: Outcome | None = None) -> None:
        """With its outcome, or because nobody wants that any more."""
        if job in self._running[job.queue]:
            os.kill(job.pid, signal.SIGKILL)
            self._reap(job)
        elif job in self._waiting[job.queue]:
            self._waiting[job.queue].remove(job)
        self._selector.unregister(job.channel)
        with contextlib.suppress(OSError):
            if outcome is not None:
                job.channel.sendall(json.dumps(outcome).encode())
            job.channel.shutdown(socket.SHUT_RDWR)  # other trials, forked meanwhile, hold the channel too
        job.channel.close()
        os.close(job.text)


def _bound(seconds: float, niceness: int) -> None:
    os.nice(niceness)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # where there is no /proc, time alone is bounded
        with open("/proc/self/statm") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _try(text: int, tokenizer: Any) -> Outcome:
    """Compiles it, and takes in some tokens: a grammar may turn out to be too large only then."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with os.fdopen(text, "rb") as file:
        file.seek(0)
        kind, source = json.load(file)
    grammar = Grammar(GrammarKind(kind), source)
    try:
        matcher = make_matcher(grammar, tokenizer)
        for place in range(TOKENS):
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
            for end in tokenizer.eos_tokens:
                allowed &= ~(1 << end)
            if not allowed or matcher.is_error():
                break
            # The highest and the lowest in turns: of quotes and braces each has its turn.
            matcher.consume_token((allowed if place % 2 else allowed & -allowed).bit_length() - 1)
        if matcher.is_error():
            refuse(grammar, matcher.get_error())
    except RequestError as error:
        return Outcome(str(error))
    return Outcome(None, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)


def main() -> None:
    """The nursery. Its argument is the control socket's descriptor; stdin brings the vocabulary."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # it ends with the engine process
        signal.signal(ignored, signal.SIG_IGN)
    install()
    try:
        vocabulary = pickle.load(sys.stdin.buffer)
    except EOFError:  # the engine process has ended meanwhile
        return
    _Nursery(socket.socket(fileno=int(sys.argv[1])), vocabulary).serve()


if __name__ == "__main__":
    main()
