"""The names by which requests ask for adapters. What a name stands for is the key of a folder's contents."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from mini_infer.core.config import LoraConfig
from mini_infer.core.errors import RequestError
from mini_infer.core.request import Request
from mini_infer.runtime.executor.base import Executor


class AdapterNames:
    """
    Args:
        unfinished: requests that the engine has at the moment.

    Attributes:
        paths: name -> folder.
    """

    def __init__(self, executor: Executor, config: LoraConfig, unfinished: Callable[[], Iterable[Request]]) -> None:
        self.paths = {name: config.adapters.get(name, "") for name in executor.adapters}
        self._executor, self._unfinished = executor, unfinished
        self._keys = dict(executor.adapters)
        self._reading: dict[str, Future[Any]] = {}  # folders
        self._loaded = set(self._keys.values())

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def key(self, name: str | None) -> str:
        """ "" for none. Raises RequestError where there is no adapter of that name."""
        if name is None:
            return ""
        if not isinstance(name, str) or name not in self._keys:
            raise RequestError(f"there is no adapter {name!r}{self._known(name)}", "adapter")
        return self._keys[name]

    def read(self, path: str) -> Future[Any]:
        """Begins to read a folder while steps go on: `load` need not wait then. Raises ConfigError where there are no
        adapters."""
        if path not in self._reading:
            self._reading[path] = self._executor.read_adapter(path)
        return self._reading[path]

    def load(self, name: str, path: str) -> None:
        """Adds an adapter, or puts another in its place: requests that run keep the one they have. Raises ModelError or
        ConfigError where it cannot be served; nothing has changed then."""
        self.read(path)
        try:
            key = self._executor.load_adapter(path)
        finally:
            del self._reading[path]
        self._keys[name] = key
        self.paths[name] = path
        self._loaded.add(key)
        self._forget_unused()

    def unload(self, name: str) -> None:
        """Requests that run finish with it. Raises RequestError where there is no adapter of that name."""
        self.key(name)
        del self._keys[name], self.paths[name]
        self._forget_unused()

    def _forget_unused(self) -> None:
        used = {*self._keys.values(), *(request.adapter for request in self._unfinished())}
        for key in sorted(self._loaded - used):
            self._executor.forget_adapter(key)
            self._loaded.remove(key)

    def _known(self, name: object) -> str:
        if not self._keys:
            return ": none is loaded"
        close = difflib.get_close_matches(str(name), self._keys, n=1)
        return f"; did you mean {close[0]!r}?" if close else f". Loaded are {', '.join(sorted(self._keys))}"
