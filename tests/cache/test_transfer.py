from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer.cache import transfer as transfers
from mini_infer.cache.block_files import BlockFiles, _file
from mini_infer.cache.kv_store import KVStore
from mini_infer.cache.layout import KVLayout, Plane
from mini_infer.cache.transfer import AtOnce, KVTransfer
from mini_infer.core.errors import ConfigError
from mini_infer.core.plan import Transfer

CPU = torch.device("cpu")
DEVICES = [CPU] + ([torch.device("cuda")] if torch.cuda.is_available() else [])
LATENT = Plane("latent", (576,), torch.bfloat16)
FP8 = tuple(Plane(n, (2, 5), torch.float8_e4m3fn, scales=Plane(f"{n}_scales", (2,), torch.float32)) for n in "kv")
LAYOUTS = {
    "keys and values": KVLayout.of_heads(3, 2, 8, torch.float32),
    "latent": KVLayout.alike(2, LATENT),
    "fp8 with scales": KVLayout.alike(2, *FP8),
    "unlike layers": KVLayout((FP8, (LATENT,), FP8)),
    "odd bytes": KVLayout.of_heads(2, 1, 3, torch.float8_e5m2),
}


def filled(layout: KVLayout, num_blocks: int, device: torch.device, block_size: int = 3) -> KVStore:
    """Random bytes."""
    store = KVStore(layout, num_blocks=num_blocks, block_size=block_size, device=device)
    for tensor in store.tensors:
        tensor.view(torch.uint8).random_()
    return store


def contents(store: KVStore) -> list[torch.Tensor]:
    """[layers, planes, num_blocks, bytes of a block] each"""
    return [tensor.view(torch.uint8).flatten(3).clone() for tensor in store.tensors]


def both_ways(transfer: KVTransfer, out: Sequence[tuple[int, int]], back: Sequence[tuple[int, int]]) -> None:
    transfer.start(Transfer(4, True, list(out)))
    assert transfer.poll(wait=True) == (4,)
    transfer.start(Transfer(5, False, list(back)))
    assert transfer.poll(wait=True) == (5,)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_come_back_as_they_went(name: str, device: torch.device) -> None:
    store = filled(LAYOUTS[name], 10, device)
    transfer = KVTransfer([store], num_host_blocks=4)
    before = contents(store)
    transfer.start(Transfer(0, True, [(7, 3), (2, 0), (5, 1)]))
    assert transfer.poll(wait=True) == (0,)
    assert all(torch.equal(one, other) for one, other in zip(contents(store), before, strict=True))
    for tensor in store.tensors:  # the blocks' next owners write
        tensor.view(torch.uint8)[:, :, [7, 2, 5]] = 1
    transfer.start(Transfer(1, False, [(0, 9), (3, 2), (1, 5)]))
    assert transfer.poll(wait=True) == (1,)
    for now, then in zip(contents(store), before, strict=True):
        for source, target in ((2, 9), (7, 2), (5, 5)):
            assert torch.equal(now[:, :, target], then[:, :, source])
        untouched = [0, 1, 3, 4, 6, 8]
        assert torch.equal(now[:, :, untouched], then[:, :, untouched])


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("staged", [1, 2, 7, 100])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_pieces_and_chunks_of_any_size(
    staged: int, chunk: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stores, which number their blocks alike."""
    layouts = KVLayout.of_heads(3, 2, 8, torch.float32), KVLayout.of_heads(1, 1, 4, torch.bfloat16)
    stores = [filled(layout, 30, device) for layout in layouts]
    block_bytes = [layout.bytes_per_block(3) for layout in layouts]
    monkeypatch.setattr(transfers, "_STAGED_BYTES", staged * sum(block_bytes))
    monkeypatch.setattr(transfers, "_CHUNK_BYTES", chunk * block_bytes[0])
    transfer = KVTransfer(stores, num_host_blocks=20)
    before = [contents(store) for store in stores]
    rng = random.Random(staged + chunk)
    sources, hosts, targets = (rng.sample(range(n), 17) for n in (30, 20, 30))
    both_ways(transfer, list(zip(sources, hosts, strict=True)), list(zip(hosts, targets, strict=True)))
    for store, (then,) in zip(stores, before, strict=True):
        (now,) = contents(store)
        assert torch.equal(now[:, :, targets], then[:, :, sources])
        untouched = sorted(set(range(30)) - set(targets))
        assert torch.equal(now[:, :, untouched], then[:, :, untouched])


class LateEvent:
    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def finish(self) -> None:
        if self._work is not None:
            self._work()
        self._work = None

    synchronize = finish

    def query(self) -> bool:
        return self._work is None


class LateStream(AtOnce):
    """Does its work when it is told to."""

    def __init__(self) -> None:
        self.events: list[LateEvent] = []

    def run(self, work: Callable[[], None]) -> LateEvent:
        self.events.append(LateEvent(work))
        return self.events[-1]


class TestPoll:
    def test_names_what_has_ended_once_and_in_order(self) -> None:
        stream = LateStream()
        transfer = KVTransfer([filled(LAYOUTS["latent"], 6, CPU)], num_host_blocks=6, stream=stream)
        for number in range(4):
            transfer.start(Transfer(number, True, [(number, number)]))
        assert transfer.poll() == ()
        stream.events[0].finish()
        stream.events[1].finish()
        assert transfer.poll() == (0, 1)
        assert transfer.poll() == ()
        assert transfer.poll(wait=True) == (2, 3)
        assert transfer.poll(wait=True) == ()

    def test_nothing_is_copied_before_its_turn(self) -> None:
        stream, store = LateStream(), filled(LAYOUTS["latent"], 6, CPU)
        transfer = KVTransfer([store], num_host_blocks=6, stream=stream)
        (before,) = contents(store)
        transfer.start(Transfer(0, True, [(1, 0)]))
        transfer.start(Transfer(1, False, [(0, 2)]))
        assert torch.equal(contents(store)[0], before)
        assert transfer.poll(wait=True) == (0, 1)
        assert torch.equal(contents(store)[0][:, :, 2], before[:, :, 1])

    def test_a_transfer_of_nothing_ends(self) -> None:
        transfer = KVTransfer([filled(LAYOUTS["latent"], 2, CPU)], num_host_blocks=1)
        transfer.start(Transfer(3, True, []))
        assert transfer.poll() == (3,)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_go_to_files_and_come_back(name: str, device: torch.device, tmp_path: Path) -> None:
    store = filled(LAYOUTS[name], 10, device)
    files = BlockFiles(str(tmp_path), name, LAYOUTS[name].bytes_per_block(3), 10**8)
    hashes = [bytes([number]) * 32 for number in range(5)]
    first = KVTransfer([store], num_host_blocks=4, files=files)
    before = contents(store)
    first.start(Transfer(0, True, [(7, 3), (2, 0), (5, 1)], True))
    assert first.poll(wait=True) == (0,)
    first.start(Transfer(1, True, [], True, [(3, hashes[0]), (0, hashes[1]), (1, hashes[2])]))
    assert first.poll(wait=True) == (1,)
    second = KVTransfer([store], num_host_blocks=4, files=files)
    lost = Path(_file(files.folder, hashes[1]))
    lost.write_bytes(lost.read_bytes()[:-1])
    read = [(2, hashes[0]), (1, hashes[1]), (0, hashes[2]), (3, hashes[4])]
    second.start(Transfer(2, False, [(2, 9), (1, 4), (0, 6), (3, 8)], True, read))
    assert second.poll(wait=True) == (2,)
    assert {number: sorted(blocks) for number, blocks in second.failed([2]).items()} == {2: [1, 3]}
    assert second.num_read(2, [0, 1, 2, 3]) == 1
    assert second.num_read(1, [0, 1, 2, 3]) == 4
    second.start(Transfer(2, False, [(1, 9)], True, [(1, hashes[0])]))
    assert second.poll(wait=True) == (2,)
    assert (second.failed([2]), second.num_read(2, [1])) == ({}, 1), "it has the number of another scheduler's"
    for now, then in zip(contents(store), before, strict=True):
        for source, target in ((7, 9), (5, 6)):
            assert torch.equal(now[:, :, target], then[:, :, source])


def test_of_a_chain_in_files_what_it_begins_with_is_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the oldest files, which go first, would be those without which the others are found by nobody."""
    layout, order = LAYOUTS["latent"], list[int]()

    class Told(BlockFiles):
        def write(self, block_hash: bytes, parts: Sequence[memoryview]) -> bool:
            order.append(block_hash[0])
            return True

    monkeypatch.setattr(transfers, "_WRITERS", 1)
    files = Told(str(tmp_path), "latent", layout.bytes_per_block(3), 10**8)
    transfer = KVTransfer([filled(layout, 4, CPU)], num_host_blocks=6, files=files)
    transfer.start(Transfer(1, True, [], True, [(block, bytes([block]) * 32) for block in range(6)]))
    assert transfer.poll(wait=True) == (1,)
    assert order == [5, 4, 3, 2, 1, 0]


def test_who_waits_for_copies_does_not_wait_for_files_being_written(tmp_path: Path) -> None:
    layout, may_write = LAYOUTS["latent"], threading.Event()

    class Slow(BlockFiles):
        def write(self, *arguments: Any) -> bool:
            return may_write.wait(30) and super().write(*arguments)

    files = Slow(str(tmp_path), "latent", layout.bytes_per_block(3), 10**8)
    transfer = KVTransfer([filled(layout, 4, CPU)], num_host_blocks=2, files=files)
    transfer.start(Transfer(0, True, [], True, [(0, b"0" * 32)]))
    transfer.start(Transfer(1, False, [(1, 2)], True, [(1, b"1" * 32)]))  # such a file there is not
    transfer.start(Transfer(2, True, [(1, 1)]))
    assert sorted(transfer.poll(wait=True)) == [1, 2]
    assert transfer.poll() == ()
    may_write.set()
    assert transfer.poll(wait=True) == (0,)
    assert transfer.failed([0, 1]) == {1: [1]}


def test_a_close_finishes_the_blocks_that_are_being_written_and_gives_up_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, may_write, closed = LAYOUTS["latent"], threading.Event(), threading.Event()
    begun: list[bytes] = []

    class Slow(BlockFiles):
        def write(self, block_hash: bytes, parts: Sequence[memoryview]) -> bool:
            begun.append(block_hash)
            return may_write.wait(30) and super().write(block_hash, parts)

    monkeypatch.setattr(transfers, "_WRITERS", 2)
    monkeypatch.setattr(transfers, "_CLOSE_S", 0.0)
    files = Slow(str(tmp_path), "latent", layout.bytes_per_block(3), 10**8)
    transfer = KVTransfer([filled(layout, 4, CPU)], num_host_blocks=16, files=files)
    hashes = [bytes([block]) * 32 for block in range(16)]
    transfer.start(Transfer(1, True, [], True, list(enumerate(hashes))))
    until = time.monotonic() + 30
    while len(begun) < 2:
        assert time.monotonic() < until
        time.sleep(0.001)
    closing = threading.Thread(target=lambda: (transfer.close(), closed.set()))
    closing.start()
    assert transfer._closing.wait(30)
    assert not closed.wait(0.05), "it waits for the two threads"
    may_write.set()
    assert closed.wait(30)
    closing.join()
    assert [block_hash in files for block_hash in hashes] == [block_hash in begun for block_hash in hashes]
    assert len(begun) == 2
    transfer.close()


def test_a_close_has_patience_with_what_is_nearly_written(tmp_path: Path) -> None:
    layout = LAYOUTS["latent"]
    files = BlockFiles(str(tmp_path), "latent", layout.bytes_per_block(3), 10**8)
    transfer = KVTransfer([filled(layout, 4, CPU)], num_host_blocks=16, files=files)
    hashes = [bytes([block]) * 32 for block in range(16)]
    transfer.start(Transfer(1, True, [], True, list(enumerate(hashes))))
    transfer.close()
    assert all(block_hash in files for block_hash in hashes)


def test_what_has_been_read_is_copied_while_the_rest_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, may_read, stream = LAYOUTS["latent"], threading.Event(), LateStream()

    class Slow(BlockFiles):
        def read(self, block_hash: bytes, parts: Sequence[memoryview]) -> bool:
            return (block_hash != hashes[0] or may_read.wait(30)) and super().read(block_hash, parts)

    store = filled(layout, 6, CPU)
    (before,), hashes = contents(store), [bytes([number]) * 32 for number in range(4)]
    files = Slow(str(tmp_path), "latent", layout.bytes_per_block(3), 10**8)
    monkeypatch.setattr(transfers, "_PIECE", 1)
    transfer = KVTransfer([store], num_host_blocks=5, files=files, stream=stream)
    transfer.start(Transfer(0, True, [(number, number) for number in range(5)]))
    transfer.poll(wait=True)
    transfer.start(Transfer(1, True, [], True, list(enumerate(hashes[:3]))))
    transfer.poll(wait=True)
    for tensor in store.tensors:
        tensor.view(torch.uint8).zero_()
    pairs = [(0, 4), (1, 3), (2, 2), (3, 1), (4, 0)]  # the last one is in host memory, that before it in no file
    transfer.start(Transfer(2, False, pairs, True, list(enumerate(hashes))))
    until = time.monotonic() + 30
    while (now := contents(store)[0])[:, :, [3, 2, 0]].ne(before[:, :, [1, 2, 4]]).any():
        assert transfer.poll() == ()
        stream.events[-1].finish()
        stream.events[1].finish()
        assert time.monotonic() < until
    assert not now[:, :, 4].any()
    may_read.set()
    assert transfer.poll(wait=True) == (2,)
    assert torch.equal(contents(store)[0][:, :, 4], before[:, :, 0])
    assert transfer.failed([2]) == {2: [3]}


def test_too_little_host_memory_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("cannot allocate memory")

    store = filled(LAYOUTS["latent"], 2, CPU)
    monkeypatch.setattr(torch, "empty", fails)
    with pytest.raises(
        ConfigError,
        match=r"7 KV blocks in host memory take .* GiB.*lower .*cache\.num_host_blocks .*preemption=recompute",
    ):
        KVTransfer([store], num_host_blocks=7)


@pytest.mark.gpu
def test_beside_a_stream_that_goes_on_writing() -> None:
    """As the scheduler uses it: blocks whose transfer has not been named stay as they are, all others are written to by
    every step. 400 transfers in both directions, of blocks of 0.9 MB."""
    device, rng = torch.device("cuda"), random.Random(0)
    layout = KVLayout.of_heads(28, 4, 128, torch.bfloat16)
    stores = [filled(layout, 300, device, 16), filled(KVLayout.of_heads(2, 2, 64, torch.bfloat16), 300, device, 16)]
    views = [store.tensors[0].view(torch.int64).flatten(3) for store in stores]
    transfer = KVTransfer(stores, num_host_blocks=200)
    busy = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    device_free, host_free = list(range(300)), list(range(200))
    on_host: list[tuple[list[int], int]] = []  # host blocks, and what is written in them
    under_way: dict[int, tuple[bool, list[int], list[int], int]] = {}
    stamp, checked = 0, 0

    def take(free: list[int], count: int) -> list[int]:
        rng.shuffle(free)
        return [free.pop() for _ in range(count)]

    def settle(ended: tuple[int, ...]) -> None:
        nonlocal checked
        for number in ended:
            to_host, own, host, value = under_way.pop(number)
            if to_host:
                on_host.append((host, value))
            else:
                for view in views:
                    wrong.add_((view[:, :, own] != value).any())
                checked += len(own)
                host_free.extend(host)
            device_free.extend(own)

    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for number in range(400):
        busy @ busy  # a step
        written = torch.tensor(rng.sample(device_free, min(40, len(device_free))), device=device)
        for view in views:
            view[:, :, written] = -1
        if len(host_free) > 70 and len(device_free) > 100 and rng.random() < 0.55:
            stamp += 1
            count = rng.randrange(1, 70)
            own, host = take(device_free, count), take(host_free, count)
            for view in views:
                view[:, :, torch.tensor(own, device=device)] = stamp  # a step's last writes
            under_way[number] = (True, own, host, stamp)
            transfer.start(Transfer(number, True, list(zip(own, host, strict=True))))
        elif on_host and len(device_free) > 80:
            host, value = on_host.pop(rng.randrange(len(on_host)))
            own = take(device_free, len(host))
            under_way[number] = (False, own, host, value)
            transfer.start(Transfer(number, False, list(zip(host, own, strict=True))))
        settle(transfer.poll(wait=rng.random() < 0.02))
    settle(transfer.poll(wait=True))
    assert not under_way
    assert checked > 1000
    assert wrong.item() == 0


@pytest.mark.gpu
def test_the_main_stream_does_not_wait() -> None:
    """A step launched behind a transfer ends before it."""
    device = torch.device("cuda")
    store = filled(KVLayout.of_heads(28, 4, 128, torch.bfloat16), 1200, device, 16)
    transfer = KVTransfer([store], num_host_blocks=1200)
    small = torch.zeros(1, device=device)
    small.add_(1)  # the first launch of a kernel loads it, for which the driver may wait
    transfer.start(Transfer(0, True, [(n, n) for n in range(8)]))
    transfer.poll(wait=True)
    transfer.start(Transfer(1, True, [(n, n) for n in range(1200)]))  # 1 GB: 20 ms
    small.add_(1)
    step = torch.cuda.current_stream().record_event()
    step.synchronize()
    assert transfer.poll() == ()
    assert transfer.poll(wait=True) == (1,)
