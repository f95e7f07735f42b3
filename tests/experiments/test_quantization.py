"""The gates of `quantization`, on a few prompts of the smaller model that ships."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_lab_exact_gate import _drawn_by_company
from torch import Tensor

from experiments import quantization
from experiments.lab.judge.gate import ErrorGate, Gate
from experiments.lab.judge.logit_gate import leave_activations
from experiments.lab.show.details import RANKING
from experiments.quantization import FEW, STEPS, Quantization
from mini_infer.core.config import CacheDType
from mini_infer.kernels import ops

SMALL = (
    *("experiment=quantization", "engine.model.path=tiny-draft", "measure.threads=1", "experiment.claims=[]"),
    *("experiment.prompts=4", "experiment.prompt_tokens=32", "experiment.new_tokens=16", "experiment.single=[]"),
    *("experiment.samples=1", "experiment.length=32"),
)
SERVED, TOKENS = Quantization._served, ops.quantize_tokens


@pytest.fixture
def gates(compose_config) -> Callable[[str], tuple[list[Gate], list[ErrorGate]]]:
    study = Quantization.from_config(compose_config(*SMALL))

    def found(variant: str) -> tuple[list[Gate], list[ErrorGate]]:
        with torch.no_grad():
            of_both = list(study._gates(variant))
        return [g for g in of_both if isinstance(g, Gate)], [g for g in of_both if isinstance(g, ErrorGate)]

    return found


@pytest.mark.parametrize(
    ("variant", "tokens", "logits"), [("w4_rtn_32z", 2, 0), ("w8a8", 2, 1), ("mixed", 2, 1), ("kv_fp8", 1, 1)]
)
def test_an_engine_generates_what_was_measured(gates, variant: str, tokens: int, logits: int) -> None:
    of_tokens, of_logits = gates(variant)
    assert (len(of_tokens), len(of_logits)) == (tokens, logits)
    assert all(gate.passed and gate.variant == variant for gate in (*of_tokens, *of_logits))
    assert of_tokens[0].total_tokens == 2 * FEW * STEPS, "in company, twice"
    assert all(gate.total_tokens == 4 * 16 for gate in of_tokens[1:]), "all that was generated"
    assert all(0 < gate.error < gate.allowed < 0.2 and gate.rows == FEW * (STEPS + 1) for gate in of_logits)


def test_what_is_worth_leaving_is_noted_for_a_reader(compose_config, monkeypatch) -> None:
    """As `RANKING` reads what processes have noted."""
    alike = lambda model, layers, *_: {name: 1.0 for layer in layers for name in layer.weights}  # noqa: E731
    monkeypatch.setattr(quantization, "sensitivities", alike)
    made = Quantization.from_config(compose_config(*SMALL))
    with torch.no_grad():
        left = made._study._worth_leaving("w8a8", made._recipes["w8a8"], 0.5)
    (note,) = made._study.notes
    head, names = RANKING.fullmatch(note).groups()
    assert head == "w8a8 RTN: layers that gain most by staying in bf16, best first: "
    first = [(path[-1], path[2]) for path in (name.split(".") for name in left)]
    assert names.split(", ")[:4] == [f"{linear} of layer {layer}" for linear, layer in first][:4]
    assert names.startswith("q_proj of layer 0, k_proj of layer 0, ")


def _with_zeros_dropped(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if name.endswith("weight_zero_point"):
            tensor.fill_(-0x77777778)  # eight codes of 8, which stand for 0


def _with_scales_of_another_layer(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if "layers.0." in name and name.endswith("weight_scale")]:
        other = name.replace("layers.0.", "layers.1.")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def _with_small_scales_of_keys(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("k_scale")]:
        tensors[name] /= 8


@pytest.mark.parametrize(
    ("variant", "fault", "tokens"),
    [
        ("w4_rtn_32z", _with_zeros_dropped, [True, False]),  # alone it is as wrong
        ("w4_rtn_32z", _with_scales_of_another_layer, [True, False]),
        ("w8a8", _with_scales_of_another_layer, [True, False]),
        ("kv_fp8", _with_small_scales_of_keys, [True]),
    ],
)
def test_a_folder_with_other_numbers_fails(gates, monkeypatch, variant: str, fault: Callable, tokens: list) -> None:
    def served(self, variant: str, model, out: Path):
        config = SERVED(self, variant, model, out)
        files = {file: load_file(file) for file in out.glob("*.safetensors")}
        tensors = {name: tensor for held in files.values() for name, tensor in held.items()}
        fault(tensors)
        for file, held in files.items():
            save_file({name: tensors[name] for name in held}, file, metadata={"format": "pt"})
        return config

    monkeypatch.setattr(Quantization, "_served", served)
    of_tokens, of_logits = gates(variant)
    assert [gate.passed for gate in of_tokens] == tokens
    assert [gate.passed for gate in of_logits] == [False] * (variant != "w4_rtn_32z")


def test_groups_of_another_size_fail(gates, monkeypatch) -> None:
    layers = quantization._Study._layers

    def write(self, variant, recipe, out) -> None:
        other = replace(recipe, group=64)
        quantization.write_layers(self._folder, out, other, layers(self, "other", other))

    monkeypatch.setattr(quantization._Study, "write", write)
    assert [gate.passed for gate in gates("w4_rtn_32z")[0]] == [True, False]


def test_activations_that_are_cut_off_fail(gates, monkeypatch) -> None:
    """Where they are to be rounded to the nearest code. Weights are right, which tokens say."""

    def cut(x: Tensor, form) -> tuple[Tensor, Tensor]:
        codes, scales = TOKENS(x, form)
        return (x / scales).trunc().to(codes.dtype), scales

    monkeypatch.setattr(ops, "quantize_tokens", cut)
    of_tokens, (of_logits,) = gates("w8a8")
    assert [gate.passed for gate in of_tokens] == [True, True]
    assert not of_logits.passed


@pytest.mark.parametrize("variant", ["w8a8", "kv_fp8"])
def test_an_engine_that_rounds_nothing_fails(variant, gates, monkeypatch) -> None:
    """Its logits are as near the right ones as rounding is."""
    engine_of = quantization.LLMEngine

    def rounds_nothing(config):
        engine = engine_of(replace(config, cache=replace(config.cache, dtype=CacheDType.auto)))
        leave_activations(engine)
        return engine

    monkeypatch.setattr(quantization, "LLMEngine", rounds_nothing)
    of_tokens, (of_logits,) = gates(variant)
    assert [gate.passed for gate in of_tokens] == [True] * len(of_tokens)
    assert not of_logits.passed


def test_a_draw_that_depends_on_the_company_fails(gates, monkeypatch) -> None:
    _drawn_by_company(monkeypatch)
    assert not gates("w4_rtn_32z")[0][0].passed
