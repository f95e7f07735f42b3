from __future__ import annotations

import pytest
import torch

from mini_infer.cache.kv_store import KVStore
from mini_infer.cache.layout import KVLayout, Plane

DEVICES = [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_available() else [])


@pytest.fixture(params=DEVICES, ids=str)
def store(request: pytest.FixtureRequest) -> KVStore:
    return KVStore(KVLayout.of_heads(3, 2, 8, torch.float32), num_blocks=10, block_size=4, device=request.param)


LATENT = Plane("latent", (576,), torch.bfloat16)
FP8 = tuple(Plane(n, (2, 8), torch.float8_e4m3fn, scales=Plane(f"{n}_scales", (2,), torch.float32)) for n in "kv")
LAYOUTS = {
    "keys and values": KVLayout.of_heads(3, 2, 8, torch.float32),
    "latent": KVLayout.alike(2, LATENT),
    "fp8": KVLayout.alike(2, *FP8),
    "unlike layers": KVLayout((FP8, (LATENT,), FP8)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_store_of_any_layout(name: str) -> None:
    layout = LAYOUTS[name]
    store = KVStore(layout, num_blocks=10, block_size=4, device=torch.device("cpu"))
    assert sum(tensor.nbytes for tensor in store.tensors) == 10 * layout.bytes_per_block(4)
    written = 0
    for layer, planes in enumerate(layout.layers):
        for plane in planes:
            for stored in plane.stored:
                own = store.plane(layer, stored.name)
                assert own.shape == (10, 4, *stored.shape)
                assert own.dtype is stored.dtype
                assert own.is_contiguous()
                assert not own.float().any(), "nobody else's memory"
                store.slots(layer, stored.name)[13] = 1.0
                assert (own[3, 1].float() == 1).all()
                written += own[3, 1].numel()
    assert sum(int(tensor.float().sum()) for tensor in store.tensors) == written


def test_keys_and_values_are_one_tensor(store: KVStore) -> None:
    (kv,) = store.tensors
    assert kv.shape == (3, 2, 10, 4, 2, 8)
    assert store.keys(1).data_ptr() == kv[1, 0].data_ptr()
    assert store.values(1).data_ptr() == kv[1, 1].data_ptr()


def test_a_slot_is_a_place_in_a_block(store: KVStore) -> None:
    store.tensors[0].normal_()
    assert store.slots(1, "k").shape == store.slots(1, "v").shape == (40, 2, 8)
    for slot in (21, 3, 38):
        block, offset = divmod(slot, 4)
        assert torch.equal(store.slots(1, "k")[slot], store.keys(1)[block, offset])
        assert torch.equal(store.slots(1, "v")[slot], store.values(1)[block, offset])


def test_writing_to_slots_touches_no_other(store: KVStore) -> None:
    k, v = torch.randn(2, 3, 2, 8, device=store.device)
    slots = torch.tensor([21, 3, 38], device=store.device)
    store.slots(1, "k")[slots] = k
    store.slots(1, "v")[slots] = v
    assert torch.equal(store.keys(1).flatten(0, 1)[slots], k)
    assert torch.equal(store.values(1).flatten(0, 1)[slots], v)
    assert torch.count_nonzero(store.tensors[0]) == torch.count_nonzero(store.tensors[0][1]) == k.numel() + v.numel()


def test_blocks_are_keys_then_values(store: KVStore) -> None:
    store.tensors[0].normal_()
    assert torch.equal(store.blocks(2)[7], store.keys(2)[7].flatten())
    assert torch.equal(store.blocks(2)[10 + 7], store.values(2)[7].flatten())
    assert store.blocks(2).data_ptr() == store.keys(2).data_ptr()
