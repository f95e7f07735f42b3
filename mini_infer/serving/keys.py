"""Who may ask: the keys that clients send, and what each may take."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Annotated

import msgspec

from mini_infer.core.errors import ConfigError

ONLY = "default"  # whose name --api-key has
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # of a key: it is a label of metrics
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
    """The keys of a server, by name; without any, everybody may ask.

    Args:
        api_key: the one that has no limits.
        path: of a YAML file: names, and a `Key` below each.

    Raises:
        ConfigError: the file cannot be read, or holds something else; it names what.
    """

    def __init__(self, api_key: str | None, path: str | None) -> None:
        self.named: dict[str, Key] = {} if path is None else _read(path)
        if api_key is not None:
            self.named[ONLY] = Key(key=api_key)
        self._names = {key.digest: name for name, key in self.named.items()}
        if len(self._names) < len(self.named):
            raise ConfigError(f"api_keys {path!r}: two names have the same key")

    def __bool__(self) -> bool:
        return bool(self.named)

    def name_of(self, authorization: str) -> str | None:
        """Whose key the header holds; None where it is nobody's.

        It is looked up by its digest, and so in a time that tells nothing about how much of it is right.
        """
        scheme, _, given = authorization.partition(" ")
        return self._names.get(_digest(given.strip())) if scheme.lower() == "bearer" else None


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def _read(path: str) -> dict[str, Key]:
    try:
        keys = msgspec.yaml.decode(Path(path).expanduser().read_bytes(), type=dict[str, Key])
    except (OSError, UnicodeError, msgspec.MsgspecError) as error:
        raise ConfigError(f"api_keys {path!r}: {error}") from error
    for name in keys:
        if not NAME.fullmatch(name) or name == ONLY:
            raise ConfigError(
                f"api_keys {path!r}: a name has up to 64 letters, digits and characters of _.- and is not "
                f"{ONLY!r}, which --api-key's is; got {name[:100]!r}"
            )
    if not keys:
        raise ConfigError(f"api_keys {path!r} holds no key: nobody could ask")
    return keys
