"""transformers' configs and tokenizers without its models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

_MODELS = "transformers.models.auto.modeling_auto"
_one_at_a_time = RLock()  # it imports its parts when they are asked for, which two threads cannot at once


@contextmanager
def without_models() -> Iterator[None]:
    """For the docstring of a config's class transformers imports what all of its models compute with, which takes more
    time than the rest of an engine's start. What cannot be imported is left out there, and here it cannot."""
    with _one_at_a_time:
        if _MODELS in sys.modules:
            yield
            return
        sys.modules[_MODELS] = None  # type: ignore[assignment]
        try:
            yield
        finally:
            del sys.modules[_MODELS]
