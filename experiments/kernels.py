"""Kernel sweeps: implementations of one operation side by side, over shapes. No engine runs."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from omegaconf import DictConfig

from experiments.lab.config import points
from experiments.lab.config.explain import require_known
from experiments.lab.config.points import Point
from experiments.lab.config.spec import ExperimentSpec, Floating, Positive
from experiments.lab.experiment import Experiment, Findings, run_rounds
from experiments.lab.judge import stats
from experiments.lab.judge.gate import ErrorGate
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.kernels import attention, fused
from experiments.lab.kernels.apart import Apart
from experiments.lab.kernels.case import Case, Timer, VariantAbsent, Work, copies_needed, prepare, require_triton
from experiments.lab.kernels.latent import MLADecode
from experiments.lab.kernels.moe import MoELayer
from experiments.lab.kernels.push import KVPush
from experiments.lab.measure import ceilings
from experiments.lab.measure.clocks import Watch
from experiments.lab.measure.hardware import Ceilings, Hardware
from experiments.lab.show.progress import Steps
from experiments.lab.store.rows import ABSENT, Row
from mini_infer.core.config import Device, DType
from mini_infer.core.errors import ConfigError, MiniInferError
from mini_infer.modeling.loader import resolve_device

CASES: dict[str, type[Case]] = {
    cls.name: cls
    for cls in (
        *(attention.FlashDecode, attention.DecodeOfFp8, attention.DecodeAttention, attention.PrefillAttention),
        *(fused.AddRmsNorm, fused.RopeAndStore, fused.SiluMul, fused.Gemv, fused.GatedLinear),
        *(MLADecode, MoELayer, KVPush),
    )
}
METRICS = {
    "time_us": Metric("time of a call", "µs", Better.lower),
    "gb_s": Metric("useful bytes a second", "GB/s", Better.higher),
    "mbu": Metric("useful share of the memory bandwidth", "", Better.higher, share=True),
    "tflop_s": Metric("operations a second", "TFLOP/s", Better.higher),
    "mfu": Metric("compute utilization", "", Better.higher, share=True),
}
OF_CEILINGS = ("mbu", "mfu")
MOST_OF_A_CEILING = 1.1  # ceilings are measured, too
REFERENCE = "a reference in fp32 from the same inputs"
PROCEDURE = (
    "all of them get the same inputs at a shape; a measurement is the median of 15 bursts of calls that use up sets of "
    "inputs in turns, together twice the last cache and more"
)


@dataclass(frozen=True)
class Sweep:
    """A case at every combination of `shapes`, setting -> values; what is not named has the case's default."""

    case: str = ""
    shapes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelSpec(ExperimentSpec):
    variants: dict[str, str] = field(default_factory=dict)  # implementation -> label; a case has those that it can
    baseline: str = ""  # the one that ratios refer to
    sweeps: tuple[Sweep, ...] = ()
    metrics: tuple[str, ...] = ("time_us", "gb_s", "mbu")  # of the least that the operation needs (`Work`)
    dtype: Floating = DType.bfloat16  # of inputs and outputs
    allowed_error: Positive = 0.02  # the most that a row may be off by, relative to its norm, for speed to count

    def __post_init__(self) -> None:
        if self.baseline not in self.variants:
            raise ConfigError(
                f"experiment.baseline={self.baseline!r} is no variant; variants: {', '.join(self.variants)}"
            )
        if not self.sweeps:
            raise ConfigError("experiment.sweeps is empty: name at least one case and its shapes")
        require_known("unknown case", [sweep.case for sweep in self.sweeps], CASES)
        known = {variant for sweep in self.sweeps for variant in CASES[sweep.case].variants}
        require_known("experiment.variants: unknown implementation", self.variants, known)
        require_known("unknown metric", self.metrics, METRICS)
        super().__post_init__()


class KernelSweep(Experiment):
    reads = ("engine.model.device", "hardware", "peers.vllm.timeout_s", "measure.aa", "measure.repeats", "measure.seed")
    spec: KernelSpec

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        spec = self.spec
        self.baseline = spec.baseline
        self.device = self.engine.model.device
        if self.device is Device.cpu and any(CASES[sweep.case].needs_gpu for sweep in spec.sweeps):
            try:
                require_triton(torch.device("cpu"))
            except VariantAbsent as why:
                raise ConfigError(
                    f"nothing of {spec.title!r} runs on a CPU ({why}): leave out hardware=cpu, and start it on a GPU"
                ) from why
        labels = {name: label or name.replace("_", " ") for name, label in spec.variants.items()}
        self.variants = self.with_baseline_again(labels)
        self.metrics = {name: METRICS[name] for name in spec.metrics}
        pairs = _points(spec.sweeps)
        self.points = [point for point, _ in pairs]
        self._sweeps = {point.name: sweep for point, sweep in pairs}
        for point in self.points:
            self._case(point, torch.device("meta"))  # to find mistakes in its shape

    def measure(self, steps: Steps) -> Findings:
        device = resolve_device(self.engine.model)
        limits, problem = ceilings.find(ceilings.FOLDER, Hardware(), device.type, self.threads)
        steps.plan(len(self.points))
        self._rows, self._gates, self._called = list[Row](), list[ErrorGate](), dict[str, None]()
        self._absent = defaultdict[tuple[str, str], list[str]](list)  # variant and reason -> at which points
        self._watch = Watch(device.type)
        with torch.inference_mode(), closing(Apart(self.peers.vllm)) as apart:
            measure = partial(self._point, device=device, limits=limits, steps=steps, apart=apart)
            status, error = run_rounds([(f"at {point.name}", partial(measure, point)) for point in self.points])
        notes = []
        for (variant, why), missing in self._absent.items():
            of = self.of_arm(variant)  # where it is absent is left out where that is everywhere that it could be
            everywhere = [p.name for p in self.points if of in CASES[self._sweeps[p.name].case].variants]
            where = "" if missing == everywhere else f" at {'; '.join(missing)}"
            notes.append(f"{self.variants[variant]} is absent{where}: {why}.")
        if error is None and not any(row.valid for row in self._rows):
            wrong = [row.reason for row in self._rows if not row.reason.startswith(ABSENT)]
            raise MiniInferError(f"nothing was measured. {'; '.join([*notes, *wrong[:1]])}")
        notes += [f"{self.variants[v]}: called one by one, since it cannot be captured." for v in self._called]
        if limits is None and any(name in self.metrics for name in OF_CEILINGS):
            notes.append(f"Utilization is left out, because {problem}.")
        kept: dict[str, Any] = {"ceilings": limits, "error_gates": self._gates, "procedure": PROCEDURE}
        return Findings(self._rows, status=status, error=error, notes=notes, gpu=self._watch.summary(), **kept)

    def _point(self, point: Point, device: torch.device, limits: Ceilings | None, steps: Steps, apart: Apart) -> None:
        """All repeats of all implementations, of the same inputs, in ABBA order. What fails is absent here alone."""
        steps.next(point.name)
        gc.collect()  # of the point before
        torch.manual_seed(self.settings.seed)
        case, at, base = self._case(point, device), _At(point, device), self.spec.baseline
        variants = [variant for variant in self.spec.variants if variant in case.variants]
        copies = copies_needed(min(case.work(variant).bytes for variant in ("", *variants)), device)
        with at.costing_only(*variants):
            case.allocate(copies)
        for variant in [variant for variant in variants if variant not in at.failed]:
            with at.costing_only(variant):
                if variant in case.apart:
                    at.timers[variant], error = apart.prepare(case, variant, self.settings.seed)
                else:
                    implementation = case.implementation(variant)
                    error = case.error(implementation.run(0))
                    at.timers[variant] = prepare(implementation, copies, device)
                at.gates[variant] = ErrorGate(variant, point.name, error, self.spec.allowed_error, REFERENCE)
        # The second arm is captured anew, as each variant is, and is there at every point: in the sweeps as they stand
        # the baseline's bursts are 1 to 18 % of a run, whose time goes into inputs, compiling and the checks of errors.
        if self.aa is not None and base in at.timers:
            with at.costing_only(self.aa):
                again = None if base in case.apart else prepare(case.implementation(base), copies, device)
                at.timers[self.aa] = again or at.timers[base]  # of another process, which has one timer
        if not at.timers and not at.failed:
            reasons = "; ".join(f"{variant}: {why}" for variant, why in at.absent.items())
            raise ConfigError(f"nothing can be measured at {point.name}. {reasons or 'No variant is one of its case'}")
        for repeat in range(self.settings.repeats):
            for variant in stats.abba(list(at.timers), repeat):
                with at.costing_only(variant):
                    work, timed = case.work(self.of_arm(variant)), at.timers[variant].sample()
                    values = _values(timed.us, work, self.spec.dtype, limits)
                    asked = {name: values.get(name) for name in self.metrics}
                    problem = timed.problem or _problem(values)
                    at.rows[variant] += self.rows(variant, point, repeat, asked, problem)
            self._watch.look()
        for variant, why in at.failed.items():
            at.rows[variant] = self.rows(variant, point, 0, dict.fromkeys(self.metrics, 0.0), f"{ABSENT}{why}")
        self._rows += chain(*at.rows.values())
        self._gates += at.gates.values()
        for variant_and_why in (*at.absent.items(), *at.failed.items()):
            self._absent[variant_and_why].append(point.name)
        if device.type == "cuda":
            self._called |= {v: None for v, timer in at.timers.items() if not timer.captured and v != self.aa}

    def _case(self, point: Point, device: torch.device) -> Case:
        shape = {key: value for key, value in point.values.items() if key != "case"}
        return CASES[self._sweeps[point.name].case](shape, getattr(torch, self.spec.dtype.value), device)


class CudaLost(MiniInferError):
    """What runs on the GPU after an illegal memory access fails too, whatever it is."""


@dataclass
class _At:
    """What is found at one point, by implementation."""

    point: Point
    device: torch.device
    timers: dict[str, Timer] = field(default_factory=dict)
    rows: dict[str, list[Row]] = field(default_factory=partial(defaultdict, list))
    gates: dict[str, ErrorGate] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)  # why it cannot run here
    failed: dict[str, str] = field(default_factory=dict)  # the error that it raised; nothing else is kept of it

    @contextmanager
    def costing_only(self, *variants: str) -> Iterator[None]:
        """An error is the reason why these are absent here. Raises CudaLost where it is more than that."""
        try:
            yield
        except VariantAbsent as why:
            self.absent |= dict.fromkeys(variants, str(why))
        except Exception as error:
            reason = f"failed with {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            if _is_lost(self.device):
                raise CudaLost(
                    f"{', '.join(variants)} at {self.point.name} {reason}. After that the GPU takes no more work from "
                    "this process, so the rest is not measured"
                ) from error
            self.failed |= dict.fromkeys(variants, f"it {reason}")
            for variant in variants:
                self.timers.pop(variant, None)
                self.rows.pop(variant, None)
                self.gates.pop(variant, None)


def _is_lost(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _points(sweeps: Sequence[Sweep]) -> list[tuple[Point, Sweep]]:
    """Every point and what it belongs to. Where there are several cases, a point begins with its case."""
    several = len({sweep.case for sweep in sweeps}) > 1
    found: dict[str, tuple[Point, Sweep]] = {}
    for sweep in sweeps:
        own = {"case": {sweep.case: {"case": sweep.case}}} if several else {}
        for point in points.grid({**own, **sweep.shapes}):
            if point.name in found:
                raise ConfigError(f"experiment.sweeps has the point {point.name!r} twice")
            found[point.name] = (point, sweep)
    return list(found.values())


def _problem(values: Mapping[str, float]) -> str:
    """Why a measurement does not count: its inputs do not fit into a cache, so that nothing is faster than ceilings."""
    share = max(values.get(name, 0.0) for name in OF_CEILINGS)
    return f"faster than the hardware allows: {share:.3g} of a ceiling" if share > MOST_OF_A_CEILING else ""


def _values(time_us: float, work: Work, dtype: DType, limits: Ceilings | None) -> dict[str, float]:
    """The metrics that there are: none of operations where the work has none that count."""
    values = {"time_us": time_us, "gb_s": work.bytes / time_us / 1e3}
    if limits is not None:
        values["mbu"] = values["gb_s"] / getattr(limits, work.ceiling)
    if work.flops:
        values["tflop_s"] = work.flops / time_us / 1e6
        if limits is not None:
            values["mfu"] = values["tflop_s"] / limits.tflop_s_of(dtype.value)
    return values
