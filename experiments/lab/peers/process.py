"""A peer's own process, as the lab sees it: started, asked, and killed; and what runs there,
`python -m experiments.lab.peers.process <module with open_peer> <descriptor>`.

Over the descriptor's pipe come (method, arguments), `open_peer` first, and the answer to each goes back, what the
method returned or an exception. The end of the pipe, whatever has ended the parent, kills the process and all that it
has started: a peer has nothing to save, and the GPU is free.

Times are time.perf_counter's, which on Linux is CLOCK_MONOTONIC, one clock for all processes of a machine.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from experiments.lab.measure.kinds import PeerAbsent, PeerError, ProcessSettings, Subject
from experiments.lab.measure.profile import KernelRow, NoProfile, StepProfile
from experiments.lab.measure.schedule import from_outside
from experiments.lab.measure.traces import Served
from experiments.lab.workloads import Item
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
LAST_LINES = 40  # of its log, in an error
GONE_S = 10.0  # after a kill, the processes it had started have so long to leave the GPU


class PeerProcess(Subject):
    """Whatever goes wrong while it is asked, Ctrl-C included, it is killed with all the processes it has started."""

    def __init__(
        self,
        name: str,
        module: str,
        config: EngineConfig,
        settings: ProcessSettings,
        wait: bool = True,
        environment: Mapping[str, str] = os.environ,
        **more: Any,
    ) -> None:
        """`open_peer` of `module` runs there. `wait`: until it has started; else it starts while others work, and
        `ready` waits. `more`: settings that are not the user's. Raises PeerAbsent where it is not installed,
        ConfigError where it cannot work with these settings, PeerError where it failed."""
        self.name, self._timeout_s = name, settings.timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="mini-infer-peer-"))
        self._log = self._folder / "log"
        self._closed = False
        path = environment.get("PYTHONPATH", "") if settings.pythonpath is None else settings.pythonpath
        environment = {
            **environment,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *([path] if path else [])]),
            "TMPDIR": str(self._folder),  # what it leaves there goes with it
        }
        self._pipe, theirs = Pipe()
        python = settings.python or sys.executable
        command = [python, "-m", "experiments.lab.peers.process", module, f"{theirs.fileno()}"]
        with self._log.open("wb") as log, theirs:
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                    start_new_session=True, pass_fds=[theirs.fileno()],
                )  # fmt: skip
            except OSError as error:
                shutil.rmtree(self._folder, ignore_errors=True)
                raise ConfigError(f"{name} cannot be started with peers.*.python={command[0]}: {error}") from error
        self.send("open_peer", config=config, settings={**asdict(settings), **more})
        if wait:
            self.ready()

    def ready(self) -> None:
        """To be called once, where it was not waited for. Raises as __init__ does."""
        self.about = self.receive("start")

    def serve(self, items: Sequence[Item], concurrency: int) -> Served:
        return self.call("serve", "serve", items=tuple(items), concurrency=concurrency)

    def forget(self) -> None:
        self.call("forget its prefix cache", "forget")

    def profile(self, items: Sequence[Item], variant: str, point: str) -> tuple[StepProfile, list[KernelRow]]:
        return self.call("be profiled", "profile", items=tuple(items), variant=variant, point=point)

    def call(self, what: str, method: str, **arguments: Any) -> Any:
        """What a method of the peer returns. Raises NoProfile as it does. `what` it does is for errors."""
        self.send(method, **arguments)
        found = self.receive(what)
        if isinstance(found, NoProfile):
            raise found
        return found

    @property
    def alive(self) -> bool:
        return not self._closed

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()
        end = time.monotonic() + GONE_S
        while _runs(self._process.pid) and time.monotonic() < end:
            time.sleep(0.02)
        shutil.rmtree(self._folder, ignore_errors=True)

    def send(self, method: str, **arguments: Any) -> None:
        try:
            with contextlib.suppress(BrokenPipeError):  # who asks hears that it has ended
                self._pipe.send((method, arguments))
        except BaseException:
            self.close()
            raise

    def receive(self, what: str, waited: bool = False) -> Any:
        reply: Any = PeerError(f"it took more than {self._timeout_s:g} s (peers.*.timeout_s)")
        try:
            try:
                if self._pipe.poll(0 if waited else self._timeout_s):
                    reply = self._pipe.recv()
            except (EOFError, ConnectionError):
                reply = PeerError(f"its process ended with code {self._process.wait()}")
            if isinstance(reply, PeerError):
                raise PeerError(f"{self.name} could not {what}: {reply}.{self._last_words()}")
            if isinstance(reply, (PeerAbsent, ConfigError)):
                raise reply
            return reply
        except BaseException:
            self.close()
            raise

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return "".join(f"\n  | {line[:300]}" for line in lines[-LAST_LINES:]) or " It has logged nothing"


def ask_all(
    processes: Sequence[PeerProcess], what: str, method: str, arguments: Sequence[Mapping[str, Any]]
) -> list[Any]:
    """What a method returns in each of several processes, which are asked at a time. What ends it early in one, Ctrl-C
    included, ends them all. Raises as `receive` does, of the process that failed first."""
    try:
        for process, given in zip(processes, arguments, strict=True):
            process.send(method, **given)
        asked: dict[Any, PeerProcess] = {process._pipe: process for process in processes}
        found: dict[PeerProcess, Any] = {}
        while len(found) < len(processes):
            told = wait(asked, processes[0]._timeout_s) or list(asked)
            # One that has ended goes first: what others say follows from it.
            for process in sorted(map(asked.__getitem__, told), key=lambda process: process._process.poll() is None):
                del asked[process._pipe]
                found[process] = process.receive(what, waited=True)
        return [found[process] for process in processes]
    except BaseException:
        for process in processes:
            process.close()
        raise


def _runs(group: int) -> bool:
    """Whether a process of the group still holds on to anything; told by /proc, where there is one."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def main() -> None:
    connection = Connection(int(sys.argv[2]))
    os.set_inheritable(connection.fileno(), False)
    os.register_at_fork(after_in_child=connection.close)  # the parent sees the end of the pipe when this process ends
    inbox: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, inbox), daemon=True).start()
    peer: Any = None
    while True:
        method, arguments = inbox.get()
        try:
            found: Any
            if method == "open_peer":
                peer = importlib.import_module(sys.argv[1]).open_peer(**arguments)
                gc.collect()
                gc.freeze()  # the collector never looks at what start-up has made; the engine is measured so, too
                found = dict(peer.about)
            elif method == "serve":
                gc.collect()
                found = from_outside(peer.serve, **arguments)
            else:
                found = getattr(peer, method)(**arguments)
        except (PeerAbsent, ConfigError, NoProfile) as error:
            found = error
        except Exception as error:
            traceback.print_exc()
            found = PeerError(f"{type(error).__name__}: {error}")
        connection.send(found)


def _listen(connection: Connection, inbox: queue.SimpleQueue[tuple[str, dict[str, Any]]]) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            inbox.put(connection.recv())
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
