"""What an experiment is to the program that runs it: findings, made in rounds that can be stopped; and, of those that
time something directly, without an engine that serves requests, what is in a round."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, get_type_hints

import torch
from omegaconf import DictConfig

from experiments.lab.config import schema
from experiments.lab.config.axes import CONF
from experiments.lab.config.points import Point
from experiments.lab.config.spec import ExperimentSpec
from experiments.lab.judge import claims, stats
from experiments.lab.judge.gate import ErrorGate, Gate
from experiments.lab.judge.metrics import Metric
from experiments.lab.measure import hardware
from experiments.lab.measure.clocks import Watch
from experiments.lab.measure.kinds import PeerSettings
from experiments.lab.measure.profile import KernelRow, StepProfile
from experiments.lab.measure.simulated import Simulator
from experiments.lab.measure.traces import BlockRow, ExpertRow, GapRow, RequestRow, StepRow
from experiments.lab.measure.witness import Timed
from experiments.lab.show.progress import Steps
from experiments.lab.store.provenance import ProcessInfo
from experiments.lab.store.result import COMPLETE, Sample
from experiments.lab.store.rows import Row
from mini_infer.core.config import Device
from mini_infer.core.errors import ConfigError, MiniInferError

Made = TypeVar("Made", bound="Experiment")


class IncompleteRun(MiniInferError):
    """A run was stopped by an error, or could not be stored or reported. The message says what is kept, and where."""


def run_rounds(
    rounds: Sequence[tuple[str, Callable[[], None]]], begun: Callable[[], str] = str
) -> tuple[str, BaseException | None]:
    """Runs named rounds in order, each of which keeps its findings at its very end. An error or Ctrl-C ends the run
    there; where nothing is kept, it is raised. Returns "complete" or "incomplete: <why, where, and what is kept>", and
    what stopped it.

    Args:
        begun: says what is kept of the first round where that was not finished; empty: nothing.

    What is alive now is out of the garbage collector's sight meanwhile: a full pass over a process that has imported
    torch takes a few tenths of a second, and would fall on whoever happens to trigger it."""
    gc.collect()
    gc.freeze()
    try:
        for done, (name, work) in enumerate(rounds):
            try:
                work()
            except (Exception, KeyboardInterrupt) as error:
                kept = f"{done} of {len(rounds)} rounds are kept" if done else begun()
                if not kept:
                    raise
                return f"incomplete: {words(error)} in {name}; {kept}", error
    finally:
        gc.unfreeze()
    return COMPLETE, None


def words(error: BaseException) -> str:
    return "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Findings:
    """What measuring gave, in one process or in all of them."""

    rows: Sequence[Row]
    gates: Sequence[Gate] = ()
    samples: Sequence[Sample] = ()
    status: str = COMPLETE  # or "incomplete: ...", where it was stopped and the finished rounds are kept
    error: BaseException | None = None  # what stopped it
    steps: Sequence[StepRow] = ()
    requests: Sequence[RequestRow] = ()
    gaps: Sequence[GapRow] = ()
    workload: Mapping[str, Any] = field(default_factory=dict)  # how the requests were made
    ceilings: hardware.Ceilings | None = None  # that floors were taken from
    notes: Sequence[str] = ()
    answer: str = ""  # the page's first sentence, where rows alone do not tell it
    error_gates: Sequence[ErrorGate] = ()
    profiles: Sequence[StepProfile] = ()
    kernels: Sequence[KernelRow] = ()  # of the profiles
    blocks: Sequence[BlockRow] = ()  # of a pass of some variants, which was not timed
    experts: Sequence[ExpertRow] = ()  # of a pass of each variant whose engine counts
    procedure: str = ""  # how a measurement begins, where not with a fresh engine
    peers: Mapping[str, tuple[dict[str, Any], ...]] = field(default_factory=dict)  # variant -> version and settings
    points: Sequence[Point] | None = None  # that were measured; None: all of the experiment's
    gpu: Mapping[str, Any] = field(default_factory=dict)  # by the names of ProcessInfo
    processes: Sequence[ProcessInfo] = ()


class Experiment:
    """Built from a config that it checks to the last key, so that `measure` cannot fail on a setting."""

    # Settings that it reads, or sections of them, beside those that every experiment does (typed.EVERYWHERE). Others on
    # the command line are refused.
    reads: Sequence[str] = ()
    spec: ExperimentSpec  # what the YAML may say: a subclass annotates it with a class of its own
    device: Device  # on which it measures
    baseline: str | None = None
    variants: Mapping[str, str]  # name -> label
    points: Sequence[Point]
    metrics: Mapping[str, Metric]
    claims: Sequence[claims.Claim]
    aa: str | None = None  # the variant that is the baseline a second time
    notes: Sequence[str] = ()  # on what it leaves out
    generates: bool = False  # whether an engine of ours answers requests here, so that a gate has to check its tokens

    def __init__(self, config: DictConfig) -> None:
        self.spec = schema.experiment_spec(get_type_hints(type(self))["spec"], config, self.generates)
        self.settings = schema.build(schema.Measure, config.measure, "measure")
        self.chosen = schema.build(hardware.Hardware, config.hardware, "hardware")
        self.peers = schema.build(PeerSettings, config.peers, "peers")
        self.paths = schema.build(schema.Paths, config.paths, "paths")
        self.engine = schema.engine_config(config.engine)  # before any variant changes it
        self.threads = self.settings.threads or torch.get_num_threads()
        self.simulator = Simulator(self.chosen, self.threads, CONF.parent / self.settings.costs)

    @classmethod
    def from_config(cls: type[Made], config: DictConfig) -> Made:
        made = cls(config)
        asked, variants, metrics = made.spec.claims, list(made.variants), list(made.metrics)
        made.claims = claims.resolve_all(asked, variants, made.baseline, metrics, made.claimable)
        return made

    @property
    def hardware_key(self) -> str:
        """The folder of its results."""
        return hardware.key(hardware.resolve(self.device))

    @property
    def claimable(self) -> Sequence[Point]:
        return self.points

    def with_baseline_again(self, labels: Mapping[str, str]) -> dict[str, str]:
        """The variants with their labels, and as the last one the baseline a second time, which is to show no
        difference, where `measure.aa` asks for it on this device: `aa` is its name then."""
        asked = self.settings.aa
        if asked is schema.Again.never or (asked is schema.Again.auto and hardware.resolve(self.device) != "cuda"):
            return dict(labels)
        assert self.baseline is not None
        self.aa = f"{self.baseline} again"
        if self.aa in labels:
            raise ConfigError(f"experiment.variants.{self.aa} has the name of the baseline's second arm: rename it")
        return {**labels, self.aa: f"{labels[self.baseline]} again"}

    def of_arm(self, variant: str) -> str:
        """The variant that is measured under this name: the baseline, of its second arm."""
        return str(self.baseline) if variant == self.aa else variant

    def rows(
        self, variant: str, point: Point, repeat: int, values: Mapping[str, float | None], problem: str = ""
    ) -> list[Row]:
        """One a metric; none of None. `problem`: why they do not count."""
        known = {name: value for name, value in values.items() if value is not None}
        return [Row(variant, point.name, repeat, name, value, self.metrics[name].unit, not problem, problem)
                for name, value in known.items()]  # fmt: skip

    def measure(self, steps: Steps) -> Findings:
        """In this process, with the seeds of the config."""
        raise NotImplementedError

    def finish(self, findings: Findings) -> None:
        """Called once, with what all processes have found."""


class Probe(Experiment):
    """Every (variant, point) of `timed`, in this order and back (ABBA); a repeat is kept whole."""

    timed: Sequence[tuple[str, Point]] = ()  # where it is not every variant at every point
    repeat = 0  # the number of the one that is measured

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.witnessed: list[Timed] = []  # the times behind the latest values

    def values(self, variant: str, point: Point) -> Mapping[str, float | None]:
        """One measurement: metric -> value, None where a sample is too small for it."""
        raise NotImplementedError

    def problem(self) -> str:
        """Why the latest of them do not count; empty where they do."""
        return next(filter(None, (timed.problem for timed in self.witnessed)), "")

    def derived(self, found: Sequence[Row]) -> Sequence[tuple[str, Point, Mapping[str, float | None]]]:
        """What follows from all values of a repeat."""
        return ()

    def measure(self, steps: Steps) -> Findings:
        repeats = self.settings.repeats
        self.timed = self.timed or [(variant, point) for variant in self.variants for point in self.points]
        steps.plan(repeats * len(self.timed))
        rows: list[Row] = []
        names = [f"repeat {repeat + 1} of {repeats}" for repeat in range(repeats)]
        watch = Watch(hardware.resolve(self.device))
        rounds = [(name, partial(self._repeat, i, name, rows, steps, watch)) for i, name in enumerate(names)]
        status, error = run_rounds(rounds)
        return Findings(rows, status=status, error=error, gpu=watch.summary())

    def _repeat(self, repeat: int, name: str, rows: list[Row], steps: Steps, watch: Watch) -> None:
        self.repeat, found = repeat, list[Row]()
        for variant, point in stats.abba(self.timed, repeat):
            label = f"{self.variants[variant]} " if len(self.variants) > 1 else ""
            steps.next(f"{label}{point.name}, {name}")
            gc.collect()
            self.witnessed = []
            values = self.values(variant, point)
            if values:  # else nothing has run
                watch.look()
            found += self.rows(variant, point, repeat, values, self.problem())
        for variant, point, values in self.derived(found):
            found += self.rows(variant, point, repeat, values)
        rows += found
