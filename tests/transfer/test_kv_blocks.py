"""Blocks of any layout go from one store to another through each connector; and the parts around them."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from mini_infer.cache.kv_store import KVStore
from mini_infer.cache.layout import KVLayout, Plane
from mini_infer.core.errors import ConfigError
from mini_infer.core.plan import Push
from mini_infer.core.request import Export, Handover
from mini_infer.transfer import address, memory, receiver
from mini_infer.transfer import nixl as nixl_module
from mini_infer.transfer.address import Door, reach
from mini_infer.transfer.link import Link, decode
from mini_infer.transfer.memory import MemoryTarget, Shared, SharedAllocator
from mini_infer.transfer.nixl import Agent
from mini_infer.transfer.protocol import Ask, Blocks, Cancel, Choice, Clock, End, Hello, Message, Unlike
from mini_infer.transfer.pusher import LOST, Pusher
from mini_infer.transfer.receiver import AWAY_S, Receiver
from mini_infer.transfer.shares import Holding, Piece, Share, pieces
from mini_infer.transfer.stream import take_blocks

CPU = torch.device("cpu")
LATENT = Plane("latent", (576,), torch.bfloat16)
FP8 = tuple(Plane(n, (2, 5), torch.float8_e4m3fn, scales=Plane(f"{n}_scales", (2,), torch.float32)) for n in "kv")
LAYOUTS = {
    "keys and values": KVLayout.of_heads(3, 2, 8, torch.float32),
    "latent": KVLayout.alike(2, LATENT),
    "unlike layers": KVLayout((FP8, (LATENT,), FP8)),
    "odd bytes": KVLayout.of_heads(2, 1, 3, torch.float8_e5m2),
}
PAIRS = [(0, 5), (4, 1), (2, 7), (1, 6)]


def blocks_of(store: KVStore) -> list[torch.Tensor]:
    """Of each tensor of each layer: [planes, num_blocks, bytes]."""
    layers = range(store.layout.num_layers)
    return [t.flatten(2).view(torch.uint8) for layer in layers for t in store.of_layer(layer)]


def filled(layout: KVLayout, num_blocks: int, allocate: Any = None) -> KVStore:
    store = KVStore(layout, num_blocks=num_blocks, block_size=3, device=CPU, allocate=allocate)
    for tensor in store.tensors:
        tensor.view(torch.uint8).random_()
    return store


@pytest.mark.parametrize("connector", ["memory", "kernel", "stream", "nixl"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_blocks_arrive_and_nothing_else_changes(
    layout: KVLayout, connector: str, nixl: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kernel`: memory, as GPUs copy to it."""
    if connector == "kernel":
        copy_by_the_kernel(monkeypatch)
    allocate = SharedAllocator(CPU)
    source, target = filled(layout, 6), filled(layout, 9, allocate)
    before = [tensor.clone() for tensor in blocks_of(target)]
    share = Share(0, layout.num_layers)

    class Direct:
        def send(self, message: Message, payload: Any, ready: Any) -> None:
            assert isinstance(message, Blocks)
            take_blocks(target, message, bytearray(payload), None)

    here, there = (Agent(store) if connector == "nixl" else None for store in (source, target))
    pusher = Pusher(Holding(source, 0, [share], agent=here))
    if there is not None:
        assert pusher.connect(5, [there.reachable(share)])
    elif connector == "stream":
        pusher.send_by(5, Direct())  # type: ignore[arg-type]
    else:
        assert pusher.connect(5, [allocate.shared(share, 9)])
    pusher.open(1, 5, 1)
    pusher.begin([Push(1, PAIRS), Push(2, [(0, 0)])])  # nobody has opened the other
    for layer in range(layout.num_layers):
        pusher.layer(layer)
    pusher.end()
    pusher.layer(0)  # of a step that pushes nothing
    assert pusher.close(1) == len(PAIRS) * layout.bytes_per_block(3)
    assert pusher.seconds > 0
    for mine, theirs, kept in zip(blocks_of(source), blocks_of(target), before, strict=True):
        for here, there in PAIRS:
            kept[:, there] = mine[:, here]
        assert torch.equal(theirs, kept)


def copy_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are not interpreted here")
    from mini_infer.kernels.push_blocks import PlaneCopies

    monkeypatch.setattr(memory, "plane_copies", lambda device: PlaneCopies)


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "kernel"])
def test_layers_go_in_groups_of_so_many_bytes(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is on its way when its last layer is there, of each transfer by itself; the step's last one may be
    smaller. Blocks of a layer that is not computed yet stay where they are."""
    if kernel:
        copy_by_the_kernel(monkeypatch)
    layout = KVLayout.of_heads(7, 2, 8, torch.float32)
    allocate = SharedAllocator(CPU)
    source, target = filled(layout, 64), filled(layout, 80, allocate)
    ours, theirs = (store.tensors[0].view(torch.int32) for store in (source, target))
    before, share = theirs.clone(), Share(0, 7)
    pusher = Pusher(Holding(source, 0, [share]))
    assert pusher.connect(5, [allocate.shared(share, 80)])
    launched = list[tuple[int, int]]()
    copies = memory.plane_copies(CPU)
    push = copies.push
    monkeypatch.setattr(
        copies, "push", lambda own, first, end, *pairs: launched.append((first, end)) or push(own, first, end, *pairs)
    )
    here, there = torch.randperm(64), torch.randperm(80)
    pairs = list(zip(here.tolist(), there.tolist(), strict=False))
    chunks = {1: pairs[:30], 2: pairs[30:45]}
    monkeypatch.setattr(MemoryTarget, "group_bytes", 30 * 3 * layout.bytes_per_block(3) // 7)
    for transfer in chunks:
        pusher.open(transfer, 5, transfer)
    pusher.begin([Push(transfer, own) for transfer, own in chunks.items()])
    of_step = [[], [], [(0, 6)], [], [], [(6, 12), (0, 12)], [(12, 14), (12, 14)]]  # planes: two of each layer
    arrived = {0: 0, 1: 0, 2: 3, 3: 3, 4: 3, 5: 6, 6: 7}
    for layer, expected in enumerate(of_step):
        launched.clear()
        pusher.layer(layer)
        assert launched == expected
        first = chunks[1][0]
        moved = (theirs[:, :, first[1]] == ours[:, :, first[0]]).flatten(1).all(1)
        assert moved.tolist() == [each < arrived[layer] for each in range(7)]
    assert pusher.end() is not None
    for transfer, own in chunks.items():
        assert pusher.close(transfer) == len(own) * layout.bytes_per_block(3)
    before[:, :, there[:45]] = ours[:, :, here[:45]]
    assert torch.equal(theirs, before)


def test_a_socket_has_each_layer_before_the_next_is_computed() -> None:
    layout = LAYOUTS["keys and values"]
    sent = list[int]()

    class Counts:
        def send(self, message: Message, payload: Any, ready: Any) -> None:
            assert isinstance(message, Blocks)
            sent.append(message.layer)

    pusher = Pusher(Holding(filled(layout, 6), 0, [Share(0, 3)]))
    pusher.send_by(5, Counts())  # type: ignore[arg-type]
    pusher.open(1, 5, 1)
    pusher.begin([Push(1, PAIRS)])
    for layer in range(3):
        pusher.layer(layer)
        assert sent == list(range(layer + 1))


def test_memory_that_is_gone_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    holding = Holding(filled(LAYOUTS["latent"], 2), 0, [Share(0, 2)])
    shared = Shared(Share(0, 2), 2, [[2**30, 0]], "")
    with pytest.raises(OSError, match="No such file"):
        MemoryTarget([shared], holding)
    assert not Pusher(holding).connect(1, [shared])
    assert "No such file" in caplog.text


def test_a_write_that_does_not_arrive_is_told(
    nixl: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layout = LAYOUTS["latent"]
    share = Share(0, layout.num_layers)
    source, target = filled(layout, 6), filled(layout, 9)
    pusher = Pusher(Holding(source, 0, [share], agent=Agent(source)))
    there = Agent(target)
    reachable = there.reachable(share)
    assert not pusher.connect(4, [reachable._replace(agent="")])
    assert pusher.connect(5, [reachable])

    tried = []

    def fail(*given: Any) -> None:
        tried.append(given)
        raise OSError("NIXL: a write ended as ERR")

    monkeypatch.setattr(Agent, "write", fail)
    pusher.open(1, 5, 1)
    pusher.begin([Push(1, PAIRS)])
    for layer in range(layout.num_layers):
        pusher.layer(layer)
    pusher.end()
    assert pusher.close(1) == LOST
    pusher.open(2, 5, 2)
    pusher.begin([Push(2, PAIRS)])
    pusher.layer(0)
    assert pusher.close(2) == LOST
    assert len(tried) == 1, "blocks of what is lost, and of others by this link, may be somebody else's by now"
    assert "did not reach the engine that asked for it: NIXL: a write ended as ERR" in caplog.text


def test_a_write_that_takes_too_long_is_given_up(nixl: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nixl_module._WRITE_S + 15 < nixl_module.LATE_S, "the other engine waits longer, with what it takes to notice"
    layout = LAYOUTS["latent"]
    agent, target = Agent(filled(layout, 6)), Agent(filled(layout, 9))
    name, rows = agent.meet(target.reachable(Share(0, 2))), np.array([[agent._addresses[0], 8, 0]], np.uint64)
    monkeypatch.setattr(
        agent,
        "_agent",
        SimpleNamespace(
            get_xfer_descs=lambda *_: None,
            initialize_xfer=lambda *_: None,
            transfer=lambda _: "PROC",
            check_xfer_state=lambda _: "PROC",
            release_xfer_handle=lambda _: None,
        ),
    )
    with pytest.raises(OSError, match="ended as PROC"):
        agent.write(name, rows, rows, time.monotonic() + 0.01)


def test_a_peer_is_forgotten_with_its_last_link(nixl: None) -> None:
    """A decoding engine that connects again may be there before its old link is seen to end."""
    layout = LAYOUTS["latent"]
    share = Share(0, layout.num_layers)
    source, target = filled(layout, 6), filled(layout, 9)
    pusher = Pusher(Holding(source, 0, [share], agent=Agent(source)))
    there = Agent(target)  # which is the same one for both
    assert all(pusher.connect(link, [there.reachable(share)]) for link in (1, 2))
    links = [pusher._ends[link] for link in (1, 2)]

    def arrives(link: int) -> bool:
        pusher._ends[link] = links[link - 1]
        pusher.open(1, link, 1)
        pusher.begin([Push(1, PAIRS)])
        pusher.layer(0)
        pusher.end()
        return pusher.close(1) != LOST

    pusher.disconnect(1)
    assert arrives(2)
    pusher.disconnect(2)
    assert not arrives(2), "nobody is known there"


def test_without_the_library_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(ConfigError, match=r"connector=nixl: the package nixl is not installed. pip install"):
        Agent(filled(LAYOUTS["latent"], 2))


def shares_of(layers: int, heads: int, stages: int, tensor: int) -> list[Share]:
    """As an engine's ranks have them: the last stage first. Where ranks are more than heads, neighbours have one."""
    own, copies = max(1, heads // tensor), max(1, tensor // heads)
    stage, rank = layers // stages, range(tensor)
    return [
        Share(first, first + stage, r // copies * own, r // copies * own + own)
        for first in reversed(range(0, layers, stage))
        for r in rank
    ]


RANKS = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (4, 2)]  # stages, tensor


@pytest.mark.parametrize("there", RANKS, ids=str)
@pytest.mark.parametrize("here", RANKS, ids=str)
@pytest.mark.parametrize("head_bytes", [8, 12], ids=["words", "odd bytes"])
def test_ranks_push_every_head_of_every_layer_once(
    here: tuple[int, int], there: tuple[int, int], head_bytes: int
) -> None:
    layers, heads, block_size = 4, 4, 3
    whole = torch.randint(0, 255, (layers, 2, 6, block_size, heads, head_bytes), dtype=torch.uint8)

    def store_of(share: Share, num_blocks: int, allocate: Any = None) -> KVStore:
        count = share.end_head - share.first_head
        layout = KVLayout.of_heads(share.end_layer - share.first_layer, count, head_bytes, torch.uint8)
        return KVStore(layout, num_blocks=num_blocks, block_size=block_size, device=CPU, allocate=allocate)

    def part(share: Share) -> torch.Tensor:
        return whole[share.first_layer : share.end_layer, :, :, :, share.first_head : share.end_head]

    ours, theirs = shares_of(layers, heads, *here), shares_of(layers, heads, *there)
    allocators = [SharedAllocator(CPU) for _ in theirs]
    targets = [store_of(share, 9, allocate) for share, allocate in zip(theirs, allocators, strict=True)]
    shared = [allocate.shared(share, 9) for share, allocate in zip(theirs, allocators, strict=True)]
    num_bytes = 0
    for rank, share in enumerate(ours):
        source = store_of(share, 6)
        source.tensors[0].copy_(part(share))
        pusher = Pusher(Holding(source, rank, ours))
        assert pusher.connect(0, shared)
        pusher.open(1, 0, 1)
        pusher.begin([Push(1, PAIRS)])
        for layer in range(share.end_layer - share.first_layer):
            pusher.layer(layer)
        num_bytes += pusher.close(1)
    for share, target in zip(theirs, targets, strict=True):
        expected = torch.zeros_like(target.tensors[0])
        for block, place in PAIRS:
            expected[:, :, place] = part(share)[:, :, block]
        assert torch.equal(target.tensors[0], expected)
    assert num_bytes == len(PAIRS) * sum(target.layout.bytes_per_block(block_size) for target in targets)


def test_ranks_alike_push_side_by_side() -> None:
    latents = [Share(0, 2)] * 2
    assert [pieces(latents, latents, rank) for rank in (0, 1)] == [
        [Piece(0, range(2), 0, None, None)],
        [Piece(1, range(2), 0, None, None)],
    ]
    assert Share(0, 4).layout(LAYOUTS["latent"], Share(0, 2)).num_layers == 4


def test_chunks_push_what_they_add() -> None:
    export = Export(1, first=1, blocks=[10, 11, 12], block_size=4)  # of 14 tokens, of which it has the first 4
    table = [5, 6, 7, 8]
    assert export.pairs(table, 3) == []
    assert export.pairs(table, 6) == [(6, 10)]
    assert export.pairs(table, 12) == [(6, 10), (7, 11)]  # the part of a block is sent again with the rest of it
    assert export.pairs(table, 14) == [(8, 12)]
    assert export.pairs(table, 8) == []  # it is computed again


def test_a_link_carries_messages_and_bytes_until_one_side_is_gone() -> None:
    heard: list[Any] = []
    ends: list[Link] = []
    near, far = socket.socketpair()
    one = Link(near, lambda link, message, payload: heard.append((message, bytes(payload))), ends.append)
    other = Link(far, lambda link, message, payload: link.send(message, payload), ends.append)
    for link in (one, other):
        link.start()
    one.send(Cancel(3))
    one.send(Blocks(1, 2, [4]), b"x" * 2**20)
    one.send(End(1, "all"))
    _wait(lambda: len(heard) == 3)
    assert heard == [(Cancel(3), b""), (Blocks(1, 2, [4]), b"x" * 2**20), (End(1, "all"), b"")]
    other.close()
    _wait(lambda: len(ends) == 2)
    one.send(Cancel(3))  # which nobody hears
    assert one.ended
    assert other.ended


NO_MESSAGES = [["Ask", 1, "at", "text", "", 0, 0, [3]], ["Blocks", 1, 2, ["x"]], ["Cancel"], ["Nothing"], [[]], 7]


@pytest.mark.parametrize("said", NO_MESSAGES, ids=str)
def test_what_is_no_message_ends_a_link_alone(said: Any) -> None:
    """And no thread of an engine, which would meet it first where it uses it."""
    with pytest.raises(ValueError, match=r"."):
        decode(bytearray(msgspec.msgpack.encode(said)))


@pytest.mark.parametrize("where", ["tcp://127.0.0.1", "tcp://::1", "tcp://[::1]", "tcp://localhost", "socket"])
def test_a_door_lets_in_who_has_its_address(tmp_path: Path, where: str) -> None:
    if "::" in where and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    door = Door.open(where if "//" in where else str(tmp_path / where))
    heard: list[Message] = []
    near = reach(door.address)
    link = Link(
        door.admit(door.listener.accept()[0]), lambda _, message, payload: heard.append(message), lambda _: None
    )
    link.start()
    one = Link(near, lambda *_: None, lambda _: None)
    one.start()
    shared = Shared(Share(0, 2), 9, [[1, 2]], "GPU-1")
    said: list[Message] = [
        Hello({"numerics": "fast"}, [shared], "here", 1.5),
        Clock(1.5, 2.5),
        Unlike("no"),
        Ask(1, door.address, [5, 6], "salt", 0, 2, [3]),
        End(1, "", 1.0, 2.0, 0.5, 7),
    ]
    for message in said:
        one.send(message)
    _wait(lambda: len(heard) == len(said))
    assert heard[1:] == said[1:]
    assert isinstance(heard[0], Hello)
    assert heard[0].memories is not None
    assert [Shared.of(*memory) for memory in heard[0].memories] == [shared]
    near.sendall(b"\x03\0\0\0" + bytes(8) + b"{}}")  # what is no message ends it
    _wait(lambda: link.ended and one.ended)
    if door.key is not None:
        with socket.create_connection(door.listener.getsockname()[:2]) as stranger:
            stranger.sendall(bytes(len(door.key)))
            with pytest.raises(PermissionError):
                door.admit(door.listener.accept()[0])
    door.listener.close()
    with pytest.raises(OSError, match="refused"):
        reach(door.address)


def test_who_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "_CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as mute:
        place = mute.getsockname()
        with socket.create_connection(place):  # now it takes no more, and says nothing
            for _ in range(2):
                start = time.monotonic()
                with pytest.raises(TimeoutError):
                    reach(f"tcp://127.0.0.1:{place[1]}/{address.new_key().hex()}")
                assert time.monotonic() - start < 5
            at, now, tried = f"tcp://127.0.0.1:{place[1]}/{address.new_key().hex()}", [100.0], list[str]()
            monkeypatch.setattr(receiver, "reach", lambda place: tried.append(place) or reach(place))
            asking = Receiver(Hello({}, None, "here"), lambda *_: None, clock=lambda: now[0])
            for seconds, times in ((0.0, 1), (0.0, 1), (AWAY_S, 2)):  # it is remembered for a while
                now[0] += seconds
                asking.start([Ask(1, at, [5, 6], "", 0, 2, [3])], [])
                assert [arrival.handover for arrival in asking.poll()] == [None]
                assert len(tried) == times
            asking.close()


class Deaf:
    def __init__(self) -> None:
        self.said: list[Any] = []

    def send(self, message: Message) -> None:
        self.said.append(message)

    def start(self) -> None: ...

    def close(self) -> None: ...


def test_blocks_of_a_lost_link_are_nobody_s_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """But its requests do not wait, and nobody is asked there meanwhile: else ever more blocks would be reserved."""
    told = list[Any]()

    def poll() -> list[tuple[Any, ...]]:
        return [tuple(arrival) for arrival in asking.poll()]

    monkeypatch.setattr(receiver.time, "sleep", lambda seconds: told.extend([seconds, poll()]))
    asking = Receiver(Hello({}, None, "here"), lambda *_: None, late_s=30.0, clock=lambda: 100.0)
    ask, link = Ask(1, "there", [5], "", 0, 0, [3]), Deaf()
    asking.attach("there", link)
    asking.start([ask], [])
    asking.hear_end(link)  # type: ignore[arg-type]
    assert told == [30.0, [(1, None, False)]]
    assert poll() == [(1, None, True)]
    asking.start([ask._replace(transfer_id=2)], [])
    assert poll() == [(2, None, True)]
    assert asking.num_failed == 2
    asking.close()


def test_another_machine_s_clock_is_another_one() -> None:
    now = [100.0]
    receiver = Receiver(Hello({}, None, "here"), lambda *_: None, clock=lambda: now[0])
    link: Any = receiver.attach("there", Deaf())
    receiver.start([Ask(1, "there", [5], "", 0, 0, [3])], [])
    hello, _ = link.said
    now[0] += 0.2
    receiver.hear(link, Clock(hello.now, 5000.1), bytearray())  # read halfway
    now[0] += 1.0
    receiver.hear(link, End(1, "", 5000.3, 5000.8, 0.1, 7), bytearray())
    (arrival,) = receiver.poll()
    assert arrival.handover == Handover(100.0, pytest.approx(100.3), pytest.approx(100.8), 0.1, 101.2, 7)
    receiver.close()


def _wait(condition: Any) -> None:
    import time

    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_a_prompt_stays_where_sending_it_costs_more() -> None:
    choice = Choice()
    assert choice.pays(1, decoding=0), "the first ones are to learn from"
    for tokens in (10, 100, 1000, 400):  # 2 ms + 0.1 ms a token to compute; 10 ms more to come here
        begun, computed = 5.0, 5.0 + 0.002 + 1e-4 * tokens
        choice.learn(tokens, Handover(4.995, begun, computed, 0.001, computed + 0.005, 1))
    assert not choice.pays(1000, decoding=0), "nobody waits for it"
    assert choice.pays(1000, decoding=1)
    assert not choice.pays(10, decoding=2), "3 ms for three, against 13 ms"
    assert choice.pays(10, decoding=8)
    assert choice.num_kept == 2
    while not choice.pays(1000, decoding=0):  # what was learned grows old
        assert choice.num_kept < 100
    assert Choice(always=True).pays(1, decoding=0)


def test_short_prompts_do_not_tell_what_a_long_one_costs() -> None:
    choice = Choice()
    for tokens, apart in ((10, 0.035), (1, 0.020), (1, 0.021), (1, 0.022)):  # a line through them: 2 s for 1,500
        choice.learn(tokens, Handover(5.0, 5.01, 5.012, 0.001, 5.0 + apart, 1))
    assert not choice.pays(12, decoding=1)
    assert choice.pays(1500, decoding=1), "to learn from"
    choice.learn(1500, Handover(5.0, 5.01, 5.16, 0.001, 5.18, 1))
    assert choice.pays(1500, decoding=1)
    assert not choice.pays(1, decoding=1)


def _num_sent(choice: Choice, ratio: float, prompts: int) -> int:
    """How many of these prompts are sent, where that takes so many times as long as computing them."""
    sent = 0
    for number in range(prompts):
        tokens = 100 + 50 * (number % 7)
        if choice.pays(tokens, decoding=0):
            sent += 1
            seconds = 0.002 + 1e-4 * tokens
            choice.learn(tokens, Handover(5.0, 5.001, 5.001 + seconds, 0.0, 5.0 + ratio * seconds, 1))
    return sent


def test_few_prompts_are_sent_where_no_trial_comes_back() -> None:
    choice = Choice()
    _num_sent(choice, 1.5, 100)
    sent = sum(choice.pays(100 + 50 * (number % 7), decoding=0) for number in range(2000))
    assert 0.025 * 2000 < sent <= 0.035 * 2000, "all of them fail, and are asked for again"


@pytest.mark.parametrize("ratio", [1.05, 1.2, 1.5, 2, 3, 10, 100])
def test_few_prompts_are_sent_where_that_always_costs_more(ratio: float) -> None:
    choice = Choice()
    assert _num_sent(choice, ratio, 2000) <= 0.05 * 2000
    assert _num_sent(choice, 0.5, 200 if ratio <= 10 else 2000) > 100, "a queue elsewhere has gone"
    assert _num_sent(choice, 0.5, 100) == 100
    _num_sent(choice, ratio, 300)  # it has come back, which takes some to learn
    assert _num_sent(choice, ratio, 2000) <= 0.05 * 2000
