"""One API process of several: the supervisor's half, and the process's own."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence

from mini_infer.core.errors import MiniInferError
from mini_infer.serving.http.handover import Channel, Handover
from mini_infer.serving.processes.launch import ending_of, start
from mini_infer.serving.settings import ServerSettings

POLL_S = 0.02


class ApiProcess:
    """Starts one, which waits for `begin`. It ends with `terminate`, when the engine dies, and with the process that
    made this object, however that one ends.

    Args:
        engine_paths: the engine processes' sockets.
        accounts, homes_file: descriptors of files that all API processes share: what the keys have taken, and where
            prompts went.
        on_serving: called once, when it takes connections.
        on_end: called once, when it is ending.
    """

    def __init__(
        self,
        engine_paths: Sequence[str],
        accounts: int,
        homes_file: int,
        on_serving: Callable[[], None],
        on_end: Callable[[ApiProcess], None],
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = [theirs.fileno(), accounts, homes_file]
            self._process = start(__name__, *descriptors, *engine_paths, pass_fds=descriptors)
        self.channel = Channel(ours, on_serving, lambda: on_end(self))

    @property
    def has_served(self) -> bool:
        return self.channel.has_served

    def begin(self, settings: ServerSettings) -> None:
        """Tells it what to serve."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died already; the channel says so too
            # Not among the arguments, which everybody on this machine can read: the key is in it.
            self._process.stdin.write(pickle.dumps(settings))
            self._process.stdin.close()

    def terminate(self) -> None:
        """It takes no further connections, and ends when what it serves has ended, or the time for that is over."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    async def ended(self, timeout: float) -> str:
        """Waits, kills it after `timeout` seconds, and says how it ended."""
        until = time.monotonic() + timeout
        while (ending := ending_of(self._process)) is None:
            if time.monotonic() > until:
                self._process.kill()
            await asyncio.sleep(POLL_S)
        self.channel.close()
        return ending

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.channel.close()


def main() -> int | str:
    """The process. Arguments: the descriptors of the channel, the accounts and the homes, the engines' sockets. stdin
    brings the settings."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the supervisor, who decides
    from mini_infer.serving.http.server import serve  # takes a second, in which the engine is made

    try:
        settings: ServerSettings = pickle.load(sys.stdin.buffer)
    except EOFError:  # there will be nothing to serve
        return 0
    channel, accounts, homes_file = map(int, sys.argv[1:4])
    handover = Handover(socket.socket(fileno=channel))
    try:
        return asyncio.run(
            serve(settings, handover, engine_paths=sys.argv[4:], accounts=accounts, homes_file=homes_file)
        )
    except asyncio.CancelledError:  # a signal while it was connecting
        return 0
    except MiniInferError as error:
        return f"an API process cannot start: {error}"


if __name__ == "__main__":
    sys.exit(main())
