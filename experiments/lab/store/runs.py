"""Finding a stored run by its name."""

from __future__ import annotations

from pathlib import Path

from experiments.lab.store import result as store
from experiments.lab.store.result import StoreError


def named(results: Path, experiment: str, hardware: str | None = None, run: str = "default") -> Path:
    """The JSON of a run. The hardware need not be given where there is only one."""
    folders = _folders(results / experiment)
    if not folders:
        known = ", ".join(_folders(results)) or "nothing"
        raise StoreError(f"{results} holds no results of {experiment!r}; it holds: {known}")
    if hardware is None and len(folders) > 1:
        raise StoreError(f"{experiment} was measured on {', '.join(folders)}: say on which")
    path = results / experiment / (hardware or folders[0]) / f"{run}.json"
    if not path.is_file():
        stored = sorted((results / experiment).glob("*/*.json"))
        have = ", ".join(f"{found.parent.name}/{found.name.removesuffix('.json')}" for found in stored) or "none"
        raise StoreError(f"{experiment} has no run {path.parent.name}/{run}; it has: {have}")
    return path


def find(results: Path, name: str) -> Path:
    """`name` is a result file (.json, or one of its .csv), or experiment[/hardware[/run]]."""
    path = Path(name)
    for ending in sorted((".json", *store.ROW_TYPES), key=len, reverse=True):
        if name.endswith(ending):
            if not path.is_file():
                raise StoreError(f"{path} does not exist")
            return path.with_name(path.name.removesuffix(ending) + ".json")
    parts = name.split("/", 2)
    if not all(parts) or ".." in parts:
        raise StoreError(f"{name!r} is neither a result file nor experiment/hardware/run")
    return named(results, *parts)


def _folders(path: Path) -> list[str]:
    return sorted(found.name for found in path.glob("*") if found.is_dir())
