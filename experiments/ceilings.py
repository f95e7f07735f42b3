"""What this machine can do at most: bytes a second through its memory, operations a second in matrix products.

It is no ablation: nothing is served. Its result is what floors, MBU and MFU of the other experiments are taken from,
and it is kept in conf/hardware/.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial

import torch
from omegaconf import DictConfig
from torch import Tensor

from experiments.lab.config.axes import CONF
from experiments.lab.config.points import Point
from experiments.lab.config.spec import ExperimentSpec, Positive
from experiments.lab.experiment import Findings, Probe
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.kernels.case import seconds_of
from experiments.lab.measure import ceilings, hardware
from experiments.lab.measure.hardware import Ceilings, Hardware
from experiments.lab.measure.witness import Timed, witnessed
from experiments.lab.show.progress import Steps
from experiments.lab.store.result import COMPLETE
from experiments.lab.store.rows import Row, Table
from mini_infer.core.config import Device
from mini_infer.core.errors import ConfigError

MIB = 2**20
ALL, ONE = "machine", "one_thread"
PASS_S = 0.005  # at least so long is a pass: far above the clock's grain, and short enough to slip past interruptions
TOTAL_S = 0.25  # so long are all passes of a measurement; the fastest counts, because a ceiling is what can be reached
MIN_PASSES = 3
FASTER = 1.1  # a size counts as cached where it is read so much faster than what fits no cache


@dataclass(frozen=True)
class CeilingsSpec(ExperimentSpec):
    # Of each device, sizes of the buffers that are copied and read; the largest must fit no cache, and memory thrice.
    mib: dict[str, list[int]] = field(default_factory=dict)
    matmul: dict[str, list[int]] = field(default_factory=dict)  # sizes n of the n x n matrices that are multiplied
    formats: dict[str, list[str]] = field(default_factory=dict)  # of FORMATS, in which they are
    # A GPU also multiplies the largest for so long without a pause, which its power limits; and copies the largest
    # buffer from and to the host, and to a second GPU where there is one.
    sustained_s: Positive = 2.0
    write: bool = True  # the result: with --record to conf/hardware/, else to the folder `hardware` of paths.results

    def __post_init__(self) -> None:
        for device in ("cpu", "cuda"):
            for name, sizes in (("mib", self.mib.get(device)), ("matmul", self.matmul.get(device))):
                if not sizes or min(sizes) < 1:
                    raise ConfigError(f"experiment.{name}.{device} must be a list of numbers from 1 on, got {sizes}")
            formats = self.formats.get(device)
            if not formats or not set(formats) <= set(FORMATS):
                raise ConfigError(f"experiment.formats.{device} must be a list of {', '.join(FORMATS)}, got {formats}")
        super().__post_init__()


class CeilingsExperiment(Probe):
    reads = ("engine.model.device", "hardware", "measure.repeats", "measure.seed")
    spec: CeilingsSpec

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        spec, device = self.spec, hardware.resolve(self.engine.model.device)
        self.device = Device(device)
        # A CPU is measured with one thread as well.
        self._threads: dict[str, int | None] = {ALL: self.threads if device == "cpu" else None}
        if device == "cpu" and self.threads > 1:
            self._threads = {ONE: 1, **self._threads}
        self.variants = {n: "GPU" if t is None else f"{t} thread{'s' * (t > 1)}" for n, t in self._threads.items()}
        self._formats = spec.formats[device]
        rates = {_rate(name): f"matrix product, {name}" for name in self._formats}
        copies = {"read_gb_s": "reading a buffer", "copy_gb_s": "copying a buffer, read + written"}
        if self.device is Device.cuda:
            rates |= {_rate(name, SUSTAINED): f"the same for {spec.sustained_s:g} s, {name}" for name in self._formats}
            copies |= {"from_host_gb_s": "copying from pinned host memory", "to_host_gb_s": "copying to the host"}
            if torch.cuda.device_count() > 1:
                copies["to_peer_gb_s"] = "copying to another GPU"
        self.metrics = {
            **{name: Metric(label, "GB/s", Better.higher) for name, label in copies.items()},
            **{name: Metric(label, "TFLOP/s", Better.higher) for name, label in rates.items()},
        }
        self._buffers = [Point.of({"mib": n}) for n in sorted(spec.mib[device])]
        self._matrices = [Point.of({"size": n}) for n in sorted(spec.matmul[device])]
        self.points = [*self._buffers, *self._matrices]
        folder = CONF.parent / ("conf" if self.paths.recorded else self.paths.results) / "hardware"
        self._file = folder / f"{hardware.device_key(device)}.yaml" if spec.write else None

    def finish(self, findings: Findings) -> None:
        if self._file is not None and findings.status == COMPLETE and _all_count(findings.rows):
            ceilings.save(self._file, self.found(findings.rows))
            print(f"hardware {self._file}", file=sys.stderr)

    def measure(self, steps: Steps) -> Findings:
        torch.manual_seed(self.settings.seed)
        with torch.inference_mode():
            findings = super().measure(steps)
        found = self.found(findings.rows).ceilings[-1] if _all_count(findings.rows) else None
        return replace(findings, ceilings=found)

    def values(self, variant: str, point: Point) -> dict[str, float]:
        with hardware.torch_threads(self._threads[variant]):
            return self._transfers(point) if "mib" in point.values else self._matmul(point)

    def _transfers(self, point: Point) -> dict[str, float]:
        count = point.values["mib"] * MIB // 4
        source = torch.rand(count, device=self.device.value)  # random, because zeros can be faster
        target = torch.empty_like(source)
        size = 4 * count
        seconds = self._seconds(lambda: source.sum())
        if self.device is Device.cuda:
            from experiments.lab.kernels.read import read  # which needs Triton

            seconds = min(seconds, self._seconds(lambda: read(source)))
        found = {"read_gb_s": size / seconds, "copy_gb_s": 2 * size / self._seconds(lambda: target.copy_(source))}
        if self.device is Device.cuda and point == self._buffers[-1]:
            host = torch.empty(count, pin_memory=True).copy_(source)
            found["from_host_gb_s"] = size / self._seconds(lambda: target.copy_(host, non_blocking=True))
            found["to_host_gb_s"] = size / self._seconds(lambda: host.copy_(source, non_blocking=True))
            if "to_peer_gb_s" in self.metrics:
                peer = torch.empty_like(source, device="cuda:1")
                found["to_peer_gb_s"] = size / self._seconds(lambda: peer.copy_(source))
        return {name: rate / 1e9 for name, rate in found.items()}

    def _matmul(self, point: Point) -> dict[str, float]:
        n = point.values["size"]
        found = {}
        for name in self._formats:
            product = FORMATS[name](n, self.device.value)
            seconds = self._seconds(product)
            found[_rate(name)] = 2 * n**3 / seconds / 1e12
            if self.device is Device.cuda and point == self._matrices[-1]:
                calls = max(1, round(self.spec.sustained_s / seconds))
                self._pass(product, calls // 4)  # the power rises at first
                found[_rate(name, SUSTAINED)] = 2 * n**3 / self._fastest(product, calls, passes=1) / 1e12
        return found

    def _seconds(self, work: Callable[[], Tensor]) -> float:
        """Of one call, in the fastest pass. A pass is long enough for the clock, and is timed on the device."""
        self._pass(work, 1)  # the first call of all may compile
        calls = 1
        while (once := self._pass(work, calls)[0]) < PASS_S:  # the first rounds warm up
            calls = max(calls + 1, min(10 * calls, round(1.2 * calls * PASS_S / once)))
        return self._fastest(work, calls, max(MIN_PASSES, round(TOTAL_S / once)))

    def _fastest(self, work: Callable[[], Tensor], calls: int, passes: int) -> float:
        bursts = [self._pass(work, calls) for _ in range(passes)]
        timed = Timed.of(bursts, calls, on_gpu=self.device is Device.cuda, typical=min)
        self.witnessed.append(timed)
        return timed.us / 1e6

    def _pass(self, work: Callable[[], Tensor], calls: int) -> tuple[float, float]:
        return witnessed(partial(seconds_of, work, calls, on_gpu=self.device is Device.cuda))

    def found(self, rows: Sequence[Row]) -> Hardware:
        """The ceilings that the rows show: the best repeat of each rate."""
        sizes = ", ".join(str(p.values["mib"]) for p in self._buffers)
        products = ", ".join(str(p.values["size"]) for p in self._matrices)
        reads = ", a kernel that only reads" if self.device is Device.cuda else ""
        return Hardware(
            device=self.device,
            memory_gib=hardware.gpu_memory_gib() if self.device is Device.cuda else None,
            host_memory_gib=hardware.host_memory_gib(),
            machine=hardware.name(self.device.value),
            measured=datetime.now(timezone.utc).date().isoformat(),
            how=f"torch {torch.__version__}: x.sum(){reads} and y.copy_(x) in float32 on {sizes} MiB, products of "
            f"n x n matrices with n = {products}; the fastest pass of {self.settings.repeats} repeats in each process",
            ceilings=tuple(self._of(variant, Table(rows)) for variant in self.variants),
        )

    def _of(self, variant: str, table: Table) -> Ceilings:
        # With more threads a machine can do no less: it may leave them idle.
        fewer = [v for v, n in self._threads.items() if (n or 0) <= (self._threads[variant] or 0)]

        def best(metric: str, where: Sequence[Point]) -> float:
            return max(value for v in fewer for p in where for value in table.values(v, p.name, metric).values())

        largest = self._buffers[-1:]
        read = best("read_gb_s", largest)
        cached: dict[int, float] = {}
        for index, point in enumerate(self._buffers[:-1]):
            # Rates fall with size; where one does not (a GPU's launches slow small sizes down), the larger size's
            # rate is what the smaller one could have.
            cached[point.values["mib"]] = _rounded(best("read_gb_s", self._buffers[index:]))
            if cached[point.values["mib"]] < FASTER * read:
                break
        gpu = self.device is Device.cuda
        links = [name for name in ("from_host_gb_s", "to_host_gb_s", "to_peer_gb_s") if name in self.metrics]
        return Ceilings(
            copy_gb_s=_rounded(best("copy_gb_s", largest)),
            read_gb_s=_rounded(read),
            matmul_tflop_s={name: _rounded(best(_rate(name), self._matrices)) for name in self._formats},
            sustained_tflop_s={
                name: _rounded(best(_rate(name, SUSTAINED), self._matrices[-1:])) for name in self._formats if gpu
            },
            cached_read_gb_s=cached if len(cached) > 1 else {},
            link_gb_s={name.removesuffix("_gb_s"): _rounded(best(name, largest)) for name in links},
            threads=self._threads[variant],
        )


def _all_count(rows: Sequence[Row]) -> bool:
    """Whether there is a repeat that counts of everything that was measured."""
    every, counting = ({(r.variant, r.point, r.metric) for r in own} for own in (rows, [r for r in rows if r.valid]))
    return every == counting


SUSTAINED = "sustained_"


def _rate(name: str, kind: str = "") -> str:
    return f"matmul_{name}_{kind}tflop_s"


def _floating(dtype: torch.dtype) -> Callable[[int, str], Callable[[], Tensor]]:
    def product(n: int, device: str) -> Callable[[], Tensor]:
        a, b = (torch.rand(n, n, device=device).sub_(0.5).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)

    return product


def _float8(n: int, device: str) -> Callable[[], Tensor]:
    """With a scale for each row of both, as quantized models have them. b is column-major, as cuBLASLt wants it."""
    a, b = (torch.rand(n, n, device=device).sub_(0.5).to(torch.float8_e4m3fn) for _ in range(2))
    rows, columns = torch.ones(n, 1, device=device), torch.ones(1, n, device=device)
    return lambda: torch._scaled_mm(a, b.t(), rows, columns, out_dtype=torch.bfloat16)


def _int8(n: int, device: str) -> Callable[[], Tensor]:
    a, b = (torch.randint(-128, 128, (n, n), dtype=torch.int8, device=device) for _ in range(2))
    return lambda: torch._int_mm(a, b.t())


FORMATS: dict[str, Callable[[int, str], Callable[[], Tensor]]] = {
    "float32": _floating(torch.float32),
    "bfloat16": _floating(torch.bfloat16),
    "float16": _floating(torch.float16),
    "float8_e4m3": _float8,
    "int8": _int8,
}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
