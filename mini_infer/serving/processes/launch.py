"""Starting the engine process, and knowing how it ended: the parent's half and the child's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import mini_infer
from mini_infer.core.config import EngineConfig
from mini_infer.core.logs import install

BACKLOG = 128
PREFIX = "mini-infer-"  # of folders for sockets
MAX_QUEUED = 1024


def prefill_socket(socket_path: str) -> str:
    """Where the engine process that listens at `socket_path` hears which prompts others want of it."""
    return socket_path + "-prompts"


def child_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """For a child that shall run this very package, wherever it was imported from; by default like this process's."""
    given = os.environ if environment is None else environment
    package_root = str(Path(mini_infer.__file__).parents[1])
    path = os.pathsep.join(filter(None, (package_root, given.get("PYTHONPATH"))))
    return {**given, "PYTHONPATH": path}


def start(
    module: str, *arguments: object, pass_fds: Sequence[int], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Runs this package's module with a pipe as its stdin. `pass_fds` are the descriptors that it has, too."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        stdin=subprocess.PIPE,
        pass_fds=pass_fds,
        env=child_environment(environment),
    )


def ending_of(process: subprocess.Popen[bytes]) -> str | None:
    """How it ended, such as "was killed by SIGKILL"; None while it runs."""
    code = process.poll()
    if code is None:
        return None
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class EngineProcess:
    """An engine process that listens at `socket_path` from the start, while the engine is still being made.

    It ends with `stop`, or with the process that made this object, however that one ends.

    Args:
        socket_path: by default in a folder of its own.
        environment: by default this process's.
        prompts_at: as of an EngineServer.
    """

    def __init__(
        self,
        config: EngineConfig,
        max_queued: int = MAX_QUEUED,
        socket_path: str | None = None,
        environment: Mapping[str, str] | None = None,
        prompts_at: str | None = None,
    ) -> None:
        self._folder = contextlib.ExitStack()
        if socket_path is None:  # nobody else may enter it
            socket_path = os.path.join(self._folder.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX)), "engine")
        self.socket_path = socket_path
        with contextlib.suppress(FileNotFoundError):  # left by a process that was killed
            os.unlink(self.socket_path)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.socket_path)
            listener.listen(BACKLOG)
            place = listener.fileno()
            self._process = start(
                "mini_infer.serving.processes.launch", place, pass_fds=[place], environment=environment
            )
        assert self._process.stdin is not None
        self._stdin = self._process.stdin  # its end tells the child that this process is gone
        with contextlib.suppress(BrokenPipeError):  # it has died already; the socket says so too
            line = json.dumps({"config": config.to_dict(), "max_queued": max_queued, "prompts_at": prompts_at})
            self._stdin.write(line.encode() + b"\n")
            self._stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ending(self) -> str | None:
        """How it ended; None while it runs."""
        return ending_of(self._process)

    def stop(self, timeout: float = 5.0) -> None:
        """Waits until it is gone. What it still computes is lost."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.close()


def main() -> None:
    """The child. Its argument is the listening socket's descriptor; stdin holds a line of settings and no end."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # a terminal's Ctrl-C is for the parent, which decides
        signal.signal(ignored, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:
        return  # the parent has ended meanwhile
    install()
    settings = json.loads(line)
    listener = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_exit_with_parent, args=[listener.getsockname()], daemon=True).start()
    from mini_infer.serving.processes.engine_process import run  # takes seconds, in which the parent may end

    run(EngineConfig.from_dict(settings["config"]), listener, settings["max_queued"], settings["prompts_at"])


def _exit_with_parent(socket_path: str) -> None:
    """The parent never writes again: a read returns when its end of the pipe is gone, however it ended."""
    os.read(sys.stdin.fileno(), 1)
    for path in (prefill_socket(socket_path), socket_path):
        with contextlib.suppress(OSError):  # a parent that still lives does so itself
            os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(socket_path))
    os._exit(0)


if __name__ == "__main__":
    main()
