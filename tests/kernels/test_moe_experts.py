"""Mixtures of experts: routes and products equal their definitions in any shape, and a token's are the same in any
company."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from pairwise import kernel_cases
from torch import Tensor

pytest.importorskip("triton")

from mini_infer.core.model_config import Routing
from mini_infer.kernels.interface import ExpertWeights, Norm, RouterSpec, Routes, Scores, Stream, TokenPlaces
from mini_infer.kernels.moe.experts import Tile, add_experts, expert_results, experts, tiles_for
from mini_infer.kernels.moe.reference import experts_reference, route_reference
from mini_infer.kernels.moe.route import norm_and_route, route
from mini_infer.kernels.ops import InvariantKernels, TritonKernels
from mini_infer.kernels.rms_norm import add_rms_norm_reference
from mini_infer.parallel.context import tree_sum
from mini_infer.quantization.formats import SCHEMES, Scheme, WeightFormat, quantize
from mini_infer.quantization.weight import QuantizedWeight

ROUTERS = [
    RouterSpec(7, 3),
    RouterSpec(5, 1, normalize=True),
    RouterSpec(12, 4, scale=2.5, num_groups=3, top_groups=2),  # DeepSeek-V2
    RouterSpec(
        12, 4, Scores.sigmoid, normalize=True, scale=2.5, correction_bias=True, num_groups=4, top_groups=2, group_top=2
    ),  # DeepSeek-V3
    RouterSpec(6, 6, Scores.sigmoid),
    RouterSpec(9, 2, routing=Routing.uniform, seed=2**32 - 1),
    RouterSpec(9, 2, routing=Routing.zipf, seed=2**31 - 1, normalize=True),
]


def places(count: int, device: torch.device) -> TokenPlaces:
    token_ids = torch.randint(0, 150_000, (count,), device=device)
    return TokenPlaces(token_ids, torch.arange(count, device=device) + 5)


@pytest.mark.parametrize("router", ROUTERS, ids=str)
def test_routes_are_those_of_the_definition(router: RouterSpec, device: torch.device) -> None:
    torch.manual_seed(0)
    logits = torch.randn(11, router.num_experts, device=device)
    bias = torch.randn(router.num_experts, device=device) if router.correction_bias else None
    tokens = places(len(logits), device)
    for dtype in (torch.float32, torch.bfloat16):
        ids, weights = route(logits.to(dtype), bias, router, tokens)
        expected_ids, expected = route_reference(logits.to(dtype), bias, router, tokens)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected)
        assert all(len(set(row)) == router.top_k for row in ids.tolist())
    assert route(logits[:0], bias, router, places(0, device))[0].shape == (0, router.top_k)


@pytest.mark.parametrize("router", ROUTERS, ids=str)
def test_norm_gate_and_route_in_one(router: RouterSpec, device: torch.device) -> None:
    torch.manual_seed(0)
    gate, x, residual = (torch.randn(n, 40, device=device) for n in (router.num_experts, 3, 3))
    norm, bias = Norm(torch.rand(40, device=device), 1e-6), torch.randn(router.num_experts, device=device)
    bias, tokens = bias if router.correction_bias else None, places(3, device)
    for dtype in (torch.float32, torch.bfloat16):
        for _ in range(2):  # the second finds the tickets as the first left them
            own = norm._replace(weight=norm.weight.to(dtype))
            stream = Stream(x.to(dtype), residual.to(dtype), own)
            normed, total, routes = norm_and_route(stream, gate, bias, router, tokens)
            expected_norm, expected_total = add_rms_norm_reference(*stream[:2], *own)
            torch.testing.assert_close(total, expected_total)
            torch.testing.assert_close(normed, expected_norm)
            alone, same, _ = norm_and_route(Stream(total, None, own), gate, bias, router, tokens)
            assert same is total
            assert torch.equal(alone, normed)
            expected = route_reference(normed.float() @ gate.T, bias, router, tokens)
            assert torch.equal(routes.ids, expected.ids)
            torch.testing.assert_close(routes.weights, expected.weights)


def test_of_equal_scores_the_first_experts_are_taken(device: torch.device) -> None:
    for find in (route, route_reference):
        ids, _ = find(torch.zeros(2, 6, device=device), None, RouterSpec(6, 3), places(2, device))
        assert ids.tolist() == [[0, 1, 2]] * 2


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_logits_that_are_no_numbers_lead_to_experts_all_the_same(device: torch.device) -> None:
    logits = torch.full((1, 12), torch.nan, device=device)
    for router in ROUTERS[2:4]:
        ids, _ = route(logits, torch.zeros(12, device=device), router, places(1, device))
        assert sorted(set(ids.flatten().tolist())) == sorted(ids.flatten().tolist())
        assert set(ids.flatten().tolist()) <= set(range(12))


@pytest.mark.parametrize(("routing", "shares"), [(Routing.uniform, (1, 1, 1, 1)), (Routing.zipf, (12, 6, 4, 3))])
def test_drawn_routes_have_the_shares_that_are_asked_for(routing: Routing, shares: tuple[int, ...]) -> None:
    count = 20_000
    router = RouterSpec(4, 1, routing=routing)
    tokens = places(count, torch.device("cpu"))
    ids, _ = route_reference(torch.zeros(count, 4), None, router, tokens)
    expected = torch.tensor(shares) / sum(shares)
    assert (ids.flatten().bincount(minlength=4) / count - expected).abs().max() < 0.015
    other, _ = route_reference(torch.zeros(count, 4), None, dataclasses.replace(router, seed=1), tokens)
    assert (ids == other).float().mean() - (expected**2).sum() < 0.015, "each layer draws for itself"


class Layer:
    def __init__(self, tokens: int, chosen: int, count: int, size: int, inner: int, dtype: torch.dtype, device) -> None:
        generator = torch.Generator().manual_seed(tokens)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype).to(device)

        self.x = randn(tokens, size)
        ids = torch.rand(tokens, count, generator=generator).argsort(1)[:, :chosen].int().contiguous()
        self.routes = Routes(ids.to(device), torch.rand(tokens, chosen, generator=generator).to(device))
        self.weights = ExpertWeights(randn(count, 2 * inner, size) / size**0.5, randn(count, size, inner) / inner**0.5)

    def some(self, part: slice = slice(None)) -> tuple[Tensor, Routes, ExpertWeights]:
        return self.x[part], Routes(*(tensor[part] for tensor in self.routes)), self.weights

    def exact(self) -> Tensor:
        routes = Routes(self.routes.ids, self.routes.weights.double())
        return experts_reference(self.x.double(), routes, ExpertWeights(*(part.double() for part in self.weights[:2])))

    def bound(self, rows: int) -> Tensor:
        """By which the first results may be off, given that SiLU(gate) * up, what down makes of it and their sum are
        rounded, each to half a unit in its last place; down adds up as many such errors as it has inputs. Twice that,
        for sums in float32, which are off by much less; in float32 these are all there is, to some 1e-5."""
        (gate_up, down), bound = (part.float() for part in self.weights[:2]), []
        for x, ids, weights in zip(self.x[:rows].float(), self.routes.ids.long(), self.routes.weights, strict=False):
            gate, up = (gate_up[ids] @ x).chunk(2, dim=1)
            h = (F.silu(gate) * up)[..., None]
            y = down[ids] @ h
            off = y.abs() + down[ids].abs() @ h.abs()
            bound.append((weights[:, None, None] * y).sum(0).abs() + (weights[:, None, None] * off).sum(0))
        return max(torch.finfo(self.x.dtype).eps, 1e-5) * torch.stack(bound)[..., 0]


SHAPES = [(1, 2, 3, 24, 20), (3, 1, 5, 40, 33), (9, 2, 2, 16, 16), (3, 3, 7, 72, 40)]


@pytest.mark.parametrize(
    ("shape", "few", "dtype"), kernel_cases(SHAPES, [0, 100], [torch.float32, torch.bfloat16]), ids=str
)
def test_products_are_those_of_the_definition(
    shape: tuple[int, ...], few: int, dtype: torch.dtype, device: torch.device
) -> None:
    layer = Layer(*shape, dtype, device)
    got = experts(*layer.some(), few_tokens=few)
    assert got.dtype == dtype
    assert ((got - layer.exact()).abs() <= layer.bound(len(got))).all()
    residual = torch.randn_like(got)
    torch.testing.assert_close(experts(*layer.some(), residual, few_tokens=few), residual + got)


def with_two_shared(layer: Layer) -> tuple[Tensor, Tensor]:
    """What the layer computes with its first two experts shared; and as it does where each token goes to them, too,
    with a weight of one."""
    x, routes, (gate_up, down, *_) = layer.some()
    residual, inner = torch.randn_like(x), down.shape[2]
    gates, ups = gate_up[:2].split(inner, dim=1)
    shared = torch.cat((gates.flatten(0, 1), ups.flatten(0, 1))), down[:2].transpose(0, 1).flatten(1).contiguous()
    ids = torch.arange(2, dtype=torch.int32, device=x.device).expand(len(x), 2)
    more = Routes(torch.cat((routes.ids, ids), 1), torch.cat((routes.weights, torch.ones_like(ids).float()), 1))
    got = experts(x, routes, layer.weights, residual, few_tokens=100, shared=shared)
    return got, experts(x, more, layer.weights, residual, few_tokens=100)


@pytest.mark.parametrize("shape", [(1, 2, 3, 24, 20), (3, 3, 7, 72, 40)], ids=str)
def test_shared_experts_are_some_of_the_chosen(shape: tuple[int, ...], device: torch.device) -> None:
    torch.testing.assert_close(*with_two_shared(Layer(*shape, torch.float32, device)))


@pytest.mark.gpu
def test_shared_experts_of_deepseek_v2_lites_shape() -> None:
    got, expected = with_two_shared(Layer(1, 6, 64, 2048, 1408, torch.bfloat16, "cuda"))
    assert (got - expected).norm() < 0.01 * expected.norm()


def test_shared_experts_ride_along_for_one_token_of_plain_weights_alone(device: torch.device) -> None:
    kernels, layer = TritonKernels(), Layer(2, 2, 3, 24, 20, torch.float32, device)
    x, routes, weights = layer.some()
    shared = torch.randn(80, 24, device=device), torch.randn(24, 40, device=device)
    assert kernels.experts_and_shared(x, routes, weights, shared, x) is None
    one = x[:1], Routes(routes.ids[:1], routes.weights[:1]), weights
    assert kernels.experts_and_shared(*one, shared, x[:1]) is not None
    assert kernels.experts_and_shared(*one, (shared[0], shared[1][:, :30]), x[:1]) is None
    assert InvariantKernels().experts_and_shared(*one, shared, x[:1]) is None


@pytest.mark.parametrize("few", [0, 100])
def test_one_expert_that_takes_everything(few: int, device: torch.device) -> None:
    layer = Layer(9, 2, 5, 32, 16, torch.float32, device)
    layer.routes.ids.fill_(3)
    got = experts(*layer.some(), few_tokens=few, tiles=(Tile(16, 64, 32, 4, 2), Tile(16, 64, 16, 4, 2)))
    torch.testing.assert_close(got.double(), layer.exact(), rtol=1e-5, atol=1e-5)
    assert experts(*layer.some(slice(0, 0)), few_tokens=few).shape == (0, 32)


@pytest.mark.parametrize(
    ("size", "inner", "dtype"),
    [(72, 40, torch.float32), (72, 40, torch.bfloat16), (36, 40, torch.bfloat16), (72, 36, torch.bfloat16)],
)
def test_tall_tiles_full_and_half(size: int, inner: int, dtype: torch.dtype, device: torch.device) -> None:
    """A row of 36 numbers in half precision is no multiple of 16 bytes, as which descriptors take them."""
    layer = Layer(150, 2, 4, size, inner, dtype, device)
    layer.routes.ids[:, 0], layer.routes.ids[:40, 1], layer.routes.ids[40:, 1] = 0, 2, 3  # 150, none, 40 and 110 pairs
    got = experts(*layer.some(), few_tokens=0, tiles=(Tile(128, 64, 32, 4, 2), Tile(128, 64, 16, 4, 2)))
    assert ((got - layer.exact()).abs() <= layer.bound(150)).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("few", [0, 100])
def test_what_has_no_expert_here_adds_nothing(few: int, device: torch.device) -> None:
    """Whatever stands in the row of a token that has none at all."""
    layer = Layer(5, 3, 5, 24, 16, torch.float32, device)
    layer.routes.ids[0, 0], layer.routes.ids[1, 1:], layer.routes.ids[3:] = -1, -1, -1
    here = layer.routes.ids >= 0
    expected = Routes(layer.routes.ids.clamp(min=0), layer.routes.weights * here)
    whole = experts_reference(layer.x, expected, layer.weights)
    layer.x[4] = torch.nan
    for found in (experts(*layer.some(), few_tokens=few, elsewhere=True), experts_reference(*layer.some())):
        torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)
    none = Routes(torch.full_like(layer.routes.ids, -1), layer.routes.weights)
    assert not experts(layer.x, none, layer.weights, few_tokens=few, elsewhere=True).any()


def test_a_token_is_the_same_to_the_bit_in_any_company(device: torch.device) -> None:
    layer = Layer(21, 2, 6, 24, 16, torch.float32, device)
    every = experts(*layer.some(), few_tokens=0)
    for part in (slice(0, 1), slice(2, 9), slice(20, 21)):
        assert torch.equal(experts(*layer.some(part), few_tokens=0), every[part])


QUANTIZED = {
    **SCHEMES,
    "w4a16_zeros": Scheme(dataclasses.replace(SCHEMES["w4a16"].weights, symmetric=False, columns=64)),
}
del QUANTIZED["mixed"], QUANTIZED["w8a16"]  # whose outliers are no part of a weight; whose weights are w8a8's


def stacked(weights: Tensor, form: WeightFormat) -> QuantizedWeight:
    own = [QuantizedWeight.of(quantize(weight, form), form) for weight in weights]
    zeros = None if own[0].zeros is None else torch.stack([weight.zeros for weight in own])
    codes, scales = (torch.stack([weight[part] for weight in own]) for part in (0, 1))
    return QuantizedWeight(codes, scales, zeros, form)


@pytest.mark.parametrize("few", [0, 100])
@pytest.mark.parametrize("scheme", QUANTIZED)
def test_quantized_experts_are_those_of_the_definition(scheme: str, few: int, device: torch.device) -> None:
    layer = Layer(2, 2, 3, 128, 128, torch.float32, device)
    form, whole = QUANTIZED[scheme], layer.exact()
    layer.weights = ExpertWeights(*(stacked(part, form.weights) for part in layer.weights[:2]), form.activations)
    got = experts(*layer.some(), few_tokens=few)
    expected = experts_reference(*layer.some())
    torch.testing.assert_close(got, expected, rtol=1e-2 if form.activations else 1e-4, atol=1e-2)
    assert (got - whole).norm() / got.norm() < 0.25


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_of_real_shapes(dtype: torch.dtype) -> None:
    """Qwen3-30B-A3B's experts, and the same to the bit in every tile."""
    layer = Layer(2048, 8, 128, 2048, 768, dtype, "cuda")
    every, exact, bound = experts(*layer.some(), few_tokens=0), layer.exact(), layer.bound(2048)
    assert ((every - exact).abs() <= bound).all()
    for rows in (1, 4, 5, 64, 300, 2048):
        own = layer.some(slice(rows))
        assert ((experts(*own) - exact[:rows]).abs() <= bound[:rows]).all(), rows
        assert torch.equal(experts(*own, few_tokens=0), every[:rows]), rows
    for pairs in (8, 4096, 16384):
        tiles = tiles_for(pairs, 128, layer.x.element_size())
        assert torch.equal(experts(*layer.some(), few_tokens=0, tiles=tiles), every), tiles


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", QUANTIZED)
def test_quantized_experts_of_real_shapes(scheme: str) -> None:
    """Weights become numbers in registers, which tensor cores read as they run.

    Where activations are rounded, a sum that is off in its last place can round to the next code; so results are held
    against the layer in float64, from which they may be no further off than the definition's.
    """
    for tokens in (16, 128, 1024):
        layer, form = Layer(tokens, 4, 16, 2048, 768, torch.bfloat16, "cuda"), QUANTIZED[scheme]
        exact = layer.exact()
        layer.weights = ExpertWeights(*(stacked(part, form.weights) for part in layer.weights[:2]), form.activations)
        found = [experts(*layer.some(), few_tokens=0) for _ in range(5)]
        assert all(torch.equal(y, found[0]) for y in found)
        expected = experts_reference(*layer.some())
        assert (found[0] - exact).norm() < 1.02 * (expected - exact).norm()
        assert form.activations or (found[0] - expected).norm() < 0.01 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 64])
def test_steps_can_be_captured_and_replayed_with_other_routes(tokens: int) -> None:
    layer = Layer(tokens, 4, 16, 256, 128, torch.bfloat16, "cuda")
    experts(*layer.some())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(*layer.some())
    for expert in (3, 15):
        layer.routes.ids.fill_(expert)
        graph.replay()
        assert torch.equal(out, experts(*layer.some()))


@pytest.mark.parametrize("inner", [16, 48])  # four chunks of 4; and of 12
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_branches_of_each_experts_sum(ranks: int, inner: int, device: torch.device) -> None:
    layer = Layer(5, 2, 3, 40, inner, torch.float32, device)
    gate_up, down, *_ = layer.weights
    own = inner // ranks
    branches = []
    for rank in range(ranks):
        part = slice(rank * own, (rank + 1) * own)
        gate, up = gate_up.chunk(2, dim=1)
        weights = ExpertWeights(
            torch.cat((gate[:, part], up[:, part]), 1), down[..., part].contiguous(), None, 4 // ranks
        )
        branches.append(expert_results(layer.x, layer.routes, weights, torch.float32))
    summed = tree_sum(torch.stack(branches))
    whole = ExpertWeights(gate_up, down, None, 4)
    assert torch.equal(summed, expert_results(layer.x, layer.routes, whole, torch.float32))
    got = experts(layer.x, layer.routes, whole, few_tokens=0)
    assert torch.equal(add_experts(summed, layer.routes.weights), got)
    assert ((got - layer.exact()).abs() <= layer.bound(5)).all()


def test_chunks_of_any_tile_are_one_sum(device: torch.device) -> None:
    """Of 8 chunks of 16, of inputs in half precision."""
    layer = Layer(9, 2, 3, 40, 128, torch.bfloat16, device)
    weights = layer.weights._replace(chunks=8)
    low, tall = (
        expert_results(layer.x, layer.routes, weights, torch.float32, tiles=(tile, tile))
        for tile in (Tile(16, 64, 64, 4, 2), Tile(128, 64, 64, 4, 2))
    )
    assert torch.equal(low, tall)
    got = add_experts(tall, layer.routes.weights)
    assert ((got - layer.exact()).abs() <= layer.bound(9)).all()
