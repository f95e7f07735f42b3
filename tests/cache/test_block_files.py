"""Blocks in files: whole or not there, whoever writes, dies or meddles."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mini_infer.cache.block_files import BlockFiles, _file, checksum
from mini_infer.core.errors import ConfigError

SIZE = 1000


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(number: int) -> list[memoryview]:
    return [memoryview(bytes([number % 251]) * 600), memoryview(bytes([number % 241]) * 400)]


def read(files: BlockFiles, number: int) -> list[bytes] | None:
    parts = [memoryview(bytearray(600)), memoryview(bytearray(400))]
    return [bytes(part) for part in parts] if files.read(name(number), parts) else None


def path_of(files: BlockFiles, number: int) -> Path:
    return Path(_file(files.folder, name(number)))


@pytest.fixture
def files(tmp_path: Path) -> BlockFiles:
    return BlockFiles(str(tmp_path), "a model", SIZE, 10**6)


def test_a_block_outlives_the_engine_that_wrote_it(files: BlockFiles, tmp_path: Path) -> None:
    assert name(1) not in files
    assert read(files, 1) is None
    assert files.write(name(1), content(1))
    assert files.write(name(1), content(1)), "there is one"
    later = BlockFiles(str(tmp_path), "a model", SIZE, 10**6)
    assert name(1) in later
    assert read(later, 1) == [bytes(part) for part in content(1)]


def test_nothing_of_another_model_is_seen_even_where_somebody_has_moved_it(files: BlockFiles, tmp_path: Path) -> None:
    files.write(name(1), content(1))
    other = BlockFiles(str(tmp_path), "another model", SIZE, 10**6)
    assert name(1) not in other
    path_of(other, 1).parent.mkdir()
    path_of(files, 1).rename(path_of(other, 1))
    assert read(other, 1) is None
    assert name(1) not in other, "it is deleted"


def test_a_file_system_may_give_and_take_less_than_it_is_asked(
    files: BlockFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def a_little(verb: Callable[[int, Any], int]) -> Callable[[int, Sequence[memoryview]], int]:
        return lambda file, parts: verb(file, [parts[0][:77]])

    monkeypatch.setattr(os, "readv", a_little(os.readv))
    monkeypatch.setattr(os, "writev", a_little(os.writev))
    assert files.write(name(1), content(1))
    assert read(files, 1) == [bytes(part) for part in content(1)]
    monkeypatch.setattr(os, "writev", lambda file, parts: 0)
    assert not files.write(name(2), content(2))
    assert "only in part" in caplog.text
    assert not list(files.folder.rglob("*.part"))


def test_a_file_that_is_read_again_and_again_is_touched_once(files: BlockFiles) -> None:
    files.write(name(1), content(1))
    moments = []
    for age in (0, 10, 100):
        used = int(time.time()) - age
        os.utime(path_of(files, 1), (used, used))
        assert read(files, 1) is not None
        moments.append(path_of(files, 1).stat().st_mtime - used)
    assert moments[:2] == [0, 0]
    assert moments[2] > 90


@pytest.mark.parametrize("harm", ["flipped bit", "cut off", "longer", "empty", "another block's", "header"])
def test_what_is_not_as_it_was_written_is_never_given_out(files: BlockFiles, harm: str) -> None:
    files.write(name(1), content(1))
    path = path_of(files, 1)
    data = bytearray(path.read_bytes())
    if harm == "flipped bit":
        data[-300] ^= 4
    elif harm == "cut off":
        del data[-1:]
    elif harm == "longer":
        data += b"x"
    elif harm == "empty":
        data.clear()
    elif harm == "header":
        data[3] ^= 1
    else:
        files.write(name(2), content(2))
        data = bytearray(path_of(files, 2).read_bytes())
    path.write_bytes(data)
    assert read(files, 1) is None
    assert name(1) not in files
    assert files.write(name(1), content(1)), "it can be written again"
    assert read(files, 1) == [bytes(part) for part in content(1)]


def test_the_checksum_sees_every_bit_and_where_each_page_is() -> None:
    whole = bytearray(random.Random(0).randbytes(3 * 4096 + 5))
    seen = {checksum([memoryview(whole)]), checksum([memoryview(whole[4096:8192] + whole[:4096] + whole[8192:])])}
    for place in (0, 4095, 4096, 9999, len(whole) - 1):
        whole[place] ^= 16
        seen.add(checksum([memoryview(whole)]))
        whole[place] ^= 16
    assert len(seen) == 7


def test_a_full_disk_is_left_alone_for_a_while(files: BlockFiles, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    files.write(name(1), content(1))
    moments = [100.0]
    monkeypatch.setattr("mini_infer.cache.block_files.time.monotonic", lambda: moments[-1])

    def full(*paths: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", full)
        assert not files.write(name(2), content(2))
    assert "No space left" in caplog.text
    assert not list(files.folder.rglob("*.part"))
    assert not files.write(name(2), content(2))
    assert read(files, 1) is not None
    moments.append(200.0)
    assert files.write(name(2), content(2))


def test_there_are_as_many_as_the_bound_allows_and_the_oldest_go_first(tmp_path: Path) -> None:
    files = BlockFiles(str(tmp_path), "a model", SIZE, 20 * 1100)
    for number in range(50):
        assert files.write(name(number), content(number))
        os.utime(path_of(files, number), (number, number))
        if number >= 10:
            assert read(files, 3) is not None, "it is used all the time"
        assert sum(path.stat().st_size for path in files.folder.rglob("*") if path.is_file()) <= 20 * 1100
    assert name(49) in files
    assert name(20) not in files


def test_what_is_used_in_memory_goes_last_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [BlockFiles(str(tmp_path), f"rank {rank}", SIZE, 20 * 1100) for rank in range(2)]
    ranks[0].beside = [str(ranks[1].folder)]
    for number in range(19):
        for files in ranks:
            assert files.write(name(number), content(number))
            os.utime(path_of(files, number), (number, number))
    touched: list[list[bytes]] = []
    touch = ranks[0]._touch
    monkeypatch.setattr(ranks[0], "_touch", lambda hashes: (touched.append(hashes), touch(hashes)))
    for _ in range(5):
        ranks[0].touch([name(0), name(1), name(99)])
    ranks[0]._touches_at = 0.0
    ranks[0].touch([name(2)])
    ranks[0]._toucher.shutdown()
    assert touched == [[name(0), name(1), name(99)], [name(0), name(1), name(99), name(2)]], "not five times"
    for files in ranks:
        for number in range(19, 22):
            assert files.write(name(number), content(number))
        assert [number for number in range(6) if name(number) in files] == [0, 1, 2]
        moments = [path_of(files, number).stat().st_mtime_ns for number in range(3)]
        assert moments == sorted(moments, reverse=True)


def test_a_folder_that_is_meddled_with_costs_blocks_and_no_error(tmp_path: Path) -> None:
    files = BlockFiles(str(tmp_path), "a model", SIZE, 20 * 1100)
    assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700
    (files.folder / "a note").write_text("")
    for number in range(30):
        assert files.write(name(number), content(number)), "it makes room"
    shutil.rmtree(files.folder)
    for number in range(30):
        files.write(name(number), content(number))
    assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700, "also when it is made again"
    BlockFiles(str(tmp_path), "a model", SIZE, 20 * 1100)


def test_a_tier_that_is_removed_stays_removed(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    files = BlockFiles(str(tier), "a model", SIZE, 20 * 1100)
    assert files.write(name(0), content(0))
    shutil.rmtree(tier)
    assert not files.write(name(1), content(1))
    assert not tier.exists()


def test_room_that_cannot_be_made_ends_writing_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = BlockFiles(str(tmp_path), "a model", SIZE, 20 * 1100)

    def refuse(path: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "unlink", refuse)
    written = [files.write(name(number), content(number)) for number in range(40)]
    assert "Operation not permitted" in caplog.text
    assert written[0]
    assert not written[-1]


def test_leftovers_of_the_killed_are_removed_when_they_are_old(files: BlockFiles, tmp_path: Path) -> None:
    files.write(name(1), content(1))
    leftovers = [path_of(files, 1).with_suffix(f".{age}.part") for age in ("old", "new")]
    for leftover in leftovers:
        leftover.write_bytes(b"half")
    os.utime(leftovers[0], (0, 0))
    BlockFiles(str(tmp_path), "a model", SIZE, 10**6)
    assert [leftover.exists() for leftover in leftovers] == [False, True]


@pytest.mark.parametrize("way", ["a file", "too small", "none would stay"])
def test_what_cannot_work_is_refused_at_the_start(tmp_path: Path, way: str) -> None:
    path = tmp_path / "folder"
    if way == "a file":
        path.write_text("")
    with pytest.raises(ConfigError, match=r"cache\.disk_prefix_path=.*(Name a folder|hold no KV block)"):
        BlockFiles(str(path), "a model", SIZE, {"a file": 10**6, "too small": 10, "none would stay": 1230}[way])


def test_the_smallest_bound_that_is_not_refused_keeps_the_newest_block(tmp_path: Path) -> None:
    files = BlockFiles(str(tmp_path), "a model", SIZE, 1240)
    for number in range(5):
        assert files.write(name(number), content(number))
        os.utime(path_of(files, number), (number, number))
        assert [other for other in range(5) if name(other) in files] == [number]


WRITER = """
import sys
from mini_infer.cache.block_files import BlockFiles, _file, checksum
sys.path.insert(0, {tests!r})
from test_block_files import SIZE, content, name
files = BlockFiles({folder!r}, "a model", SIZE, 30 * 1100)
print("ready", flush=True)
number = 0
while True:
    files.write(name(number % 60), content(number % 60))
    number += 1
"""


def test_writers_may_be_many_and_may_be_killed(tmp_path: Path) -> None:
    """Whatever is read is what belongs there, while two processes write and make room, and after both were killed."""
    code = WRITER.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    writers = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(2)]
    files = BlockFiles(str(tmp_path), "a model", SIZE, 30 * 1100)
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
    found = 0
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        for number in range(60):
            got = read(files, number)
            found += got is not None
            assert got in (None, [bytes(part) for part in content(number)])
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert found > 100
    for number in range(60):
        if name(number) in files:
            assert read(files, number) == [bytes(part) for part in content(number)]
