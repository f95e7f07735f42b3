"""mini-infer-serve as a process that another one starts, and the line by which it says where it is."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mini_infer.serving.processes.launch import child_environment

SERVES = "mini-infer serves "  # begins the line that ends with the address


def address_line(model_name: str, url: str) -> str:
    """What mini-infer-serve prints when it can be asked."""
    return f"{SERVES}{model_name} at {url}"


def start_server(
    flags: Sequence[str], environment: Mapping[str, str] | None = None, **more: Any
) -> subprocess.Popen[str]:
    """
    Args:
        environment: instead of this process's own.
        more: of Popen. Its stdout is a pipe, for `read_address`.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "mini_infer.cli.serve", *flags],
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(environment),
        **more,
    )


def read_address(lines: Iterable[str]) -> str | None:
    """The server's URL, once it serves; None where its output ends before."""
    return next((line.split()[-1] for line in lines if line.startswith(SERVES)), None)


def discard(lines: Iterable[str]) -> None:
    """Reads what else it prints, for as long as it runs: it would stand still when the pipe is full."""
    threading.Thread(target=deque, args=[lines, 0], daemon=True).start()
