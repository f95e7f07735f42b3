"""Stored runs: finding one by its name, how much of the code that it names has changed since, by the history of git,
and one process at a time, since parallel jobs of a sweep write into the same folders."""

from __future__ import annotations

import fcntl
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.lab.config import axes
from experiments.lab.store.provenance import git
from experiments.lab.store.result import TABLES, Result, RunInfo, StoreError, run_path

LEVELS = ("experiment", "scale.via", "hardware")


def find(results: Path, name: str) -> Path:
    """The JSON of a run. `name` is a result file (.json, one of its .csv) or experiment[/scale.via[/hardware[/run]]]:
    `prefix_cache/7b`. Of what is left out there must be one alone; of runs the default one is meant."""
    path = Path(name)
    for ending in sorted((".json", *TABLES), key=len, reverse=True):
        if name.endswith(ending):
            if not path.is_file():
                raise StoreError(f"{path} does not exist")
            return path.with_name(path.name.removesuffix(ending) + ".json")
    parts = name.split("/", len(LEVELS))
    if not all(parts) or ".." in parts:
        raise StoreError(f"{name!r} is neither a result file nor experiment/scale.via/hardware/run")
    folder, run = results, parts[len(LEVELS)] if len(parts) > len(LEVELS) else "default"
    for level, part in zip(LEVELS, [*parts, "", ""], strict=False):
        known = sorted(found.name for found in folder.glob("*") if found.is_dir())
        fit = [part] if part in known else [name for name in known if name.startswith(f"{part}." if part else "")]
        if len(fit) > 1:
            raise StoreError(f"{folder} holds more than one {level}, {', '.join(fit)}: say which")
        if not fit:
            raise StoreError(f"{folder} holds no {level} {part!r}; it holds: {', '.join(known) or 'nothing'}")
        folder /= fit[0]
    path = folder / f"{run}.json"
    if not path.is_file():
        stored = ", ".join(sorted(found.stem for found in folder.glob("*.json"))) or "none"
        raise StoreError(f"{folder} has no run {run}; it has: {stored}")
    return path


def published(path: Path, revision: str, folder: Path) -> Path:
    """What `path`, a run's JSON, was at a revision of git, wherever it lay then: its files are written to `folder`."""
    if git(path.parent, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}") is None:
        raise StoreError(f"git knows no revision {revision!r}")
    moves = git(path.parent, "log", "--follow", "--diff-filter=R", "--format=", "--name-status", f"{revision}..HEAD",
                "--", path.name) or ""  # fmt: skip
    old = moves.splitlines()[-1].split("\t")[1] if moves.strip() else f"./{path.name}"
    for ending in (".json", *TABLES):
        text = git(path.parent, "show", f"{revision}:{old.removesuffix('.json')}{ending}")
        if text is not None:
            (folder / f"{path.stem}{ending}").write_text(text, encoding="utf-8", newline="")
        elif ending == ".json":
            raise StoreError(f"{path} was not published at {revision}, neither there nor where it was moved from")
    return folder / path.name


ROOT = Path(__file__).resolve().parents[3]
Since = Callable[[RunInfo], int | None]
# What an experiment says that decides no number; of its claims `asked_differently` knows.
SHOWN = (
    *("title", "question", "method", "original", "target", "bounded_by", "claims", "plots", "block_map", "code"),
    axes.LIMITS,
)
ASKED_DIFFERENTLY = "its claims have changed since"


def commits_since(info: RunInfo, root: Path = ROOT) -> int | None:
    """The number of commits after `info.provenance.commit` that touched a file of `info.code`, or the experiment's or
    scale's own with those they build on, of files that read otherwise now, and say something else of the run's scale
    and way; None where nobody can tell: no git, no repository at `root`, a run without a commit, or a commit that this
    history does not hold."""
    if info.provenance.commit is None or not info.code:
        return None
    own = (Path("conf/experiment", f"{info.experiment}.yaml"), Path("conf/scale", f"{info.scale}.yaml"))
    asked = [str(path.relative_to(root)) for each in own for path in axes.with_parents(root / each)]
    since = f"{info.provenance.commit}..HEAD"
    found = git(root, "diff", "--name-only", "--no-renames", "--relative", since, "--", *info.code, *asked)
    if found is None:
        return None
    changed = set(found.splitlines())
    if not changed.isdisjoint(asked) and _asks_as_then(info, root):
        changed -= set(asked)
    found = git(root, "rev-list", "--count", since, "--", *sorted(changed)) if changed else "0"
    return None if found is None else int(found)


def _asks_as_then(info: RunInfo, root: Path) -> bool:
    """Whether files said of the run's scale and way what they say now, when it was measured. Of a scale of which they
    say nothing by itself, nobody can tell."""
    with TemporaryDirectory() as folder:
        packed = Path(folder, "conf.tar")
        if git(root, "archive", f"--output={packed}", str(info.provenance.commit), "conf") is None:
            return False
        with tarfile.open(packed) as files:
            # Python before 3.10.12 and 3.11.4 has no filters; the files are this repository's own.
            files.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
            files.extractall(folder)
        then, now = (_question(info, Path(of, "conf")) for of in (folder, root))
    return then is not None and then == now


def _question(info: RunInfo, conf: Path) -> dict[str, Any] | None:
    """What files say that decides which numbers there are, without what they say of other scales and ways."""
    if (said := axes.said(info.experiment, info.scale, info.via, conf)) is None:
        return None
    asked = {key: value for key, value in said.get("experiment", {}).items() if key not in SHOWN}
    return {key: of for key, of in said.items() if key not in ("scales", "via")} | {"experiment": asked}


def asked_differently(info: RunInfo, root: Path = ROOT) -> bool:
    """Whether the claims are others than those that the experiment makes now at this scale and way. A run that left
    some out is held to those that it kept; one whose claims were typed, or whose scale is its own, to nothing."""
    now = axes.said(info.experiment, info.scale, info.via, root / "conf")
    if now is None or any(key.startswith("experiment.claims") for key in info.changed):
        return False
    had, asks = (
        [{key: value for key, value in claim.items() if key != "source"} for claim in said.get("claims") or []]
        for said in (info.config.get("experiment", {}), now["experiment"])
    )
    whole = not info.changed and not any("Left out: " in note for note in info.notes)
    return any(claim not in asks for claim in had) or (whole and any(claim not in had for claim in asks))


def table(results: Sequence[Result], root: Path = ROOT) -> str:
    """Runs whose code or question has changed since, those with most commits first; and how many are as they were."""
    found = [(commits_since(r.info, root), asked_differently(r.info, root), str(run_path(r.info))) for r in results]
    due = sorted((-(count or 0), name, other) for count, other, name in found if count or other)
    lines = [f"{-count:>5} commit{' ' if count == -1 else 's'}  {name}" + f", {ASKED_DIFFERENTLY}" * other
             for count, name, other in due]  # fmt: skip
    lines += [f"    ?          {name}: no commit known, or no code named" for count, _, name in found if count is None]
    fresh = sum(count == 0 and not other for count, other, _ in found)
    return "\n".join([*lines, f"{len(due)} of {len(found)} runs are due: commits have touched the code that they name, "
                      f"or their question, since they were measured. {fresh} are as both are now."])  # fmt: skip


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Waits until no other process of this machine is inside."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # and with it goes the lock
