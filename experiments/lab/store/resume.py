"""What a stored run has of the processes that this one is to be made of: with `--resume` they are taken from there. One
that was cut off goes on, and one of a single process gets more, also on another day or another machine of its kind."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from experiments.lab.config import points, typed
from experiments.lab.experiment import Experiment, Findings
from experiments.lab.measure import hardware
from experiments.lab.measure.hardware import Ceilings
from experiments.lab.measure.processes import OF_ALL, OF_RUN
from experiments.lab.store import provenance, runs
from experiments.lab.store import result as store
from experiments.lab.store.rows import from_plain
from mini_infer.core.errors import ConfigError

LONG = 80  # of two values: no line of an error holds more
KIND = {"gpu": ("gpu", "gpus", "gpu_memory_gib"), "cpu": ("cpu", "cores")}  # facts that machines of one kind share
LEFT_ASIDE = (*typed.PLACES, "measure.processes")  # settings that change nothing of what a process measures


def find(
    place: Path, config: Mapping[str, Any], experiment: Experiment, clean: bool | None, root: Path
) -> Findings | None:
    """What the complete processes of the run at `place`, its files without an ending, have found; None where there is
    no such run, or its first process, which has the gates, is not complete.

    Raises ConfigError where that run was measured with other settings, or by other code.

    Args:
        config: as a run of now would state it.
        clean: whether the tree equals its commit; None where nobody knows.
        root: of the repository.
    """
    problems, found = list[str](), list[Findings]()
    for path in (place.with_name(f"{place.name}{store.INCOMPLETE}.json"), place.with_name(f"{place.name}.json")):
        if path.exists():
            try:
                result = store.read(path)
                if (problem := _problem(result.info, config, experiment, clean, root)) is not None:
                    problems.append(f"{path} {problem}")
                elif (own := _findings(result, experiment.settings.processes)) is not None:
                    found.append(own)
            except ValueError as why:  # damaged, or of an older format
                problems.append(f"{path}: {why}")
    if found:
        return max(found, key=lambda own: len(own.processes))
    if problems:
        raise ConfigError(f"--resume: {'; '.join(problems)}. Leave --resume out to measure all processes anew")
    print(f"--resume: {place}.json has no complete process to go on from; all are measured", file=sys.stderr)
    return None


def _problem(
    info: store.RunInfo, config: Mapping[str, Any], experiment: Experiment, clean: bool | None, root: Path
) -> str | None:
    had, asks = (points.flat(store.plain(of)) for of in (info.config, config))
    counted = (key for key in had.keys() | asks.keys() if not points.within(key, LEFT_ASIDE))
    if other := sorted(key for key in counted if had.get(key) != asks.get(key)):
        pair = f" ({had.get(other[0])}, not {asks.get(other[0])})"
        return f"was measured with another {other[0]}{pair if len(pair) < LONG else ''}"
    if not (info.provenance.clean and clean):
        return "can be gone on with only where neither then nor now code was uncommitted"
    if runs.commits_since(info, root) != 0:
        return "was measured before the code that it names changed, or by a commit that is not in this history"
    if gone := [name for name in info.variants if name not in experiment.variants]:
        return f"has {', '.join(gone)}, which this run would not measure"
    here, kind = hardware.facts(hardware.resolve(experiment.device)), KIND["gpu" if info.on_gpu else "cpu"]
    of_machine = () if info.is_simulated else kind
    then = info.provenance.versions | {key: info.provenance.device.get(key) for key in of_machine}
    now = provenance.versions() | {key: here.get(key) for key in of_machine}
    if differ := sorted(key for key in then.keys() | now.keys() if then.get(key) != now.get(key)):
        return f"was measured with {differ[0]} {then.get(differ[0])}, and here is {now.get(differ[0])}"
    return None


def _findings(result: store.Result, planned: int) -> Findings | None:
    info = result.info
    whole = tuple(
        replace(p, complete=True, commit=p.commit or info.provenance.commit)
        for p in info.processes
        if (info.status == store.COMPLETE if p.complete is None else p.complete) and p.index < planned
    )
    if not whole or whole[0].index != 0:
        return None
    own = {process.index for process in whole}
    found = {f.name: getattr(info, f.name) for f in fields(Findings) if hasattr(info, f.name)}
    found |= {name: getattr(result, name) for name, _ in store.TABLES.values()}
    found |= {name: tuple(row for row in found[name] if row.process in own) for name in OF_ALL}
    with_rows = {row.point for row in found["rows"]}
    return Findings(
        **found
        | {
            "status": store.COMPLETE,
            "processes": whole,
            "notes": [note for note in info.notes if not note.startswith(OF_RUN)],
            "points": [points.Point(name, values) for name, values in info.points.items() if name in with_rows],
            "ceilings": None if info.ceilings is None else from_plain(Ceilings, info.ceilings),
        }
    )
