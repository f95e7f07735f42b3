from __future__ import annotations

import pytest
import torch

from mini_infer.cache import transfer as swap
from mini_infer.cache.kv_store import KVStore
from mini_infer.cache.transfer import HostStore

DEVICES = [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_available() else [])


@pytest.fixture(params=DEVICES, ids=str)
def store(request: pytest.FixtureRequest) -> KVStore:
    return KVStore(
        num_layers=3, num_kv_heads=2, head_dim=8, num_blocks=10, block_size=4, dtype=torch.float32, device=request.param
    )


def test_bytes_per_block(store: KVStore) -> None:
    size = KVStore.bytes_per_block(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.float32)
    assert size * store.num_blocks == store.kv.numel() * store.kv.element_size()
    assert size == 2 * KVStore.bytes_per_block(
        num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.bfloat16
    )


def test_a_slot_is_a_place_in_a_block(store: KVStore) -> None:
    store.kv.normal_()
    assert store.key_slots(1).shape == store.value_slots(1).shape == (40, 2, 8)
    for slot in (21, 3, 38):
        block, offset = divmod(slot, 4)
        assert torch.equal(store.key_slots(1)[slot], store.keys(1)[block, offset])
        assert torch.equal(store.value_slots(1)[slot], store.values(1)[block, offset])


def test_writing_to_slots_touches_no_other(store: KVStore) -> None:
    k, v = torch.randn(2, 3, 2, 8, device=store.device)
    slots = torch.tensor([21, 3, 38], device=store.device)
    store.key_slots(1)[slots] = k
    store.value_slots(1)[slots] = v
    assert torch.equal(store.keys(1).flatten(0, 1)[slots], k)
    assert torch.equal(store.values(1).flatten(0, 1)[slots], v)
    assert torch.count_nonzero(store.kv) == torch.count_nonzero(store.kv[1]) == k.numel() + v.numel()


def test_blocks_are_keys_then_values(store: KVStore) -> None:
    store.kv.normal_()
    assert torch.equal(store.blocks(2)[7], store.keys(2)[7].flatten())
    assert torch.equal(store.blocks(2)[10 + 7], store.values(2)[7].flatten())
    assert store.blocks(2).data_ptr() == store.keys(2).data_ptr()


@pytest.mark.parametrize("staged", [1, 2, 32])
def test_swap_roundtrip(store: KVStore, monkeypatch: pytest.MonkeyPatch, staged: int) -> None:
    monkeypatch.setattr(swap, "_STAGED_BLOCKS", staged)
    host = HostStore(store, num_host_blocks=4)
    store.kv.normal_()
    before = store.kv.clone()
    host.swap_out([(7, 3), (2, 0), (5, 1)])
    assert torch.equal(store.kv, before)
    store.kv[:, :, [7, 2, 5]] = -1.0  # their next owners write
    host.swap_in([(0, 9), (3, 2), (1, 5)])
    for source, target in ((2, 9), (7, 2), (5, 5)):
        assert torch.equal(store.kv[:, :, target], before[:, :, source])
    untouched = [0, 1, 3, 4, 6, 8]
    assert torch.equal(store.kv[:, :, untouched], before[:, :, untouched])


def test_swapped_blocks_may_be_reused_in_the_same_step(store: KVStore) -> None:
    """A step swaps out first, then in: the block that one request leaves is the one another comes back to."""
    host = HostStore(store, num_host_blocks=2)
    store.kv.normal_()
    first, second = store.kv[:, :, 1].clone(), store.kv[:, :, 2].clone()
    host.swap_out([(1, 0)])
    host.swap_out([(2, 1)])
    host.swap_in([(0, 2)])
    assert torch.equal(store.kv[:, :, 2], first)
    host.swap_in([(1, 2)])
    assert torch.equal(store.kv[:, :, 2], second)


def test_swapping_nothing(store: KVStore) -> None:
    host = HostStore(store, num_host_blocks=1)
    host.swap_out([])
    host.swap_in([])
    assert not store.kv.any()
