"""What Hydra checks a config against, and the one way out of Hydra into frozen, validated settings."""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.config_store import ConfigStore
from hydra.utils import get_class
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.lab.config import axes
from experiments.lab.config.explain import describe
from experiments.lab.config.spec import Checked, Count, ExperimentSpec, Name, Natural
from experiments.lab.measure.hardware import Hardware
from experiments.lab.measure.kinds import Kind, PeerSettings
from experiments.lab.workloads import WORKLOADS, Workload
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError

Settings = TypeVar("Settings")
Spec = TypeVar("Spec", bound=ExperimentSpec)


def node(cls: Any) -> DictConfig:
    """A config with the types and defaults of a frozen dataclass, which OmegaConf would not merge into."""
    made: DictConfig = OmegaConf.structured(cls)
    _thaw(made)
    return made


def _thaw(config: DictConfig) -> None:
    OmegaConf.set_readonly(config, None)
    for child in map(config._get_node, config):
        if isinstance(child, DictConfig) and child:
            _thaw(child)


class Again(str, Enum):
    auto = "auto"  # on a GPU
    always = "always"
    never = "never"


@dataclass(frozen=True)
class Measure(Checked, section="measure"):
    processes: Count = 3  # each with weights, prompts, lengths and sampling of its own
    repeats: Count = 2  # in each process, of every variant at every point; even, or 1
    gates: bool = True  # whether engines are checked before they are timed: once, in the first process
    aa: Again = Again.auto  # whether the baseline is measured a second time, under another name
    seed: Natural = 0  # of prompts, lengths and the order of everything random
    threads: Count | None = None  # of torch, for all variants alike; default: what torch chooses
    system: Kind | None = None  # the only one to measure; default: the experiment's variants
    predict: bool = False  # beside each variant of the engine, what a simulated one would do
    costs: str = "conf/costs"  # folder of what a simulated engine's steps take
    points: dict[str, Any] = field(default_factory=dict)  # axis of experiment.points -> the values to measure instead
    without: tuple[str, ...] = ()  # of experiment.variants, those that are left out, with the claims about them


@dataclass(frozen=True)
class Paths:
    """Where a run writes; relative paths start at the folder of run.py. By default it is a trial, in a folder that git
    ignores; `--record` chooses what is committed."""

    results: str = "trial/results"
    reports: str = "trial/reports"
    run: str | None = None  # the run's name; default: what was changed
    resume: bool = False  # the processes that the stored run has are not measured again; --resume says so

    @property
    def recorded(self) -> bool:
        return self.results == RECORDED["paths.results"]


RECORDED = {"paths.results": "results", "paths.reports": "reports"}  # what --record stands for
SHORT = {"--record": RECORDED, "--resume": {"paths.resume": "true"}}


class TrackerKind(str, Enum):
    none = "none"
    wandb = "wandb"  # Weights & Biases


@dataclass(frozen=True)
class TrackerSettings(Checked, section="tracker"):
    """Who is told of a finished run."""

    kind: TrackerKind = TrackerKind.none
    sync: bool = False  # sends the runs; else they stay in files, for a later `wandb sync`
    project: Name = "mini-infer"
    folder: Name = "outputs"  # of its files; a relative path starts at the folder of run.py


@dataclass(frozen=True)
class RunConfig:
    """The root of the config. `workload` and `experiment` take their types from what was chosen."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    workload: Any = None
    measure: Measure = field(default_factory=Measure)
    hardware: Hardware = field(default_factory=Hardware)
    peers: PeerSettings = field(default_factory=PeerSettings)
    tracker: TrackerSettings = field(default_factory=TrackerSettings)
    paths: Paths = field(default_factory=Paths)
    experiment: Any = None
    axes: axes.Axes = field(default_factory=axes.Axes)
    scales: Any = None  # what the experiment says of each scale, and of each way beside in_process: see axes.py
    via: Any = None


class _Shared(dict[str, Any]):
    """Hydra copies the whole store for each composition and each group that `--help` lists, and never changes it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self


def register(conf: Path = axes.CONF, experiment: str = "*") -> None:
    """Makes known to Hydra: `schema` for the root, `schema/workload: <kind>` for a workload file, and what the
    experiments of the folder `conf` say of their scales; reading all of them takes seconds, one of them none."""
    store = ConfigStore.instance()
    store.store(name="schema", node=node(RunConfig))
    for name, cls in WORKLOADS.items():
        store.store(group="schema/workload", name=name, node=node(cls))
    axes.register(conf / "experiment", experiment)
    store.repo = _Shared(store.repo)


def build(cls: type[Settings], values: Any, path: str) -> Settings:
    """`values` (a config node or plain dict) as a frozen `cls`; unknown keys and wrong types are errors."""
    plain = OmegaConf.to_container(values, resolve=True) if OmegaConf.is_config(values) else values
    try:
        merged: Any = OmegaConf.merge(_schema(typing.cast(Any, cls), path), {path: plain})
        return typing.cast(Settings, _frozen(merged[path]))
    except OmegaConfBaseException as error:
        text = describe(error)
        raise ConfigError(text if path in text else f"{path}: {text}") from error


@functools.cache
def _schema(cls: Any, path: str) -> DictConfig:
    """Nested, so that an error names the whole key. It takes more than half of the time of a merge with it."""
    return OmegaConf.create({path: node(cls)})


def experiment_spec(cls: type[Spec], config: DictConfig, generates: bool) -> Spec:
    """What the YAML says under `experiment`, beside the class that runs it. A scale speaks to whoever has several
    engines, and of the gate to whoever has one that generates tokens: others leave it out."""
    of_scales = {"keep_engines"} if generates else {"keep_engines", "gate_logit_error"}
    left_out = {"_target_"} | (of_scales - {f.name for f in fields(cls)})
    values = {name: value for name, value in plain(config.experiment).items() if name not in left_out}
    return build(cls, values, "experiment")


def _frozen(value: Any) -> Any:
    if isinstance(value, ListConfig):
        return tuple(_frozen(value[index]) for index in range(len(value)))
    if not isinstance(value, DictConfig):
        return value
    values: dict[Any, Any] = {key: _frozen(value[key]) for key in value}
    cls = OmegaConf.get_type(value)
    return cls(**values) if is_dataclass(cls) else values


def plain(config: DictConfig) -> dict[str, Any]:
    """The resolved config as nested dicts of JSON values."""
    return typing.cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True, enum_to_str=True))


def engine_config(config: DictConfig) -> EngineConfig:
    return EngineConfig.from_dict(plain(config))


def workload(config: DictConfig) -> Workload:
    """The chosen workload. Its class is that of the schema which its file names in its defaults list."""
    cls = OmegaConf.get_type(config.workload) if OmegaConf.is_config(config.workload) else None
    if not is_dataclass(cls):
        kind = f"in its defaults list, `- /schema/workload@_here_: <kind>`, which is one of {', '.join(WORKLOADS)}"
        way = f"choose one with workload=<name>; a file in conf/workload/ names its kind {kind}"
        raise ConfigError(f"the workload has no type: {way}")
    return typing.cast(Workload, build(cls, config.workload, "workload"))


def merged(config: DictConfig, changes: Mapping[str, Any], where: str) -> DictConfig:
    """`config` with nested `changes`; an error names its key below `where`."""
    try:
        return typing.cast(DictConfig, OmegaConf.merge(config, changes))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {describe(error)}") from error


def of_points(config: DictConfig) -> DictConfig:
    """What points may change and variants build on, without the rest of the config, which is long."""
    part = OmegaConf.masked_copy(config, ["engine", "workload", "axes"])
    OmegaConf.set_struct(part, True)
    return part


def with_values(config: DictConfig, values: Mapping[str, Any]) -> DictConfig:
    """A copy of `config` with dotted keys set, checked against the schema like anything typed on a command line."""
    changed = config.copy()
    for key, value in values.items():
        OmegaConf.update(changed, key, value, merge=True)
    return changed


def experiment_class(config: DictConfig) -> Any:
    target = config.experiment.get("_target_")
    try:
        return get_class(target)
    except (ImportError, ValueError, TypeError, AttributeError) as error:
        needed = "must name the class that runs the experiment, such as experiments.ablation.Ablation"
        raise ConfigError(f"experiment._target_={target} {needed}: {error}") from error
