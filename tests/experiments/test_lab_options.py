"""Every mechanism can be chosen by an option group, and the help text tells the truth about all of them."""

import dataclasses
import functools
import itertools
import typing
from enum import Enum
from pathlib import Path

import pytest
from hydra.errors import MissingConfigException

from experiments.lab.commands import COMMANDS
from experiments.lab.config import catalog, schema
from experiments.lab.config.explain import explain
from experiments.lab.config.schema import TrackerSettings
from experiments.lab.measure.hardware import Hardware
from mini_infer.core.config import EngineConfig, Layout
from mini_infer.core.errors import ConfigError

CONF = Path(__file__).resolve().parents[2] / "conf"
GROUPS = catalog.groups(CONF)
# On what and in which numbers a model is computed, beside whom, and where a draft comes from: chosen by key. So is a
# policy, which is a file and a line, and no option of its own.
NO_MECHANISM = {"model.device", "model.dtype", "speculation.draft.dtype", "speculation.draft.load_format"}
NO_MECHANISM |= {"speculation.draft.quantization", "parallel.launcher", "cache.gpu_shared", "scheduler.policy"}


def choices(cls=EngineConfig, prefix=""):
    """(dotted key, its values) of every setting that is one of a few things."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint, key = hints[field.name], f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hint):
            yield from choices(hint, f"{key}.")
        elif isinstance(hint, type) and issubclass(hint, Enum):
            yield key, list(hint)
        elif hint is bool:
            yield key, [False, True]


MECHANISMS = [(key, values) for key, values in choices() if key not in NO_MECHANISM]


def test_the_mechanisms_are_found():
    assert {"cache.layout", "cache.prefix_caching", "scheduler.chunked_prefill"} <= {key for key, _ in MECHANISMS}
    assert {key for key, _ in choices()} >= NO_MECHANISM


def of_mechanisms(group):
    return group == "model" or group.startswith("engine/")


def rounds(of):
    """In each, every one of these groups takes its next option beside the default."""
    default = catalog.defaults(CONF)
    others = [[f"{g}={o}" for o in options if o != default.get(g)] for g, options in GROUPS.items() if of(g)]
    return [[], *([*filter(None, chosen)] for chosen in itertools.zip_longest(*others))]


def configs(compose_config, chosen):
    """Of options together, or of fewer where they cannot stand together."""
    config = compose_config(*chosen)
    try:
        yield schema.engine_config(config.engine)
        assert schema.workload(config).in_flight >= 1, chosen
    except ConfigError as error:
        if len(chosen) < 2:
            pytest.fail(f"{chosen}: {error}")
        for half in (chosen[::2], chosen[1::2]):
            yield from configs(compose_config, half)


def test_every_option_is_valid_and_every_mechanism_has_one_for_all_it_can_be(compose_config):
    reached = {key: set() for key, _ in MECHANISMS}
    for engine in (engine for chosen in rounds(of_mechanisms) for engine in configs(compose_config, chosen)):
        for key in reached:
            reached[key].add(functools.reduce(getattr, key.split("."), engine))
    assert reached == {key: set(values) for key, values in MECHANISMS}
    assert all(list(configs(compose_config, chosen)) for chosen in rounds(lambda group: not of_mechanisms(group)))


def test_the_prefix_cache_follows_the_layout_unless_it_is_chosen(compose_config):
    def cache(*overrides):
        return schema.engine_config(compose_config(*overrides).engine).cache

    assert cache().prefix_caching
    assert not cache("engine/prefix_cache=disabled").prefix_caching
    assert not cache("engine/prefix_cache=disabled", "engine/cache=paged").prefix_caching
    assert cache("engine/cache=contiguous").layout is Layout.contiguous
    assert not cache("engine/cache=contiguous").prefix_caching
    with pytest.raises(ConfigError, match=r"needs cache.layout=paged"):  # and is not dropped in silence
        cache("engine/cache=contiguous", "engine/prefix_cache=enabled")


@pytest.mark.parametrize(("name", "kind", "sync"), [("none", "none", False), ("wandb", "wandb", True)])
def test_trackers_are_typed(compose_config, name, kind, sync):
    found = schema.build(TrackerSettings, compose_config(f"tracker={name}", "tracker.project=p").tracker, "tracker")
    assert (found.kind.value, found.sync, found.project) == (kind, sync, "p")


def test_hardware_is_looked_up_unless_it_is_chosen(compose_config):
    assert schema.build(Hardware, compose_config().hardware, "hardware") == Hardware()
    chosen = schema.build(Hardware, compose_config("hardware=h200").hardware, "hardware")
    assert chosen.machine == "NVIDIA H200"
    assert chosen.ceilings[0].read_gb_s == 4411


def test_help_marks_defaults_and_names_every_command(compose_config):
    lines = catalog.help_text(CONF).splitlines()
    for group, option in catalog.defaults(CONF).items():
        assert option in GROUPS[group]
        (line,) = (line for line in lines if line.startswith(f"  {group} "))
        assert f" {option}*" in line
        assert line.count("*") == 1
    for name, command in COMMANDS.items():
        assert any(f"run.py {name}" in line and command.help in line for line in lines)


@pytest.mark.parametrize(("launcher", "extra"), [("joblib", "sweep"), ("submitit_slurm", "cluster")])
def test_a_launcher_that_is_not_installed_says_how_to_get_it(launcher, extra):
    error = MissingConfigException("", f"hydra/launcher/{launcher}", ["basic"])
    assert explain(error).endswith(f"The launcher {launcher} is a plugin: pip install -e '.[{extra}]'")
