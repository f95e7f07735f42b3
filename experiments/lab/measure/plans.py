"""Layouts of engines on which a planner simulates a workload, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from omegaconf import DictConfig

from experiments.lab import schema
from experiments.lab.judge import formulas, stats
from experiments.lab.judge.metrics import SLO, Context, Missing
from experiments.lab.measure.simulated import Setup, Simulator, drive
from experiments.lab.measure.traces import RequestTrace, Served
from experiments.lab.points import Point
from experiments.lab.spec import NOT_MEASURED, PREFILL_SHARE, SHAPE
from experiments.lab.workloads import Item
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError

OF_PASS = ("slo_share", "ttft_p50_ms", "ttft_p90_ms", "tpot_p50_ms", "tpot_p90_ms")
REPLICAS = "engine.parallel.replicas"
NO_ENGINE_OF_ITS_OWN = (PREFILL_SHARE, "engine.parallel.routing")  # settings that one engine alone does not read
TIE = 0.1  # two latencies that differ by less are equal: a simulated one is off by as much

Settings = Mapping[str, Any]


class Plan(NamedTuple):
    """A layout with a number of replicas, and what came of the workload on it.

    `point` is called by what differs from the engine's own settings, and by whether its steps have been measured.
    """

    point: Point
    settings: Settings
    replicas: int
    gpus: int
    values: Mapping[str, float]  # of OF_PASS, as far as there are enough requests
    needs: Mapping[str, float]  # the bounds, in milliseconds, that just so many requests would keep as are to
    used: float  # of the SLO by these: up to 1 it is kept
    measured: bool  # what steps take in its layout
    alone: bool = False  # of requests that have an engine for themselves: as if there were any number

    @property
    def keeps(self) -> bool:
        return self.used <= 1

    @property
    def order(self) -> tuple[Any, ...]:
        """Smaller is better: what keeps the SLO with the fewest GPUs, and room to spare; else what comes nearest."""
        return (False, self.gpus, self.used) if self.keeps else (True, self.used, self.gpus)

    def beats(self, other: Plan | None) -> bool:
        """By more than the simulator is off."""
        if other is None:
            return True
        if self.keeps != other.keeps or (self.keeps and self.gpus != other.gpus):
            return self.order < other.order
        return self.used < (1 - TIE) * other.used

    @property
    def words(self) -> str:
        return f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}"

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(self.settings.get(key) for key in SHAPE)


@dataclass
class Layouts:
    """A workload, to be simulated on one layout after the other."""

    config: DictConfig
    simulator: Simulator
    base: Settings  # the engine's own values of all settings that others are tried of
    items: Sequence[Item]
    slo: SLO
    share: float  # of the requests, which must keep the SLO
    tried: list[Plan] = field(default_factory=list)  # all, whatever number of replicas they have
    sources: dict[str, None] = field(default_factory=dict)  # of what steps take
    _alone: dict[tuple[Any, ...], Plan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ConfigError where requests are too few: counted as a pass would be, before anything is simulated."""
        self._workload = schema.workload(self.config)
        due = tuple(RequestTrace(0, 0, item.arrival_s or 0.0, (), ()) for item in self.items)
        counted = len(self._in_window(Served(due, 0.0, 0.0)).counted)
        if counted < stats.MEDIAN_SAMPLES:
            raise ConfigError(
                f"too few requests to plan with: {counted} of {len(due)} come neither at the beginning nor at the end, "
                f"and a median takes {stats.MEDIAN_SAMPLES}: raise workload."
                f"{'limit' if self._workload.kind == 'trace' else 'count'}"
            )

    def is_measured(self, settings: Settings) -> bool:
        """Whether the steps of such engines are; no, where they do not fit."""
        try:
            return _is_measured(
                self.simulator.setup(engine_of(self.config, settings, 2 if settings.get(PREFILL_SHARE) else 1))
            )
        except ConfigError:
            return False

    def simulate(self, settings: Settings, replicas: int, slo: SLO | None = None) -> Plan:
        """`slo`: another one than was asked for. ConfigError where it does not fit."""
        setup = self.simulator.setup(engine_of(self.config, settings, replicas))
        served = drive(setup.cluster(), self.items, self._workload.in_flight)
        plan = self._planned(settings, replicas, served, setup, slo or self.slo)
        self.tried.append(plan)
        return plan

    def alone(self, settings: Settings) -> Plan | None:
        """One request after the other, by an engine that forgets no prefix: nobody is served sooner, however many
        engines there are. None where drafts depend on chance."""
        one = {key: value for key, value in settings.items() if key not in NO_ENGINE_OF_ITS_OWN}
        key = tuple(one.items())
        if key not in self._alone:
            engine = engine_of(self.config, one, 1)
            if engine.speculation.most:
                return None
            setup = self.simulator.setup(engine)
            size = engine.cache.block_size
            blocks = sum(-(-(len(item.prompt) + item.output_tokens) // size) for item in self.items)
            limits = replace(setup.limits, num_blocks=max(blocks, setup.limits.num_blocks))
            items = [replace(item, arrival_s=None) for item in self.items]
            served = drive(replace(setup, limits=limits).cluster(), items, 1)
            due = []  # as if each had come when its item is due
            for trace, item in zip(served.requests, self.items, strict=True):
                arrival = trace.arrival if item.arrival_s is None else item.arrival_s
                times = tuple([time + (arrival - trace.arrival) for time in trace.token_times])
                due.append(replace(trace, arrival=arrival, token_times=times))
            served = replace(served, requests=tuple(due))
            self._alone[key] = self._planned(one, 1, served, setup, self.slo, alone=True)
        return self._alone[key]._replace(settings=settings)

    def _planned(
        self, settings: Settings, replicas: int, served: Served, setup: Setup, slo: SLO, alone: bool = False
    ) -> Plan:
        if setup.found.measured or not self.sources:  # that of one that is not says what is known beside it
            self.sources[f"What steps take: {setup.found.source}."] = None
        served = self._in_window(served)
        gpus = sum(engine.ranks for engine in setup.config.parallel.of_engines)
        changed = {key: value for key, value in settings.items() if value != self.base[key]}
        changed.pop(PREFILL_SHARE, None)
        measured = _is_measured(setup)
        name = Point.of({**changed, **counted(settings, replicas)}).name
        point = Point(
            name + NOT_MEASURED * (not measured) + " (each request alone)" * alone, {**settings, REPLICAS: replicas}
        )
        # The tightest bounds that the share of the requests keeps which comes nearest to the SLO.
        taken = sorted((slo.taken_by(request) for request in served.counted), key=slo.used_by)
        kept = taken[: math.ceil(self.share * len(taken) - 1e-9)]  # as 0.7 of 10 is 7
        needs = {name: max(each[name] for each in kept) for name in slo.bounds}
        found = formulas.measure(served, OF_PASS, Context(self.slo, None, "nothing is measured"))
        shown = {name: float(value) for name, value in found.items() if not isinstance(value, Missing)}
        values = {"gpus": float(gpus), **shown}
        return Plan(point, settings, replicas, gpus, values, needs, slo.used_by(needs), measured, alone)

    def _in_window(self, served: Served) -> Served:
        return served.without_ramps() if self._workload.has_ramps else served


def engine_of(config: DictConfig, settings: Settings, replicas: int) -> EngineConfig:
    values = {key: value for key, value in settings.items() if key != PREFILL_SHARE}
    return schema.engine_config(schema.with_values(config, {**values, **counted(settings, replicas)}).engine)


def _is_measured(setup: Setup) -> bool:
    return setup.found.measured and setup.config.parallel.pipeline == 1  # of stages nobody measures a step


def counted(settings: Settings, engines: int) -> dict[str, int]:
    """Keys of so many engines, each with a role where prompts are computed apart."""
    if not (share := settings.get(PREFILL_SHARE)):
        return {REPLICAS: engines}
    prompts = min(max(1, round(share * engines)), engines - 1)
    return {"engine.parallel.prefill": prompts, "engine.parallel.decode": engines - prompts}
