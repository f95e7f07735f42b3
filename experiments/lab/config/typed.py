"""What was typed on the command line: all of it counts in the experiment, or is refused before anything runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from experiments.lab.config import ablation_spec, axes, points, schema
from experiments.lab.config.explain import require_known, suggest
from experiments.lab.config.spec import RATE, settings_of
from experiments.lab.workloads import WORKLOADS
from mini_infer.core.config import Device, EngineConfig
from mini_infer.core.errors import ConfigError

ADDRESS = "peers.http.url"
HERE = ("paths", "tracker", "peers.hf.python", "peers.vllm.python", "peers.vllm.pythonpath")
PLACES = (*HERE, ADDRESS)  # say where things are, and not what is measured
# What a page's name says already.
NOT_CHANGES = ("experiment", "scale", "via", "hardware", "model", "engine.model.path")
VARIANTS = "experiment.variants."
# How the names of metrics end whose values are a machine's, and no other one's: times, rates, shares of what it can do.
OF_MACHINES = ("_ms", "_us", "_s", "_rps", "mbu", "mfu", "gpu_idle_share")
DEVICES = {"cpu": "a CPU", "cuda": "a GPU"}
WHOLE = ("model", "workload")  # of the one that is chosen points and variants change what they like
# Settings, or sections of them, of mechanisms -> what switches one on: while it is as by default, they do nothing.
NEEDS: dict[str, Sequence[str]] = {
    "engine.speculation": ["speculation.method"],
    "engine.parallel.dispatch": ["parallel.expert"],
    "engine.parallel.all_reduce": ["parallel.tensor", "parallel.expert"],
    "engine.parallel.routing": ["parallel.replicas", "parallel.decode"],
    "engine.parallel.hand_over": ["parallel.prefill"],
    "engine.parallel.connector": ["parallel.prefill"],
    "engine.scheduler.ageing_tokens_per_s": ["scheduler.policy"],
    "engine.lora.max_rank": ["lora.max_adapters"],
    "engine.model.dry": ["model.load_format"],
}
INTERNAL = {"axes", "scales", "via"}  # of the config: what `scale` and `via` choose
EVERYWHERE = ("experiment", "measure.processes", "measure.threads", "measure.without", "hydra", *HERE)  # of any
MODEL = ("model", "engine.model.path", "engine.model.hf_config")  # keys that say which model it is
Asked = Sequence[tuple[Override, str]]  # what was typed, and each setting that it changes


@dataclass(frozen=True)
class Settled:
    config: DictConfig  # what is measured
    axes: axes.Axes
    default_scale: str  # of the experiment
    changed: Mapping[str, str]  # key -> value, of what was typed and is neither an axis nor a place
    notes: tuple[str, ...]  # about what is left out, and why


def settle(config: DictConfig, experiment: str, overrides: Sequence[str]) -> Settled:
    """Raises ConfigError where something that was typed would have no effect."""
    typed = OverridesParser.create().parse_overrides(list(overrides))
    asked = [(one, key) for one in typed for key in _keys(one)]
    _require_known(asked)
    default = axes.check(config, experiment)
    config = config.copy()
    OmegaConf.set_struct(config, False)
    _set_device(config, [one.key_or_group for one in typed])
    _keep_references(config, experiment)
    notes = [*_leave_out(config), *_narrow(config, experiment)]
    _require_not_varied(config, typed, experiment)
    notes += _fit_workload(config, experiment)
    _require_switched_on(config, asked)
    _require_read(config, asked, experiment)
    if (repeats := config.measure.repeats) % 2 and repeats > 1:
        config.measure.repeats = repeats + 1
        why = "variants take turns in ABBA order, which an odd number does not balance"
        notes.append(f"measure.repeats={repeats} was rounded up to {repeats + 1}: {why}.")
    notes += [*_drop_bounds(config, experiment), *_rename(config, typed)]
    changed = _changed(config, typed)
    notes += _say(config, changed)
    schema.workload(next(ablation_spec.at_points(config)))  # to find what it does not know
    OmegaConf.set_struct(config, True)
    return Settled(config, schema.build(axes.Axes, config.axes, "axes"), default, changed, tuple(notes))


def _changed(config: DictConfig, typed: Sequence[Override]) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in typed:
        key, value = one.key_or_group, one.value()
        if key == "measure.points":
            found |= {axis: points.shown(values) for axis, values in value.items()}
        elif key == "measure.without":
            found |= {f"{VARIANTS}{name}": "deleted" for name in value}
        elif one.is_delete():
            found[key] = "deleted"
        elif key == "measure.repeats":
            found[key] = str(config.measure.repeats)  # as many as there will be
        elif key not in NOT_CHANGES and not points.within(key, PLACES):
            found |= {leaf: points.shown(own) or "none" for leaf, own in points.flat({key: value}).items()}
    return found


def _say(config: DictConfig, changed: Mapping[str, str]) -> list[str]:
    """What is not as the experiment has it, on the page and in the labels of variants."""
    said = [f"{VARIANTS}{name}" for name in config.measure.without]
    own = {key: value for key, value in changed.items() if key.startswith("experiment.") and key not in said}
    for name, variant in (config.experiment.get("variants") or {}).items():
        keys = [key for key in own if key.startswith(f"{VARIANTS}{name}.")]
        if keys and f"{VARIANTS}{name}.label" not in own and isinstance(variant, DictConfig):
            told = ", ".join(f"{key.rpartition('.')[2]} {own[key]}" for key in keys)
            variant.label = f"{variant.get('label') or name.replace('_', ' ')} ({told})"
    text = ", ".join(f"{key.removeprefix('experiment.')}={value}" for key, value in own.items())
    return [f"Not as the experiment has it: {text}."] if own else []


def _keep_references(config: DictConfig, experiment: str) -> None:
    """Ratios that the experiment claims are to its own baseline, whichever is typed."""
    said = (axes.said(experiment, config.axes.scale, config.axes.via) or {}).get("experiment", {})
    if said.get("baseline") in (None, config.experiment.get("baseline")):
        return
    for claim in config.experiment.get("claims") or []:
        ratio = any(key.startswith("ratio_") for key in claim)
        if ratio and not claim.get("to") and not claim.get("against") and schema.plain(claim) in said.get("claims", ()):
            claim["to"] = said["baseline"]


def _leave_out(config: DictConfig) -> list[str]:
    """Drops the variants of measure.without, and the claims about them."""
    if not (gone := list(config.measure.without)):
        return []
    known = config.experiment.get("variants") or {}
    require_known("experiment.variants has no", gone, known)
    for name in gone:
        del known[name]
    about, what = set(gone), "about what is not measured"
    lost = _drop_claims(config, lambda claim: not {claim.get("variant"), claim.get("to")} & about, what)
    return [f"Measured without {', '.join(gone)}.{lost}"]


def _drop_bounds(config: DictConfig, experiment: str) -> list[str]:
    """Those that a CPU keeps, or does not, say nothing where they were written for a GPU, and the other way round."""
    files = axes.said(experiment, config.axes.scale, config.axes.via) or {}
    own, here = files.get("engine", {}).get("model", {}).get("device"), config.engine.model.device
    if own not in DEVICES or here in (own, Device.auto):
        return []

    def holds(claim: Mapping[str, Any]) -> bool:
        ratio = any(claim.get(bound) is not None for bound in ("ratio_at_least", "ratio_at_most"))
        return ratio or not str(claim.get("metric")).partition("@")[0].endswith(OF_MACHINES)

    if not (lost := _drop_claims(config, holds, f"with bounds for {DEVICES[own]}")):
        return []
    config.experiment.target = ""
    return [f"Measured on {DEVICES[here.value]} in place of {DEVICES[own]}.{lost}"]


def _drop_claims(config: DictConfig, kept: Callable[[Any], bool], why: str) -> str:
    """Says how many; empty where all are kept."""
    every = config.experiment.get("claims") or []
    config.experiment.claims = [claim for claim in every if kept(claim)]
    count = len(every) - len(config.experiment.claims)
    return f" Left out: {count} claim{'s' if count > 1 else ''} {why}." if count else ""


def _require_known(asked: Asked) -> None:
    """`+foo=1` would be merged, and read by nobody."""
    settings = {f.name for f in fields(schema.RunConfig)} - INTERNAL | {"hydra"}
    groups = {path.name for path in axes.CONF.iterdir() if path.is_dir()} - {"costs"}  # which are read, not chosen
    for _, key in asked:
        root = key.replace("/", ".").partition(".")[0]
        if root not in settings:
            raise ConfigError(f"unknown setting {key!r}{suggest(root, sorted(settings | groups))}")


def _require_switched_on(config: DictConfig, asked: Asked) -> None:
    """Raises ConfigError for a setting of a mechanism that is off in all that is measured."""
    needing = [(one, key, of) for one, key in asked for of in NEEDS if points.within(key, [of])]
    if not needing or config.experiment.get("_target_") != ablation_spec.ABLATION:
        return
    alone, measured, default = config.measure.system, list(ablation_spec.engines(config)), EngineConfig()
    for one, key, of in needing:
        engines = [engine for kind, engine in measured if points.within(key, (alone or kind).can.reads)]
        switches = {f"engine.{name}": attrgetter(name) for name in NEEDS[of]}
        is_off = all(found(engine) == found(default) for engine in engines for found in switches.values())
        if engines and is_off and key not in switches:
            values = {name: getattr(found(default), "value", found(default)) for name, found in switches.items()}
            off = " and ".join(f"{name}={value}" for name, value in values.items())
            raise ConfigError(f"{one.input_line}: {key} does nothing while {off}: change that, too, or leave it out")


def _require_read(config: DictConfig, asked: Asked, experiment: str) -> None:
    own, who = [(one, key) for one, key in asked if not points.within(key, EVERYWHERE)], experiment
    if not own:
        return
    if config.experiment.get("_target_") == ablation_spec.ABLATION:
        kinds = ablation_spec.kinds(config)
        reads = (*(key for kind in kinds for key in kind.can.reads), *ablation_spec.READ)
        who = next(iter(kinds)).label if len(kinds) == 1 else experiment
    else:
        reads = schema.experiment_class(config).reads
    for one, key in own:
        if not points.within(key, reads):
            way = f"leave it out{', or add via=url' if key == ADDRESS else ''}"
            unread = f"{who} does not read {key}, and would measure the same: {way}"
            raise ConfigError(f"{one.input_line}: {unread}. It reads {', '.join(sorted({*reads, *EVERYWHERE}))}")


def _set_device(config: DictConfig, keys: Sequence[str]) -> None:
    """`hardware=cpu` says where to measure, beside what the machine can do at most. A model on a GPU, with the dtype,
    lengths and memory of a scale for a CPU, would be another engine."""
    device, room = config.hardware.device, config.hardware.memory_gib
    others = [scale for scale in config.get("scales") or () if scale != config.axes.scale]
    of_cpu = device is Device.cuda and config.engine.model.device is Device.cpu and "scale" not in keys
    if of_cpu and others and (chosen := [key for key in keys if key in MODEL]):
        way = f"type the one whose settings it is to have, scale={' or scale='.join(others)}"
        of_scale = f"the settings of scale={config.axes.scale}, which is for a CPU"
        raise ConfigError(f"{chosen[0]} on a GPU with {of_scale}: {way}")
    if device is not None and "engine.model.device" not in keys:
        config.engine.model.device = device
    if room is not None and (config.engine.cache.memory_gib or 0) > room:
        there = f"is more than the {room:g} GiB of {config.hardware.machine}: choose a smaller scale=..., or set less"
        raise ConfigError(f"engine.cache.memory_gib={config.engine.cache.memory_gib:g} {there}")


def _narrow(config: DictConfig, experiment: str) -> list[str]:
    """Puts measure.points in the place of what the experiment says, and drops the claims that fall away."""
    if not (asked := schema.plain(config.measure).get("points") or {}):
        return []
    if config.experiment.get("_target_") != ablation_spec.ABLATION:
        raise ConfigError(f"{experiment} has no experiment.points to change")
    own = schema.plain(config.experiment).get("points") or {}
    known = dict(own)
    for axis, values in asked.items():
        bundles, _, name = axis.partition(".")
        if isinstance(named := known.get(bundles), Mapping) and name:  # one more
            known[bundles] = {**named, name: values}
        else:  # names of bundles that set the same give way to it
            values, own_values = values if isinstance(values, (list, Mapping)) else [values], known.get(axis)
            if isinstance(own_values, Mapping):  # the bundles of that name
                require_known(f"experiment.points.{axis} has no", map(str, values), own_values)
                values = {name: own_values[name] for name in values}
            elif not (axis in known or isinstance(values, Mapping) or axis.startswith(("workload.", "engine."))):
                ways = "an axis it has, or names with their settings, {name: {workload.count: 8}}"
                raise ConfigError(f"experiment.points has no {axis!r}: give a key of workload or engine, {ways}")
            known = {name: of for name, of in known.items() if name == axis or not _sets(of, axis)} | {axis: values}
    if known == own:
        return []
    config.experiment.points = known
    grid = points.grid(known)

    def stands(at: Mapping[str, Any]) -> bool:
        return len(points.fitting(grid, at)) == 1

    def kept(claim: Any) -> bool:
        wanted = [at for at in (claim.get("at"), claim.get("against")) if at]
        return claim.get("everywhere") or all("search" in at or stands(at) for at in wanted or [{}])

    lost = _drop_claims(config, kept, "about other points")
    if config.experiment.get("timeline") is not None and not stands(config.experiment.timeline):
        config.experiment.timeline = None
    for name, instead in (("again_at", []), ("gate_at", [dict(grid[0].values)]), ("profile", [dict(grid[0].values)])):
        if own_points := config.experiment.get(name):
            config.experiment[name] = list(filter(stands, own_points)) or instead
    of = ", ".join(f"{axis} {points.shown(values)}" for axis, values in known.items() if values != own.get(axis))
    gone = ", ".join(axis for axis in own if axis not in known)
    taken = f" in the place of {gone}" if gone else ""
    return [f"Measured at other points than the experiment's own: {of}{taken}.{lost}"]


def _sets(values: Any, key: str) -> bool:
    """Whether an axis has names for settings, that one among them."""
    return isinstance(values, Mapping) and any(key in bundle for bundle in values.values())


def _require_not_varied(config: DictConfig, typed: Sequence[Override], experiment: str) -> None:
    """A key that points, variants or the search set themselves: what was typed would never be measured."""
    spec = schema.plain(config.experiment)
    for name in ("points", "search", "variants"):
        if not isinstance(spec.get(name) or {}, Mapping):
            raise ConfigError(f"experiment.{name} must map names to settings, got {spec[name]!r}")
    points.grid(spec.get("points") or {})  # to find what is none
    varied, by_variants = _varied(spec), _varied({"variants": spec.get("variants")})
    for one in typed:
        chooses = one.key_or_group in WHOLE and isinstance(one.value(), str)
        of_points = one.key_or_group == "measure.points"  # which take the place of other points
        for key in () if chooses else one.value() if of_points else _keys(one):
            for name, who in (by_variants if of_points else varied).items():
                if points.within(key, [name]) or points.within(name, [key]):
                    raise ConfigError(f"{one.input_line}: {experiment} sets {name} itself, by {who}")


def _fit_workload(config: DictConfig, experiment: str) -> list[str]:
    """The rate that a workload's file has gives way to those of a search. Raises ConfigError where the workload lacks
    what the experiment sets."""
    spec, kind = schema.plain(config.experiment), getattr(OmegaConf.get_type(config, "workload"), "kind", None)
    names = {key.partition(".")[2] for key in _varied(spec) if key.startswith("workload.")}
    fit = [name for name, cls in WORKLOADS.items() if names <= {f.name for f in fields(cls)}]
    if kind in WORKLOADS and fit and kind not in fit:
        lacking = ", ".join(sorted(names - {f.name for f in fields(WORKLOADS[kind])}))
        raise ConfigError(f"{experiment} sets {lacking} itself, and workload={kind} has none: take {', '.join(fit)}")
    rate = config.workload.get("rate_per_s") if kind in WORKLOADS else None
    if rate is None or (spec.get("search") or {}).get("low_per_s") is None:
        return []
    config.workload.rate_per_s = None
    return [f"The arrivals that are measured, those of the search among them, stand in the place of {rate:g} a second."]


def _varied(spec: Mapping[str, Any]) -> dict[str, str]:
    """Dotted key -> who sets it, and the way out."""
    found: dict[str, str] = {}
    search = spec.get("search") or {}
    if search.get("low_per_s") is not None:
        for key in (RATE, *search.get("at", {})):
            found[key] = "its search: experiment.search.low_per_s and high_per_s choose the range"
    for axis, values in (spec.get("points") or {}).items():
        named = values if isinstance(values, Mapping) else {points.shown(values): {axis: values}}
        for key in {key for bundle in named.values() for key in bundle}:
            without = [name for name, bundle in named.items() if key not in bundle]
            way = "leaves it alone" if without else "chooses what is measured"
            chosen = points.shown(without or [next(iter(named))])
            found.setdefault(key, f"its points: experiment.points.{axis}=[{chosen}] {way}")
    for name, changes in (spec.get("variants") or {}).items():
        if isinstance(changes, Mapping):
            for key, value in points.flat(settings_of(changes)).items():
                way = f"experiment.variants.{name}.{key}={points.shown(value)} is where it stands"
                found.setdefault(f"engine.{key}", f"its variants: {way}")
    return found


def _keys(one: Override) -> Sequence[str]:
    """The settings that it changes; those of a file, where it chooses one that is not about the whole config."""
    key, value = one.key_or_group, one.value()
    if isinstance(value, Mapping) and value:
        return [f"{key}.{leaf}" for leaf in points.flat(value)]
    if not (axes.CONF / key).is_dir():
        return [key]
    path = axes.CONF / key / f"{value}.yaml"
    package = path.is_file() and re.match("# @package (.*)", path.read_text(encoding="utf-8"))
    section = package[1].strip() if package else key.replace("/", ".")
    if not path.is_file() or section == "_global_":
        return []
    return [f"{section}.{leaf}" for leaf in points.flat(axes.read(path)) if leaf != "defaults"] or [section]


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
    lost = _drop_claims(config, lambda claim: False, f"with bounds for {was}")
    config.experiment.target = ""
    return [f"Measured with {config.axes.model} instead of {was}.{lost}"]
