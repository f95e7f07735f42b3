"""--config FILE: settings in YAML, under the names of their flags, and the models where one server has several.

    port: 8000
    models:
      chat:                          # the name that requests choose it by
        model: /models/Qwen2.5-7B-Instruct
        aliases: [gpt-4o]
        max_queued: 256
        cache: {gpu_memory_utilization: 0.6}
      small:
        model: tiny-target
        scheduler.max_num_seqs: 16

What stands beside `models` is the server's, or what all models have unless they say something else. A file becomes
flags, and those are read as on the command line, so that both take the same and complain of the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from mini_infer.core.errors import ConfigError
from mini_infer.serving.settings import Given, ServerSettings, table

NAME_FIELD = "served_model_name"
Texts = dict[str, str]  # by a setting's key


def read(path: str, texts_of: Callable[[Sequence[str]], Texts]) -> tuple[Given, list[Given]]:
    """What the file says for all, and of each of its models.

    Args:
        texts_of: reads flags; raises ConfigError for one that does not exist.

    Raises:
        ConfigError: the file cannot be read, or holds something else; it names what and where.
    """
    try:
        content = yaml.load(Path(path).expanduser().read_text(encoding="utf-8"), _Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: {error.problem}") from error
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ConfigError(f"config {path!r} cannot be read: {error}") from error
    shared = dict(_mapping(content, path))
    models = _mapping(shared.pop("models", {}), f"{path}: models")
    given = Given(path, _read(shared, path, texts_of))
    return given, [_model(str(name), entry, path, texts_of) for name, entry in models.items()]


def _model(name: str, entry: Any, path: str, texts_of: Callable[[Sequence[str]], Texts]) -> Given:
    place = f"{path}, model {name!r}"
    settings = dict(_mapping(entry, place))
    aliases = settings.pop("aliases", [])
    names = [name, *(aliases if isinstance(aliases, list) else [aliases])]
    texts = _read(settings, place, texts_of)
    for item in fields(ServerSettings):
        if item.name in texts:
            raise ConfigError(f"{place}: {item.name} is the server's: it stands beside models")
    if NAME_FIELD in texts:
        raise ConfigError(f"{place}: its name is {name!r} already; further ones are its aliases, and no {NAME_FIELD}")
    return Given(place, {**texts, NAME_FIELD: ",".join(map(str, names))})


def _read(settings: Mapping[Any, Any], place: str, texts_of: Callable[[Sequence[str]], Texts]) -> Texts:
    try:
        texts = texts_of([f"--{key}={text}" for key, text in _flat(settings)])
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
    if "config" in texts:
        raise ConfigError(f"{place}: a file cannot name another one; leave config out")
    return texts


def _flat(settings: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each setting's dotted key and how a flag spells its value."""
    objects = {row.key for row in table() if row.types == [dict]}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in objects:
            yield from _flat(value, f"{key}.")
        elif isinstance(value, Mapping):
            yield key, json.dumps(value)
        elif isinstance(value, list):  # --lora is given several times, all others divide by commas
            yield from ((key, str(text)) for text in (value if key == "lora" else [",".join(map(str, value))]))
        elif value is None or isinstance(value, bool):
            yield key, str(value).lower()
        else:
            yield key, str(value)


def _mapping(value: Any, place: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{place} must hold names with values below them, got {value!r}")
    return value


class _Loader(yaml.SafeLoader):
    """Of two values of one name YAML's own would take the second, and say nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a name must be a text", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)
