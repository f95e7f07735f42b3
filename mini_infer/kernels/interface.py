"""What a model asks of the kernels that it is handed: the operations between products and attention, and their grouped
arguments.

The residual stream goes from one to the next as a pair (x, residual), whose value is residual + x, or x alone where
residual is None. So whoever computes x may leave the addition to the norm that reads the stream next, or do it itself,
whichever costs less at the number of tokens. `Stream` is such a pair with the norm through which it is read next.

T tokens, hidden size H, Hq query heads and Hkv KV heads of size D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mini_infer.core.model_config import Routing
from mini_infer.quantization.formats import ActivationFormat, WeightFormat
from mini_infer.quantization.weight import QuantizedTokens, QuantizedWeight


class Norm(NamedTuple):
    """RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) over H, times weight."""

    weight: Tensor  # [H]
    eps: float


class Ranks(Protocol):
    """Who share a sum. ParallelContext (parallel/context.py) is one."""

    def in_halves(self, rows: int) -> Sequence[slice]:
        """How so many rows are cut, so that a sum of some is under way while others are computed; none: not at all."""

    def begin_all_reduce(self, x: Tensor) -> Callable[[], object]:
        """Begins to make x, contiguous, the sum of all ranks' x. What is returned waits for it."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, contiguous, which may be written to."""

    def tree_sum(self, x: Tensor) -> Tensor:
        """As all_reduce, added up as a balanced tree over the ranks in their order."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor] | None:
        """(norm(total), total), where total is residual plus the sum of all ranks' x; None where that is better done
        one after the other."""


@dataclass(frozen=True, eq=False)
class Part:
    """This rank's part of an x that all ranks' parts add up to: whoever reads it adds them up, in one kernel with what
    it does first where it can."""

    own: Tensor  # [T, H], of `dtype`; float32 where it is `ordered`
    ranks: Ranks
    dtype: torch.dtype  # of x
    ordered: bool = False  # to be added up as a tree
    bias: Tensor | None = None  # [H], added behind the sum
    # Rows that are being summed up in their place, and what waits for it: whoever reads them one by one goes on while
    # the others travel.
    halves: Sequence[tuple[slice, Callable[[], object]]] = ()
    more: Tensor | None = None  # [T, H] of `dtype`, added to `own`, where there is one rank

    @property
    def shape(self) -> torch.Size:
        return self.own.shape

    def __len__(self) -> int:
        return len(self.own)

    def sum(self) -> Tensor:
        """x, which may be written to."""
        if self.halves:
            for _, wait in self.halves:
                wait()
            return self.own
        if not self.ordered:
            return self.ranks.all_reduce(self.own if self.more is None else self.own + self.more)
        total = self.ranks.tree_sum(self.own)
        return (total if self.bias is None else total + self.bias.float()).to(self.dtype)


class Stream(NamedTuple):
    x: Tensor | Part  # [T, H]
    residual: Tensor | None  # [T, H]
    norm: Norm


class Gated(NamedTuple):
    """Gate and up, of which a reader takes silu(gate) * up: it may make codes of it in the same step."""

    gate_up: Tensor  # [T, 2I]


class QKNorm(NamedTuple):
    """The norm over each head of q and of k (Henry et al. 2020, arXiv:2010.04245), as RMSNorm."""

    q_weight: Tensor  # [D]
    k_weight: Tensor  # [D]
    eps: float


class Places(NamedTuple):
    """Where tokens stand: the angles of their positions, and their slots in a layer's cache.

    Contiguous but for cos and sin, whose rows may lie apart, both at one distance.
    """

    cos: Tensor  # [T, 1, D], cos cos of each token's angles, as RotaryTable gives them
    sin: Tensor  # [T, 1, D], -sin sin
    slot_mapping: Tensor  # [T] int64, where in key_slots and value_slots each token goes
    key_slots: Tensor  # [slots, Hkv, D]
    value_slots: Tensor  # [slots, Hkv, D]
    kv_scales: Tensor | None = None  # [2, Hkv] float32: what is stored is divided by them, where the cache is float8


class Scores(str, Enum):
    """What a router makes of its logits."""

    softmax = "softmax"  # over all experts
    sigmoid = "sigmoid"  # each for itself


@dataclass(frozen=True)
class RouterSpec:
    """How a token's experts and their weights follow from the router's logits [E]. Computed in float32:

    scores = softmax or sigmoid of the logits
    choice = scores, + a correction bias where there is one; or what `routing` draws instead
    groups of E / num_groups experts: those with the top_groups highest sums of their group_top highest choices
    experts = the top_k highest choices in these groups, the highest first; of equals the first
    weights = the experts' scores, divided by their sum where `normalize`, times `scale`
    """

    num_experts: int
    top_k: int
    scores: Scores = Scores.softmax
    normalize: bool = False
    scale: float = 1.0
    correction_bias: bool = False  # the checkpoint has one (Wang et al. 2024, arXiv:2408.15664)
    num_groups: int = 1
    top_groups: int = 1
    group_top: int = 1
    float32_logits: bool = False  # the product with x is in float32 too
    routing: Routing = Routing.learned
    seed: int = 0  # of what `routing` draws, another in each layer


class TokenPlaces(NamedTuple):
    """Which tokens a step computes, for those who go by that."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    real: Tensor | None = None  # [T] int32, 1 of a token and 0 of padding; None: nobody asks


class Routes(NamedTuple):
    """Where tokens go. An expert may come up any number of times."""

    ids: Tensor  # [T, k] int32, of experts
    weights: Tensor  # [T, k] float32


class ExpertWeights(NamedTuple):
    """Of x's dtype; or quantized, with E as the first dimension of each tensor."""

    gate_up: Tensor | QuantizedWeight  # [E, 2I, H], gate over up
    down: Tensor | QuantizedWeight  # [E, H, I]
    activations: ActivationFormat | None = None  # of x and of what down takes; None: they stay as they are
    chunks: int = 1  # of down's I, as in `Kernels.linear`


class LatentPlaces(NamedTuple):
    """As Places, for a cache of latents: rank R, and P dimensions that are rotated."""

    cos: Tensor  # [T, 1, P], cos cos of each token's angles, as RotaryTable gives them
    sin: Tensor  # [T, 1, P], -sin sin
    slot_mapping: Tensor  # [T] int64, where in slots each token goes
    slots: Tensor  # [slots, R + P], of the queries' dtype or float8_e4m3fn
    interleaved: bool  # dimensions 2i and 2i + 1 are rotated together; else i and i + P / 2


class Kernels(Protocol):
    """Arguments are contiguous unless said."""

    name: str
    fallback: str | None  # what `auto` would have preferred, and why it could not be had
    invariant: bool  # a token's numbers are the same in any company, to the bit
    gemv: ModuleType | None  # kernels/gemv.py, where products of few rows with unquantized weights may use it
    all_reduce: ModuleType | None  # kernels/all_reduce.py, for sums over ranks
    dispatch: ModuleType | None  # kernels/moe/dispatch.py, for experts of other ranks
    lora: ModuleType  # kernels/lora.py, or lora_kernels.py

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None, *, chunks: int = 1
    ) -> Tensor:
        """x [T, K] W^T + b, W [N, K] -> [T, N] of x's dtype, in `out`, contiguous, where it is given. `chunks`, where
        `num_chunks` gives a number: K is summed in so many parts, which are added up as a balanced tree; `out` may
        then be float32, for a sum that goes on elsewhere."""

    def num_chunks(self, in_size: int, dtype: torch.dtype) -> int | None:
        """Of a product whose inputs ranks share, over all ranks: so its sum is the same on any number of ranks that
        divides this one. None: sums have no order of their own."""

    def quantized_linear(
        self,
        x: Tensor | QuantizedTokens,
        weight: QuantizedWeight,
        bias: Tensor | None,
        activations: ActivationFormat | None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """As quantization/weight.py defines it, to rounding, plus residual [T, N] -> [T, N]."""

    def quantized_refusal(self, form: WeightFormat, activations: ActivationFormat | None, in_size: int) -> str | None:
        """Why there is no `quantized_linear` for weights [N, in_size] of these formats, or None if there is."""

    def outlier_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product with columns of a quantized weight that are kept as they are, x [T, C] and weight [N, C] ->
        [T, N], summed as `quantized_linear` sums the others."""

    def quantized_gemv(
        self, weight: QuantizedWeight, activations: ActivationFormat | None, rows: int, dtype: torch.dtype
    ) -> Callable[..., Tensor] | None:
        """`quant_gemv` (kernels/quantized/gemv.py), which does its neighbours' work too, where it is the fastest."""

    def adds_residual(self, weight: QuantizedWeight, activations: ActivationFormat | None, rows: int) -> bool:
        """Whether it costs `quantized_linear` less to add a residual than it costs the norm that reads the sum next."""

    def quantize_tokens(self, x: Tensor, form: ActivationFormat, silu_mul: bool = False) -> QuantizedTokens:
        """x [T, K], or of gate_up [T, 2K] what `silu_mul` gives, as codes."""

    def quantized_norm(self, stream: Stream, form: ActivationFormat) -> tuple[QuantizedTokens, Tensor]:
        """The stream -> (its norm, quantized; its value)."""

    def add_rms_norm(self, stream: Stream, value: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The stream -> (its norm, its value, in `value` where it is given and there is a residual). Leaves its
        argument as it is."""

    def rope_and_store(self, qkv: Tensor, qk_norm: QKNorm | None, places: Places, more: Tensor | None = None) -> Tensor:
        """Stores a step's K and V and returns its queries [T, Hq, D], whose tokens may lie apart.

        Args:
            qkv: [T, (Hq + 2 Hkv) * D], q heads | k heads | v heads.
            more: of qkv's shape and dtype, added to it.
        """

    def rope_and_store_latent(self, q: Tensor, kv: Tensor, norm: Norm, places: LatentPlaces) -> Tensor:
        """Stores a step's latents, the first R numbers of `kv` normalised and the others rotated, and returns its
        queries, the last P numbers of each head rotated. What was rotated has the first of each pair in its first half.

        Args, of which tokens may lie apart:
            q: [T, Hq, D]; what is returned is contiguous.
            kv: [T, R + P].
        """

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """x [T, K] and weight [2I, K], gate over up -> silu(gate) * up [T, I], where one kernel is the fastest."""

    def silu_mul(self, gate_up: Tensor, more: Tensor | None = None) -> Tensor:
        """gate_up [T, 2I], to which `more` of its shape and dtype is added -> silu(gate) * up [T, I]."""

    def route(self, logits: Tensor, bias: Tensor | None, router: RouterSpec, tokens: TokenPlaces) -> Routes:
        """As RouterSpec defines it, of logits [T, E] and bias [E] float32."""

    def norm_and_route(
        self, stream: Stream, gate: Tensor, bias: Tensor | None, router: RouterSpec, tokens: TokenPlaces
    ) -> tuple[Tensor, Tensor, Routes] | None:
        """(the stream's norm, its value, and `route` of the norm's product with gate [E, H]), where one kernel for all
        is the fastest; else None."""

    def experts(
        self,
        x: Tensor,
        routes: Routes,
        weights: ExpertWeights,
        residual: Tensor | None = None,
        *,
        elsewhere: bool = False,
    ) -> Tensor:
        """x [T, H] -> [T, H] of its dtype: the sum over a token's experts of their weight times down(silu(gate x) *
        up x), plus residual [T, H]. `elsewhere`: some experts are -1, for which nothing is added, whatever x is."""

    def experts_and_shared(
        self, x: Tensor, routes: Routes, weights: ExpertWeights, shared: tuple[Tensor, Tensor], residual: Tensor
    ) -> Tensor | None:
        """`experts`, with what shared experts make of every token in the sum, where that is the fastest; else None.
        shared: their gate over up [2S, H] and down [H, S]."""

    def expert_results(self, x: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
        """The first part of `experts`: what each of a token's experts makes of it, [T, k, H] float32, for sums that go
        on elsewhere before they are rounded."""

    def add_experts(self, results: Tensor, shares: Tensor) -> Tensor:
        """The last part of `experts`: results [T, k, H] of a token's experts and their weights [T, k] -> [T, H], summed
        from first to last."""
