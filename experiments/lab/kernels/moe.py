"""The experts of one layer of a mixture of experts, by how tokens are brought to them.

    dense      every expert computes every token, and most of it is multiplied by zero
    padded     each expert has a buffer of as many tokens as the busiest gets, and one batched product takes all buffers
    packed     tokens are sorted by expert, and each expert that has any computes its own: the host reads the counts
    few        each token's experts, one token after the other (mini_infer/kernels/moe/experts.py)
    grouped    tokens sorted by expert, in tiles of one expert each (the same)

Bytes are the weights of the experts that are chosen at all, and tokens in and out; operations those of the chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.lab.kernels.case import Case, Implementation, VariantAbsent, Work, require_triton, some
from mini_infer.core.errors import ConfigError
from mini_infer.core.model_config import Routing
from mini_infer.kernels.interface import ExpertWeights, RouterSpec, Routes, TokenPlaces
from mini_infer.kernels.moe.reference import experts_reference, route_reference

DENSE, PADDED, PACKED, FEW, GROUPED = "dense", "padded", "packed", "few", "grouped"
ROUTINGS = ("uniform", "zipf", "one")  # one: all tokens go to the first experts
CHECKED_TOKENS = 32
MOST_FEW = 64  # tokens


class MoELayer(Case, tokens=None, routing="uniform", experts=128, chosen=8, hidden=2048, inner=768):
    name = "moe_layer"
    variants = (DENSE, PADDED, PACKED, FEW, GROUPED)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        tokens, experts, chosen, routing = (self.shape[key] for key in ("tokens", "experts", "chosen", "routing"))
        if routing not in ROUTINGS or chosen > experts:
            raise ConfigError(
                f"the case {self.name}: routing is one of {', '.join(ROUTINGS)}, and no more experts are chosen than "
                f"there are; got {routing!r} and {chosen} of {experts}"
            )
        drawn = Routing.learned if routing == "one" else Routing(routing)
        logits = -torch.arange(float(experts)).expand(tokens, experts)
        every = torch.arange(tokens)
        router = RouterSpec(experts, chosen, routing=drawn)
        self._ids, _ = route_reference(logits, None, router, TokenPlaces(every, every))
        self._counts = self._ids.flatten().bincount(minlength=experts)

    def work(self, variant: str = "") -> Work:
        tokens, chosen, hidden = (self.shape[key] for key in ("tokens", "chosen", "hidden"))
        expert = 3 * hidden * self.shape["inner"]
        moved = int((self._counts > 0).sum()) * expert + 2 * tokens * hidden
        return Work(moved * self.dtype.itemsize, 2.0 * tokens * chosen * expert, "read_gb_s")

    def allocate(self, copies: int) -> None:
        tokens, count, hidden, inner = (self.shape[key] for key in ("tokens", "experts", "hidden", "inner"))
        ids, self.sets = self._ids.to(self.device), []
        for _ in range(copies):
            routes = Routes(ids.clone(), torch.rand(ids.shape, device=self.device))
            gate_up = self.random(count, 2 * inner, hidden, scale=hidden**-0.5)
            down = self.random(count, hidden, inner, scale=inner**-0.5)
            self.sets.append((self.random(tokens, hidden), routes, gate_up, down))

    def implementation(self, variant: str) -> Implementation:
        padded = partial(_padded, int(self._counts.max()))
        in_torch: dict[str, Callable[..., Tensor]] = {DENSE: _dense, PADDED: padded, PACKED: _packed}
        if compute := in_torch.get(variant):
            return self.on_sets(compute, graph_safe=variant != PACKED)
        if variant == FEW and self.shape["tokens"] > MOST_FEW:
            raise VariantAbsent(f"it is for up to {MOST_FEW} tokens")
        require_triton(self.device)
        from mini_infer.kernels.moe.experts import experts

        few = MOST_FEW if variant == FEW else 0
        return self.on_sets(lambda x, routes, *weights: experts(x, routes, ExpertWeights(*weights), few_tokens=few))

    def checked(self, output: Any) -> Iterable[tuple[Tensor, Tensor]]:
        x, routes, *weights = self.sets[0]
        rows, exact = some(len(x), CHECKED_TOKENS), ExpertWeights(*(weight.float() for weight in weights))
        return [(output[rows], experts_reference(x[rows].float(), Routes(*(part[rows] for part in routes)), exact))]


def _products(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """x [E, N, H], of each expert its own -> [E, N, H]."""
    gate, up = torch.bmm(x, gate_up.transpose(1, 2)).chunk(2, dim=-1)
    return torch.bmm(F.silu(gate) * up, down.transpose(1, 2))


def _dense(x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor) -> Tensor:
    count = len(down)
    shares = routes.weights.new_zeros((len(x), count)).scatter_(1, routes.ids.long(), routes.weights).to(x.dtype)
    y = _products(x.expand(count, *x.shape), gate_up, down)
    return torch.bmm(shares[:, None], y.transpose(0, 1))[:, 0]


def _packed(x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor) -> Tensor:
    experts, order = routes.ids.flatten().sort(stable=True)
    found = x.new_empty(len(order), x.shape[1])
    begin = 0
    for expert, count in enumerate(experts.bincount(minlength=len(down)).tolist()):
        if count:
            own = order[begin : begin + count]
            of_expert = slice(expert, expert + 1)
            found[own] = _products(x[own // routes.ids.shape[1]][None], gate_up[of_expert], down[of_expert])[0]
        begin += count
    return (found.view(*routes.ids.shape, -1) * routes.weights[..., None]).sum(1).to(x.dtype)


def _padded(capacity: int, x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor) -> Tensor:
    """A pair's place in its expert's buffer is the number of pairs of that expert before it."""
    (tokens, chosen), count = routes.ids.shape, len(down)
    experts = routes.ids.flatten().long()
    before = F.one_hot(experts, count).cumsum(0).gather(1, experts[:, None])[:, 0] - 1
    places = experts * capacity + before
    buffers = x.new_zeros((count * capacity, x.shape[1]))
    buffers.index_copy_(0, places, x.repeat_interleave(chosen, 0))
    y = _products(buffers.unflatten(0, (count, capacity)), gate_up, down).flatten(0, 1)[places]
    return (y.unflatten(0, (tokens, chosen)) * routes.weights[..., None]).sum(1).to(x.dtype)
