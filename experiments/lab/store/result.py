"""The result store: results/<experiment>/<scale>.<via>/<hardware>/<run>.csv with the numbers, <run>.json with all that
is needed to understand them, and more tables (see TABLES) where the experiment asks for them.

The JSON names each table's row count and SHA-256, so a file that was cut short or edited is found out. All are written
beside their places first and then renamed into them, so that a disk that fills up costs no earlier result; numbers are
rounded once, when written, so rewriting changes no byte.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from experiments.lab.config.axes import IN_PROCESS, OWN
from experiments.lab.config.points import short_names
from experiments.lab.config.spec import PlotSpec
from experiments.lab.judge import formulas, knees, stats
from experiments.lab.judge.claims import Claim, Judgement, judge
from experiments.lab.judge.gate import ErrorGate, Gate
from experiments.lab.judge.metrics import Metric
from experiments.lab.measure.profile import KernelRow, StepProfile
from experiments.lab.measure.traces import BlockRow, ExpertRow, GapRow, RequestRow, StepRow
from experiments.lab.store.provenance import ProcessInfo
from experiments.lab.store.rows import OtherFormat, Row, Table, Turn, from_csv, from_plain, rounded, to_csv
from mini_infer.core.errors import MiniInferError

FORMAT = 2
EVERY_RUN = "*/*/*/*.json"  # below the folder of results
COMPLETE = "complete"
PROCESSES = 3  # that a result is made of
OF_PROCESSES = "processes are complete"  # ends the status of a run of several that was cut off
REMARKS = ".remarks.md"  # ends the name of a file beside a run's, which no run writes
SIMULATED = "simulated-"  # begins the hardware of a run that ran on none
INCOMPLETE = "-incomplete"  # ends the name of a run that may not replace a complete one
AGAIN = "run the experiment again, or restore all its files"
TABLES: dict[str, tuple[str, type]] = {  # the ending of the file's name -> a Result's field, and the type of its rows
    ".csv": ("rows", Row),  # one per (variant, point, repeat, process, metric)
    ".steps.csv": ("steps", StepRow),  # one per engine step of one point
    ".requests.csv": ("requests", RequestRow),  # one per request of every pass
    ".gaps.csv": ("gaps", GapRow),  # one per pass that counts: how long its tokens took
    ".profile.csv": ("kernels", KernelRow),  # one per kernel of a decode step
    ".blocks.csv": ("blocks", BlockRow),  # one per KV block and the steps in which its owner is the same
    ".experts.csv": ("experts", ExpertRow),  # one per layer with experts
}


class StoreError(MiniInferError, ValueError):
    """A result file that cannot be read or written."""


@dataclass(frozen=True)
class Sample:
    """A real prompt and the text that some variants, alike, generated for it."""

    variants: tuple[str, ...]
    prompt: str
    text: str


@dataclass(frozen=True)
class Provenance:
    command: str
    started: str  # ISO 8601, UTC
    seconds: float
    commit: str | None  # None outside a git repository, or before its first commit
    clean: bool | None  # whether the tree equalled the commit, results/ and reports/ aside
    versions: dict[str, str]
    device: dict[str, Any]


@dataclass(frozen=True)
class RunInfo:
    """Everything about a run that is not a number in its CSV. Lists are in the order of the report."""

    experiment: str
    hardware: str
    run: str  # "default", or what was changed
    title: str
    question: str
    method: str
    baseline: str | None
    variants: dict[str, str]  # name -> label
    points: dict[str, dict[str, Any]]  # name -> settings
    metrics: dict[str, Metric]
    claims: tuple[Claim, ...]
    gates: tuple[Gate, ...]
    samples: tuple[Sample, ...]
    plots: tuple[PlotSpec, ...]
    code: tuple[str, ...]
    limits: tuple[str, ...]
    provenance: Provenance
    config: dict[str, Any]
    status: str = COMPLETE  # or "incomplete: <why, and what is kept>"
    workload: dict[str, Any] = field(default_factory=dict)  # how the requests were made
    ceilings: dict[str, Any] | None = None  # what this hardware can do at most, as measured; None: not known
    original: str = ""  # the original project's figure
    target: str = ""  # the figure to reach or beat
    bounded_by: str = ""  # what limits the figures, where the page cannot compute it
    notes: tuple[str, ...] = ()  # what a reader should know, and what invalidates nothing
    error_gates: tuple[ErrorGate, ...] = ()
    profiles: tuple[StepProfile, ...] = ()
    procedure: str = ""  # how a measurement begins, where not with a fresh engine
    peers: dict[str, tuple[dict[str, Any], ...]] = field(default_factory=dict)  # variant -> version and settings
    scale: str = OWN  # of conf/scale/, or another model's name
    via: str = IN_PROCESS  # of conf/via/: how requests reach the engine
    default_scale: str = OWN  # the one that the experiment takes where none is chosen
    changed: dict[str, str] = field(default_factory=dict)  # key -> value, of what was typed and is not in the above
    processes: tuple[ProcessInfo, ...] = ()  # empty in results older than they are, which were made by one
    answer: str = ""  # the page's first sentence, where rows alone do not tell it
    aa: str | None = None  # the variant that is the baseline a second time, in `variants`; None: it was measured once

    @property
    def cells(self) -> list[tuple[str, str]]:
        return [(variant, point) for point in self.points for variant in self.variants]

    @property
    def measured(self) -> str:
        """The day, or the first and the last of those on which its processes began."""
        days = sorted(started[:10] for started in [p.started for p in self.processes] or [self.provenance.started])
        return " to ".join(dict.fromkeys((days[0], days[-1])))

    @property
    def is_simulated(self) -> bool:
        return self.hardware.startswith(SIMULATED)

    @property
    def on_gpu(self) -> bool:
        return "gpu" in self.provenance.device and not self.is_simulated

    @property
    def machine(self) -> str:
        """The GPU's or the CPU's name: all CPUs have one hardware key."""
        return str(self.provenance.device["gpu" if self.on_gpu else "cpu"])

    @property
    def processes_due(self) -> int:
        """Of which a result is made: fewer where the experiment asks for fewer itself, or nothing differs in them."""
        asked = self.config.get("measure", {}).get("processes", PROCESSES)
        return 1 if self.is_simulated else PROCESSES if "measure.processes" in self.changed else min(asked, PROCESSES)

    @property
    def every_gate(self) -> tuple[Gate | ErrorGate, ...]:
        return (*self.gates, *self.error_gates)

    def fails(self, variant: str, point: str) -> bool:
        return any(gate.covers(variant, point) and not gate.passed for gate in self.every_gate)


@dataclass(frozen=True)
class Result:
    info: RunInfo
    rows: tuple[Row, ...]
    steps: tuple[StepRow, ...] = ()
    requests: tuple[RequestRow, ...] = ()
    kernels: tuple[KernelRow, ...] = ()  # of the profiled decode steps
    blocks: tuple[BlockRow, ...] = ()  # of the KV pool, and whose they were in a pass that was not timed
    experts: tuple[ExpertRow, ...] = ()  # where tokens went, by layer
    gaps: tuple[GapRow, ...] = ()  # between tokens, of passes that count; none in results older than these
    runs: tuple[RunInfo, ...] = ()  # that were put together, where it is not one run
    remarks: str = ""  # written by hand in <run>.remarks.md: what stands behind these rows, as markdown

    @cached_property
    def table(self) -> Table:
        """With searches as their passes have bracketed the knee, those outside of the range among them, and goodput as
        what is kept of the rate of arrivals."""
        points, config = self.info.points, self.info.config
        rows = knees.with_goodput(knees.bracketed(self.rows, points, config), points, config)
        return Table(rows, self.info.is_simulated)

    def values(self, variant: str, point: str, metric: str) -> dict[Turn, float]:
        """Those that count, by process and repeat."""
        return self.table.values(variant, point, metric)

    def steps_of(self, variant: str, point: str) -> list[StepRow]:
        return [step for step in self.steps if (step.variant, step.point) == (variant, point)]

    def estimate(self, variant: str, point: str, metric: str) -> stats.Estimate | None:
        """None where there is no valid value."""
        values, about = self.values(variant, point, metric), self.info.metrics.get(metric)
        return stats.absolute(values, about is not None and about.share) if values else None

    def ratio(self, cell: tuple[str, str], reference: tuple[str, str], metric: str) -> stats.Estimate | None:
        return stats.ratio(self.values(*cell, metric), self.values(*reference, metric))

    def power(self, cell: tuple[str, str], reference: tuple[str, str], metric: str, true: float) -> stats.Power | None:
        return stats.power(self.values(*cell, metric), self.values(*reference, metric), true)

    @property
    def repeats(self) -> int:
        """In each process, of what was measured here: rows from beside may have more."""
        asked = self.info.config.get("measure", {}).get("repeats")
        return int(asked or max((row.repeat + 1 for row in self.rows), default=0))

    @cached_property
    def judgements(self) -> tuple[Judgement, ...]:
        info, several = self.info, self.info.processes_due > 1
        return tuple(judge(c, self.table, info.every_gate, info.metrics[c.metric].share, several) for c in info.claims)

    @cached_property
    def faults(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.is_fault)

    @cached_property
    def counting(self) -> set[tuple[str, str, int, int]]:
        """Passes that do, by their rows: variant, point, process, repeat."""
        return {(row.variant, row.point, row.process, row.repeat) for row in self.rows if not row.is_fault}

    @cached_property
    def counted(self) -> tuple[RequestRow, ...]:
        """The requests of passes that count."""
        by_rows = ((r, (r.variant, r.point, r.process, r.repeat) in self.counting) for r in self.requests)
        return tuple(r for r, counts in by_rows if (counts if r.valid is None else r.valid))

    @cached_property
    def traced(self) -> tuple[RequestRow, ...]:
        """Of each variant and point the requests of the first pass that counts, as a timeline has them."""
        first = {(r.variant, r.point): (r.process, r.repeat) for r in reversed(self.counted)}
        return tuple(r for r in self.counted if (r.process, r.repeat) == first[r.variant, r.point])


def page_name(info: RunInfo) -> str:
    """The name of the page that the run stands on, without its ending: one a (experiment, scale, via)."""
    if info.via == IN_PROCESS and info.scale == info.default_scale:
        return info.experiment
    return f"{info.experiment}.{info.scale}.{info.via}"


def run_path(info: RunInfo) -> Path:
    """Where the files of the run are, below the folder of results and without their endings."""
    return place(info.experiment, info.scale, info.via, info.hardware, info.run)


def place(experiment: str, scale: str, via: str, hardware: str, run: str) -> Path:
    return Path(experiment, f"{scale}.{via}", hardware, run)


def run_name(changed: Mapping[str, str]) -> str:
    """`default`, or what was changed, key by key, as a file name."""
    names = short_names(sorted(changed))
    return ",".join(slug(f"{name}={changed[key]}") for key, name in names.items()) or "default"


def slug(text: str) -> str:
    """`text` made safe for a file name, with what is not replaced by _."""
    return re.sub(r"[^A-Za-z0-9_.=,+-]+", "_", text).strip("_.")


def write_run(root: Path, result: Result) -> Path:
    """As `write`; but an incomplete run does not replace a complete one: it stands beside it until it is complete."""
    info = result.info
    folder, beside = root / run_path(info).parent, f"{info.run}{INCOMPLETE}"
    with suppress(StoreError):
        if info.status != COMPLETE and read(folder / f"{info.run}.json").info.status == COMPLETE:
            info = replace(info, run=beside)
    path = write(root, replace(result, info=info))
    for ending in (".json", REMARKS, *TABLES) if info.run != beside else ():
        (folder / f"{beside}{ending}").unlink(missing_ok=True)
    return path


def write(root: Path, result: Result) -> Path:
    """Replaces the run's files and returns the JSON's path. Raises StoreError; the earlier files are whole then.

    Remarks go: they were about the rows that went."""
    info, texts, stated = result.info, {}, {}
    path = root / run_path(info).parent / f"{info.run}.json"
    for ending, (name, kind) in TABLES.items():
        if (rows := getattr(result, name)) or ending == ".csv":
            texts[ending] = to_csv(kind, rows)
            stated[ending] = {"rows": len(rows), "sha256": hashlib.sha256(texts[ending].encode()).hexdigest()}
    document = {"format": FORMAT, "tables": stated, **plain(info)}
    texts[".json"] = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic({path.with_suffix(ending): text for ending, text in texts.items()})
        for ending in (*TABLES.keys() - texts.keys(), REMARKS):
            path.with_suffix(ending).unlink(missing_ok=True)  # of an earlier run
    except OSError as error:
        raise StoreError(f"the results of {info.experiment} cannot be written to {path.parent}: {error}") from error
    return path


def write_atomic(files: Mapping[Path, str | bytes]) -> None:
    """A reader sees an old file or the new one, never half of it."""
    made = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in files}
    try:
        for path, temporary in made.items():
            data = files[path]
            temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        for path, temporary in made.items():
            temporary.replace(path)
    finally:
        for temporary in made.values():
            temporary.unlink(missing_ok=True)


def read(path: Path) -> Result:
    """Reads `<run>.json` and the tables beside it. Raises StoreError where one is damaged or of another version."""
    try:
        document = json.loads(_text(path))
        found = document.pop("format", None)
        if found != FORMAT:
            raise StoreError(f"{path} has format {found!r}; this version reads format {FORMAT}. {AGAIN.capitalize()}")
        rows: dict[str, Any] = {}
        for ending, stated in document.pop("tables").items():
            name, kind = TABLES[ending]
            text = _text(path.with_suffix(ending))
            if hashlib.sha256(text.encode()).hexdigest() != stated["sha256"]:
                lines = max(text.count("\n") - 1, 0)
                raise StoreError(f"{path.with_suffix(ending)} is not the one that {path.name} was written with: it has "
                                 f"{lines} of {stated['rows']} rows, or other ones; {AGAIN}")  # fmt: skip
            rows[name] = from_csv(kind, text)
        written = path.with_suffix(REMARKS)
        remarks = written.read_text(encoding="utf-8").strip() if written.exists() else ""
        info = from_plain(RunInfo, document)
        # Which metrics are shares is known now, whatever a result has said that is older than that.
        metrics = {name: replace(m, share=m.share or formulas.is_share(name)) for name, m in info.metrics.items()}
        return Result(replace(info, metrics=metrics), remarks=remarks, **rows)
    except StoreError:
        raise
    except OtherFormat as error:
        raise StoreError(f"{path} was written in an older format, or a newer one ({error}): read it with the version "
                         "of its commit, or run the experiment again") from error  # fmt: skip
    except (KeyError, TypeError, AttributeError, ValueError, msgspec.ValidationError) as error:
        raise StoreError(f"{path} is cut short, or is not a result file ({error!r}): {AGAIN}") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")  # universal newlines: a checkout may have changed them
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} cannot be read ({error}): {AGAIN}") from error


def read_all(root: Path, damaged: dict[Path, StoreError] | None = None) -> list[Result]:
    """Every result under `root`: page by page, hardware by name, each one's default run first. What cannot be read goes
    into `damaged`, by its path below `root`; without one, StoreError is raised."""
    found = []
    for path in sorted(root.glob(EVERY_RUN)):
        try:
            found.append(read(path))
        except StoreError as error:
            if damaged is None:
                raise
            damaged[path.relative_to(root)] = error
    return sorted(found, key=lambda r: (page_name(r.info), r.info.hardware, r.info.run != "default", r.info.run))


def without_beside(found: list[Result]) -> list[Result]:
    """All but incomplete runs that stand beside a complete one: what is shown is of the other."""
    beside = {run_path(r.info).with_name(r.info.run + INCOMPLETE) for r in found}
    return [r for r in found if run_path(r.info) not in beside]


def plain(value: Any) -> Any:
    """As JSON and YAML have it; numbers are rounded, and those that JSON does not have are text."""

    def known(part: Any) -> Any:
        return part.value if isinstance(part, Enum) else {f.name: getattr(part, f.name) for f in fields(part)}

    text = json.dumps(value, default=known)
    return json.loads(text, parse_float=lambda x: rounded(float(x)), parse_constant=lambda x: str(float(x)))
