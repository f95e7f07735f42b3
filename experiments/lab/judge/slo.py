"""Service level objectives: what a request must keep to count as good."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.lab.measure.traces import RequestTrace
from mini_infer.core.errors import ConfigError


@dataclass(frozen=True)
class SLO:
    """Bounds, in milliseconds, that a request must all keep to count as goodput. None: no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itl_ms: float | None = None  # of every single gap
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        for name, bound in self.bounds.items():
            if bound <= 0:
                raise ConfigError(f"experiment.slo.{name} must be above 0 ms, got {bound}")

    @property
    def bounds(self) -> dict[str, float]:
        every = {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms, "itl_ms": self.itl_ms, "e2e_ms": self.e2e_ms}
        return {name: bound for name, bound in every.items() if bound is not None}

    def met_by(self, request: RequestTrace) -> bool:
        """A request without a complete answer met nothing; one of a single token has no TPOT and no gap to miss."""
        if request.error or request.ttft is None or request.e2e is None:
            return False
        took = {"ttft_ms": request.ttft, "tpot_ms": request.tpot or 0.0, "e2e_ms": request.e2e}
        took["itl_ms"] = max(request.gaps, default=0.0)
        return all(1e3 * took[name] <= bound for name, bound in self.bounds.items())
