"""Layouts of engines on which a planner simulates a workload, and what came of it; and commands for what it found: of a
server, and of the run that measures plans beside their predictions."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from experiments.lab.config import axes, schema
from experiments.lab.config.points import Point, flat, within
from experiments.lab.config.spec import NOT_MEASURED, PREFILL_SHARE, SHAPE
from experiments.lab.judge import formulas, stats
from experiments.lab.judge.metrics import SLO, Context, Missing
from experiments.lab.load.subject import flags
from experiments.lab.measure.simulated import Setup, Simulator, drive
from experiments.lab.measure.traces import RequestTrace, Served
from experiments.lab.workloads import Item
from mini_infer.core.config import EngineConfig, LoadFormat, Routing
from mini_infer.core.errors import ConfigError
from mini_infer.core.speculation_config import SpeculationConfig, SpeculationMethod

OF_PASS = ("slo_share", "ttft_p50_ms", "ttft_p90_ms", "tpot_p50_ms", "tpot_p90_ms")
REPLICAS, DRAFTS = "engine.parallel.replicas", "engine.speculation.method"
NO_ENGINE_OF_ITS_OWN = (PREFILL_SHARE, "engine.parallel.routing")  # settings that one engine alone does not read
TIE = 0.1  # two latencies that differ by less are equal: a simulated one is off by as much

PROPOSER = SpeculationMethod.ngram  # of drafts, in commands: as those that are simulated, it costs the device nothing
METRICS = ["slo_share", "goodput_rps", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms", "output_tokens_per_s"]
# By the kind of the workload: the experiment that measures it, and the axis of its points, which is not to be typed.
MEASURED_BY = {"trace": ("simulator_trace", "rate_scale"), "shared_prefix": ("simulator", "count")}
KEPT = ("scale", "hardware", "model", "engine", "measure.costs", "measure.seed")  # of what was typed

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
        engines = 2 if settings.get(PREFILL_SHARE) else 1
        try:
            return _is_measured(self.simulator.setup(engine_of(self.config, settings, engines)))
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
        name = Point.of({**changed, **counted(settings, replicas)}).name + NOT_MEASURED * (not measured)
        point = Point(name + " (each request alone)" * alone, {**settings, REPLICAS: replicas})
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


def server(engine: EngineConfig) -> str:
    """With all that differs from its defaults: what is simulated, but with seeds as they come, the model's own weights
    where its shape stood for it, and drafts that the target judges where a rate stood for them."""
    model, drafts = engine.model, engine.speculation if engine.speculation.most else SpeculationConfig()
    if model.load_format is LoadFormat.dummy:
        model = replace(model, load_format=LoadFormat.auto, hf_config=None, routing=Routing.learned)
    method = drafts.method if drafts.rate is None else PROPOSER
    engine = replace(engine, model=model, speculation=replace(drafts, method=method, acceptance=None), seed=None)
    return shlex.join(["mini-infer-serve", "--model", model.path, *flags(engine, EngineConfig(model.path))])


def measuring(config: DictConfig, typed: Sequence[str], base: Settings, plans: Mapping[str, Plan], slo: SLO) -> str:
    """The run that serves the workload with these plans, by name, each beside what is predicted of it. Empty of a
    workload that no experiment does that with. `typed`: on the planner's command line; `base`: as in Layouts."""
    workload = schema.workload(config)
    if workload.kind not in MEASURED_BY:
        return ""
    experiment, axis = MEASURED_BY[workload.kind]
    scale = next((text.partition("=")[2] for text in typed if text.startswith("scale=")), "tiny")
    own, theirs = (_of_scale(name, scale) for name in ("capacity", experiment))
    changed = {key for plan in plans.values() for key in base if plan.settings[key] != base[key]} - {PREFILL_SHARE}
    variants = {}
    for name, plan in plans.items():
        changes = {key: plan.settings[key] for key in changed} | counted(plan.settings, plan.replicas)
        sections = axes.plain(schema.with_values(OmegaConf.create(), changes))["engine"]
        variants[name] = {"kind": "served", "label": plan.point.name, **sections}
    engine = flat(schema.plain(config.engine), "engine.")
    # What is said of drafts is refused where nothing drafts.
    drafts = {str(plan.settings.get(DRAFTS, engine.get(DRAFTS))) for plan in plans.values()}
    left = {key for key in engine if drafts == {SpeculationMethod.none.value} and within(key, ["engine.speculation"])}
    given = [text for text in typed if within(_key(text), KEPT) and _key(text) not in {*changed, *left}]
    said = {key: engine.get(key) for key in {**own, **theirs} if key.startswith("engine.")}
    load = {f"workload.{f.name}": getattr(workload, f.name) for f in fields(workload) if f.name != axis}
    usual = {f"workload.{f.name}": f.default for f in fields(workload)}
    said |= {key: value for key, value in load.items() if key in theirs or value != usual[key]}
    known = {*map(_key, given), *changed, *left}
    return shlex.join(
        [
            *("python", "run.py", f"experiment={experiment}", *given, f"workload={workload.kind}"),
            *(f"{key}={_typed(value)}" for key, value in said.items() if key not in known),
            *("~experiment.points", f"+experiment.points={{workload.{axis}: [{getattr(workload, axis)}]}}"),
            *("~experiment.variants", f"+experiment.variants={_typed(variants)}"),
            f"experiment.baseline={next(iter(plans))}",
            *( "experiment.keep_engines=false", f"+experiment.slo={_typed(asdict(slo))}"),
            f"experiment.metrics={_typed(METRICS)}",
        ]
    )  # fmt: skip


def _of_scale(experiment: str, scale: str) -> Mapping[str, Any]:
    """Dotted keys that the experiment sets of an engine and a workload at this scale."""
    scales = axes.plain(OmegaConf.load(axes.CONF / "experiment" / f"{experiment}.yaml"))["scales"]
    return flat({key: value for key, value in scales.get(scale, {}).items() if key != "experiment"})


def _key(text: str) -> str:
    return text.partition("=")[0].lstrip("+~").replace("/", ".").partition("@")[0]


def _typed(value: Any) -> str:
    """As Hydra reads it."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_typed(one)}' for key, one in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_typed, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Enum):
        return str(value.value)
    return f'"{value}"' if isinstance(value, str) and not re.fullmatch(r"[\w./~-]+", value) else str(value)
