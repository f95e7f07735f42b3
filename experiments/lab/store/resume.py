"""What a stored run has of the processes that this one is to be made of: with `--resume` they are taken from there. One
that was cut off goes on, and one of a single process gets more, also on another day or another machine of its kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from experiments.lab import typed
from experiments.lab.experiment import Findings
from experiments.lab.measure.hardware import Ceilings
from experiments.lab.measure.processes import OF_ALL
from experiments.lab.points import Point
from experiments.lab.store import provenance, runs
from experiments.lab.store import result as store
from experiments.lab.store.rows import from_plain
from mini_infer.core.errors import ConfigError

LEFT_ASIDE = (*typed.PLACES, "measure.processes")  # settings that change nothing of what a process measures


def find(place: Path, config: Mapping[str, Any], root: Path) -> Findings | None:
    """What the complete processes of the run at `place`, its files without an ending, have found; None where there is
    no such run, or its first process, which has the gates, is not complete.

    Raises ConfigError where that run was measured with other settings, or by other code.

    Args:
        config: as a run of now would state it.
        root: of the repository.
    """
    problems = []
    for path in (place.with_name(f"{place.name}{store.INCOMPLETE}.json"), place.with_name(f"{place.name}.json")):
        if path.exists():
            result = store.read(path)
            if (problem := _problem(result.info, config, root)) is None:
                return _findings(result, provenance.commit(root))
            problems.append(f"{path} {problem}")
    if problems:
        raise ConfigError(f"--resume: {'; '.join(problems)}. Leave --resume out to measure all processes anew")
    return None


def _problem(info: store.RunInfo, config: Mapping[str, Any], root: Path) -> str | None:
    had, asks = (dict(_settings(store.plain(of))) for of in (info.config, config))
    if other := sorted(key for key in had.keys() | asks.keys() if had.get(key) != asks.get(key)):
        return f"was measured with another {other[0]} ({had.get(other[0])}, not {asks.get(other[0])})"
    if not (info.provenance.clean and provenance.is_clean(root)):
        return "can be gone on with only where neither then nor now code was uncommitted"
    if runs.commits_since(info, root) != 0:
        return "was measured before the code that it names changed, or by a commit that is not in this history"
    now = provenance.versions()
    if other := sorted(key for key, version in info.provenance.versions.items() if version != now.get(key)):
        return f"was measured with {other[0]} {info.provenance.versions[other[0]]}, and here is {now.get(other[0])}"
    return None


def _settings(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key -> value, but for what is left aside."""
    for name, value in config.items():
        key = f"{above}{name}"
        if key in LEFT_ASIDE:
            continue
        if isinstance(value, Mapping) and value:
            yield from _settings(value, f"{key}.")
        else:
            yield key, value


def _findings(result: store.Result, commit: str | None) -> Findings | None:
    info = result.info
    whole = tuple(p for p in info.processes if (info.status == store.COMPLETE if p.complete is None else p.complete))
    if not whole or whole[0].index != 0:
        return None
    own = {process.index for process in whole}
    found = {f.name: getattr(info, f.name) for f in fields(Findings) if hasattr(info, f.name)}
    found |= {name: getattr(result, name) for name, _ in store.TABLES.values()}
    found |= {name: tuple(row for row in found[name] if row.process in own) for name in OF_ALL}
    notes = list(info.notes)
    if (then := info.provenance.commit) != commit:
        who = ", ".join(str(index + 1) for index in sorted(own))
        notes.append(f"Process {who}: measured at commit {str(then)[:12]}, since which no code that is named changed.")
    return Findings(
        **found
        | {
            "status": store.COMPLETE,
            "processes": whole,
            "notes": notes,
            "points": [Point(name, values) for name, values in info.points.items()],
            "ceilings": None if info.ceilings is None else from_plain(Ceilings, info.ceilings),
        }
    )
