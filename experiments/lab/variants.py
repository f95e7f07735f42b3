"""The engines that variants ask for, of the config alone: what cannot run here is refused before torch is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from experiments.lab import axes, points, schema
from experiments.lab.measure.kinds import SERVED, Kind
from experiments.lab.spec import settings_of
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError
from mini_infer.runtime import preflight

ABLATION = "experiments.ablation.Ablation"
READ = ("workload", "hardware", "peers.processes", *points.keys("measure", "aa points predict repeats seed system"))
NO_ADDRESS = "via=url needs the server's address: peers.http.url=http://localhost:8000, say"


def kinds(config: DictConfig) -> set[Kind]:
    """Of the systems that are measured. Raises ConfigError."""
    if config.axes.via == axes.URL:
        return {Kind.http}
    alone, own = config.measure.system, schema.plain(config.experiment).get("variants") or {}
    asked = own if alone is None else {alone.value: {"kind": alone.value}}
    found = {_kind(config, name, changes or {}) for name, changes in asked.items()}
    return found | {Kind.simulated} if config.measure.predict else found


def made(config: DictConfig, name: str, changes: Mapping[str, Any]) -> tuple[Kind, EngineConfig]:
    """The variant of that name, with these changes to the config. Raises ConfigError."""
    kind = _kind(config, name, changes)
    where = f"experiment.variants.{name}"
    return kind, schema.engine_config(schema.merged(config.engine, settings_of(changes), where))


def _kind(config: DictConfig, name: str, changes: Mapping[str, Any]) -> Kind:
    where = f"experiment.variants.{name}"
    if not isinstance(changes, Mapping):
        raise ConfigError(f"{where} must map engine settings to values, got {changes!r}")
    try:
        kind = Kind(changes.get("kind", "engine"))
    except ValueError:
        allowed = ", ".join(k.value for k in Kind)
        raise ConfigError(f"{where}.kind must be one of {allowed}; got {changes['kind']!r}") from None
    if config.axes.via == axes.HTTP:
        kind = SERVED.get(kind, kind)
        if not (kind.can.over_http or kind.can.client_of or kind is Kind.simulated):
            raise ConfigError(f"{where}: {kind.label} is not served over HTTP by us: start its server, and ask it with "
                              "via=url peers.http.url=...")  # fmt: skip
    return kind


def require_files(config: DictConfig) -> None:
    """Raises ConfigError where a file that requests of some point are made of is missing, or is not sound."""
    asked, spec = schema.of_points(config), schema.plain(config.experiment)
    for point in points.grid(spec.get("points") or {}):
        schema.workload(schema.with_values(asked, point.values)).require_files()


def require_possible(config: DictConfig) -> None:
    """Raises ConfigError or ModelError where what the experiment is to measure cannot start here."""
    if config.axes.via == axes.URL and config.peers.http.url is None:
        raise ConfigError(NO_ADDRESS)
    if config.axes.scale == axes.NO_SCALE:
        if config.hardware.device is None:  # else who measures nothing on it may go on
            preflight.require_device(schema.engine_config(config.engine))
        return
    require_files(config)
    system = Kind(config.measure.system or Kind.engine)
    if system.can.needs_gpu and not preflight.sees_gpu():
        raise ConfigError(f"system={system.value}: {system.label} is measured on a GPU, and none is visible here")
    if config.axes.via == axes.URL or not system.can.ours:
        return
    asked, spec, checked = schema.of_points(config), schema.plain(config.experiment), list[EngineConfig]()
    if spec.get("_target_") != ABLATION:  # others make engines of their own, of this model
        preflight.check_model(schema.engine_config(config.engine).model)
        return
    for point in points.grid(spec.get("points") or {}):
        at_point = schema.with_values(asked, point.values)
        for name, changes in (spec.get("variants") or {}).items():
            kind, engine = made(at_point, name, changes or {})
            if kind.can.ours and engine not in checked:
                checked.append(engine)
                preflight.check(engine)
