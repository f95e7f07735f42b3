"""Every setting of the server in one table, which makes the flags, the environment variables and --help.

The table is read off three dataclass trees, ServerSettings and ModelSettings below and the EngineConfig: a field's
name, type, default and the comment behind it are the flag's name, its parser, its default and its help. Enum members'
comments join the help.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import math
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mini_infer.core.config import EngineConfig, Launcher, LoadFormat, When
from mini_infer.core.errors import ConfigError
from mini_infer.core.logs import LogFormat

if TYPE_CHECKING:
    from mini_infer.serving.keys import Keys

PREFIX = "MINI_INFER_"
ENGINE_SECTION = "engine"
COMMENT = re.compile(
    r"^    (\w+)(?::| =) [^#\n]*?  # (.+)$", re.MULTILINE
)  # of a dataclass's field or an Enum's member
SWITCH = {"true": True, "1": True, "false": False, "0": False}


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return number


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


PARSERS: dict[type, tuple[Callable[[str], Any], str]] = {  # of the types that are no Enum, with what they take
    bool: (lambda text: SWITCH[text.lower()], "true or false"),
    int: (int, "an integer"),
    float: (_finite, "a number"),
    str: (str, "a text"),
    dict: (_json_object, "a JSON object"),
}


class LogLevel(str, Enum):
    critical = "critical"
    error = "error"
    warning = "warning"
    info = "info"
    debug = "debug"


class Tools(str, Enum):
    auto = "auto"  # told by the chat template
    hermes = "hermes"  # Qwen 2.5 and 3 too
    llama3 = "llama3"
    mistral = "mistral"


class Reasoning(str, Enum):
    auto = "auto"  # told by the chat template
    think = "think"  # between <think> and </think>
    none = "none"  # thoughts are a part of the text


@dataclass(frozen=True)
class ModelSettings:
    """What the server is told of a model beside its engine's own settings. A ConfigError names what cannot work."""

    dry_run: bool = False  # no weights: the dry model answers the whole API with made-up text
    use_cuda_graph: bool = False  # short for --graphs.capture always
    served_model_name: str | None = None  # names under which clients see it, divided by commas; its own is still taken
    chat_template: str | None = None  # file of a Jinja template in place of the tokenizer's own
    tool_format: Tools = Tools.auto  # how the model writes the calls of tools
    reasoning_format: Reasoning = Reasoning.auto  # how it marks thoughts, which become reasoning_content
    gpus: str | None = None  # numbers of the GPUs that its engines use, divided by commas; models may share them
    max_queued: int = 1024  # requests that may wait beyond those that run; further ones get 429
    request_timeout: float | None = None  # seconds a request may take; its `timeout` field can only shorten it
    hang_timeout: float = 30.0  # seconds without a sign of life after which the engine counts as hung: 503
    startup_timeout: float = 1800.0  # seconds that loading may take; of several ranks parallel.start_timeout_s, too
    max_answer_size: int = 2**23  # of one answer: a token counts 1, each log-probability 8; more gets 400
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        self.engine.parallel.require_both_roles()
        _require_positive(self, "max_queued", "max_answer_size", "hang_timeout", "startup_timeout")
        if self.request_timeout is not None and not 0 < self.request_timeout < math.inf:
            raise ConfigError(f"request_timeout must be above 0 seconds, or none, got {self.request_timeout}")
        if self.served_model_name is not None and not all(self.names):
            raise ConfigError("served_model_name is empty: give a name, or leave it unset")
        if self.gpus is not None and not re.fullmatch(r"\d+(\s*,\s*\d+)*", self.gpus):
            raise ConfigError(f"gpus must be numbers of GPUs divided by commas, such as 0,1; got {self.gpus!r}")
        _require_files(self, "chat_template")

    def chat_template_text(self) -> str:
        """Raises ConfigError where the file cannot be read."""
        try:
            return Path(self.chat_template or "").expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"chat_template {self.chat_template!r} cannot be read: {error}") from error

    @property
    def model(self) -> str:
        """The model's own name."""
        return self.engine.model.path

    @property
    def names(self) -> list[str]:
        """Under which clients see it; the first is what they are told."""
        return [self.model] if self.served_model_name is None else _divided(self.served_model_name)

    @property
    def model_name(self) -> str:
        """What clients are told."""
        return self.names[0]


@dataclass(frozen=True)
class ServerSettings:
    """What the server is told, whatever it serves. A ConfigError names the setting whose value cannot work."""

    host: str = "127.0.0.1"  # address to listen on; 0.0.0.0 is every network of this machine
    port: int = 8000  # to listen on; 0 takes a free one, which is printed
    ssl_certfile: str | None = None  # file of a certificate, in PEM: the server speaks HTTPS
    ssl_keyfile: str | None = None  # file of its key, where the certificate's file does not hold it
    root_path: str | None = None  # under which a proxy in front shows the server, such as /llm
    allowed_origins: str | None = None  # web pages that browsers let ask: origins divided by commas, or *
    api_processes: int = 1  # processes that share the work of HTTP; give it one for every 20,000 tokens a second
    lora_loading: bool = False  # /v1/load_lora_adapter and /v1/unload_lora_adapter change which adapters there are
    api_key: str | None = None  # clients must send it as "Authorization: Bearer KEY"; a process list shows flags
    api_keys: str | None = None  # YAML file of several, each with limits of its own (docs/serving.md); may change
    isolate_keys: bool = False  # cached prefixes are found by the key that sent them alone
    key_everywhere: bool = False  # /metrics, /docs and /openapi.json ask for a key, too; probes never do
    shutdown_timeout: float = 30.0  # seconds that running requests get to finish after SIGTERM
    max_body_bytes: int = 16 * 2**20  # bytes that a request's body may have; more gets 413
    max_connections: int = 16_384  # open ones of an API process; beyond, those that say nothing are closed
    header_timeout: float = 20.0  # seconds until a request's headers must have come; then 408
    body_timeout: float = 120.0  # seconds until its body must have come, too
    log_level: LogLevel = LogLevel.info  # the least grave messages that are logged
    log_format: LogFormat = LogFormat.text  # of what is logged to standard error
    stats_interval: float = 10.0  # seconds between lines in the log about what is done; 0: no such lines
    otlp_traces_endpoint: str | None = None  # URL of a collector of OpenTelemetry's that gets a span a request
    access_log: bool = False  # logs one line a request
    models: tuple[ModelSettings, ...] = field(default_factory=lambda: (ModelSettings(),))

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "log_level", LogLevel(self.log_level))
        except ValueError:
            allowed = ", ".join(level.value for level in LogLevel)
            raise ConfigError(f"log_level must be one of {allowed}; got {self.log_level!r}") from None
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be from 0 (any free one) to 65535, got {self.port}")
        _require_positive(self, "api_processes", "max_body_bytes", "max_connections", "header_timeout", "body_timeout")
        if not 0 <= self.stats_interval < math.inf:
            raise ConfigError(f"stats_interval must be 0 seconds (never) or more, got {self.stats_interval}")
        if not 0 <= self.shutdown_timeout < math.inf:
            raise ConfigError(f"shutdown_timeout must be 0 seconds or more, got {self.shutdown_timeout}")
        if self.api_key is not None and (not self.api_key or not self.api_key.isascii()):
            raise ConfigError("api_key must be a non-empty ASCII text, or left unset")
        _require_files(self, "ssl_certfile", "ssl_keyfile", "api_keys")
        for name in ("isolate_keys", "key_everywhere"):
            if getattr(self, name) and self.api_key is None and self.api_keys is None:
                raise ConfigError(f"{name} needs keys: give api_keys or api_key")
        if self.api_keys is not None:
            _ = self.keys  # before minutes go into a model
        if self.otlp_traces_endpoint is not None:
            from mini_infer.serving.tracing import require_opentelemetry

            require_opentelemetry()
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile needs the certificate that it belongs to: give ssl_certfile too")
        if self.root_path is not None and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root_path must begin with a slash and not end with one, got {self.root_path!r}")
        self._require_models_beside_each_other()

    def _require_models_beside_each_other(self) -> None:
        taken: dict[str, int] = {}
        for number, model in enumerate(self.models):
            for name in model.names:
                if taken.setdefault(name, number) != number:
                    raise ConfigError(f"two models have the name {name!r}: give each names of its own")
        for number, model in enumerate(self.models):
            for name in (*model.engine.lora.adapters, *model.engine.lora.dummy_names):
                if taken.setdefault(name, number) != number or name in model.names:
                    raise ConfigError(f"the adapter {name!r} has the name of a model, or of another model's adapter")
        if self._on_ray and len(self.models) > 1:
            raise ConfigError(
                "parallel.launcher=ray starts the engines of one model: serve each of several with a server of its own"
            )

    @cached_property
    def keys(self) -> Keys:
        """Sent along to every API process, which then looks at the file itself. Raises ConfigError."""
        from mini_infer.serving.keys import Keys

        return Keys(self.api_key, self.api_keys)

    @property
    def origins(self) -> list[str]:
        """Those of `allowed_origins`."""
        return [origin for origin in _divided(self.allowed_origins or "") if origin]

    @property
    def num_engines(self) -> int:
        """Of all models."""
        return sum(model.engine.parallel.engines for model in self.models)

    @property
    def keeps_engines(self) -> bool:
        """Whether another engine takes the place of one that ends: of several, or where it has ranks, any of which may
        fail, or on a Ray cluster, which may lose its machine."""
        has_ranks = any(model.engine.parallel.has_ranks for model in self.models)
        return self.num_engines > 1 or has_ranks or self._on_ray

    @property
    def places_engines(self) -> bool:
        return self._on_ray or any(model.gpus for model in self.models)

    @property
    def _on_ray(self) -> bool:
        return any(model.engine.parallel.launcher is Launcher.ray for model in self.models)

    @property
    def is_supervised(self) -> bool:
        """Whether engines and API processes are several, or are kept, or must be somewhere: then a process more looks
        after them."""
        return self.places_engines or self.api_processes > 1 or self.keeps_engines


def _require_positive(settings: Any, *names: str) -> None:
    for name in names:
        if not 0 < getattr(settings, name) < math.inf:
            raise ConfigError(f"{name} must be above 0, got {getattr(settings, name)}")


def _require_files(settings: Any, *names: str) -> None:
    for name in names:
        path = getattr(settings, name)
        if path is not None and not Path(path).expanduser().is_file():
            raise ConfigError(f"{name} names no file: {path!r}")


def _divided(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    key: str  # dotted, as in EngineConfig.from_dict for the engine's: "cache.block_size"
    section: str  # heading in --help
    hint: Any  # the field's type
    default: Any
    help: str

    @property
    def flags(self) -> list[str]:
        if self.key == "model.path":
            return ["--model", "--model.path"]
        return [f"--{self.key if '.' in self.key else self.key.replace('_', '-')}"]

    @property
    def variables(self) -> list[str]:
        return [PREFIX + flag[2:].replace(".", "__").replace("-", "_").upper() for flag in self.flags]

    @property
    def types(self) -> list[type]:
        """The types of its values, without None."""
        options = typing.get_args(self.hint) if typing.get_origin(self.hint) is not dict else ()
        plain = [typing.get_origin(option) or option for option in options or (self.hint,)]
        return [dict if option is dict else option for option in plain if option is not type(None)]

    @property
    def is_switch(self) -> bool:
        return self.types == [bool]

    @property
    def choices(self) -> list[str]:
        (kind,) = self.types
        return [member.value for member in kind] if issubclass(kind, Enum) else []

    def parse(self, text: str, origin: str) -> Any:
        """The value that a flag or a variable spells.

        Args:
            origin: the flag or variable, for the message.

        Raises:
            ConfigError: it is no such value.
        """
        (kind,) = self.types
        if text.lower() in ("none", "null") and type(None) in typing.get_args(self.hint):
            return None
        parser, wanted = PARSERS.get(kind, (kind, f"one of {', '.join(self.choices)}"))
        try:
            return parser(text)
        except (KeyError, ValueError):
            raise ConfigError(f"{origin} must be {wanted}, got {text!r}") from None


@cache
def table() -> tuple[Setting, ...]:
    """All settings: the model, the server's, the engine's by section."""
    trees = ((ModelSettings, "server"), (ServerSettings, "server"), (EngineConfig, ENGINE_SECTION))
    rows = [row for tree, section in trees for row in _rows(tree, section, "")]
    return tuple(sorted(rows, key=lambda row: row.key != "model.path"))


def _rows(cls: type, section: str, prefix: str) -> Iterator[Setting]:
    hints = typing.get_type_hints(cls)
    comments = _comments(cls)
    for item in fields(cls):
        hint = hints[item.name]
        key = prefix + item.name
        if item.name == "models" or hint is EngineConfig:
            continue
        if isinstance(hint, type) and is_dataclass(hint):
            yield from _rows(hint, key, f"{key}.")
            continue
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        row = Setting(key, "server" if key == "model.path" else section, hint, default, comments.get(item.name, ""))
        yield dataclasses.replace(row, help=_with_choices(row))


def _comments(cls: type) -> dict[str, str]:
    """Of its members. inspect.getsource(cls) would parse the whole module, for each class: 0.3 s of every start."""
    module = inspect.getsource(sys.modules[cls.__module__])
    body = re.search(rf"^class {cls.__name__}\b.*\n(?:(?: .*)?\n)*", module, re.MULTILINE)
    return dict(COMMENT.findall(body[0])) if body else {}


def _with_choices(row: Setting) -> str:
    """The help, and what the members of an Enum mean."""
    if not row.choices:
        return row.help
    comments = _comments(row.types[0])
    meanings = [f"{choice} ({comments[choice]})" if choice in comments else choice for choice in row.choices]
    return ": ".join(filter(None, (row.help, ", ".join(meanings)))) if comments else row.help


class Given(NamedTuple):
    """Settings as texts, and where they stand.

    Attributes:
        place: for messages; empty: flags.
        texts: by key ("cache.block_size").
    """

    place: str
    texts: Mapping[str, str]

    def values(self) -> dict[str, Any]:
        by_key = {row.key: row for row in table()}
        found = {}
        for key, text in self.texts.items():
            found[key] = by_key[key].parse(text, f"{self.place}: {key}" if self.place else by_key[key].flags[0])
        return found


def from_environment(
    environ: Mapping[str, str],
    flags: Mapping[str, str] | None = None,
    file: Given | None = None,
    models: Sequence[Given] = (),
) -> ServerSettings:
    """The settings that a file, variables and flags spell. A variable wins over the file, and a flag over both.

    Args:
        environ: names that do not begin with MINI_INFER_ are none of ours.
        flags: texts by key ("cache.block_size").
        models: each one's own, which win over what all of them have; without any there is one.

    Raises:
        ConfigError: an unknown variable, or a value that cannot work.
    """
    by_variable = {variable: row for row in table() for variable in row.variables}
    values: dict[str, Any] = file.values() if file is not None else {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX):
            continue
        if variable not in by_variable:
            close = difflib.get_close_matches(variable, by_variable, n=1)
            hint = f": did you mean {close[0]}?" if close else ""
            raise ConfigError(f"unknown variable {variable}{hint} `mini-infer-serve --help` lists all settings")
        row = by_variable[variable]
        values[row.key] = row.parse(text, variable)
    values |= Given("", flags or {}).values()
    own = {item.name for item in fields(ServerSettings)}
    servers = {key: value for key, value in values.items() if key in own}
    shared = {key: value for key, value in values.items() if key not in own}
    if not models:
        return ServerSettings(**servers, models=(_model(shared),))
    for key in OF_ONE:
        if key in shared:
            raise ConfigError(f"{key} is a model's own: with several models it stands below the name of each")
    return ServerSettings(**servers, models=tuple(_named(given, shared) for given in models))


OF_ONE = ("model.path", "served_model_name", "gpus")


def _named(given: Given, shared: Mapping[str, Any]) -> ModelSettings:
    try:
        values = {**shared, **given.values()}
        if "model.path" not in values and not values.get("dry_run"):
            raise ConfigError("it does not say what to load: give it `model`, a folder or a hub name")
        return _model(values)
    except ConfigError as error:
        said = str(error)
        raise ConfigError(said if said.startswith(given.place) else f"{given.place}: {said}") from error


def _model(values: dict[str, Any]) -> ModelSettings:
    """From values by dotted key. `dry_run` and `use_cuda_graph` are short for settings of the engine."""
    for short, key, meant in (
        ("dry_run", "model.load_format", LoadFormat.dry),
        ("use_cuda_graph", "graphs.capture", When.always),
    ):
        if not values.get(short):
            continue
        if values.get(key, meant) is not meant:
            raise ConfigError(f"{short} is short for {key}={meant.value}, which is also given as {values[key].value}")
        values = {**values, key: meant}
    if values.get("dry_run"):
        values = {"model.path": "dry", **values}
    own = {item.name for item in fields(ModelSettings)}
    tree: dict[str, Any] = {}
    for key, value in values.items():
        if key in own:
            continue
        *path, name = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[name] = value
    given = {key: value for key, value in values.items() if key in own}
    return ModelSettings(**given, engine=EngineConfig.from_dict(tree))
