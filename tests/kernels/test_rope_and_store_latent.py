from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from mini_infer.kernels.interface import LatentPlaces, Norm
from mini_infer.kernels.ops import TorchKernels
from mini_infer.kernels.rope_and_store_latent import rope_and_store_latent, rope_and_store_latent_reference
from mini_infer.modeling.rope import RopeSpec, RotaryTable


def make_case(
    tokens: int,
    heads: int,
    nope: int,
    rope: int,
    rank: int,
    interleaved: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, Norm, LatentPlaces]:
    generator = torch.Generator().manual_seed(0)
    # Both are parts of one product.
    down = torch.randn(tokens, heads * (nope + rope) + rank + rope, generator=generator).to(device, dtype)
    q, kv = down.tensor_split((heads * (nope + rope),), dim=1)
    cos, sin = RotaryTable(RopeSpec(100.0), rope, 64, dtype, device).forward(torch.arange(tokens, device=device) * 3)
    slots = torch.full((90, rank + rope), 7.0, dtype=dtype, device=device)
    mapping = torch.randperm(90, generator=generator)[:tokens].to(device)
    weight = torch.randn(rank, generator=generator).to(device, dtype)
    return q.unflatten(1, (heads, -1)), kv, Norm(weight, 1e-6), LatentPlaces(cos, sin, mapping, slots, interleaved)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("sizes", [(4, 12, 8, 24), (11, 16, 2, 100), (1, 1, 6, 33), (16, 128, 64, 512)], ids=str)
@pytest.mark.parametrize("function", [rope_and_store_latent, TorchKernels().rope_and_store_latent])
def test_equals_the_reference(function, sizes, interleaved: bool, device: torch.device) -> None:
    q, kv, norm, places = make_case(7, *sizes, interleaved, torch.float32, device)
    expected_places = places._replace(slots=places.slots.clone())
    expected = rope_and_store_latent_reference(q, kv, norm, expected_places)
    got = function(q, kv, norm, places)
    assert got.is_contiguous()
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(places.slots, expected_places.slots, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    q, kv, norm, places = make_case(9, 4, 32, 16, 48, True, dtype, device)
    exact = [Norm(norm.weight.float(), norm.eps), places._replace(slots=places.slots.float())]
    exact[1] = exact[1]._replace(cos=places.cos.float(), sin=places.sin.float())
    expected = rope_and_store_latent_reference(q.float(), kv.float(), *exact)
    torch.testing.assert_close(rope_and_store_latent(q, kv, norm, places).float(), expected, atol=3e-2, rtol=1e-2)
    torch.testing.assert_close(places.slots.float(), exact[1].slots, atol=3e-2, rtol=1e-2)


@pytest.mark.parametrize("function", [rope_and_store_latent, TorchKernels().rope_and_store_latent])
def test_latents_in_8_bits_are_those_rounded(function, device: torch.device) -> None:
    q, kv, norm, places = make_case(7, 4, 12, 8, 24, True, torch.float32, device)
    codes = places._replace(slots=torch.zeros_like(places.slots).to(torch.float8_e4m3fn))
    function(q, 100 * kv, norm, codes)
    rope_and_store_latent_reference(q, 100 * kv, norm, places)
    stored, whole = (case.slots.float()[places.slot_mapping] for case in (codes, places))
    torch.testing.assert_close(stored, whole.clamp(-448, 448), rtol=2**-4, atol=2**-10)
