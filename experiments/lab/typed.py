"""What was typed on the command line: all of it counts in the experiment, or is refused before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from experiments.lab import axes, points, schema
from experiments.lab.axes import CONF, Axes
from experiments.lab.explain import suggest
from experiments.lab.spec import RATE, VARIANT_KEYS
from mini_infer.core.config import Device
from mini_infer.core.errors import ConfigError

# What a page's name says already, or where things are, and not what is measured.
NOT_CHANGES = (
    *("experiment", "scale", "via", "hardware", "model", "engine.model.path"),
    *("paths", "tracker", "peers.hf.python", "peers.vllm.python", "peers.vllm.pythonpath", "peers.http.url"),
)
MODEL = ("model", "engine.model.path", "engine.model.hf_config")  # keys that say which model it is


@dataclass(frozen=True)
class Settled:
    config: DictConfig  # what is measured
    axes: Axes
    default_scale: str  # of the experiment
    changed: Mapping[str, str]  # key -> value, of what was typed and is neither an axis nor a place
    notes: tuple[str, ...]  # about what is left out, and why


def settle(config: DictConfig, experiment: str, overrides: Sequence[str]) -> Settled:
    """Raises ConfigError where something that was typed would have no effect."""
    typed = OverridesParser.create().parse_overrides(list(overrides))
    _require_known(typed)
    default = axes.check(config, experiment)
    config = config.copy()
    OmegaConf.set_struct(config, False)
    _require_scale_of_device(config, typed)
    _set_device(config, typed)
    if config.axes.scale == axes.NO_SCALE:
        _require_used(typed, experiment)
    _require_not_varied(config, typed, experiment)
    notes = [*_narrow(config, experiment), *_rename(config, typed)]
    OmegaConf.set_struct(config, True)
    return Settled(config, axes.chosen(config), default, _changed(typed), tuple(notes))


def _changed(typed: Sequence[Override]) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in typed:
        key = one.key_or_group
        if key == "measure.points":
            found |= {axis: points.shown(values) for axis, values in one.value().items()}
        elif not any(key == name or key.startswith(f"{name}.") for name in NOT_CHANGES):
            found[key] = "deleted" if one.is_delete() else points.shown(one.value())
    return found


def _require_known(typed: Sequence[Override]) -> None:
    """`+foo=1` would be merged, and read by nobody."""
    roots = {f.name for f in fields(schema.RunConfig)} | {"hydra", "system"}
    for one in typed:
        root = _root(one)
        if root not in roots and root not in {path.name for path in CONF.iterdir()}:
            raise ConfigError(f"unknown setting {one.key_or_group!r}{suggest(root, sorted(roots))}")


def _root(one: Override) -> str:
    return one.key_or_group.replace("/", ".").partition(".")[0]


def _require_used(typed: Sequence[Override], experiment: str) -> None:
    for one in typed:
        if _root(one) in ("workload", "model", "system") or one.key_or_group.startswith("engine.model.path"):
            raise ConfigError(f"{one.key_or_group}: {experiment} runs no model and serves no workload: leave it out")


def _require_scale_of_device(config: DictConfig, typed: Sequence[Override]) -> None:
    """A model on a GPU, with the dtype, lengths and memory of a scale for a CPU, would be another engine."""
    device, keys = config.hardware.device, [one.key_or_group for one in typed]
    others = [scale for scale in config.get("scales") or () if scale != config.axes.scale]
    if device is Device.cuda and config.engine.model.device is Device.cpu and others and "scale" not in keys:
        for key in keys:
            if key in MODEL:
                raise ConfigError(
                    f"{key} on a GPU with the settings of scale={config.axes.scale}, which is for a CPU: type the one "
                    f"whose settings it is to have, scale={' or scale='.join(others)}"
                )


def _set_device(config: DictConfig, typed: Sequence[Override]) -> None:
    """`hardware=cpu` says where to measure, beside what the machine can do at most."""
    device, room = config.hardware.device, config.hardware.memory_gib
    if device is not None and not any(one.key_or_group == "engine.model.device" for one in typed):
        config.engine.model.device = device
    if room is not None and (config.engine.cache.memory_gib or 0) > room:
        raise ConfigError(
            f"engine.cache.memory_gib={config.engine.cache.memory_gib:g} is more than the {room:g} GiB of "
            f"{config.hardware.machine}: choose a smaller scale=..., or set less"
        )


def _narrow(config: DictConfig, experiment: str) -> list[str]:
    """Puts measure.points in the place of what the experiment says, and drops the claims that fall away."""
    asked = schema.plain(config.measure).get("points") or {}
    if not asked:
        return []
    if config.axes.scale == axes.NO_SCALE:
        raise ConfigError(f"{experiment} has no experiment.points to change")
    known = dict(schema.plain(config.experiment).get("points") or {})
    for axis, values in asked.items():
        known[axis] = _chosen(axis, known.get(axis), values)
    config.experiment.points = known
    grid = points.grid(known)
    kept, lost = [], 0
    for claim in config.experiment.get("claims") or []:
        wanted = [at for at in (claim.get("at"), claim.get("against")) if at]
        if claim.get("everywhere") or all("search" in at or _stands(grid, at) for at in wanted or [{}]):
            kept.append(claim)
        else:
            lost += 1
    config.experiment.claims = kept
    if config.experiment.get("timeline") is not None and not _stands(grid, config.experiment.timeline):
        config.experiment.timeline = None
    if config.experiment.get("again_at"):
        config.experiment.again_at = [at for at in config.experiment.again_at if _stands(grid, at)]
    profiled = config.experiment.get("profile")
    if profiled:
        config.experiment.profile = [at for at in profiled if _stands(grid, at)] or [dict(grid[0].values)]
    of = ", ".join(f"{axis} {points.shown(known[axis])}" for axis in asked)
    return [f"Measured at other points than the experiment's own: {of}." + _left_out(lost, "about other points")]


def _stands(grid: Sequence[points.Point], at: Mapping[str, Any]) -> bool:
    return len(points.fitting(grid, at)) == 1


def _chosen(axis: str, own: Any, values: Any) -> Any:
    """The bundles of that name, or the values themselves."""
    values = values if isinstance(values, list) else [values]
    if not isinstance(own, Mapping):
        if own is None and not axis.startswith(("workload.", "engine.")):
            raise ConfigError(f"experiment.points has no {axis!r}: give a key of workload or engine, or an axis it has")
        return values
    for name in values:
        if name not in own:
            raise ConfigError(f"experiment.points.{axis} has no {name!r}{suggest(str(name), own)}")
    return {name: own[name] for name in values}


def _left_out(count: int, why: str) -> str:
    return f" Left out: {count} claim{'s' if count > 1 else ''} {why}." if count else ""


def _require_not_varied(config: DictConfig, typed: Sequence[Override], experiment: str) -> None:
    """A key that points, variants or the search set themselves: what was typed would never be measured."""
    spec = schema.plain(config.experiment)
    varied = _varied(spec)
    for one in typed:
        for key in _keys(one):
            for name, who in varied.items():
                if key == name or key.startswith(f"{name}.") or name.startswith(f"{key}."):
                    raise ConfigError(f"{one.input_line}: {experiment} sets {name} itself, by {who}")


def _varied(spec: Mapping[str, Any]) -> dict[str, str]:
    """Dotted key -> who sets it, and the way out."""
    found: dict[str, str] = {}
    for axis, values in (spec.get("points") or {}).items():
        bundles = values.values() if isinstance(values, Mapping) else [{axis: values}]
        names = f"[{next(iter(values))}]" if isinstance(values, Mapping) else f"[{points.shown(values)}]"
        for key in set.intersection(*(set(bundle) for bundle in bundles)):  # where only some set it, it holds at others
            found[key] = f"its points: experiment.points.{axis}={names} chooses what is measured"
    search = spec.get("search") or {}
    if search.get("low_per_s") is not None:
        for key in (RATE, *search.get("at", {})):
            found.setdefault(key, "its search: experiment.search.low_per_s and high_per_s choose the range")
    for name, changes in (spec.get("variants") or {}).items():
        if isinstance(changes, Mapping):
            for key, value in points.flat({k: v for k, v in changes.items() if k not in VARIANT_KEYS}).items():
                way = f"experiment.variants.{name}.{key}={points.shown(value)} is where it stands"
                found.setdefault(f"engine.{key}", f"its variants: {way}")
    return found


def _keys(one: Override) -> list[str]:
    """The settings under engine and workload that it changes; those of a file, where it chooses one."""
    key = one.key_or_group
    group = CONF / key
    if not group.is_dir():
        return [key] if key.startswith(("engine.", "workload.")) else []
    path = group / f"{one.value()}.yaml"
    if not key.startswith("engine/") or not path.is_file():
        return []  # a model or a workload is a whole one, and points and variants change what they like of it
    _, said, package = path.read_text(encoding="utf-8").partition("\n")[0].partition("# @package ")
    package = package.strip() if said else key.replace("/", ".")
    return [f"{package}.{leaf}" for leaf in points.flat(axes.plain(OmegaConf.load(path)))]


def _rename(config: DictConfig, typed: Sequence[Override]) -> list[str]:
    """Another model than the scale's has pages of its own, and none of the bounds that were for that one."""
    if config.axes.scale == axes.NO_SCALE:
        return []
    name = Path(str(config.engine.model.path)).name
    changed = [one.key_or_group for one in typed if one.key_or_group.startswith(MODEL)]
    inside = any(key.startswith("engine.model.hf_config") for key in changed)
    if not changed or (name == config.axes.model and not inside):
        return []
    was = config.axes.model or f"scale={config.axes.scale}"
    config.axes.model = f"{name}, changed" if inside else name
    config.axes.scale = "".join(c if c.isalnum() or c in "_-" else "_" for c in name) + "_changed" * inside
    config.axes.method = ""
    lost = len(config.experiment.get("claims") or [])
    config.experiment.claims = []
    config.experiment.target = ""
    return [f"Measured with {config.axes.model} instead of {was}." + _left_out(lost, f"with bounds for {was}")]
