"""Who may ask: the keys that clients send, what each may take, and what each has taken."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec

from mini_infer.core.errors import ConfigError

logger = logging.getLogger(__name__)

ONLY = "default"  # whose name --api-key has
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # of a key: it is a label of metrics
MOST_KEYS = 4096
LOOK_S = 1.0  # between two looks at the file
MINUTE_S = 60.0
MUTEX = 2**30  # the byte of the accounts' file whose lock is held while numbers change; those of columns lie before it
ADAPTERS = MUTEX + 1  # ... while an API process changes adapters
OPEN_RETRY_S = 1.0
Limit = Annotated[float, msgspec.Meta(gt=0)]


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file says of one key. Limits that it does not name are none.

    Attributes:
        key: what the client sends.
        sha256: of it, in hexadecimal digits, in place of `key`: then the file tells nobody what to send.
        requests_per_minute: as many at once, too, where none came before.
        tokens_per_minute: of prompts and answers. A request is taken as long as any are left; what it takes beyond
            them is waited for by the next.
        max_open: completions that may run or wait at the same time.
    """

    key: str = ""
    sha256: str = ""
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    max_open: Annotated[int, msgspec.Meta(gt=0)] | None = None

    def __post_init__(self) -> None:
        if bool(self.key) == bool(self.sha256):
            raise ValueError("give either key or sha256")
        if self.sha256 and not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise ValueError("sha256 has 64 digits of 0-9 and a-f")

    @property
    def digest(self) -> str:
        return self.sha256 or _digest(self.key)

    @property
    def is_limited(self) -> bool:
        return (self.requests_per_minute, self.tokens_per_minute, self.max_open) != (None, None, None)


class Keys:
    """The keys of a server; without any, everybody may ask.

    Args:
        api_key: the one that has no limits.
        path: of a YAML file: names, and a `Key` below each.

    Raises:
        ConfigError: the file cannot be read, or holds something else; it names what.
    """

    def __init__(self, api_key: str | None, path: str | None) -> None:
        self._path = None if path is None else Path(path).expanduser()
        self._own = {} if api_key is None else {ONLY: Key(key=api_key)}
        self._looked = time.monotonic()
        self._version = self._look()
        self._by_digest = self._read()

    def __bool__(self) -> bool:
        return bool(self._by_digest)

    def find(self, authorization: str) -> tuple[str, Key] | None:
        """Whose key the header holds, and its limits; None where it is nobody's.

        It is looked up by its digest, and so in a time that tells nothing about how much of it is right.
        """
        self._refresh()
        scheme, _, given = authorization.partition(" ")
        return self._by_digest.get(_digest(given.strip())) if scheme.lower() == "bearer" else None

    def _refresh(self) -> None:
        """Reads the file again where it has changed. One that cannot be used leaves the keys as they are."""
        now = time.monotonic()
        if self._path is None or now - self._looked < LOOK_S:
            return
        self._looked, before, self._version = now, self._version, self._look()
        if self._version == before:
            return
        try:
            self._by_digest = self._read()
        except ConfigError as error:
            logger.error("the keys stay as they were: %s", error)
        else:
            logger.warning("%s was read again: %d keys", self._path, len(self._by_digest))

    def _look(self) -> tuple[int, ...]:
        """Differs for every version of the file, also where a link leads to another one."""
        try:
            about = os.stat(self._path or "")
        except OSError:
            return ()
        return about.st_mtime_ns, about.st_size, about.st_ino

    def _read(self) -> dict[str, tuple[str, Key]]:
        keys = {**self._own, **({} if self._path is None else _keys_of(self._path))}
        found = {key.digest: (name, key) for name, key in keys.items()}
        if len(found) < len(keys):
            raise ConfigError(f"api_keys '{self._path}': two names have the same key")
        return found


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def _keys_of(path: Path) -> dict[str, Key]:
    try:
        keys = msgspec.yaml.decode(path.read_bytes(), type=dict[str, Key])
    except (OSError, UnicodeError, msgspec.MsgspecError) as error:
        raise ConfigError(f"api_keys '{path}': {error}") from error
    for name in keys:
        if not NAME.fullmatch(name) or name == ONLY:
            raise ConfigError(
                f"api_keys '{path}': a name has up to 64 letters, digits and characters of _.- and is not {ONLY!r}, "
                f"which --api-key's is; got {name[:100]!r}"
            )
    if not 0 < len(keys) <= MOST_KEYS:
        most = f"more than {MOST_KEYS} keys" if keys else "no key: nobody could ask"
        raise ConfigError(f"api_keys '{path}' holds {most}")
    return keys


def locked(file: int, byte: int) -> bool:
    """Takes the kernel's lock on a byte of the accounts' file, unless another process has it."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except OSError:
        return False
    return True


class Exceeded(Exception):
    """A key has taken what it may, and may take more in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Accounts:
    """What each key has taken, counted once for all API processes of a server, in a file that they map.

    A key has a row, which whoever needs it first gives it. A rate is kept in it as one number, the time at which its
    bucket of a minute's amount will be full again (the generic cell rate algorithm); what is open has a column for each
    process, since a process that is killed takes its requests with it. The kernel's lock on a process's column tells
    that it lives: whoever comes after it finds the column free, and empties it.

    Args:
        file: descriptor of the file that they share; None: this process is the only one.
        processes: that may share it.
        clock: seconds, the same for all processes of the machine.
    """

    def __init__(self, file: int | None, processes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        columns = 2 * processes  # one that takes another's place may come before that one has gone
        self._width = 3 + columns  # numbers of a row: whose it is, requests, tokens, completions that are open
        size = 8 * self._width * MOST_KEYS
        self._file = file
        if file is not None:
            os.ftruncate(file, size)
        self._numbers = memoryview(mmap.mmap(-1 if file is None else file, size)).cast("d")
        self._rows: dict[str, tuple[float, int]] = {}  # as far as is known here: whose each is, and where it begins
        self._column = 3 + self._free_column(columns)
        with self._changing():
            for start in range(0, len(self._numbers), self._width):
                if self._numbers[start + self._column]:
                    self._numbers[start + self._column] = 0

    def take(self, name: str, limits: Key, prompt_tokens: int, completions: int) -> None:
        """Counts a key's request, or raises Exceeded and counts nothing."""
        now = self._clock()
        with self._changing():
            start = self._row(name, now)
            full_at = [max(now, self._numbers[start + 1]), max(now, self._numbers[start + 2])]
            if limits.max_open is not None:
                taken = self._open(start)
                if taken and taken + completions > limits.max_open:
                    raise Exceeded(f"{taken} completions are open, and max_open is {limits.max_open}", OPEN_RETRY_S)
            rate = limits.requests_per_minute
            if rate is not None:
                wait = full_at[0] + MINUTE_S / rate - now - max(MINUTE_S, MINUTE_S / rate)
                if wait > 0:
                    raise Exceeded(f"requests_per_minute is {rate:g}", wait)
                full_at[0] += MINUTE_S / rate
            rate = limits.tokens_per_minute
            if rate is not None:
                wait = full_at[1] - now - MINUTE_S
                if wait >= 0:
                    raise Exceeded(f"tokens_per_minute is {rate:g}", wait)
                full_at[1] += prompt_tokens * MINUTE_S / rate
            self._numbers[start + 1], self._numbers[start + 2] = full_at
            self._numbers[start + self._column] += completions

    def give_back(self, name: str, limits: Key, generated_tokens: int, completions: int) -> None:
        """Completions that `take` counted have ended."""
        rate, now = limits.tokens_per_minute, self._clock()
        with self._changing():
            start = self._row(name, now)
            self._numbers[start + self._column] -= completions
            if rate is not None:
                self._numbers[start + 2] = max(now, self._numbers[start + 2]) + generated_tokens * MINUTE_S / rate

    def _row(self, name: str, now: float) -> int:
        """Where the key's numbers begin. One that has none gets those of a key that owes nothing."""
        whose, start = self._rows.get(name) or (float(int(_digest(name)[:12], 16) + 1), 0)
        if self._numbers[start] == whose:
            return start
        rows: list[Any] = self._numbers[:: self._width].tolist()
        if whose in rows:
            start = rows.index(whose) * self._width
        else:
            start = next(filter(partial(self._owes_nothing, now), range(0, len(self._numbers), self._width)), -1)
            if start < 0:
                raise Exceeded(f"{MOST_KEYS} keys are in use", MINUTE_S)
            self._numbers[start] = whose
        self._rows[name] = whose, start
        return start

    def _owes_nothing(self, now: float, start: int) -> bool:
        return max(self._numbers[start + 1], self._numbers[start + 2]) <= now and not self._open(start)

    def _open(self, start: int) -> int:
        """Completions of a row, in all processes."""
        return round(sum(self._numbers[start + 3 : start + self._width]))

    def _free_column(self, columns: int) -> int:
        if self._file is None:
            return 0
        for column in range(columns):
            if locked(self._file, column):
                return column
        raise RuntimeError(f"all {columns} columns of the keys' accounts are held by processes that live")

    @contextmanager
    def _changing(self) -> Iterator[None]:
        if self._file is None:
            yield
            return
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, MUTEX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, MUTEX)
