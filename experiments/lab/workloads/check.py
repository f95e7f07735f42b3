"""Checks of a workload's settings. A setting that is None was not given, and passes."""

from __future__ import annotations

import math

from mini_infer.core.errors import ConfigError


def at_least(workload: object, bound: int, *names: str) -> None:
    for name in names:
        value = getattr(workload, name)
        if value is not None and not bound <= value < math.inf:
            raise ConfigError(f"workload.{name} must be at least {bound}, got {value}")


def above_zero(workload: object, *names: str) -> None:
    for name in names:
        value = getattr(workload, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"workload.{name} must be above 0, got {value}")


def share(workload: object, *names: str) -> None:
    for name in names:
        value = getattr(workload, name)
        if not 0 <= value <= 1:
            raise ConfigError(f"workload.{name} is a share: it must be from 0 to 1, got {value}")


def ordered(workload: object, low: str, high: str) -> None:
    if getattr(workload, high) < getattr(workload, low):
        raise ConfigError(f"workload.{high}={getattr(workload, high)} is below workload.{low}={getattr(workload, low)}")
