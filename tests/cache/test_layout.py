from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

from mini_infer.cache.layout import KVLayout, Plane

LATENT = Plane("latent", (576,), torch.bfloat16)
FP8 = tuple(
    Plane(name, (8, 128), torch.float8_e4m3fn, scales=Plane(f"{name}_scales", (8,), torch.float32)) for name in "kv"
)


def test_bytes_of_a_block() -> None:
    assert KVLayout.of_heads(28, 4, 128, torch.bfloat16).bytes_per_block(16) == 28 * 2 * 16 * 4 * 128 * 2
    assert KVLayout.alike(27, LATENT).bytes_per_block(16) == 27 * 16 * 576 * 2
    assert KVLayout.alike(32, *FP8).bytes_per_block(16) == 32 * 16 * 2 * (8 * 128 + 8 * 4)
    assert KVLayout(((LATENT,), FP8)).bytes_per_block(1) == 576 * 2 + 2 * (8 * 128 + 8 * 4)


def test_it_is_a_value() -> None:
    layout = KVLayout.of_heads(3, 2, 8, torch.float32)
    assert layout == KVLayout.of_heads(3, 2, 8, torch.float32)
    assert hash(layout) == hash(KVLayout.of_heads(3, 2, 8, torch.float32))
    others = [(2, 2, 8, torch.float32), (3, 1, 8, torch.float32), (3, 2, 4, torch.float32), (3, 2, 8, torch.bfloat16)]
    assert all(layout != KVLayout.of_heads(*other) for other in others)
    with pytest.raises(FrozenInstanceError):
        layout.layers = ()  # type: ignore[misc]


def test_heads_are_those_of_plain_keys_and_values() -> None:
    k, v = (Plane(name, (2, 8), torch.float32) for name in "kv")
    wide, more = Plane("v", (2, 16), torch.float32), Plane("v", (3, 8), torch.float32)
    assert KVLayout.of_heads(3, 2, 8, torch.float32).heads == (k, v)
    assert KVLayout.of_heads(3, 2, 8, torch.float32, 16).heads == (k, wide)
    for other in (KVLayout.alike(2, LATENT), KVLayout.alike(2, *FP8), KVLayout.alike(2, k, more), KVLayout.alike(2, k)):
        assert other.heads is None
    assert KVLayout(((k, v), (k, wide))).heads is None


def test_layers_that_keep_the_same_are_one_group() -> None:
    layout = KVLayout(((LATENT,), FP8, (LATENT,)))
    assert layout.groups() == [([0, 2], (LATENT,)), ([1], FP8)]


@pytest.mark.parametrize("planes", [(), (LATENT, LATENT), (FP8[0], Plane("k_scales", (), torch.float32))])
def test_a_name_stands_once(planes: tuple[Plane, ...]) -> None:
    with pytest.raises(ValueError, match=r"layer 1 has \["):
        KVLayout(((LATENT,), planes))
