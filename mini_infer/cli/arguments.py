"""What the commands have in common: how they read their arguments, and how they say that something cannot work."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import Any

from mini_infer import __version__
from mini_infer.core.errors import ConfigError

REFUSED = 2  # exit code
OF_SERVER = ("fastapi", "uvicorn", "httptools", "prometheus_client", "llguidance")


def command_parser(name: str, description: str, **more: Any) -> argparse.ArgumentParser:
    """
    Args:
        description: is shown as it is written.
        more: of ArgumentParser.
    """
    parser = argparse.ArgumentParser(
        prog=name,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a mistyped flag is an error, and not another flag
        **more,
    )
    parser.add_argument("--version", action="version", version=f"{name} {__version__}")
    return parser


def require_server() -> None:
    """Raises ConfigError where the packages that a server takes are not installed."""
    missing = [name for name in OF_SERVER if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"a server takes packages that are not installed ({', '.join(missing)}): pip install -e '.[serve]'"
        )


def refuse(name: str, error: Exception) -> int:
    """Tells the user, and returns the exit code."""
    print(f"{name}: error: {error}", file=sys.stderr)
    return REFUSED
