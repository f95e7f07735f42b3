"""Files of conf/hardware/: finds the ceilings of the machine that a run measures on, and writes those of a new one."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from experiments.lab.config import schema
from experiments.lab.config.axes import CONF
from experiments.lab.measure import hardware
from experiments.lab.measure.hardware import Ceilings, Hardware
from experiments.lab.store import result as store
from mini_infer.core.errors import ConfigError

HEADER = """\
# Ceilings of a machine, which floors, MBU and MFU are taken from. Written by `python run.py experiment=ceilings`.
"""
FOLDER = CONF / "hardware"
ORDER = ("device", "memory_gib", "host_memory_gib", "machine", "measured", "how")  # of a file, before its ceilings
WAY_OUT = "measure them with `python run.py experiment=ceilings`"


def find(folder: Path, chosen: Hardware, device: str, threads: int) -> tuple[Ceilings | None, str]:
    """The ceilings that hold for a run on `device` (`cpu` or `cuda`) with so many torch threads, or why there are none.
    What `hardware=<name>` has chosen counts as it is, whatever machine this is. Raises ConfigError where the file is no
    hardware file."""
    known = chosen
    if not known.machine:
        path, machine = folder / f"{hardware.device_key(device)}.yaml", hardware.name(device)
        if not path.is_file():
            return None, f"no ceilings are known for {machine}: {WAY_OUT}"
        known = read(path)
        if known.machine != machine:
            return None, f"{path.name} holds the ceilings of {known.machine}, and this is {machine}: {WAY_OUT}"
    wanted = threads if device == "cpu" else None
    for ceilings in known.ceilings:
        if ceilings.threads == wanted:
            return ceilings, ""
    of, way_out = ("a GPU", "") if wanted is None else (f"{wanted} threads", f" measure.threads={wanted}")
    return None, f"no ceilings of {known.machine} are known for {of}: {WAY_OUT}{way_out}"


def read(path: Path) -> Hardware:
    try:
        return schema.build(Hardware, OmegaConf.load(path), "hardware")
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def save(path: Path, found: Hardware) -> None:
    """Writes `found`. Of the same machine what was not measured now, other threads and links, stays."""
    ceilings = {new.threads: new for new in found.ceilings}
    if path.is_file() and (before := read(path)).machine == found.machine:
        for old in before.ceilings:
            new = ceilings.get(old.threads, old)
            ceilings[old.threads] = replace(new, link_gb_s={**old.link_gb_s, **new.link_gb_s})
    told = store.plain(found)
    content = {name: told[name] for name in ORDER if told[name] is not None}
    content["ceilings"] = [
        {key: value for key, value in ({"threads": threads} | asdict(own)).items() if value not in (None, {})}
        for threads, own in sorted(ceilings.items(), key=lambda item: item[0] or 0)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(content, sort_keys=False, width=110, allow_unicode=True)
    store.write_atomic({path: HEADER + text})
