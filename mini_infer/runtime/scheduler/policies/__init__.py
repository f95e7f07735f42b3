"""Whose turn it is among requests that wait, and who keeps a place when memory runs out: a file each.

A new policy is a file here, called as it is typed, with `place(request, config)`, and its line in `Policy`
(core/config.py). Smaller places go first, equal ones by arrival. A place is settled when the request comes, so nobody
starves where it grows with the time of arrival, or falls behind a bounded number of others.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from mini_infer.core.config import Policy, SchedulerConfig
from mini_infer.core.request import Request

Place = Callable[[Request, SchedulerConfig], float]


def place_of(policy: Policy) -> Place:
    """The function of the policy's file."""
    place: Place = import_module(f"{__name__}.{policy.value}").place
    return place
