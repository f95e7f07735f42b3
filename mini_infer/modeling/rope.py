"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class RopeSpec:
    """
    Attributes:
        scaled: radians a position of each pair of dimensions, where a rope type stretches them.
        attention_factor: of cos and sin, which changes the temperature of attention (YaRN, arXiv:2309.00071).
    """

    theta: float
    scaled: tuple[float, ...] | None = None
    attention_factor: float = 1.0

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """[head_dim / 2] float32: radians a position."""
        if self.scaled is not None:
            return torch.tensor(self.scaled)
        return 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


class RotaryTable(nn.Module):
    """cos and sin of every position below max_len, computed once in float32 and kept in the model's dtype."""

    table: Tensor  # [max_len, 2 * head_dim]: cos cos | -sin sin, each a half of head_dim

    def __init__(self, rope: RopeSpec, head_dim: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        inv_freq = rope.inverse_frequencies(head_dim).to(device)
        if device.type == "meta":  # to compute without numbers, torch would import its compiler for seconds
            table = torch.empty((max_len, 4 * len(inv_freq)), dtype=dtype, device=device)
        else:
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
