"""The planner: simulates a workload on one layout after the other, for the fewest GPUs that keep a promise.

From the engine's own settings on, one setting at a time takes each of its values, and the best stays (coordinate
descent), until none helps any more. Layouts count whose steps have been measured, as long as there are any; what
the others may do stands beside. Of each layout the fewest replicas are found that keep the promise:
doubled until they do, then bisected. None are looked for where too few requests would keep it if each had an engine for
itself. Where nothing keeps the promise, the nearest one that something keeps is simulated in its place.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from experiments.lab.config import schema
from experiments.lab.config.points import Point, flat
from experiments.lab.config.spec import PREFILL_SHARE, Count, ExperimentSpec, PositiveShare
from experiments.lab.experiment import Experiment, Findings
from experiments.lab.judge import formulas, stats
from experiments.lab.judge.metrics import SLO, Better, Metric
from experiments.lab.measure.plans import OF_PASS, PROPOSER, REPLICAS, TIE, Layouts, Plan, engine_of, measuring, server
from experiments.lab.show.progress import Steps
from experiments.lab.store.result import SIMULATED
from experiments.lab.workloads.base import Vocabulary
from mini_infer.core.config import Device
from mini_infer.core.errors import ConfigError
from mini_infer.simulation.costs import require_simulated

VARIANT = "simulated"
GPUS = Metric("GPUs", "", Better.lower)
LOSERS = 2  # that are to be measured beside the winner
LATENCIES = ("ttft", "tpot")
TOLD = 0.05  # so much better a latency has to be for more GPUs to be worth a word
REACH, MOST_COUNTS = 4, 13  # a front goes on to so many times the fewest replicas, in so many numbers of them at most


@dataclass(frozen=True)
class CapacitySpec(ExperimentSpec):
    slo: SLO = field(default_factory=SLO)  # bounds that a request must keep
    share: PositiveShare = 0.9  # of the requests, which must
    # Dotted keys of the engine, or PREFILL_SHARE -> values to try beside its own.
    settings: dict[str, Any] = field(default_factory=dict)
    most_replicas: Count = 64  # that are tried; engines of both roles where prompts are computed apart

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
        known = {PREFILL_SHARE: 0.0, **flat(schema.plain(self._config.engine), "engine.")}
        if unknown := [key for key in self.spec.settings if key not in known]:
            raise ConfigError(f"experiment.settings: the engine has no setting {unknown[0]}")
        self._base = {key: known[key] for key in self.spec.settings}
        self._changes = [{key: value} for key, values in self.spec.settings.items() for value in values]
        self.metrics = {"gpus": GPUS, **{name: formulas.describe(name) for name in OF_PASS}}
        formulas.require_known(OF_PASS, self.spec.slo)
        self._typed = list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
        self._engine = partial(engine_of, self._config)
        require_simulated(self._engine({}, 1))
        self._plans: dict[tuple[Any, ...], Plan] = {}  # by settings
        self._impossible: dict[tuple[Any, ...], str] = {}  # and why others cannot be had

    @property
    def hardware_key(self) -> str:
        return f"{SIMULATED}{self.simulator.key(self._engine({}, 1))}"

    def measure(self, steps: Steps) -> Findings:
        inputs = self._workload.make(Vocabulary(self._engine({}, 1).model), self.settings.seed)
        self._layouts = Layouts(
            self._config, self.simulator, self._base, inputs.measured, self.spec.slo, self.spec.share
        )
        best = self._search(steps)
        own = f"What a layout does not name is as given: {Point.of(self._base).name}." if self._base else ""
        if best.keeps:
            answer = self._kept(best)
            unmeasured = list(self._unmeasured(best, steps))
            self._fill_fronts(best, steps)
            shown = [plan for plan in self._layouts.tried if plan.keeps]
            found = [*unmeasured, *self._beside(best), *self._worth(best)]
            notes = [answer, self._start(best), self._picked(best), *found]
        else:
            best, answer = self._nearest(best)
            shown = self._layouts.tried
            notes = [answer, self._start(best)]
        notes += _fronts([plan for plan in shown if plan.measured >= best.measured])
        every = sorted((*self._plans.values(), *shown), key=lambda plan: plan.order)
        plans = {plan.point.name: plan for plan in every if plan.point.name != best.point.name}
        plans[best.point.name] = best
        notes += [own, self._assumed(list(plans.values())), *self._refused()]
        notes += [*self._layouts.sources, *self.simulator.beyond()]
        notes = [note for note in notes if note]
        print("\n".join(notes), file=sys.stderr)
        return Findings(
            [row for plan in plans.values() for row in self.rows(VARIANT, plan.point, 0, plan.values)],
            notes=notes[1:],
            answer=answer,
            points=[plan.point for plan in plans.values()],
            workload=self._workload.describe(inputs),
        )

    def _search(self, steps: Steps) -> Plan:
        """The best layout of those that were measured; of all, where none was."""
        singles = [{**self._base, **change} for change in self._changes]
        steps.plan(1 + len(singles))
        steps.next("the engine's own settings")
        start = next((one for one in (self._base, *singles) if self._layouts.is_measured(one)), None)
        best, improved, told = self._plan(start or self._base), True, steps.next
        while improved:
            improved = False
            for change in self._changes:
                told(Point.of(change).name)
                tried = {**(best.settings if best else start or self._base), **change}
                if start is None or self._layouts.is_measured(tried):
                    plan = self._plan(tried)
                    if plan is not None and plan.beats(best):
                        best, improved = plan, True
            told = steps.note
        if best is None:
            raise ConfigError(f"none of {len(self._impossible)} layouts is possible. The engine's own settings: "
                              f"{self._impossible[tuple(self._base.items())]}")  # fmt: skip
        return best

    def _plan(self, settings: Mapping[str, Any]) -> Plan | None:
        """The fewest replicas that keep the promise, or the most there may be; None where the layout does not fit."""
        key = tuple(settings.items())
        if key not in (*self._plans, *self._impossible):
            try:
                alone = self._layouts.alone(settings)
                self._plans[key] = self._fewest(settings) if alone is None or alone.keeps else alone
            except ConfigError as error:
                self._impossible[key] = str(error)
        return self._plans.get(key)

    def _fewest(self, settings: Mapping[str, Any], slo: SLO | None = None) -> Plan:
        most, low, high = self.spec.most_replicas, 0, 1
        if settings.get(PREFILL_SHARE):
            low, high = 1, 2
        if most < high:
            raise ConfigError(f"{PREFILL_SHARE}={settings[PREFILL_SHARE]} takes {high} engines: raise most_replicas")
        found = self._layouts.simulate(settings, high, slo)
        while not found.keeps and high < most:
            low, high = high, min(2 * high, most)
            found = self._layouts.simulate(settings, high, slo)
        while found.keeps and high - low > 1:
            middle = (low + high) // 2
            tried = self._layouts.simulate(settings, middle, slo)
            if tried.keeps:
                found, high = tried, middle
            else:
                low = middle
        return found

    def _nearest(self, best: Plan) -> tuple[Plan, str]:
        """Where nothing keeps the promise: what comes nearest to it, and what that keeps, simulated."""
        spec = self.spec
        number = "any number of" if best.alone else f"up to {spec.most_replicas}"
        # Whoever is served alone waits for nobody: what comes of a number of engines is no better.
        alone = sorted((plan for plan in self._candidates(best) if plan.alone), key=lambda plan: plan.used)
        known = [plan for plan in self._candidates(best) if not plan.alone]
        for plan in alone:
            nearest = min(known, key=lambda one: one.order, default=None)
            if nearest is not None and (1 - TIE) * nearest.used <= plan.used:
                break
            known.append(self._layouts.simulate(plan.settings, spec.most_replicas))
        nearest = min(known, key=lambda one: one.order)
        slo = SLO(**{name: max(bound, _rounded_up(nearest.needs[name])) for name, bound in spec.slo.bounds.items()})
        kept = self._fewest(nearest.settings, slo)
        typed = " ".join(f"slo.{name}={bound:g}" for name, bound in slo.bounds.items())
        return kept, (
            f"Nothing keeps {_told(spec.slo)} for {spec.share:.0%} of the requests, with {number} replicas. The "
            f"nearest that can be kept is {_told(slo)}, with {kept.words}, {kept.point.name}: {typed}."
        )

    def _candidates(self, best: Plan) -> list[Plan]:
        """Those that are not measured only where there is nothing else."""
        return [plan for plan in self._plans.values() if plan.measured >= best.measured]

    def _fill_fronts(self, best: Plan, steps: Steps) -> None:
        """More replicas than the fewest: of the winner, and of the layouts of each shape that are the best, and the
        quickest to the first and to the next token."""
        kept = [plan for plan in self._candidates(best) if plan.keeps]
        orders: list[Callable[[Plan], tuple[Any, ...]]] = [lambda plan: plan.order, *map(_quickest, LATENCIES)]
        firsts: dict[tuple[Any, ...], Plan] = {(best.shape, 0): best}
        for index, order in enumerate(orders):
            for plan in sorted(kept, key=order):
                firsts.setdefault((plan.shape, index), plan)
        for plan in {tuple(plan.settings.items()): plan for plan in firsts.values()}.values():
            steps.note(f"more replicas than {plan.point.name}")
            last = min(REACH * plan.replicas, self.spec.most_replicas)
            step = max(1.0, (last - plan.replicas) / (MOST_COUNTS - 1))
            known = {one.replicas for one in self._layouts.tried if one.settings == plan.settings}
            counts = {round(plan.replicas + step * index) for index in range(MOST_COUNTS)}
            for count in sorted(count for count in counts - known if count <= last):
                self._layouts.simulate(plan.settings, count)

    def _kept(self, best: Plan) -> str:
        near = ", which leaves less room than the simulator may be off: measure it first" if best.used > 1 - TIE else ""
        return (
            f"The fewest: {best.words}, {best.point.name}. {best.values['slo_share']:.1%} of the requests keep "
            f"{_told(self.spec.slo)}, and {self.spec.share:.0%} need at most {best.used:.0%} of the time that this "
            f"allows{near}."
        )

    def _picked(self, best: Plan) -> str:
        """Why this one, where others keep the promise with as many GPUs."""
        others = [
            plan.used for plan in self._candidates(best) if plan.keeps and plan.gpus == best.gpus and plan != best
        ]
        if not others:
            return ""
        slo = self.spec.slo
        tightest = max(slo.bounds, key=lambda name: best.needs[name] / slo.bounds[name])
        low, high = (f"{share:.0%}" for share in (min(others), max(others)))
        return (
            f"Why this one of {1 + len(others)} layouts that keep it with {best.words}: chosen is what leaves the most "
            f"room below its tightest bound. Here {self.spec.share:.0%} of the requests need at most {best.used:.0%} "
            f"of {_told(SLO(**{tightest: slo.bounds[tightest]}))}, and of the tightest bounds of the others "
            f"{low if low == high else f'{low} to {high}'}; less than {TIE:.0%} apart is equal, and then settings stay "
            "as they were."
        )

    def _start(self, best: Plan) -> str:
        return f"Start it with: {server(self._engine(best.settings, best.replicas))}"

    def _neighbours(self, best: Plan) -> Iterator[tuple[str, Plan]]:
        """The winner with one setting changed, and which: of all that was tried."""
        for plan in self._plans.values():
            changed = [key for key, value in best.settings.items() if plan.settings[key] != value]
            if len(changed) == 1:
                yield changed[0], plan

    def _unmeasured(self, best: Plan, steps: Steps) -> Iterator[str]:
        """What nobody has measured."""
        if not best.measured:
            yield "Nobody has measured what steps take, in this layout or any other here. Calibrate first."
            return
        told = []
        for change in self._changes:
            settings, name = {**best.settings, **change}, Point.of(change).name
            if not self._layouts.is_measured(settings):
                steps.note(f"what {name} may do")
                if (plan := self._plan(settings)) is not None:
                    told.append(f"{name}: {self._worth_of(plan)}")
        if told:
            yield (
                f"Nobody has measured these, and so they do not compete: {'; '.join(told)}. What is shown of them is "
                "an estimate from the steps of one rank, or a bound that no step can beat: the roofline, or stages of "
                "a pipeline that hand on in no time. `experiment=calibrate` with that setting tells what they take."
            )

    def _others(self, best: Plan) -> list[Plan]:
        """The next ones, of different settings where there are such, that differ by more than the simulator is off:
        whether the winner is one shows beside them. Those that break the promise, too, with no more GPUs."""
        firsts, rest = dict[str, Plan](), list[Plan]()
        for key, plan in sorted(self._neighbours(best), key=lambda each: each[1].order):
            told = plan.gpus != best.gpus or abs(plan.used - best.used) > TIE * best.used
            fits = plan.keeps or (plan.gpus <= best.gpus and not plan.alone)
            if told and fits and plan.measured is best.measured and firsts.setdefault(key, plan) is not plan:
                rest.append(plan)
        return [*firsts.values(), *rest][:LOSERS]

    def _beside(self, best: Plan) -> Iterator[str]:
        others = self._others(best)
        for plan in others:
            breaks = "" if plan.keeps else ", which is to break the promise"
            yield f"To be measured beside it: {plan.words}, {plan.point.name}{breaks}. {self._start(plan)}"
        named = dict(zip(("winner", "second", "third"), [best, *others], strict=False))
        if line := measuring(self._config, self._typed, self._base, named, self.spec.slo):
            yield f"What measures {'these' if others else 'it'}, beside what is predicted: {line}"

    def _worth(self, best: Plan) -> Iterator[str]:
        """Each setting of the winner against the other values that were tried of it, all else equal."""
        for key in self.spec.settings:
            others = [f"{plan.settings[key]}: {self._worth_of(plan)}" for of, plan in self._neighbours(best)
                      if of == key and plan.measured is best.measured]  # fmt: skip
            if others:
                mine = f"{best.settings[key]}: {self._worth_of(best)} (chosen)"
                yield f"{key.removeprefix('engine.')}, all else as in the winner: {mine}; {'; '.join(others)}."

    def _worth_of(self, plan: Plan) -> str:
        found = ((name.upper(), *_latency([plan], name)) for name in LATENCIES)
        told = ", ".join(f"{name} {quantile.upper()} {plan.values[key]:.3g} ms" for name, quantile, key in found if key)
        if not plan.keeps:
            told += f", not kept by {'any number of' if plan.alone else plan.replicas} replicas"
        return f"{plan.words}, {told}"

    def _refused(self) -> Iterator[str]:
        for key, why in self._impossible.items():
            changed = {name: value for name, value in key if value != self._base[name]}
            yield f"Not possible: {Point.of(changed or self._base).name}: {why}."

    def _assumed(self, plans: Sequence[Plan]) -> str:
        """Of drafts: whose they are to be, and what that rests on."""
        rates = {engine.speculation.rate for engine in (self._engine(plan.settings, 1) for plan in plans)} - {None}
        told = " and ".join(f"{rate:g}" for rate in rates if rate is not None)
        return told and (
            f"Assumed, not known: that drafts are accepted at a rate of {told}. The commands take them from "
            f"{PROPOSER.value}, which loads no model; how many of its drafts your text accepts is to be "
            "measured first."
        )


def front(plans: Sequence[Plan], metric: str) -> list[Plan]:
    """Those that no other with as few GPUs beats (Pareto), from the fewest on."""
    known = [plan for plan in plans if metric in plan.values]
    return stats.front(known, lambda plan: (plan.gpus, plan.values[metric]))


def _fronts(plans: Sequence[Plan]) -> Iterator[str]:
    for name in LATENCIES:
        quantile, metric = _latency(plans, name)
        told = list[Plan]()
        for plan in front(plans, metric):
            if not told or plan.values[metric] < (1 - TOLD) * told[-1].values[metric]:
                told.append(plan)
        if told:
            each = "; ".join(f"{plan.words} {plan.values[metric]:.3g} ms ({plan.point.name})" for plan in told)
            yield f"Cost against {name.upper()} {quantile.upper()}, where nothing is better in both: {each}."


def _quickest(name: str) -> Callable[[Plan], tuple[Any, ...]]:
    keys = [f"{name}_{quantile}_ms" for quantile in ("p90", "p50")]
    return lambda plan: (plan.gpus, *(plan.values.get(key, math.inf) for key in keys))


def _latency(plans: Sequence[Plan], name: str) -> tuple[str, str]:
    """The percentile that all of them show, and its key; empty where none is."""
    for quantile in ("p90", "p50"):
        if plans and all(f"{name}_{quantile}_ms" in plan.values for plan in plans):
            return quantile, f"{name}_{quantile}_ms"
    return "", ""


def _told(slo: SLO) -> str:
    return " and ".join(f"{name.removesuffix('_ms').upper()} {bound:g} ms" for name, bound in slo.bounds.items())


def _rounded_up(value: float) -> float:
    """To three digits."""
    digit = 10.0 ** (math.floor(math.log10(value)) - 2) if value > 0 else 1.0
    return float(f"{math.ceil(value / digit * (1 + 1e-9)) * digit:.6g}")
