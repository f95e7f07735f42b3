from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from mini_infer.assets.evaluate import greedy
from mini_infer.assets.prompts import draw_prompts
from mini_infer.calibration import layerwise
from mini_infer.calibration.accuracy import (
    Logits,
    Reading,
    TeacherForced,
    function_body,
    generated,
    greedy_together,
    spread_windows,
    teacher_forced,
)
from mini_infer.calibration.fp8_kv import with_fp8_kv
from mini_infer.calibration.layerwise import ComputesRounded, RoundedLayer, RoundedLinear, quantized_layers
from mini_infer.calibration.recipe import Method, Recipe
from mini_infer.calibration.scales import rounded
from mini_infer.calibration.sensitivity import sensitivities, worth_leaving
from mini_infer.calibration.stages import Stage, find_stages, observe
from mini_infer.calibration.streamed import StreamedDecoder
from mini_infer.quantization.formats import SCHEMES

CPU = torch.device("cpu")


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(2048, (3, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["qwen2", "gemma2"])
def any_folder(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Path:
    """gemma2: layers of two kinds of attention, norms that multiply by 1 + weight, scaled embeddings."""
    if request.param == "qwen2":
        return folder
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=2048, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, sliding_window=8, max_position_embeddings=64, initializer_range=0.1,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "gemma2")
    return tmp_path / "gemma2"


@torch.no_grad()
def test_layers_one_by_one_compute_what_the_model_does(any_folder: Path, ids: Tensor) -> None:
    model = AutoModelForCausalLM.from_pretrained(any_folder, dtype=torch.float32).eval()
    expected = model.model(ids, output_hidden_states=True).hidden_states
    decoder = StreamedDecoder(any_folder, CPU)
    hidden, told = decoder.inputs(ids)
    for index in range(len(decoder.layers)):
        torch.testing.assert_close(hidden, expected[index], rtol=1e-4, atol=1e-4)
        with decoder.loaded(index) as layer:
            hidden = torch.cat([layer(row[None], **told[index]) for row in hidden])
    assert all(parameter.is_meta for parameter in decoder.layers.parameters())


@pytest.mark.parametrize("method", [Method.gptq, Method.awq])
def test_at_most_one_layer_is_in_memory(
    folder: Path, ids: Tensor, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever a layer computes, and between them none."""
    decoder, computes, seen = StreamedDecoder(folder, CPU), layerwise._call, []

    def filled() -> set[str]:
        return {name for name, parameter in decoder._model.named_parameters() if not parameter.is_meta}

    def watched(layer: nn.Module, *args: Any) -> Tensor:
        seen.append(filled())
        return computes(layer, *args)

    monkeypatch.setattr(layerwise, "_call", watched)
    for index, _ in enumerate(quantized_layers(decoder, Recipe("w4a16", method, group=32), ids)):
        name = decoder.layer_names[index]
        own = {f"{name}.{inside}" for inside, _ in decoder.layers[index].named_parameters()}
        assert len(seen) > len(ids)
        assert all(names == own for names in seen)
        assert filled() == set()
        seen.clear()


@torch.no_grad()
def test_stages_and_folds(any_folder: Path, ids: Tensor) -> None:
    decoder = StreamedDecoder(any_folder, CPU)
    hidden, told = decoder.inputs(ids)
    with decoder.loaded(0) as layer:

        def output() -> Tensor:
            return layer(hidden[:1], **told[0])

        stages = find_stages(layer, output)
        assert [[name.rpartition(".")[2] for name in stage.linears] for stage in stages] == [
            ["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"],
        ]  # fmt: skip
        (seen, *_) = observe(stages, lambda: [layer(row[None], **told[0]) for row in hidden])
        before = output()
        for stage in stages:
            weight = stage.weight.clone()
            scales = torch.rand(weight.shape[1]) + 0.5
            exact = stage.fold(scales, torch.bfloat16, output)
            assert exact is not None
            torch.testing.assert_close(exact, scales, rtol=2e-2, atol=0)
            torch.testing.assert_close(stage.weight, weight * exact)
            torch.testing.assert_close(output(), before, rtol=1e-3, atol=1e-3)
            if stage is stages[0]:
                (now, *_) = observe(stages, lambda: [layer(row[None], **told[0]) for row in hidden])
                torch.testing.assert_close(now.largest, seen.divided(exact).largest, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_what_somebody_else_reads_is_not_folded() -> None:
    norm, linear = nn.LayerNorm(8), nn.Linear(8, 8)
    x = torch.randn(4, 8)

    def output() -> Tensor:
        y = norm(x)
        return linear(y) + y

    before = [p.clone() for p in (*norm.parameters(), *linear.parameters())]
    assert Stage({"linear": linear}, norm).fold(torch.rand(8) + 0.5, torch.float32, output) is None
    assert all(map(torch.equal, before, (*norm.parameters(), *linear.parameters())))


def test_a_rounded_layer_with_outliers() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(6, 64), torch.randn(5, 64)
    x[:, 7] *= 1000
    outliers = torch.tensor([7])
    scheme = SCHEMES["mixed"]
    found = RoundedLinear(rounded(weight.index_fill(1, outliers, 0), scheme.weights), outliers, weight[:, outliers])
    y = ComputesRounded(found, scheme.weights, scheme.activations, None)(x)
    all_rounded = ComputesRounded(
        RoundedLinear(rounded(weight, scheme.weights)), scheme.weights, scheme.activations, None
    )(x)
    exact = x @ weight.T
    assert float((y - exact).norm()) < 0.02 * float((all_rounded - exact).norm())


def test_teacher_forced_figures() -> None:
    """By hand: two tokens, of which the reference gives the first 3 of 4, the second 1 of 4."""
    p, q = (torch.tensor([numbers]).log() for numbers in ([0.75, 0.25], [0.25, 0.75]))
    windows = torch.tensor([[0, 0], [1, 0], [0, 0], [1, 0], [1, 0]])

    def same_everywhere(log_p: Tensor) -> Logits:
        return lambda ids: log_p.expand(*ids.shape, 2)

    reference = Reading.of(same_everywhere(p), windows)
    same, other = (teacher_forced(reference, same_everywhere(each)) for each in (p, q))
    assert same == TeacherForced(5, pytest.approx(4 / 3), 0.0, 0.0, 1.0)
    assert other.agreement == 0
    assert other.perplexity == pytest.approx(4)
    assert other.increase == pytest.approx(2)
    assert other.divergence == pytest.approx(0.5 * torch.tensor(3.0).log().item())
    assert teacher_forced(reference.first(2), same_everywhere(q)).tokens == 2


def test_generated_counts_to_the_first_difference() -> None:
    prompts = draw_prompts(2)
    replies = {(1, 2, 9, 4): "    return (\n", (1, 2, 3, 4): "    return 1\nx = (\n"}
    found = generated(prompts, [[1, 2, 3, 4]] * 2, [list(reply) for reply in replies], lambda ids: replies[tuple(ids)])
    assert found.equal == 6 / 8
    assert found.compiles == 1 / 2, "the first function does not end, the second does before what is wrong"


def test_a_body_ends_where_less_is_indented() -> None:
    assert function_body("    a = 1\n\n        b\n    c\ndef f():\n    d\n") == "    a = 1\n\n        b\n    c\n"
    assert function_body("    a\n  half a li") == "    a\n"
    assert function_body("") == ""


@torch.no_grad()
def test_prompts_that_go_on_together_go_on_as_alone(any_folder: Path, ids: Tensor) -> None:
    model = AutoModelForCausalLM.from_pretrained(any_folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = [0]
    found = greedy_together(model, ids, 6, [0])
    assert found == [greedy(model, row.tolist(), 6) for row in ids]
    third = found[0][2]
    assert greedy_together(model, ids[:1], 6, [0, third])[0] == found[0][: found[0].index(third) + 1]


@torch.no_grad()
def test_what_minds_most_is_left(folder: Path, ids: Tensor) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reading = Reading.of(lambda ids: model(ids).logits, ids)
    recipe = Recipe("w4a16", Method.rtn, group=64)
    layers = [layer for layer, _ in quantized_layers(StreamedDecoder(folder, CPU), recipe, None)]
    before = dict(model.named_modules())

    def divergence(model: nn.Module) -> float:
        return teacher_forced(reading, lambda ids: model(ids).logits).divergence

    found = sensitivities(model, layers, recipe, divergence)
    assert dict(model.named_modules()) == before
    weights = {name: count for layer in layers for name, count in layer.weights.items()}
    assert found.keys() == weights.keys()
    assert all(value > 0 for value in found.values())
    (most,) = worth_leaving(found, weights, max(weights.values()) / sum(weights.values()))[:1]
    assert found[most] / weights[most] == max(found[name] / weights[name] for name in found)
    assert len(worth_leaving(found, weights, 1.0)) == len(found)
    assert worth_leaving(found, weights, 0.0) == []
    bits = sum(layer.bits(recipe, lambda name: name != most) - layer.bits(recipe) for layer in layers)
    rows, columns = model.get_submodule(most).weight.shape
    assert bits == 12 * weights[most] - 16 * rows * (columns // 64)


def test_windows_are_spread_over_the_text() -> None:
    found = spread_windows(torch.arange(100), 3, 9)
    assert found.shape == (3, 10)
    assert found[:, 0].tolist() == [0, 45, 90]
    assert found[-1, -1] == 99
    assert spread_windows(torch.arange(100), 3, 9, start=0.5)[:, 0].tolist() == [15, 45, 75]


@torch.no_grad()
def test_fp8_keys_and_values_change_little(any_folder: Path, ids: Tensor) -> None:
    model = AutoModelForCausalLM.from_pretrained(any_folder, dtype=torch.float32).eval()
    expected = model(ids).logits
    error = float((with_fp8_kv(model, ids)(ids).logits - expected).norm() / expected.norm())
    assert 1e-4 < error < 0.1


def test_bits_of_a_layer() -> None:
    """32 x 64 weights in groups of 32: 4 bits each, and a scale of 16 and a zero of 4 bits for each of 64 groups."""
    recipe = Recipe("w4a16", Method.rtn, group=32, symmetric=False)
    found = RoundedLinear(rounded(torch.randn(32, 64), recipe.formats.weights))
    others = {"norm.weight": torch.ones(64), "kept.weight": torch.ones(8, 64)}
    layer = RoundedLayer("layer", {"linear": found}, others)
    assert layer.num_weights == 32 * 64 + 8 * 64
    assert layer.bits(recipe) == 4 * 32 * 64 + 20 * 64 + 16 * 8 * 64
