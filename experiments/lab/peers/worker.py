"""A peer in a process of its own: `python -m experiments.lab.peers.worker <module with open_peer>`.

One JSON document a line comes in on stdin, and an answer to each goes out on stdout:

    {"op": "open", "config": ..., "settings": ...}       -> {"about": ...}, or {"absent": why}
    {"op": "serve", "items": ..., "concurrency": ...}    -> {"served": ...}
    {"op": "forget"}                                     -> {}
    {"op": "call", "method": ..., "arguments": ...}      -> {"result": ...}
    whatever fails                                       -> {"error": why, "config": whether a setting is to blame}

Both pipes are taken away from everybody else first: what a library prints goes to stderr. The end of stdin, whatever
has ended the parent, kills this process and all that it has started: a peer has nothing to save, and the GPU is free.

Times are time.perf_counter's, which on Linux is CLOCK_MONOTONIC, one clock for all processes of a machine.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import queue
import signal
import sys
import threading
import traceback
from typing import Any, BinaryIO

from experiments.lab.measure.schedule import from_outside
from experiments.lab.peers import base
from experiments.lab.peers.base import PeerAbsent, Subject
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError


class Worker:
    def __init__(self, module: str) -> None:
        self._module = module
        self._peer: Subject | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._do(request)
        except PeerAbsent as error:
            return {"absent": str(error)}
        except Exception as error:
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}", "config": isinstance(error, ConfigError)}

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "open":
            peer = importlib.import_module(self._module).open_peer(
                EngineConfig.from_dict(request["config"]), request["settings"]
            )
            self._peer = peer
            gc.collect()
            gc.freeze()  # the collector never looks at what start-up has made; the engine is measured so, too
            return {"about": dict(peer.about)}
        assert self._peer is not None
        if request["op"] == "forget":
            self._peer.forget()
            return {}
        if request["op"] == "call":
            return {"result": getattr(self._peer, request["method"])(**request["arguments"])}
        items = base.unpack_items(request["items"])
        gc.collect()
        return {"served": base.pack_served(from_outside(self._peer.serve, items, request["concurrency"]))}


def main() -> None:
    commands, replies = _take_pipes()
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(commands, inbox), daemon=True).start()
    worker = Worker(sys.argv[1])
    while True:
        replies.write(json.dumps(worker.answer(json.loads(inbox.get()))).encode() + b"\n")
        replies.flush()


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes on new descriptors; the old ones lead to nowhere and to stderr. Processes that this one forks lose
    the new ones, so that the parent sees the end of the pipe when this process ends."""
    commands = os.dup(0)
    replies = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: os.closerange(commands, replies + 1))
    return open(commands, "rb", closefd=False), open(replies, "wb", closefd=False)


def _listen(commands: BinaryIO, inbox: queue.SimpleQueue[bytes]) -> None:
    for line in commands:
        inbox.put(line)
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
