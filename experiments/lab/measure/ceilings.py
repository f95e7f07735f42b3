"""Files of conf/hardware/: finds the ceilings of the machine that a run measures on, and adds those of a new one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from experiments.lab.config import schema
from experiments.lab.config.axes import CONF
from experiments.lab.measure import hardware
from experiments.lab.measure.hardware import Ceilings, Hardware, Machine
from experiments.lab.store import result as store
from mini_infer.core.errors import ConfigError

HEADER = """\
# Ceilings of a machine, which floors, MBU and MFU are taken from. Written by `python run.py experiment=ceilings`.
"""
FOLDER = CONF / "hardware"
ORDER = ("memory_gib", "host_memory_gib", "machine", "measured", "how")  # of a machine, before its ceilings
WAY_OUT = "measure them with `python run.py experiment=ceilings --record`"


def find(folder: Path, chosen: Hardware, device: str, threads: int) -> tuple[Ceilings | None, str]:
    """The ceilings that hold for a run on `device` (`cpu` or `cuda`) with so many torch threads, or why there are none.
    A machine that `hardware=<name>` has `chosen` to be simulated counts as it is; what is measured is measured here,
    with nothing chosen. Raises ConfigError where the file is no hardware file."""
    if chosen.machine:
        return _of(chosen, device, threads)
    return of_machine(folder, hardware.device_key(device), hardware.name(device), threads)


def of_machine(folder: Path, key: str, machine: str, threads: int) -> tuple[Ceilings | None, str]:
    """As `find`, of the machine of that name: one key, `cpu` above all, may be that of several."""
    path = folder / f"{key}.yaml"
    known = {each.machine: each for each in read(path).machines} if path.is_file() else {}
    if machine in known:
        return _of(known[machine], "cpu" if key == "cpu" else "cuda", threads)
    if known:
        return None, f"{path.name} holds the ceilings of {', '.join(known)}, and none of {machine}: {WAY_OUT}"
    return None, f"no ceilings are known for {machine}: {WAY_OUT}"


def _of(known: Machine, device: str, threads: int) -> tuple[Ceilings | None, str]:
    wanted = threads if device == "cpu" else None
    for ceilings in known.ceilings:
        if ceilings.threads == wanted:
            return ceilings, ""
    of, way_out = ("a GPU", "") if wanted is None else (f"{wanted} threads", f" measure.threads={wanted}")
    return None, f"no ceilings of {known.machine} are known for {of}: {WAY_OUT}{way_out}"


def run_of(stored: Path, machine: str) -> str:
    """The name of a run of this experiment, of which each machine keeps its own; `stored`: the JSON that the name which
    was asked for stands for."""
    with suppress(store.StoreError):  # a new one, or a damaged one that is replaced
        if store.read(stored).info.machine != machine:
            changed = [] if stored.stem == "default" else [stored.stem]
            return ",".join([*changed, store.slug(machine.replace(",", ""))])
    return stored.stem


def read(path: Path) -> Hardware:
    try:
        return schema.build(Hardware, OmegaConf.load(path), "hardware")
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def save(path: Path, found: Hardware) -> None:
    """Writes `found`. What the file has of other machines stays, its first one first; and of the same machine what was
    not measured now, other threads and links."""
    before = read(path) if path.is_file() else found
    known = {each.machine: _told(each) for each in before.machines}
    known[found.machine] = _told(found, next((m for m in before.machines if m.machine == found.machine), found))
    first, *others = known.values()
    device = {} if found.device is None else {"device": found.device.value}
    content = device | first | ({"others": others} if others else {})
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(content, sort_keys=False, width=110, allow_unicode=True)
    store.write_atomic({path: HEADER + text})


def _told(found: Machine, before: Machine | None = None) -> dict[str, Any]:
    """As plain values, with what was known before and is not found anew."""
    ceilings = {new.threads: new for new in found.ceilings}
    for old in before.ceilings if before else ():
        new = ceilings.get(old.threads, old)
        ceilings[old.threads] = replace(new, link_gb_s={**old.link_gb_s, **new.link_gb_s})
    content = {name: getattr(found, name) for name in ORDER if getattr(found, name) is not None}
    content["ceilings"] = [
        {key: value for key, value in ({"threads": threads} | asdict(own)).items() if value not in (None, {})}
        for threads, own in sorted(ceilings.items(), key=lambda item: item[0] or 0)
    ]
    return content
