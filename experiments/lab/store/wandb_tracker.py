"""Weights & Biases. Runs are always written to files first, and those are sent then: a missing login, a network that
fails in the middle or a server that does not answer cost nothing but a later `wandb sync`, and nobody is prompted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.lab.schema import TrackerSettings
from experiments.lab.store.trackers import Values


class WandbTracker:
    """Its runs lie in `<settings.folder>/wandb/`."""

    def __init__(self, settings: TrackerSettings, root: Path) -> None:
        try:
            import wandb  # only who asks for it waits for it
        except ImportError as error:
            raise RuntimeError(f"the package wandb cannot be imported ({error}): pip install wandb") from error
        self._wandb = wandb
        self._settings = settings
        self._folder = root / settings.folder
        self._folder.mkdir(parents=True, exist_ok=True)  # else wandb falls back to the system's temporary folder
        self._run: Any = None
        self._written: list[Path] = []

    def start(self, name: str, group: str, job: str, config: Mapping[str, Any], tags: Sequence[str]) -> None:
        self._run = self._wandb.init(
            project=self._settings.project,
            entity=self._settings.entity,
            dir=str(self._folder),
            name=name,
            group=group,
            job_type=job,
            config=dict(config),
            tags=[tag[:64] for tag in tags],  # wandb's limit
            settings=self._wandb.Settings(
                mode="offline", silent=True, console="off", save_code=False, x_disable_stats=True
            ),
        )
        self._written.append(Path(self._run.settings.sync_dir))

    def series(self, name: str, x: str, rows: Iterable[Values]) -> None:
        self._run.define_metric(f"{name}/*", step_metric=f"{name}/{x}")
        for row in rows:
            self._run.log({f"{name}/{column}": value for column, value in row.items()})

    def summary(self, values: Values) -> None:
        self._run.summary.update(dict(values))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        data = [list(row) for row in rows]
        self._run.log({name: self._wandb.Table(columns=list(columns), data=data, allow_mixed_types=True)})

    def figure(self, name: str, path: Path) -> None:
        self._run.log({f"figures/{name}": self._wandb.Image(str(path))})

    def finish(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()

    def close(self) -> str:
        where = f"{len(self._written)} W&B runs in {self._folder / 'wandb'}"
        later = f"send them with: wandb sync {' '.join(map(str, self._written))}"
        if not self._settings.sync:
            return f"{where}; {later}"
        problem = self._sync()
        return f"{where}, sent to W&B" if not problem else f"{where} could not be sent ({problem}); {later}"

    def _sync(self) -> str:
        """Why they could not be sent; empty when they were. wandb itself would try again for ever."""
        command = [sys.executable, "-m", "wandb", "sync", *map(str, self._written)]
        limit = self._settings.sync_timeout_s
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return f"no answer within {limit:g} s"
        except OSError as error:
            return str(error)
        return "" if done.returncode == 0 else _reason(f"{done.stdout}\n{done.stderr}")


def _reason(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("Error:")]
    return (errors or lines or ["wandb sync failed"])[-1].removeprefix("Error:").strip().rstrip(".")
