"""A peer in a process of its own: `python -m experiments.lab.peers.worker <module with open_peer> <descriptor>`.

Over the descriptor's pipe come (method, arguments), `open_peer` first, and the answer to each goes back, what the
method returned or an exception. The end of the pipe, whatever has ended the parent, kills this process and all that it
has started: a peer has nothing to save, and the GPU is free.

Times are time.perf_counter's, which on Linux is CLOCK_MONOTONIC, one clock for all processes of a machine.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import queue
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from experiments.lab.measure.profile import NoProfile
from experiments.lab.measure.schedule import from_outside
from experiments.lab.peers.base import PeerAbsent, PeerError
from mini_infer.core.errors import ConfigError


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
