"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and the ways its frequencies are stretched."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float
    attention_factor: float = 1.0

    def apply(self, inv_freq: Tensor, theta: float) -> Tensor:
        return inv_freq / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: slow frequencies divided by `factor`, fast ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int
    attention_factor: float = 1.0

    def apply(self, inv_freq: Tensor, theta: float) -> Tensor:
        turns = self.original_max_len * inv_freq / (2 * math.pi)  # of each dimension within the original length
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = keep.clamp(0, 1)
        return (1 - keep) * inv_freq / self.factor + keep * inv_freq


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): as Llama3Scaling with a ramp over dimensions, and cos and sin scaled
    by `attention_factor`, which changes the temperature of attention."""

    factor: float
    original_max_len: int
    beta_fast: float  # dimensions that turn more often than this within the original length are kept
    beta_slow: float  # those that turn less often are divided
    truncate: bool  # the ramp starts and ends at whole dimensions
    attention_factor: float

    def apply(self, inv_freq: Tensor, theta: float) -> Tensor:
        half = len(inv_freq)

        def dimension(turns: float) -> float:
            return half * math.log(self.original_max_len / (turns * 2 * math.pi)) / math.log(theta)

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        if low == high:
            high += 0.001
        divide = ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        return divide * inv_freq / self.factor + (1 - divide) * inv_freq


@dataclass(frozen=True)
class RopeSpec:
    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None

    @property
    def attention_factor(self) -> float:
        return 1.0 if self.scaling is None else self.scaling.attention_factor

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """[head_dim / 2] float32: radians a position."""
        inv_freq = 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        return inv_freq if self.scaling is None else self.scaling.apply(inv_freq, self.theta)


class RotaryTable(nn.Module):
    """cos and sin of every position below max_len, computed once in float32 and kept in the model's dtype."""

    table: Tensor  # [max_len, 2 * head_dim]: cos cos | -sin sin, each a half of head_dim

    def __init__(self, rope: RopeSpec, head_dim: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        inv_freq = rope.inverse_frequencies(head_dim).to(device)
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32, device=device), inv_freq)
        cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
        table = torch.cat((cos, cos, -sin, sin), dim=1).to(dtype)
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos and signed sin, each [T, 1, head_dim], the rows of both 2 * head_dim apart.

        Gathered once a step: a layer's kernel then need not wait for the position before it can ask for the angle.
        """
        cos, sin = self.table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        return cos, sin
