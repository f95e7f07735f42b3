"""What the commands have in common: how they read their arguments, and how they say that something cannot work."""

from __future__ import annotations

import argparse
import sys
from typing import Any

REFUSED = 2  # exit code


def command_parser(name: str, description: str, **more: Any) -> argparse.ArgumentParser:
    """
    Args:
        description: is shown as it is written.
        more: of ArgumentParser.
    """
    return argparse.ArgumentParser(
        prog=name,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a mistyped flag is an error, and not another flag
        **more,
    )


def refuse(name: str, error: Exception) -> int:
    """Tells the user, and returns the exit code."""
    print(f"{name}: error: {error}", file=sys.stderr)
    return REFUSED
