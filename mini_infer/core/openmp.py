"""How OpenMP's threads, among which torch shares an operation on a CPU, wait for each other."""

from __future__ import annotations

from collections.abc import Mapping

WAIT_POLICY = "OMP_WAIT_POLICY"
_SPEAK_OF_WAITING = (WAIT_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def waiting_asleep(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of a process before torch is loaded, which reads it then: threads that wait sleep.

    OpenMP lets them spin, which beside one busy process takes the core from the very thread that they wait for.
    Nothing, where the environment says already how threads wait.
    """
    if any(name in environment for name in _SPEAK_OF_WAITING):
        return {}
    return {WAIT_POLICY: "passive"}
