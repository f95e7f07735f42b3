"""The planner: simulates a workload on one layout after the other, for the fewest GPUs that keep a promise.

From the engine's own settings on, one setting at a time takes each of its values, and the best stays (coordinate
descent), until none helps any more. Of each layout the fewest replicas are found that keep the promise: doubled until
they do, then bisected. None are looked for where too few requests would keep it if each had an engine for itself.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from omegaconf import DictConfig

from experiments.lab import axes, points, schema
from experiments.lab.check import Count, PositiveShare
from experiments.lab.experiment import Experiment, Findings
from experiments.lab.judge import formulas
from experiments.lab.judge.metrics import SLO, Better, Context, Metric, Missing
from experiments.lab.load.server import flags
from experiments.lab.measure.simulated import Setup, Simulator, drive
from experiments.lab.measure.traces import RequestTrace, Served
from experiments.lab.points import Point
from experiments.lab.show.progress import Steps
from experiments.lab.spec import ExperimentSpec
from experiments.lab.store.rows import Row
from experiments.lab.workloads import Item
from experiments.lab.workloads.vocabulary import ModelVocabulary
from mini_infer.core.config import Device, EngineConfig, LoadFormat, Routing
from mini_infer.core.errors import ConfigError
from mini_infer.core.speculation_config import SpeculationMethod

VARIANT = "simulated"
OF_PASS = (
    "slo_share",
    "goodput_rps",
    "ttft_p50_ms",
    "ttft_p90_ms",
    "tpot_p50_ms",
    "tpot_p90_ms",
    "output_tokens_per_s",
)
GPUS = Metric("GPUs", "", Better.lower)
REPLICAS = "engine.parallel.replicas"
LOSERS = 2  # that are to be measured beside the winner
PREFILL_SHARE = "prefill_share"  # of the engines, which then compute prompts for the others: 0 where all do both
PROPOSER = SpeculationMethod.ngram  # of drafts, in commands: as those that are simulated, it costs the device nothing


@dataclass(frozen=True)
class CapacitySpec(ExperimentSpec):
    """
    Attributes:
        slo: bounds that a request must keep.
        share: of the requests, which must.
        settings: dotted keys of the engine, or PREFILL_SHARE -> values to try beside its own.
        most_replicas: that are tried; engines of both roles where prompts are computed apart.
    """

    slo: SLO = field(default_factory=SLO)
    share: PositiveShare = 0.9
    settings: dict[str, Any] = field(default_factory=dict)
    most_replicas: Count = 64

    def __post_init__(self) -> None:
        if not self.slo.bounds:
            raise ConfigError("experiment.slo has no bound: give experiment.slo.ttft_ms, tpot_ms, itl_ms or e2e_ms")
        super().__post_init__()
        for key, values in self.settings.items():
            known = key.startswith("engine.") or key == PREFILL_SHARE
            if not known or not isinstance(values, Sequence) or isinstance(values, str):
                raise ConfigError(
                    f"experiment.settings[{key}] must be a list of values of a key of engine, or of {PREFILL_SHARE}, "
                    f"got {values}"
                )
            if key == PREFILL_SHARE and not all(0 <= share < 1 for share in values):
                raise ConfigError(f"experiment.settings[{key}] must be from 0 to less than 1, got {list(values)}")
            if key == REPLICAS:
                raise ConfigError(f"experiment.settings must not give {REPLICAS}, which is what is searched")


class Plan(NamedTuple):
    """A layout with a number of replicas, and what came of the workload on it.

    `point` is called by what differs from the engine's own settings, and by whether its steps are bounds.
    """

    point: Point
    settings: Mapping[str, Any]
    replicas: int
    gpus: int
    values: Mapping[str, float]
    keeps: bool
    bound: bool  # of costs that no step can have: nobody has measured this layout
    alone: bool = False  # of requests that have an engine for themselves: as if there were any number

    @property
    def order(self) -> tuple[Any, ...]:
        """Smaller is better: what keeps the promise with the fewest GPUs, then the quicker; else what comes nearest."""
        quick = self.values["ttft_p50_ms"] + self.values.get("tpot_p50_ms", 0.0)
        return (False, self.gpus, quick) if self.keeps else (True, -self.values["slo_share"], self.gpus)

    @property
    def words(self) -> str:
        return f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}"


class Capacity(Experiment):
    reads = ("engine", "workload", "hardware", "measure.costs", "measure.seed")
    spec: CapacitySpec
    device = Device.cpu  # whatever is simulated
    variants: Mapping[str, str] = {VARIANT: "simulated"}
    points: Sequence[Point] = ()

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self._config = schema.of_points(config)
        self._workload = schema.workload(config)
        self._base = {
            key: 0.0 if key == PREFILL_SHARE else _plain(_known(self._config, key)) for key in self.spec.settings
        }
        self._simulator = Simulator(self.chosen, self.threads, axes.CONF.parent / self.settings.costs)
        self.metrics = {"gpus": GPUS, **{name: formulas.describe(name) for name in OF_PASS}}
        formulas.require_known(OF_PASS, self.spec.slo)
        self._plans: dict[tuple[Any, ...], Plan | str] = {}  # by settings: or why they cannot be had
        self._tried: list[Plan] = []  # with other numbers of replicas, too
        self._alone: dict[tuple[Any, ...], Plan] = {}  # by settings

    @property
    def hardware_key(self) -> str:
        return f"simulated-{self._simulator.key(self._engine({}, 1))}"

    def measure(self, steps: Steps) -> Findings:
        vocabulary = ModelVocabulary(self._engine({}, 1).model)
        inputs = self._workload.make(vocabulary, self.settings.seed)
        self._items = inputs.measured
        self._sources: dict[str, None] = {}
        steps.plan(1 + sum(map(len, self.spec.settings.values())))
        best = self._search(lambda plan: True, steps)
        known = best.bound and any(isinstance(plan, Plan) and not plan.bound for plan in self._plans.values())
        sure = self._search(lambda plan: not plan.bound) if known else None
        found = list({plan.point.name: plan for plan in self._plans.values() if isinstance(plan, Plan)}.values())
        front = _front([plan for plan in self._tried if plan.keeps] or found)
        plans = sorted([*found, *(plan for plan in front if plan not in found)], key=lambda plan: plan.order)
        rows = [
            Row(VARIANT, plan.point.name, 0, name, float(value), self.metrics[name].unit)
            for plan in plans
            for name, value in plan.values.items()
        ]
        beside = [f"Its steps are bounds. Of what was measured: {self._answer(sure)}"] if sure and sure.keeps else []
        own = f"What a layout does not name is as given: {points.point(self._base).name}." if self._base else ""
        notes = [self._answer(best), *beside, *self._losers(best, plans), *self._worth(best), _front_words(front), own]
        notes = [
            note
            for note in (*notes, self._assumed(plans), *self._refused(), *self._sources, *self._simulator.beyond())
            if note
        ]
        print("\n".join(notes), file=sys.stderr)
        # The best one last: it is what the page's first sentence is about.
        return Findings(
            rows, notes=notes, points=[plan.point for plan in reversed(plans)], workload=self._workload.describe(inputs)
        )

    # --- the search -----------------------------------------------------------------------------------------------

    def _search(self, counts: Callable[[Plan], bool], steps: Steps | None = None) -> Plan:
        """The best of those that count: one setting after the other, until none brings anything. From the engine's own
        settings, or what has been tried already and counts."""
        tried = (plan for plan in self._plans.values() if isinstance(plan, Plan) and counts(plan))
        best = min(tried, key=lambda plan: plan.order, default=None)
        if steps is not None:
            steps.next("the engine's own settings")
            best = self._plan(self._base)
        settings = dict(self._base if best is None else best.settings)
        improved = True
        while improved:
            improved = False
            for key, values in self.spec.settings.items():
                for value in values:
                    if steps is not None:
                        steps.next(points.point({key: value}).name)
                    plan = self._plan({**settings, key: value})
                    if plan is not None and counts(plan) and (best is None or plan.order < best.order):
                        best, improved = plan, True
                if best is not None:
                    settings = dict(best.settings)
            steps = None
        if best is None:
            raise ConfigError(f"none of {len(self._plans)} layouts fits. The engine's own settings: "
                              f"{self._plans[tuple(self._base.items())]}")  # fmt: skip
        return best

    def _plan(self, settings: Mapping[str, Any]) -> Plan | None:
        """The fewest replicas that keep the promise, or the most there may be; None where the layout does not fit."""
        key = tuple(settings.items())
        if key not in self._plans:
            try:
                self._plans[key] = self._fewest(settings)
            except ConfigError as error:
                self._plans[key] = str(error)
        found = self._plans[key]
        return found if isinstance(found, Plan) else None

    def _fewest(self, settings: Mapping[str, Any]) -> Plan:
        most, low, high = self.spec.most_replicas, 0, 1
        if settings.get(PREFILL_SHARE):
            low, high = 1, 2
        if most < high:
            raise ConfigError(f"{PREFILL_SHARE}={settings[PREFILL_SHARE]} takes {high} engines: raise most_replicas")
        alone = self._served_alone(settings)
        if alone is not None and not alone.keeps:
            return alone._replace(settings=settings)
        found = self._simulated(settings, high)
        if not found.keeps:
            all_there_may_be = self._simulated(settings, most) if most > high else found
            if not all_there_may_be.keeps:
                return min(found, all_there_may_be, key=lambda plan: plan.order)
        while not found.keeps:
            low, high = high, min(2 * high, most)
            found = self._simulated(settings, high)
        while found.keeps and high - low > 1:
            middle = (low + high) // 2
            tried = self._simulated(settings, middle)
            if tried.keeps:
                found, high = tried, middle
            else:
                low = middle
        return found

    def _served_alone(self, settings: Mapping[str, Any]) -> Plan | None:
        """One request after the other, by an engine that forgets no prefix: nobody is served sooner, however many
        engines there are. None where drafts depend on chance."""
        settings = {key: value for key, value in settings.items() if key != PREFILL_SHARE}
        key = tuple(settings.items())
        if key not in self._alone:
            engine = self._engine(settings, 1)
            if engine.speculation.most:
                return None
            setup = self._simulator.setup(engine)
            size = engine.cache.block_size
            blocks = sum(-(-(len(item.prompt) + item.output_tokens) // size) for item in self._items)
            limits = replace(setup.limits, num_blocks=max(blocks, setup.limits.num_blocks))
            items = [replace(item, arrival_s=None) for item in self._items]
            served = drive(replace(setup, limits=limits).cluster(), items, 1)
            due = [_arrived_at(*one) for one in zip(served.requests, self._items, strict=True)]
            self._alone[key] = self._planned(settings, 1, replace(served, requests=tuple(due)), setup, alone=True)
        return self._alone[key]

    def _simulated(self, settings: Mapping[str, Any], replicas: int) -> Plan:
        setup = self._simulator.setup(self._engine(settings, replicas))
        served = drive(setup.cluster(), self._items, self._workload.in_flight)
        plan = self._planned(settings, replicas, served, setup)
        self._tried.append(plan)
        return plan

    def _planned(
        self, settings: Mapping[str, Any], replicas: int, served: Served, setup: Setup, alone: bool = False
    ) -> Plan:
        self._sources[f"What steps take: {setup.found.source}."] = None
        if self._workload.has_ramps:
            served = served.without_ramps()
        values = dict(_values(served, self.spec.slo))
        gpus = sum(engine.ranks for engine in setup.config.parallel.of_engines)
        keeps = values["slo_share"] >= self.spec.share
        changed = {key: value for key, value in settings.items() if value != self._base[key]}
        changed.pop(PREFILL_SHARE, None)
        marks = " (bound)" * setup.found.bound + " (each request alone)" * alone
        name = points.point({**changed, **_counted(settings, replicas)}).name + marks
        point = Point(name, {**settings, REPLICAS: replicas})
        bound = setup.found.bound or setup.config.parallel.pipeline > 1  # of stages nobody measures a step
        return Plan(point, settings, replicas, gpus, {"gpus": gpus, **values}, keeps, bound, alone)

    def _engine(self, settings: Mapping[str, Any], replicas: int) -> EngineConfig:
        values = {key: value for key, value in settings.items() if key != PREFILL_SHARE}
        changed = schema.with_values(self._config, {**values, **_counted(settings, replicas)})
        return schema.engine_config(changed.engine)

    # --- what it says ---------------------------------------------------------------------------------------------

    def _answer(self, best: Plan) -> str:
        spec, bounds = self.spec, self._bounds()
        if best.keeps:
            return (
                f"The fewest: {best.words}, {best.point.name}. {best.values['slo_share']:.1%} of the requests keep "
                f"{bounds}. Start it with: {self._command(best)}"
            )
        quantile = "p90" if "ttft_p90_ms" in best.values else "p50"  # which fewer requests have
        of_it = {name.partition("_")[0].upper(): best.values[name] for name in best.values if quantile in name}
        near = ", ".join(f"{name} {value:.3g} ms" for name, value in of_it.items())
        number, way_out = f"up to {spec.most_replicas}", "raise experiment.most_replicas"
        if best.alone:
            number, way_out = "any number of", "try other settings"
        return (
            f"Nothing keeps {bounds} for {spec.share:.0%} of the requests, with {number} replicas. The nearest is "
            f"{best.point.name}: {best.values['slo_share']:.1%} do, and its {quantile.upper()} are {near}. Allow as "
            f"much, ask it of fewer requests, or {way_out}"
        )

    def _losers(self, best: Plan, plans: Sequence[Plan]) -> Iterator[str]:
        """The next ones, each with settings of its own: whether the winner is one shows beside them."""
        others: dict[str, Plan] = {}
        for plan in plans:
            if best.keeps and not plan.alone and plan.settings != best.settings:
                others.setdefault(self._command(plan), plan)
        few = list(others.items())[:LOSERS]
        if few:
            told = "; ".join(f"{plan.words}, {plan.point.name}: {command}" for command, plan in few)
            yield f"To be measured beside it, where there are as many GPUs: {told}"

    def _bounds(self) -> str:
        return " and ".join(
            f"{name.removesuffix('_ms').upper()} {bound:g} ms" for name, bound in self.spec.slo.bounds.items()
        )

    def _worth(self, best: Plan) -> Iterator[str]:
        """Each setting of the winner against the other values that were tried of it, all else equal."""
        for key in self.spec.settings:
            others = []
            for plan in self._plans.values():
                alike = isinstance(plan, Plan) and all(
                    plan.settings[k] == best.settings[k] for k in best.settings if k != key
                )
                if alike and isinstance(plan, Plan) and plan.settings[key] != best.settings[key]:
                    word = plan.words if plan.keeps else f"only {plan.values['slo_share']:.0%} kept"
                    others.append(f"{plan.settings[key]}: {word}, TTFT {plan.values['ttft_p50_ms']:.0f} ms")
            if others:
                mine = f"{best.settings[key]}: {best.words}, TTFT {best.values['ttft_p50_ms']:.0f} ms"
                yield f"{key.removeprefix('engine.')}, all else as in the winner: {mine} (chosen); {'; '.join(others)}."

    def _refused(self) -> Iterator[str]:
        for key, why in self._plans.items():
            if isinstance(why, str):
                yield f"Not possible: {points.point(dict(key)).name}: {why}."

    def _command(self, best: Plan) -> str:
        """Of the server: all that differs from its defaults."""
        engine = to_serve(self._engine(best.settings, best.replicas))
        path = engine.model.path
        return shlex.join(["mini-infer-serve", "--model", path, *flags(engine, EngineConfig(path))])

    def _assumed(self, plans: Sequence[Plan]) -> str:
        """Of drafts: whose they are to be, and what that rests on."""
        rates = {engine.speculation.rate for engine in (self._engine(plan.settings, 1) for plan in plans)} - {None}
        told = " and ".join(f"{rate:g}" for rate in rates if rate is not None)
        return told and (
            f"Assumed, not known: that drafts are accepted at a rate of {told}. The commands take them from "
            f"{PROPOSER.value}, which loads no model; how many of its drafts your text accepts is to be measured first."
        )


def to_serve(engine: EngineConfig) -> EngineConfig:
    """What is simulated, as a server is told of it: seeds as they come, the model's own weights where its shape stood
    for it, and drafts that the target judges where a rate stood for them."""
    model, drafts = engine.model, engine.speculation
    if model.load_format is LoadFormat.dummy:
        model = replace(model, load_format=LoadFormat.auto, hf_config=None, routing=Routing.learned)
    method = drafts.method if drafts.rate is None else PROPOSER
    return replace(engine, model=model, speculation=replace(drafts, method=method, acceptance=None), seed=None)


def _values(served: Served, slo: SLO) -> Iterator[tuple[str, float]]:
    """What the pass shows; percentiles that take more requests are left out."""
    for name, value in formulas.measure(served, OF_PASS, Context(slo, None, "nothing is measured")).items():
        if not isinstance(value, Missing):
            yield name, float(value)


def _counted(settings: Mapping[str, Any], engines: int) -> dict[str, int]:
    """Keys of so many engines, each with a role where prompts are computed apart."""
    if not (share := settings.get(PREFILL_SHARE)):
        return {REPLICAS: engines}
    prompts = min(max(1, round(share * engines)), engines - 1)
    return {"engine.parallel.prefill": prompts, "engine.parallel.decode": engines - prompts}


def _arrived_at(trace: RequestTrace, item: Item) -> RequestTrace:
    """As if it had come when the item is due."""
    if item.arrival_s is None:
        return trace
    later = item.arrival_s - trace.arrival
    return replace(trace, arrival=item.arrival_s, token_times=tuple([time + later for time in trace.token_times]))


def _front(plans: Sequence[Plan]) -> list[Plan]:
    """Those that no other beats both in GPUs and in the median TTFT (Pareto)."""
    front: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.gpus, plan.values["ttft_p50_ms"])):
        if not front or plan.values["ttft_p50_ms"] < front[-1].values["ttft_p50_ms"]:
            front.append(plan)
    return front


def _front_words(front: Sequence[Plan]) -> str:
    told = [
        f"{plan.words}: TTFT {plan.values['ttft_p50_ms']:.0f} ms, {plan.values['slo_share']:.0%} kept "
        f"({plan.point.name})"
        for plan in front
    ]
    return f"Cost against latency, where nothing is better in both: {'; '.join(told)}."


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _known(config: Mapping[Any, Any] | DictConfig, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        if part not in node:
            raise ConfigError(f"experiment.settings: the engine has no setting {key}")
        node = node[part]
    return node
