"""The limit of open files: every connection is one."""

from __future__ import annotations

import contextlib
import resource

WANTED = 65_536


RESERVED = 64  # for what is no connection


def room_for_connections() -> int:
    """As many as this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else max(soft - RESERVED, 1)


def allow_many_open_files() -> None:
    """Raises this process's own limit towards the one that the system sets it.

    Many systems start programs with 256 or 1,024, for old ones that can do no more, and let them ask for a lot.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS says that there is no limit, and has one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
