"""Hot experts placed twice: which, where, and that nobody's tokens change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_expert import CPU, EXPERTS, Layer, generated, one_process, together
from test_expert import SHAPE as DEEPSEEK
from torch import Tensor

from mini_infer import LLMEngine
from mini_infer.core.config import Dispatch, ModelConfig
from mini_infer.kernels.interface import ExpertWeights, Routes
from mini_infer.kernels.moe.reference import experts_reference
from mini_infer.kernels.ops import Kernels, TorchKernels
from mini_infer.modeling.loader import load_model, load_spec
from mini_infer.parallel import expert_copies
from mini_infer.parallel.context import ParallelContext
from mini_infer.parallel.expert import ExpertExchange, ExpertRanks
from mini_infer.parallel.expert_copies import ExpertCopies, HotExperts, choose_copies
from mini_infer.quantization.formats import SCHEMES, quantize

pytestmark = pytest.mark.usefixtures("plain_sampler")


@pytest.mark.parametrize(
    ("load", "ranks", "room", "copies"),
    [
        ([90, 10, 20, 30], 2, 1, [[3], [0]]),
        ([90, 80, 10, 10], 2, 2, [[2, 3], [0, 1]]),
        ([80, 0, 60, 0], 2, 2, [[], []]),  # with half of the 80, the second rank would have most to do
        ([5, 5, 5, 5], 2, 2, [[], []]),
        ([0, 0, 0, 0], 2, 2, [[], []]),
        ([60, 0, 30, 0, 0, 0], 3, 1, [[], [], [0]]),
    ],
)
def test_the_busiest_experts_go_where_least_is_to_be_done(
    load: list[int], ranks: int, room: int, copies: list[list[int]]
) -> None:
    assert choose_copies(load, ranks, room) == copies


class Placed:
    """A layer over ranks that have copies of its experts."""

    def __init__(self, layer: Layer, context: ParallelContext, room: int, kernels: Kernels, form: Dispatch) -> None:
        redundant, own = room * context.size, context.rows_of(range(EXPERTS))
        self.weights = ExpertWeights(*(_with_room(weight[own.start : own.stop], room) for weight in layer.weights[:2]))
        self.copies = ExpertCopies(context, EXPERTS, redundant, list(self.weights[:2]), CPU)
        self.layer, self.context = layer, context
        self.exchange = ExpertExchange(ExpertRanks(context, form, redundant), EXPERTS + redundant, kernels)

    def run(self) -> Tensor:
        x, routes = self.context.rows_of(self.layer.x), Routes(*map(self.context.rows_of, self.layer.routes))
        return self.exchange.experts(x, self.copies.routed(routes), self.weights, None, len(self.layer.x))


def _with_room(weight: Tensor, room: int) -> Tensor:
    return torch.cat((weight, torch.full((room, *weight.shape[1:]), torch.nan)))


@pytest.mark.parametrize("form", [Dispatch.padded, Dispatch.packed, Dispatch.grouped])
def test_copies_compute_what_their_experts_do(form: Dispatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_copies, "PLACE_EVERY", 2)
    layer = Layer.made(12)
    layer = layer._replace(routes=layer.routes._replace(ids=layer.routes.ids % 4))  # of the first rank, and one more

    def work(context: ParallelContext) -> tuple[Tensor, list[list[int | None]], list[int]]:
        placed = Placed(layer, context, 2, TorchKernels(), form)
        hot = HotExperts(context, [placed.copies])
        for _ in range(3):
            hot.before_step()
            y = placed.run()
        return y, placed.copies.held, placed.copies.load.tolist()

    found = together(2, work)
    for y, held, load in found:
        torch.testing.assert_close(y, experts_reference(*layer), rtol=1e-5, atol=1e-5)
        assert held == found[0][1]
        assert None not in held[1]
        assert sum(load) > 0


def test_who_has_a_copy_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three ranks the third goes to the expert and its copy by turns."""
    load = [60, 0, 30, 0, 0, 0]

    def work(context: ParallelContext) -> list[list[int]]:
        weight = torch.arange(context.rank * 2.0, context.rank * 2 + 3)[:, None].clone()
        copies = ExpertCopies(context, 6, 3, [weight], CPU)
        copies.place(load)
        assert weight[2].item() == (0.0 if context.rank == 2 else context.rank * 2 + 2)
        ids = torch.tensor([[0, 5], [0, 3]], dtype=torch.int32)
        return copies.routed(Routes(ids, torch.ones(2, 2))).ids.tolist()

    # Slots: 0, 1 and room 2; 3, 4 and room 5; 6, 7 and room 8, where expert 0 has its copy.
    assert together(3, work) == [[[0, 7], [0, 4]], [[0, 7], [8, 4]], [[8, 7], [8, 4]]]


def test_copies_that_stay_are_not_sent_again() -> None:
    def work(context: ParallelContext) -> None:
        weight = torch.arange(context.rank * 2.0, context.rank * 2 + 4)[:, None].clone()
        copies = ExpertCopies(context, 4, 4, [weight], CPU)
        sent: list[int] = []
        send = copies._send
        copies._send = lambda weight, moves: sent.append(len(moves)) or send(weight, moves)
        for load in ([90, 80, 10, 10], [80, 90, 10, 10], [90, 10, 10, 20], [0, 0, 9, 0]):
            copies.place(load)
        assert sent == [4, 1]
        assert copies.held == [[2, None], [None, None]]

    together(2, work)


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16", "fp8"])
def test_weights_of_every_format_travel(scheme: str) -> None:
    form = SCHEMES[scheme].weights

    def work(context: ParallelContext) -> None:
        generator = torch.Generator().manual_seed(context.rank)
        own = [quantize(torch.randn(16, 128, generator=generator), form) for _ in range(2)]
        parts = [[getattr(each, name) for each in own] for name in ("codes", "scales")]
        stacks = [torch.stack([*part, torch.zeros_like(part[0])]) for part in parts]
        ExpertCopies(context, 4, 2, stacks, CPU).place([90, 10, 5, 5])
        if context.rank == 1:
            generator = torch.Generator().manual_seed(0)
            first = quantize(torch.randn(16, 128, generator=generator), form)
            for stack, expected in zip(stacks, (first.codes, first.scales), strict=True):
                assert torch.equal(stack[2].view(torch.uint8), expected.view(torch.uint8))

    together(2, work)


def test_engines_with_copies_give_the_bits_of_one_process(
    make_engine: Callable[..., LLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_copies, "PLACE_EVERY", 2)
    model = {**DEEPSEEK, "routing": "zipf", "count_experts": True}
    sections = {"model": model, "numerics": "batch_invariant"}
    engine = make_engine(tensor=1, parallel={"expert": 2, "redundant_experts": 2, "dispatch": "direct"}, **sections)
    assert generated(engine) == generated(one_process(**sections))
    (layer,) = engine.executor.runner._runner._model.module.hot_experts._layers
    assert layer.held[1] in ([0], [1]), "these get most tokens, and are rank 0's"
    one_expert = 3 * 32 * 16 * 4
    alone = make_engine(tensor=1, parallel={"expert": 2}, **sections)
    assert engine.startup.weight_bytes == alone.startup.weight_bytes + one_expert
    generated(alone)
    for even, uneven in zip(engine.records, alone.records, strict=True):
        (experts,), (ranks,) = uneven.expert_tokens, uneven.rank_tokens
        assert ranks == (sum(experts[:2]), sum(experts[2:]))
        assert uneven.rank_imbalance == 2 * max(ranks) / sum(ranks)
        assert (even.expert_tokens, sum(even.rank_tokens[0])) == (uneven.expert_tokens, sum(ranks))
    total = [sum(record.rank_imbalance or 0 for record in each.records) for each in (engine, alone)]
    assert total[0] < total[1], "once a copy is placed"


def test_one_expert_may_take_everything(make_engine: Callable[..., LLMEngine], tmp_path: Path) -> None:
    """A router of zeros: of equal scores the first are taken, which are one rank's."""
    config = ModelConfig(**DEEPSEEK)
    tensors = {}
    for name, tensor in load_model(config, load_spec(config), torch.float32, CPU, 16).checkpoint_tensors().items():
        weight = tensor.memory.clone().contiguous()
        tensors[name] = torch.zeros_like(weight) if name.endswith("gate.weight") else weight
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config.hf_config | {"num_experts_per_tok": 1}))
    model = {"path": str(tmp_path), "count_experts": True}
    engine = make_engine(tensor=1, parallel={"expert": 2}, model=model)
    assert generated(engine)[0][0] == generated(one_process(model=model))[0][0]
    for record in engine.records:
        assert record.expert_imbalance == 4, "of four experts, one has four times the average"
        assert record.expert_tokens[0][1:] == (0, 0, 0)
