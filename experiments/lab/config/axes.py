"""Axes of an experiment: the scale it is measured at (model, dtype, device), and the way requests reach the engine.

An experiment is one file; under `scales:` it says what differs at each scale, and under `via:` at each way beside
in_process. Of these `register` makes config nodes, one for each (experiment, scale, way), which the last line of the
defaults list in conf/config.yaml names: so Hydra merges them after the experiment and before the command line. A list
replaces another, but `limits` add up: those of all, then those of the scale and of the way."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from mini_infer.core.errors import ConfigError

CONF = Path(__file__).resolve().parents[3] / "conf"
GROUP = "at"
IN_PROCESS, HTTP, URL = "in_process", "http", "url"  # of conf/via/
OWN = "own"  # the scale of an experiment that names none, and says itself what it measures
NO_SCALE = "none"  # of experiments without a model
LIMITS = "limits"  # of an experiment: what its numbers do not say


@dataclass(frozen=True)
class Axes:
    """What was chosen, with the words that it adds to a report."""

    scale: str = OWN
    via: str = IN_PROCESS
    model: str = ""  # of the scale, in titles
    method: str = ""  # of the scale, after the experiment's
    title: str = ""  # of the way, after the model
    procedure: str = ""  # of the way, before the experiment's method
    code: tuple[str, ...] = ()  # of the way, after the experiment's
    node: str = ""  # which of the nodes below was merged


def register(folder: Path, only: str = "*") -> None:
    """Makes nodes of all experiments in `folder` known to Hydra, or of the one of that name."""
    store = ConfigStore.instance()
    for path in sorted(path for path in folder.glob(f"{only}.yaml") if not path.name.startswith("_")):
        for scale, via, content in nodes(OmegaConf.load(path), _limits(_whole(path))):
            name = f"{path.stem}.{scale}.{via}"
            store.store(name, _merged(content, {"axes": {"node": name}}), GROUP, "_global_")


def nodes(experiment: Any, limits: Sequence[str] = ()) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(scale, way, what the experiment's file says of both, behind `limits`); of any server what it says of ours."""
    scales, ways = plain(experiment.get("scales")), plain(experiment.get("via"))
    common = {"experiment": {LIMITS: [*limits]}} if limits else {}
    for scale, content in scales.items():
        own = _merged(common, content or {})
        yield scale, IN_PROCESS, own
        for via in dict.fromkeys((*ways, URL)) if scale != NO_SCALE else ():
            said = dict(ways.get(via) or ways.get(HTTP) or {})
            of_scale = said.pop("scales", {})
            if scale in of_scale or via == URL:
                both = of_scale.get(scale) if isinstance(of_scale, Mapping) else None
                yield scale, via, functools.reduce(_merged, (own, said, both or {}))


@functools.cache
def said(experiment: str, scale: str, via: str, conf: Path = CONF) -> dict[str, Any] | None:
    """What the files of the experiment and of the scale say of both, in the order in which Hydra merges them, which
    takes half a second for all that others say; None where they say nothing of that scale and way."""
    path = conf / "experiment" / f"{experiment}.yaml"
    own = _whole(path)
    known = {(s, v): content for s, v, content in nodes(read(path), _limits(own))} if path.is_file() else {}
    at = known.get((scale, via), {} if path.is_file() and not known and scale == OWN else None)
    return None if at is None else functools.reduce(_merged, (_whole(conf / "scale" / f"{scale}.yaml"), own, at))


def _whole(path: Path) -> dict[str, Any]:
    """What a file says with those that it builds on; empty where there is none."""
    return functools.reduce(_merged, map(read, with_parents(path)), {})


def _limits(said: Mapping[str, Any]) -> list[str]:
    return list(said.get("experiment", {}).get(LIMITS, ()))


def with_parents(path: Path) -> list[Path]:
    """A file behind those that its defaults list builds on; nothing where there is none."""
    if not path.is_file():
        return []
    named = [entry for entry in read(path).get("defaults") or [] if isinstance(entry, str) and entry != "_self_"]
    return [*(file for name in named for file in with_parents(path.with_name(f"{name}.yaml"))), path]


def read(path: Path) -> Any:
    """A file in which OmegaConf, which parses in Python for seconds, would take 1e3 for a number."""
    return yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}


def check(config: DictConfig, experiment: str) -> str:
    """The scale that is taken where none is chosen: the first. Raises ConfigError for axes that it does not have."""
    axes, known = config.axes, dict[str, list[str]]()
    for scale, via, _ in nodes(config):
        known.setdefault(scale, []).append(via)
    if axes.node == f"{experiment}.{axes.scale}.{axes.via}":
        return next(iter(known))
    if not known and axes.via == IN_PROCESS:  # an experiment of one scale, which need not say so
        return OWN
    if not known:
        raise ConfigError(f"via={axes.via}: {experiment} says nothing of it. Name its scales under `scales` first")
    if axes.via in known.get(axes.scale, ()):
        raise ConfigError(f"{experiment} has `scales`, so its file must lie in conf/experiment/")
    there = "; ".join(f"scale={scale} via={'|'.join(ways)}" for scale, ways in known.items())
    more = f"Another takes an entry under `scales` or `via` in conf/experiment/{experiment}.yaml"
    asked = f"{experiment} says nothing of scale={axes.scale} via={axes.via}"
    raise ConfigError(f"{asked}. It is measured at {there}. {more}")


def _merged(node: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """As OmegaConf merges, which takes twenty times as long; but limits add up."""
    both = {key for key in changes if isinstance(node.get(key), dict) and isinstance(changes[key], dict)}
    merged = {**node, **changes, **{key: _merged(node[key], changes[key]) for key in both}}
    if LIMITS in node and LIMITS in changes:
        merged[LIMITS] = list(dict.fromkeys([*node[LIMITS], *changes[LIMITS]]))
    return merged


def plain(node: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", OmegaConf.to_container(node)) if OmegaConf.is_config(node) else dict(node or {})
