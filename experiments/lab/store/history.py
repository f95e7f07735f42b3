"""How much of the code that a result names has changed since it was measured, by the history of git."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.lab.store.provenance import git
from experiments.lab.store.result import Result, RunInfo, run_path

ROOT = Path(__file__).resolve().parents[3]
Since = Callable[[RunInfo], int | None]


def commits_since(info: RunInfo, root: Path = ROOT) -> int | None:
    """The number of commits after `info.provenance.commit` that touched a file of `info.code`; None where nobody can
    tell: no git, no repository at `root`, a run without a commit, or a commit that this history does not hold."""
    if info.provenance.commit is None or not info.code:
        return None
    found = git(root, "rev-list", "--count", f"{info.provenance.commit}..HEAD", "--", *info.code)
    return None if found is None else int(found)


def table(results: Sequence[Result], root: Path = ROOT) -> str:
    """Runs whose code has changed since, those with most commits first; and how many are as the code is."""
    found = [(commits_since(result.info, root), str(run_path(result.info))) for result in results]
    due = sorted((-count, name) for count, name in found if count)
    lines = [f"{-count:>5} commits  {name}" for count, name in due]
    lines += [f"    ?          {name}: no commit known, or no code named" for count, name in found if count is None]
    fresh = sum(count == 0 for count, _ in found)
    return "\n".join([*lines, f"{len(due)} of {len(found)} runs are due: commits have touched the code that they name "
                      f"since they were measured. {fresh} are as the code is."])  # fmt: skip
