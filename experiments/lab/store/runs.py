"""Finding a stored run by its name."""

from __future__ import annotations

from pathlib import Path

from experiments.lab.store import result as store
from experiments.lab.store.provenance import git
from experiments.lab.store.result import StoreError

LEVELS = ("experiment", "scale.via", "hardware")


def find(results: Path, name: str) -> Path:
    """The JSON of a run. `name` is a result file (.json, one of its .csv) or experiment[/scale.via[/hardware[/run]]]:
    `prefix_cache/7b`. Of what is left out there must be one alone; of runs the default one is meant."""
    path = Path(name)
    for ending in sorted((".json", *store.TABLES), key=len, reverse=True):
        if name.endswith(ending):
            if not path.is_file():
                raise StoreError(f"{path} does not exist")
            return path.with_name(path.name.removesuffix(ending) + ".json")
    parts = name.split("/", len(LEVELS))
    if not all(parts) or ".." in parts:
        raise StoreError(f"{name!r} is neither a result file nor experiment/scale.via/hardware/run")
    folder = results
    for level, part in zip(LEVELS, [*parts, "", ""], strict=False):
        folder /= _chosen(folder, level, part)
    run = parts[len(LEVELS)] if len(parts) > len(LEVELS) else "default"
    if not (folder / f"{run}.json").is_file():
        stored = ", ".join(sorted(found.stem for found in folder.glob("*.json"))) or "none"
        raise StoreError(f"{folder} has no run {run}; it has: {stored}")
    return folder / f"{run}.json"


def published(path: Path, revision: str, folder: Path) -> Path:
    """What `path`, a run's JSON, was at a revision of git, wherever it lay then: its files are written to `folder`."""
    if git(path.parent, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}") is None:
        raise StoreError(f"git knows no revision {revision!r}")
    moves = git(path.parent, "log", "--follow", "--diff-filter=R", "--format=", "--name-status", f"{revision}..HEAD",
                "--", path.name) or ""  # fmt: skip
    old = moves.splitlines()[-1].split("\t")[1] if moves.strip() else f"./{path.name}"
    for ending in (".json", *store.TABLES):
        text = git(path.parent, "show", f"{revision}:{old.removesuffix('.json')}{ending}")
        if text is not None:
            (folder / f"{path.stem}{ending}").write_text(text, encoding="utf-8", newline="")
        elif ending == ".json":
            raise StoreError(f"{path} was not published at {revision}, neither there nor where it was moved from")
    return folder / path.name


def _chosen(folder: Path, level: str, part: str) -> str:
    """The folder that is meant by `part`, or the only one there is."""
    known = sorted(found.name for found in folder.glob("*") if found.is_dir())
    if part in known:
        return part
    fit = [name for name in known if name.startswith(f"{part}.")] if part else known
    if len(fit) == 1:
        return fit[0]
    if fit:
        raise StoreError(f"{folder} holds more than one {level}, {', '.join(fit)}: say which")
    raise StoreError(f"{folder} holds no {level} {part!r}; it holds: {', '.join(known) or 'nothing'}")
