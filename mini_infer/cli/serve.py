"""mini-infer-serve: the OpenAI API on a mini-infer engine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import difflib
import json
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from mini_infer.cli import config_file
from mini_infer.cli.arguments import command_parser, refuse, require_server
from mini_infer.cli.server_process import address_line
from mini_infer.cli.vllm_flags import translated
from mini_infer.core.errors import ConfigError, MiniInferError
from mini_infer.runtime import preflight
from mini_infer.serving.settings import PREFIX, ServerSettings, Setting, from_environment, table

NAME = "mini-infer-serve"
USAGE = f"{NAME} [MODEL] [--dry-run] [--port PORT] [--config FILE] [--SETTING VALUE ...]"
CONFIG = "--config"
LORA = "--lora"
DESCRIPTION = """\
Serves a model over HTTP with the OpenAI API.

  mini-infer-serve tiny-target                  the small model that ships with the package
  mini-infer-serve PATH                         a Hugging Face folder or a hub name; --model PATH says the same
  mini-infer-serve --dry-run --port 8000        no weights: answers made-up text, starts in seconds
  mini-infer-serve --config models.yaml         settings from a file, of several models too (docs/models.md)
  curl localhost:8000/healthz

The paths: /v1/models, /v1/chat/completions, /v1/completions, /v1/responses, /tokenize, /detokenize, /healthz, /readyz,
/metrics, and /docs, which describes them. Flags of `vllm serve` are understood, or refused with what to do instead.
"""
EPILOG = f"""\
Each setting can also stand in the environment, under the name that is given with it ({PREFIX}...); a flag wins.
`uvicorn mini_infer.serving.api.app:app` reads the environment alone, and takes host, port and logging from uvicorn.
SIGTERM: no further requests are taken, those that run get --shutdown-timeout seconds, and the exit code is 0.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 after a signal, 1 when the engine died, 2 for settings that cannot work."""
    try:
        settings = parse(sys.argv[1:] if argv is None else argv)
        for remark in remarks(settings):
            print(f"{NAME}: {remark}", file=sys.stderr)
        with _bound(settings) as sock:
            return asyncio.run(_serve(settings, sock))
    except (asyncio.CancelledError, KeyboardInterrupt):  # a signal while the engine was starting
        return 0
    except MiniInferError as error:
        return refuse(NAME, error)
    finally:
        for name in ("stdout", "stderr"):
            try:
                getattr(sys, name).flush()
            except OSError:  # a full disk, say: Python would end with an error if it could not flush
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


async def _serve(settings: ServerSettings, sock: socket.socket) -> int:
    def on_ready() -> None:
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if settings.ssl_certfile is None else "https"
        names = ", ".join(model.model_name for model in settings.models)
        with contextlib.suppress(OSError):  # a server whose log takes nothing still serves
            print(address_line(names, f"{scheme}://{shown}:{port}"), flush=True)

    from mini_infer.core.logs import install

    install(settings.log_format)
    # What takes a second to import, and no help text needs.
    if settings.is_supervised:
        from mini_infer.serving.processes.supervisor import Supervisor

        return await Supervisor(settings, sock, on_ready).run()
    from mini_infer.serving.http.server import serve

    return await serve(settings, sock, on_ready)


def parse(argv: Sequence[str], environ: dict[str, str] | None = None) -> ServerSettings:
    """Settings from flags, and from the environment where there is no flag.

    Raises:
        ConfigError: an unknown flag or variable, or a value that cannot work.
    """
    given = _texts(argv)
    path = given.pop("config", None)
    file, models = (None, []) if path is None else config_file.read(path, _texts)
    return from_environment(dict(os.environ) if environ is None else environ, given, file, models)


def _texts(argv: Sequence[str]) -> dict[str, str]:
    """What flags say, by the settings' keys."""
    known = [CONFIG, LORA, *(flag for row in table() for flag in row.flags)]
    given, unknown = _parser().parse_known_args(translated(argv, known))
    if unknown:
        close = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise ConfigError(f"unknown argument {unknown[0]!r}{hint} `mini-infer-serve --help` lists all settings")
    return _with_adapters(vars(given))


def _with_adapters(given: dict[str, Any]) -> dict[str, str]:
    """With --lora as settings of the engine: all of them can be in one batch, unless it is said how many."""
    found = {}
    for text in given.pop("lora", ()):
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"{LORA} takes NAME=PATH, the name of an adapter and its PEFT folder; got {text!r}")
        found[name] = path
    if not found:
        return given
    if "lora.adapters" in given:
        raise ConfigError(f"{LORA} and --lora.adapters say the same: give one of them")
    return {"lora.max_adapters": str(len(found)), **given, "lora.adapters": json.dumps(found)}


def remarks(settings: ServerSettings) -> tuple[str, ...]:
    """What models will not do, a sentence each. Raises ConfigError or ModelError where one cannot be served here."""
    require_server()
    said: list[str] = []
    for model in settings.models:
        try:
            of_model = preflight.check(model.engine)
        except MiniInferError as error:
            if len(settings.models) == 1:
                raise
            raise type(error)(f"model {model.model_name!r}: {error}") from error
        said += of_model if model.chat_template is None else ()
    return tuple(said)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(NAME, DESCRIPTION, usage=USAGE, epilog=EPILOG)
    text = "YAML file of settings, under the names of their flags; models: has several (docs/models.md)"
    parser.add_argument(CONFIG, default=argparse.SUPPRESS, metavar="FILE", help=text)
    text = "adapter of the model, which requests ask for by that name; any number of times (docs/lora.md)"
    options: dict[str, Any] = {"action": "append", "default": argparse.SUPPRESS, "help": text}
    parser.add_argument(LORA, dest="lora", metavar="NAME=PATH", **options)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for row in table():
        if row.section not in groups:
            groups[row.section] = parser.add_argument_group(row.section)
        options = {"nargs": "?", "const": "true"} if row.is_switch else {}
        groups[row.section].add_argument(
            *row.flags,
            dest=row.key,
            default=argparse.SUPPRESS,
            metavar=_metavar(row),
            help=_help(row),
            **options,
        )
    return parser


def _metavar(row: Setting) -> str:
    (kind,) = row.types
    return {bool: "true|false", int: "N", float: "X", dict: "JSON"}.get(kind, "|".join(row.choices) or "TEXT")


def _help(row: Setting) -> str:
    text = f"{row.help}. " if row.help else ""
    if row.default is not None or "default: " not in row.help:
        plain = getattr(row.default, "value", row.default)
        text += f"Default: {str(plain).lower() if row.is_switch or plain is None else plain}. "
    return f"{text}[{row.variables[0]}]".replace("%", "%%")


@contextlib.contextmanager
def _bound(settings: ServerSettings) -> Any:
    """A socket at the address, before minutes go into a model that could then not be served. Nobody can connect yet."""
    where = f"{settings.host}:{settings.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {where}: {error}. --host takes an address of this machine") from error
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            reason = f"{error.strerror}. Choose another --port (0: any free one) or --host"
            raise ConfigError(f"cannot listen on {where}: {reason}") from error
        yield sock


if __name__ == "__main__":
    sys.exit(main())
