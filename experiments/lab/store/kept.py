"""What the finished processes of a run have found, on disk until the run is complete: with `--resume` a run that was
cut off goes on with the process that is missing, also where nobody was left to store it."""

from __future__ import annotations

import hashlib
import json
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from experiments.lab import schema
from experiments.lab.experiment import Findings
from experiments.lab.store.result import COMPLETE, write_atomic

LEFT_ASIDE = ("paths", "tracker")  # settings that change nothing of what is measured


@dataclass(frozen=True)
class Kept:
    place: Path  # of the run's files, without an ending
    commit: str | None  # of a clean tree; None where it is not known which code measures: nothing is kept then
    resume: bool  # what is there already counts; else it goes, whenever its turn comes

    def find(self, process: int, config: DictConfig) -> Findings | None:
        """What the process has found with this config, measured by this commit."""
        path = self._path(process)
        if self.resume and self.commit is not None and path.exists():
            key, found = pickle.loads(path.read_bytes())
            if key == self._key(config):
                assert isinstance(found, Findings)
                return found
        path.unlink(missing_ok=True)
        return None

    def keep(self, process: int, config: DictConfig, found: Findings) -> None:
        if self.commit is None or found.status != COMPLETE:
            return
        try:
            self.place.parent.mkdir(parents=True, exist_ok=True)
            write_atomic({self._path(process): pickle.dumps((self._key(config), found))})
        except OSError as error:
            print(f"process {process + 1} is not kept for --resume: {error}", file=sys.stderr)

    def drop(self) -> None:
        for path in self.place.parent.glob(self._path(0).name.replace("-1.", "-*.")):
            path.unlink(missing_ok=True)

    def _path(self, process: int) -> Path:
        return self.place.with_name(f"{self.place.name}.process-{process + 1}.pickle")

    def _key(self, config: DictConfig) -> str:
        settings = {key: value for key, value in schema.plain(config).items() if key not in LEFT_ASIDE}
        return hashlib.sha256(json.dumps([self.commit, settings], sort_keys=True).encode()).hexdigest()
