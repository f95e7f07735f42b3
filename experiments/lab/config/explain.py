"""Errors of Hydra and OmegaConf in our own words: which key, what is allowed, the closest match. One screen."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, ValidationError
from omegaconf.errors import OmegaConfBaseException as OmegaConfError

from experiments.lab.config import points
from mini_infer.assets import SHIPPED
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError, MiniInferError

ENGINE_KEYS = tuple(points.flat(asdict(EngineConfig())))
# As the engine names them, which knows nothing of run.py: not behind --, `engine.`, or the name of a variant.
_NAMED = re.compile(rf"(?<![\w./-])(?:{'|'.join(k if '.' in k else f'{k}(?==)' for k in ENGINE_KEYS)})\b")


def explain(error: BaseException, groups: Sequence[str] = ()) -> str | None:
    """The message for a person, or None where the error is no mistake in the input. `groups` are the config groups
    that may stand on a command line beside the keys."""
    if isinstance(error, MiniInferError):
        return _NAMED.sub(r"engine.\g<0>", str(error))
    if isinstance(error, MissingConfigException) and error.options is not None and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        options = [option for option in error.options if not option.startswith("_")]  # which others build on
        options += SHIPPED if group == "model" else ()
        if group == "hardware" and (one := re.sub(r"x\d+$", "", name)) in options:
            return f"unknown option hardware={name}: say hardware={one}, and a run counts the GPUs that it uses itself"
        extra = "sweep" if name == "joblib" else "cluster" if name.startswith("submitit") else ""
        plugin = f". The launcher {name} is a plugin: pip install -e '.[{extra}]'" if extra else ""
        return f"unknown option {group}={name}{suggest(name, options)}{plugin if group == 'hydra/launcher' else ''}"
    if isinstance(error, OverrideParseException):
        reason = str(error).splitlines()[0]
        return f"cannot read {error.override!r} ({reason}): settings are typed as key=value"
    text, cause = str(error).strip(), error
    while (before := cause.__cause__ or cause.__context__) and not isinstance(cause, OmegaConfError):
        cause = before
    found = re.match(r"Could not override '((\w+)[^']*)'", text)
    if found and found[2] in EngineConfig.__dataclass_fields__:
        close = difflib.get_close_matches(found[1], ENGINE_KEYS, n=1) or [found[2]]
        return f"unknown setting {found[1]!r}; did you mean 'engine.{close[0]}'?"
    if isinstance(cause, OmegaConfError):
        origin = text.partition(":")[0] + ": " if text.startswith("In '") else ""
        return origin + describe(cause, groups)
    if isinstance(error, ValueError) and text.startswith("Config group override must be"):
        return "a group on the command line takes the name of one of its options; to take none, leave the group out"
    if isinstance(error, ValueError) and text.startswith("invalid literal for int()"):
        return f"{text.rpartition(': ')[2]} is typed under a list, which is given as a whole: KEY=[...]"
    if isinstance(error, HydraException):
        if text.startswith("Could not override 'engine'"):
            asked = text.rpartition("+")[2]
            return f"{asked}: another system is system={asked.partition('=')[2]}, and mechanisms are engine/<name>=..."
        if text.startswith("Ambiguous value"):
            return f"{text.splitlines()[0]}: several values are a sweep, which takes -m: python run.py -m ..."
        return text
    return None


def describe(error: OmegaConfError, groups: Sequence[str] = ()) -> str:
    key = str(error.full_key or error.key or "").removeprefix(".")
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)):
        section, _, last = key.rpartition(".")
        parent = error.parent_node
        known = [str(key) for key in parent] if isinstance(parent, DictConfig) else []
        if not section and "hydra" in known:  # the root of the command line
            known = sorted({*known, *groups} - {"hydra"})
        text = f"unknown setting {key!r}{suggest(last or key, known, f' in {section}' if section else '')}"
        return text + (f". To add one, write +{key}=..." if section and error.object_type is dict else "")
    if isinstance(error, MissingMandatoryValue):
        return f"{key} has no value: it must be given"
    reason = str(error.msg or error).splitlines()[0]
    node = error.child_node
    if node is None and isinstance(error.parent_node, DictConfig) and isinstance(error.key, str):
        node = error.parent_node._get_node(error.key)
    if isinstance(error, ValidationError) and (kind := getattr(node, "enum_type", None)):
        return f"{key} cannot be {error.value!r}{suggest(str(error.value), [member.name for member in kind])}"
    return f"{key}: {reason}" if key or isinstance(error, ValidationError) else reason


def suggest(name: str, known: Iterable[str], where: str = "") -> str:
    """`; did you mean 'x'? Known: ...`, where x is never what was typed."""
    names = [str(k) for k in known]
    close = difflib.get_close_matches(name, [k for k in names if k != name], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"{hint} Known{where}: {', '.join(names) or '(nothing)'}"


def require_known(what: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raises ConfigError for a name that is none of them."""
    for name in names:
        if name not in known:
            raise ConfigError(f"{what} {name!r}{suggest(name, known)}")
