"""What a metric is: a formula over a timed pass, its unit, and which way is better; or why there is no value. And the
service level objectives (SLO) that a request must keep to count as good."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from experiments.lab.config.spec import Checked, Positive
from experiments.lab.judge.roofline import Floor
from experiments.lab.measure.traces import RequestTrace, Served
from experiments.lab.store.rows import NOT_SHOWN
from mini_infer.core.plan import StepRecord


class Better(Enum):
    higher = "higher"
    lower = "lower"


HIGHER, LOWER = Better.higher, Better.lower


@dataclass(frozen=True)
class Metric:
    """What a report needs to know about a column of numbers."""

    label: str
    unit: str
    better: Better
    share: bool = False  # it lies between 0 and 1, and so does its interval


@dataclass(frozen=True)
class SLO(Checked, section="experiment.slo"):
    """Bounds, in milliseconds, that a request must all keep to count as goodput. None: no bound."""

    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None
    itl_ms: Positive | None = None  # of every single gap
    e2e_ms: Positive | None = None

    @property
    def bounds(self) -> dict[str, float]:
        return {name: bound for name, bound in vars(self).items() if bound is not None}

    def taken_by(self, request: RequestTrace) -> dict[str, float]:
        """Milliseconds of what each bound is of; endless without an answer. One token has no TPOT and no gap."""
        if request.error or request.ttft is None or request.e2e is None:
            return dict.fromkeys(self.bounds, math.inf)
        gap = max(request.gaps, default=0.0)
        took = {"ttft_ms": request.ttft, "tpot_ms": request.tpot or 0.0, "itl_ms": gap, "e2e_ms": request.e2e}
        return {name: 1e3 * took[name] for name in self.bounds}

    def used_by(self, taken: Mapping[str, float]) -> float:
        """The largest part of its bound that any of these latencies takes: up to 1 all are kept."""
        return max((taken[name] / bound for name, bound in self.bounds.items()), default=0.0)

    def met_by(self, request: RequestTrace) -> bool:
        """A request without a complete answer met nothing."""
        return bool(request.token_times) and not request.error and self.used_by(self.taken_by(request)) <= 1


@dataclass(frozen=True)
class Context:
    slo: SLO = field(default_factory=SLO)
    floors: Callable[[Sequence[StepRecord]], Sequence[Floor]] | None = None  # of steps, by this machine's ceilings
    no_floors: str = "no ceilings are known for this machine"  # why there are none


@dataclass(frozen=True)
class Missing:
    """No value, and why. `applies`: there should have been one, so the row is kept and marked invalid."""

    reason: str
    applies: bool = True


def too_few(reason: str) -> Missing:
    """Nothing went wrong, and there is nothing to be shown."""
    return Missing(f"{NOT_SHOWN}{reason}")


NOT_A_PEERS = Missing("a peer has no engine steps to look at", applies=False)
NOTHING = Missing("no request gave a sample of it")
Value = Callable[[Served], "float | Missing"]
Compute = Callable[[Served, Context], "float | Missing"]
Samples = Callable[[Served], Iterable["tuple[Hashable, float | None]"]]


@dataclass(frozen=True)
class Formula:
    metric: Metric
    compute: Compute
    of_requests: bool = False  # and so can be taken of one class of them


def of_pass(
    label: str, unit: str, better: Better, compute: Compute, *, share: bool = False, of_requests: bool = False
) -> Formula:
    return Formula(Metric(label, unit, better, share), compute, of_requests)


of_requests = partial(of_pass, of_requests=True)


def of_engine(label: str, unit: str, better: Better, value: Value, *, share: bool = False) -> Formula:
    """It looks at an engine's steps, which a peer does not tell."""
    return of_pass(label, unit, better, lambda s, c: value(s) if s.records else NOT_A_PEERS, share=share)


def total(value: Callable[[StepRecord], float]) -> Value:
    return lambda served: float(sum(map(value, served.records)))


def mean(value: Callable[[StepRecord], float]) -> Value:
    return lambda served: sum(map(value, served.records)) / len(served.records)
