"""Server and engine processes for tests of what they do, and not of how they start: forked from a helper that has
imported what all of them import, which is seconds of CPU time for each. The helper is forked from the test's process.

The test's process asks `forks()` for a server. In that, and in the test's process while `engines_are_forked`, whatever
the package starts as `python -m module` is forked, too.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import importlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from mini_infer.runtime.executor import rank_process
from mini_infer.serving.processes import launch

IMPORTED = (
    "mini_infer.cli.serve",
    "mini_infer.runtime.executor.local",
    "mini_infer.serving.http.server",
    "mini_infer.serving.processes.engine_process",
    "mini_infer.serving.processes.supervisor",
)
ROOT = Path(__file__).resolve().parents[2]
HIGH = 100  # beyond the descriptors that a server has when it starts others


class Child:
    """What is used of subprocess.Popen. `reap` gives the exit code of a child of whoever forked it, None while it
    runs."""

    def __init__(self, pid: int, reap: Callable[[int], int | None]) -> None:
        self.pid, self._reap, self._reaping = pid, reap, threading.Lock()
        self.returncode: int | None = None
        self.stdin: IO[Any] | None = None
        self.stdout: IO[Any] | None = None

    def poll(self) -> int | None:
        with self._reaping:  # a child can be reaped once, and several threads wait for it
            if self.returncode is None:
                self.returncode = self._reap(self.pid)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        started = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - started > timeout:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Start = Callable[[Sequence[str], Mapping[str, str], Mapping[int, int]], Child]


def reap(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def fork(arguments: Sequence[str], environment: Mapping[str, str], places: Mapping[int, int]) -> Child:
    """A child of this process.

    Args:
        arguments: the module whose `main` it runs, and what that finds in sys.argv.
        places: its open files by their descriptors there, as descriptors here, beside those of 0, 1 and 2.
    """
    # What comes before the child has handlers of its own is dealt with by those, and not by the parent's.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    if pid := os.fork():
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        return Child(pid, reap)
    code = 1
    try:
        logging.shutdown()  # now, and not when uvicorn sets up its own: then the descriptors of pytest's are others'
        logging.getLogger().handlers.clear()
        gc.freeze()  # nothing of the parent's is finalised here, where its descriptors are others' from now on
        high = {place: fcntl.fcntl(descriptor, fcntl.F_DUPFD, HIGH) for place, descriptor in places.items()}
        for place, descriptor in high.items():
            os.dup2(descriptor, place)
        first = 3
        for kept in [*sorted(place for place in places if place > 2), os.sysconf("SC_OPEN_MAX")]:
            os.closerange(first, kept)
            first = kept + 1
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # it is where this environment says
        files = [open(place, mode, closefd=False) for place, mode in enumerate("rww")]  # noqa: SIM115
        sys.stdin, sys.stdout, sys.stderr = files
        code = run(arguments)
    finally:
        os._exit(code)


def run(arguments: Sequence[str]) -> int:
    """The exit code that the interpreter would give."""
    sys.argv = list(arguments)
    code: Any = None
    try:
        code = importlib.import_module(arguments[0]).main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return 120
    return code or 0


def popen(start: Start, command: Sequence[str], stdin: int, pass_fds: Sequence[int], env: Mapping[str, str]) -> Child:
    """As subprocess.Popen, for what the package starts."""
    assert (command[:2], stdin) == ([sys.executable, "-m"], subprocess.PIPE)
    theirs, ours = os.pipe()
    child = start(command[2:], env, {0: theirs, **{descriptor: descriptor for descriptor in (1, 2, *pass_fds)}})
    os.close(theirs)
    child.stdin = open(ours, "wb")  # noqa: SIM115
    return child


def engines_are_forked(patch: pytest.MonkeyPatch, start: Start) -> None:
    """And API processes and ranks. Until `patch` is undone, in this process and in those that it forks."""
    names = {"PIPE": subprocess.PIPE, "TimeoutExpired": subprocess.TimeoutExpired}
    for module in (launch, rank_process):
        patch.setattr(module, "subprocess", SimpleNamespace(Popen=functools.partial(popen, start), **names))


class Forks:
    """The helper, which forks for this process. What it forks is its child, and so below this process."""

    def __init__(self) -> None:
        import torch

        self._one_at_a_time = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            place = theirs.fileno()
            self.process: Child | subprocess.Popen[bytes]
            if torch.cuda.is_available():  # where a process has looked for it, no child can use it
                paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
                environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
                command = [sys.executable, __file__, str(place)]
                self.process = subprocess.Popen(command, cwd=ROOT, pass_fds=[place], env=environment)
            else:
                self.process = fork([__name__, str(place)], os.environ, {each: each for each in (0, 1, 2, place)})

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], places: Mapping[int, int]) -> Child:
        """See `fork`."""
        pid = self._ask((arguments, dict(environment), list(places)), list(places.values()))
        return Child(pid, self._ask)

    def server(self, flags: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Its stdout is a pipe, of text, into which stderr goes too."""
        ours, theirs = os.pipe()
        child = self.start(["mini_infer.cli.serve", *flags], environment, {1: theirs, 2: theirs})
        os.close(theirs)
        child.stdout = open(ours)  # noqa: SIM115
        return child

    def imports(self, module: str) -> None:
        """For those that are started from now on."""
        self._ask(module)

    def _ask(self, question: Any, descriptors: Sequence[int] = ()) -> Any:
        with self._one_at_a_time:
            socket.send_fds(self._socket, [pickle.dumps(question)], descriptors)
            return pickle.loads(self._socket.recv(2**10))

    def close(self) -> None:
        self._socket.close()
        self.process.wait()


forks = functools.cache(Forks)  # each process of the test run has one, from its first use on


def main() -> None:
    """The helper."""
    asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=int(sys.argv[1]))
    for name in IMPORTED:
        importlib.import_module(name)
    engines_are_forked(pytest.MonkeyPatch(), fork)
    gc.collect()
    gc.freeze()
    while True:
        data, descriptors, *_ = socket.recv_fds(asked, 2**18, 8)
        if not data:
            return
        question = pickle.loads(data)
        if isinstance(question, str):
            answer: Any = importlib.import_module(question).__name__
            gc.freeze()
        elif descriptors:
            arguments, environment, places = question
            answer = fork(arguments, environment, dict(zip(places, descriptors, strict=True))).pid
            for descriptor in descriptors:
                os.close(descriptor)
        else:
            answer = reap(question)
        asked.send(pickle.dumps(answer))


if __name__ == "__main__":
    main()
