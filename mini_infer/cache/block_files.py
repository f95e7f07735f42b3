"""Blocks of KV in files, one a block, which outlive an engine and which engines beside each other share.

    PATH/4f1c62.../c2/c2a91b...    header: magic, identity, hash, length, checksum    then the block's bytes

A file has the name of its block's hash, and stands in the folder of what computed it: model, layout, numerics and code
make an identity, so engines that differ in any of it see none of each other's. It appears whole or not at all, since it
is renamed when it is written: whoever else writes the same block, and whoever is killed meanwhile. What was read is
compared with the header before anybody may use it, and a file that is not as it was written is deleted.

There is no index beside the files that could disagree with them: whether a block is there is asked of the file system.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from mini_infer.core.config import CacheConfig
from mini_infer.core.errors import ConfigError

_HEADER = struct.Struct("<8s32s32sQI")
_MAGIC = b"minikv 2"
_PAGE = 4096  # bytes
_PART = ".part"  # of a file that is being written
_ABANDONED_S = 3600.0
_RETRY_S = 60.0  # after a write has failed
_TOUCH_S = 30.0  # in which a file is touched once at most: what is in memory is used in every step
_LOOKS = 16  # at the folder, while as much is written as it may hold

logger = logging.getLogger(__name__)


class BlockFiles:
    """Files of one identity. Any thread may call any of it.

    Args:
        path: a folder; others may use it, too.
        identity: all that the values of a block depend on, beside its tokens.
        block_bytes: of a block.
        max_bytes: of all files of this identity, about: the least recently used go first. None: half of what is free,
            or theirs already.
        ranks: that share the disk, each with files of its own.

    Attributes:
        beside: folders of the other ranks, each of which has a part of every block.

    Raises ConfigError where nothing can be written there.
    """

    def __init__(
        self, path: str, identity: str, block_bytes: int, max_bytes: int | None = None, ranks: int = 1
    ) -> None:
        self._identity = hashlib.sha256(identity.encode()).digest()
        self.folder = Path(path).expanduser() / self._identity.hex()[:16]
        self.beside: list[str] = []
        self._file_bytes = _HEADER.size + block_bytes
        self._lock = threading.Lock()
        self._full_until = 0.0
        self._used: dict[bytes, None] = {}  # that no file tells yet
        self._touches_at = 0.0
        self._toucher = ThreadPoolExecutor(1, "kv toucher")
        try:
            # Who can read KV can find out the prompts that it is of.
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
            if not os.access(self.folder, os.W_OK):
                raise PermissionError("it may not be written to")
            files = self._look()
            self.max_bytes = (free + self._bytes * ranks) // 2 // ranks if max_bytes is None else max_bytes // ranks
            self._low_bytes = self.max_bytes - 2 * self.max_bytes // _LOOKS  # of files when room has been made
            if self._low_bytes < self._file_bytes:
                raise ConfigError(
                    f"cache.disk_prefix_path={path}: {self.max_bytes} bytes of files hold no KV block of {block_bytes} "
                    "bytes and its header, with an eighth kept free. Raise cache.disk_prefix_gib, or free some of "
                    "the disk"
                )
            self._make_room(files)
        except OSError as error:
            raise ConfigError(
                f"cache.disk_prefix_path={path}: {error}. Name a folder that can be written to"
            ) from error
        others = [entry.name for entry in self.folder.parent.iterdir() if entry.is_dir() and entry != self.folder]
        logger.info(
            "%d KV blocks of this model in %s%s",
            self._bytes // self._file_bytes,
            self.folder,
            f"; {len(others)} folders of other models or settings beside it are left alone" if others else "",
        )

    def __contains__(self, block_hash: object) -> bool:
        """Whether every rank has a file for it, whatever is in it."""
        assert isinstance(block_hash, bytes)
        return all(os.path.exists(_file(folder, block_hash)) for folder in (str(self.folder), *self.beside))

    def write(self, block_hash: bytes, parts: Sequence[memoryview]) -> bool:
        """Whether there is a file for it now. Where the disk is full, or fails, nothing is written for a while."""
        path = _file(self.folder, block_hash)
        if os.path.exists(path):
            return True
        if time.monotonic() < self._full_until:
            return False
        unfinished = f"{path}.{os.getpid()}-{threading.get_ident()}{_PART}"
        try:
            self._fill(unfinished, [self._header(block_hash, parts), *parts])
            os.rename(unfinished, path)
            with self._lock:
                self._written += self._file_bytes
                if self._bytes + self._written > self.max_bytes or self._written > self.max_bytes // _LOOKS:
                    self._make_room(self._look())
        except OSError as error:
            self._full_until = time.monotonic() + _RETRY_S
            logger.warning("no KV block is written to %s for %.0f s: %s", self.folder, _RETRY_S, error)
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            return os.path.exists(path)  # it may be there, and room for the next one not
        return True

    def read(self, block_hash: bytes, parts: Sequence[memoryview]) -> bool:
        """Whether `parts` hold the block now. If not, whatever is in them is nobody's, and there is no such file."""
        path, header = _file(self.folder, block_hash), memoryview(bytearray(_HEADER.size))
        try:
            file = os.open(path, os.O_RDONLY)
            try:
                about = os.fstat(file)
                whole = about.st_size == self._file_bytes == _move(os.readv, file, [header, *parts])
                if whole and header == self._header(block_hash, parts):
                    if abs(time.time() - about.st_mtime) > _TOUCH_S:
                        os.utime(file)  # used just now
                    return True
            finally:
                os.close(file)
        except FileNotFoundError:  # others have made room
            return False
        except OSError as error:
            logger.warning("a KV block cannot be read: %s", error)
        else:
            logger.warning("%s is no KV block as it was written: it is deleted", path)
        with contextlib.suppress(OSError):
            os.unlink(path)
        return False

    def touch(self, hashes: Iterable[bytes]) -> None:
        """These blocks of a chain were used just now, in memory: a thread lets the files know from time to time, on all
        ranks. For one thread, which waits for nothing."""
        self._used.update(dict.fromkeys(hashes))
        if (now := time.monotonic()) >= self._touches_at:
            used, self._used, self._touches_at = self._used, {}, now + _TOUCH_S
            self._toucher.submit(self._touch, list(used))

    def _touch(self, hashes: Sequence[bytes]) -> None:
        for block_hash in reversed(hashes):  # what a chain begins with is used last
            for folder in (str(self.folder), *self.beside):
                with contextlib.suppress(OSError):  # it is not written yet, or others have made room
                    os.utime(_file(folder, block_hash))

    def _fill(self, path: str, parts: Sequence[bytes | memoryview]) -> None:
        """Makes a file, and its folders where there are none yet. But where somebody has removed the folder of all
        models, it stays removed: who writes on would fill it again behind his back."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            file = os.open(path, flags, 0o666)
        except FileNotFoundError:
            for folder in (self.folder, os.path.dirname(path)):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o700)
            file = os.open(path, flags, 0o666)
        try:
            if _move(os.writev, file, parts) < self._file_bytes:
                raise OSError(errno.EIO, "a file could be written only in part", path)
        finally:
            os.close(file)

    def _header(self, block_hash: bytes, parts: Iterable[memoryview]) -> bytes:
        return _HEADER.pack(_MAGIC, self._identity, block_hash, self._file_bytes, checksum(parts))

    def _look(self) -> list[tuple[float, int, str]]:
        """When each file was used last, its size and its path. Deletes what somebody was killed over."""
        files: list[tuple[float, int, str]] = []
        now = time.time()
        for folder in os.scandir(self.folder):
            for entry in os.scandir(folder) if folder.is_dir() else ():
                with contextlib.suppress(OSError):
                    about = entry.stat()
                    if not entry.name.endswith(_PART):
                        files.append((about.st_mtime, about.st_size, entry.path))
                    elif now - about.st_mtime > _ABANDONED_S:
                        os.unlink(entry.path)
        self._bytes, self._written = sum(size for _, size, _ in files), 0  # as of this look, and since
        return files

    def _make_room(self, files: list[tuple[float, int, str]]) -> None:
        """Deletes what was used longest ago, down to the bound and a little below. Raises OSError where it may not."""
        if self._bytes <= self.max_bytes - self.max_bytes // _LOOKS:
            return
        for _, size, path in sorted(files):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            self._bytes -= size
            if self._bytes <= self._low_bytes:
                return


def checksum(parts: Iterable[memoryview]) -> int:
    """CRC-32 of the sums of each page's words, and of what is left of a page: a CRC of everything takes more than twice
    as long as reading it does from the operating system's memory."""
    crc = 0
    for part in parts:
        size = len(part) - len(part) % _PAGE
        pages = np.frombuffer(part, np.uint8)[:size].view(np.uint64).reshape(-1, _PAGE // 8)
        crc = zlib.crc32(part[size:], zlib.crc32(pages.sum(1), crc))
    return crc


def _file(folder: Path | str, block_hash: bytes) -> str:
    name = block_hash.hex()
    return f"{folder}/{name[:2]}/{name}"


def _move(verb: Callable[[int, list[Any]], int], file: int, parts: Sequence[bytes | memoryview]) -> int:
    """Bytes that `os.readv` or `os.writev` moves: of all parts, or as far as the file goes. As a rule that is one call:
    each one gives Python's lock away, and threads beside each other wait longer to have it back than they keep it."""
    rest, moved = [memoryview(part) for part in parts], 0
    while rest and (count := verb(file, rest)):
        moved += count
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if rest:
            rest[0] = rest[0][count:]
    return moved


def open_block_files(
    cache: CacheConfig, identity: Callable[[], str], block_bytes: int, ranks: int = 1
) -> BlockFiles | None:
    """One rank's of the settings; None where they ask for none: then nobody needs the identity, which takes reading."""
    if cache.disk_prefix_path is None:
        return None
    most = None if cache.disk_prefix_gib is None else int(cache.disk_prefix_gib * 2**30)
    return BlockFiles(cache.disk_prefix_path, identity(), block_bytes, most, ranks)
