"""What a model asks of the kernels that it is handed: the operations around attention, and their grouped arguments.

The residual stream goes from one to the next as a pair (x, residual), whose value is residual + x, or x alone where
residual is None. So whoever computes x may leave the addition to the norm that reads the stream next, or do it itself,
whichever costs less at the number of tokens: each operation says which it takes and gives.

T tokens, hidden size H, Hq query heads and Hkv KV heads of size D.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


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


class Kernels(Protocol):
    """Arguments are contiguous unless said."""

    name: str
    fallback: str | None  # what `auto` would have preferred, and why it could not be had

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x and residual [T, H], the stream -> (its RMSNorm times weight [H], its value).

        RMSNorm: Zhang & Sennrich 2019, arXiv:1910.07467, over H. Leaves its arguments as they are.
        """

    def norm_linear(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None = None,
        silu_mul: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """`add_rms_norm`, of its first result `linear` and, on request, `silu_mul` -> (that, the stream's value)."""

    def linear_add(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The stream of value residual [T, N] plus `linear` of x [T, K], whether the addition is done here or not."""

    def rope_and_store(self, qkv: Tensor, qk_norm: QKNorm | None, places: Places) -> Tensor:
        """Stores a step's K and V and returns its queries [T, Hq, D], whose tokens may lie apart.

        Args:
            qkv: [T, (Hq + 2 Hkv) * D], q heads | k heads | v heads.
        """

    def norm_qkv_rope(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        qk_norm: QKNorm | None,
        places: Places,
    ) -> tuple[Tensor, Tensor]:
        """`norm_linear` to q | k | v heads, and of that `rope_and_store` -> (queries, the stream's value)."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2I] -> silu(gate) * up [T, I]."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x [T, K], weight [N, K] (of any strides), bias [N] -> [T, N], in `out`, of x's dtype, where it is given."""
