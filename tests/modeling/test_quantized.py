"""Quantized folders compute what their numbers say: as transformers, or as a dequantization that is written out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from quantized_folders import (
    FP8,
    INT,
    INT4,
    awq,
    compressed_tensors_folder,
    fp8,
    gptq,
    model,
    packed_by_activations,
    quantized_folder,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mini_infer.attention.context import AttentionBatch, AttentionContext, ModelAttention
from mini_infer.attention.torch_sdpa import SdpaBackend
from mini_infer.cache.kv_store import KVStore
from mini_infer.calibration import scales
from mini_infer.core.config import CacheConfig, EngineConfig, ModelConfig
from mini_infer.core.errors import ConfigError, ModelError
from mini_infer.kernels.ops import InvariantKernels, TorchKernels, TritonKernels
from mini_infer.modeling.linear_methods import quantized
from mini_infer.modeling.linear_methods.base import Build, LinearShape, Parallel
from mini_infer.modeling.linear_methods.quantized import QuantizedLinear
from mini_infer.modeling.linear_methods.stored import SideBySide, stored_as
from mini_infer.modeling.loader import as_served, load_model, load_spec, outline
from mini_infer.modeling.model import Model
from mini_infer.quantization.checkpoint_config import rounding
from mini_infer.quantization.formats import INT8, SCHEMES, Number, WeightFormat, dequantize, quantize, quantize_tokens

CPU = torch.device("cpu")
TOKENS = torch.arange(12) * 7 % 90


def load(folder: Path, cache: CacheConfig | None = None, **options: Any) -> Model:
    config = ModelConfig(path=str(folder), **options)
    served = as_served(load_spec(config), EngineConfig(config, cache or CacheConfig()))
    return load_model(config, served, torch.float32, CPU)


@torch.inference_mode()
def logits(own: Model, step_rows: Callable[..., AttentionBatch]) -> Tensor:
    """Of TOKENS: a prompt of ten, and two decode steps."""
    attention, backend, results = own.spec.attention, SdpaBackend(), []
    store = KVStore(own.kv_layout, num_blocks=4, block_size=4, device=CPU, scales=own.kv_scales)
    for start, count, decodes in ((0, 10, 0), (10, 1, 1), (11, 1, 1)):
        batch = step_rows([(start, count, [2, 0, 3])], decodes, 4)
        context = AttentionContext(batch, ModelAttention(store, own.spec.windows, attention.scale), backend, backend)
        hidden = own.forward(TOKENS[start : start + count], batch.positions, context)
        results.append(own.compute_logits(hidden))
    return torch.cat(results)


@torch.inference_mode()
def transformers_logits(own: nn.Module) -> Tensor:
    return own(TOKENS[None]).logits[0]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def with_weights(weights: dict[str, Tensor], activations: Any = None) -> nn.Module:
    """The model with other weights in its projections, and with activations that are quantized before them."""
    made = model()
    made.load_state_dict(made.state_dict() | weights)
    for module in made.modules():
        if activations is not None and isinstance(module, nn.Linear) and module is not made.lm_head:
            module.register_forward_pre_hook(lambda _, args: (rounded(args[0], activations),))
    return made


def rounded(x: Tensor, form: Any) -> Tensor:
    codes, scales = quantize_tokens(x.flatten(0, -2), form)
    width = form.columns or x.shape[-1]
    return (codes.float() * scales.repeat_interleave(width, 1)[:, : x.shape[-1]]).view_as(x)


# A code of an activation that is rounded to the other side, here and there, since what came before it differs in its
# last bit.
FLIPS = 0.02


def check_products(own: Model, meant: dict[str, Tensor]) -> None:
    """Products of the first layer, of one x, where no code can differ."""
    layer, biases = own.layers[0], model().state_dict()
    for name, parts, product in (
        ("model.layers.0.self_attn", "qkv", layer.self_attn.qkv_proj),
        ("model.layers.0.mlp", ("gate", "up"), layer.mlp.gate_up_proj),
        ("model.layers.0.mlp", ("down",), layer.mlp.down_proj),
    ):
        names = [f"{name}.{part}_proj" for part in parts]
        weight = torch.cat([meant[f"{part}.weight"] for part in names])
        x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(1))
        form = own.spec.quantization.layer(names[0]).scheme.activations
        expected = (x if form is None else rounded(x, form)) @ weight.T
        if parts == "qkv":
            expected += torch.cat([biases[f"{part}.bias"] for part in names])
        torch.testing.assert_close(product.method.apply(x), expected, rtol=1e-4, atol=1e-4)


WEIGHTS_ALONE = {
    "int8": {"weights": {**INT, "strategy": "channel"}},
    "int8 in groups": {"weights": {**INT, "strategy": "group", "group_size": 32}},
    "int4": {"weights": {**INT4, "strategy": "channel"}},
    "int4 in groups": {"weights": {**INT4, "strategy": "group", "group_size": 32}},
    "int4 with zeros": {"weights": {**INT4, "strategy": "group", "group_size": 64, "symmetric": False}},
}
FP8_TOKENS = {**FP8, "strategy": "token", "dynamic": True}
WITH_ACTIVATIONS = {
    "int8": {
        "weights": {**INT, "strategy": "channel"},
        "input_activations": {**INT, "strategy": "token", "dynamic": True},
    },
    "fp8": {"weights": {**FP8, "strategy": "channel"}, "input_activations": FP8_TOKENS},
    "fp8, one scale": {"weights": {**FP8, "strategy": "tensor"}, "input_activations": FP8_TOKENS},
    "fp8, static": {
        "weights": {**FP8, "strategy": "tensor"},
        "input_activations": {**FP8, "strategy": "tensor", "dynamic": False},
    },
    "fp8 in blocks": {
        "weights": {**FP8, "strategy": "block", "block_structure": [64, 64]},
        "input_activations": {**FP8, "strategy": "group", "group_size": 64, "dynamic": True},
    },
}


def linear(group: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {"group_0": {"targets": ["Linear"], **group}}


@pytest.mark.parametrize("name", WEIGHTS_ALONE)
def test_compressed_tensors_give_the_logits_that_transformers_gives(
    name: str, tmp_path: Path, step_rows: Callable[..., AttentionBatch]
) -> None:
    pytest.importorskip("compressed_tensors")
    compressed_tensors_folder(tmp_path, linear(WEIGHTS_ALONE[name]))
    found = logits(load(tmp_path), step_rows)
    expected = transformers_logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert error(expected, transformers_logits(model())) > 1e-3


@pytest.mark.parametrize("name", WITH_ACTIVATIONS)
def test_compressed_tensors_with_activations(
    name: str, tmp_path: Path, step_rows: Callable[..., AttentionBatch]
) -> None:
    """Against numbers that are written out; transformers rounds int8 activations to another scale, and static ones to a
    given one."""
    pytest.importorskip("compressed_tensors")
    compressed_tensors_folder(tmp_path, linear(WITH_ACTIVATIONS[name]))
    own = load(tmp_path)
    assert own.spec.quantization is not None
    assert ("static scales" in own.spec.quantization.describe()) == ("static" in name)
    scheme = own.spec.quantization.layer("model.layers.0.mlp.up_proj").scheme
    weights = {}
    for key, tensor in load_file(tmp_path / "model.safetensors").items():
        if key.endswith("proj.weight"):
            scales = load_file(tmp_path / "model.safetensors")[f"{key}_scale"]
            for dim in (0, 1) if scales.numel() > 1 else ():
                scales = scales.repeat_interleave(tensor.shape[dim] // scales.shape[dim], dim)
            weights[key] = tensor.float() * scales
    expected = transformers_logits(with_weights(weights, scheme.activations))
    check_products(own, weights)
    found = logits(own, step_rows)
    assert error(found, expected) < FLIPS
    theirs = transformers_logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    assert error(found, theirs) < (0.2 if "static" in name else 0.1)


FOLDERS: dict[str, tuple[dict[str, Any], Any]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, gptq(4, 32, True)),
    "gptq, act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True},
        gptq(4, 32, True, act_order=True),
    ),
    "gptq, act-order, zeros": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": True},
        gptq(4, 64, False, act_order=True),
    ),
    "gptq, a group, zeros": ({"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": False}, gptq(4, None, False)),
    "gptq v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"},
        gptq(4, 64, False, version=2),
    ),
    "gptq, 8 bits": ({"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True}, gptq(8, 32, True)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}, awq(64)),
    "compressed-tensors, act-order": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": linear({"weights": {**INT4, "strategy": "group", "group_size": 32, "actorder": "group"}}),
            "ignore": ["lm_head"],
        },
        packed_by_activations(32),
    ),
    "fp8 in blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        fp8(WeightFormat(Number.fp8, 128, 128), "weight_scale_inv"),
    ),
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        fp8(WeightFormat(Number.fp8), "weight_scale", one_scale=True),
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_compute_what_their_numbers_say(
    name: str, tmp_path: Path, step_rows: Callable[..., AttentionBatch]
) -> None:
    config, tensors = FOLDERS[name]
    meant = quantized_folder(tmp_path, config, tensors)
    own = load(tmp_path)
    assert own.weight_bytes() == outline(own.spec, torch.float32).weight_bytes()
    assert own.spec.quantization is not None
    activations = own.spec.quantization.layer("model.layers.0.mlp.up_proj").scheme.activations
    check_products(own, meant)
    found, expected = logits(own, step_rows), transformers_logits(with_weights(meant, activations))
    assert error(found, expected) < (1e-5 if activations is None else FLIPS)
    assert error(expected, transformers_logits(model())) > 2e-3


@pytest.mark.parametrize(
    "name", ["gptq, act-order", "gptq, act-order, zeros", "gptq, a group, zeros", "fp8 in blocks", "fp8"]
)
def test_a_row_of_a_product_is_the_same_to_the_bit_in_any_batch(name: str, tmp_path: Path) -> None:
    config, tensors = FOLDERS[name]
    quantized_folder(tmp_path, config, tensors, intermediate_size=256)
    folder = ModelConfig(path=str(tmp_path))
    own = load_model(folder, load_spec(folder), torch.float32, CPU, kernels=InvariantKernels())
    for product in (own.layers[0].mlp.gate_up_proj.method, own.layers[0].mlp.down_proj.method):
        x = torch.randn(16, product._shape.in_size, generator=torch.Generator().manual_seed(1))
        every = product.apply(x)
        for rows in (slice(0, 1), slice(3, 12), slice(15, 16)):  # of one tile, as numpy sums in orders of its own
            assert torch.equal(product.apply(x[rows]), every[rows])


def test_blocks_that_would_overlap_are_computed_side_by_side(tmp_path: Path) -> None:
    config, tensors = FOLDERS["fp8 in blocks"]
    quantized_folder(tmp_path, config, tensors)
    layer = load(tmp_path).layers[0]
    assert isinstance(layer.self_attn.qkv_proj.method, SideBySide), "k has 64 rows, and a block 128"
    assert isinstance(layer.self_attn.o_proj.method, QuantizedLinear)


def test_layers_that_are_ignored_stay_as_they_are(tmp_path: Path, step_rows: Callable[..., AttentionBatch]) -> None:
    config, _ = FOLDERS["awq"]
    left = ["model.layers.1.mlp", "q_proj"]

    def tensors(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return awq(64)(weight)

    meant = quantized_folder(tmp_path, config | {"modules_to_not_convert": left}, tensors)
    kept = {name: tensor for name, tensor in model().state_dict().items() if re.search(r"1\.mlp|q_proj\.w", name)}
    stored = load_file(tmp_path / "model.safetensors")
    stored = {name: tensor for name, tensor in stored.items() if f"{name.rpartition('.')[0]}.weight" not in kept}
    save_file(stored | {name: tensor.contiguous() for name, tensor in kept.items()}, tmp_path / "model.safetensors")
    biases = {name: tensor for name, tensor in model().state_dict().items() if name.endswith("q_proj.bias")}
    save_file(
        load_file(tmp_path / "model.safetensors") | {name: tensor.contiguous() for name, tensor in biases.items()},
        tmp_path / "model.safetensors",
    )
    expected = transformers_logits(with_weights(meant | kept))
    torch.testing.assert_close(logits(load(tmp_path), step_rows), expected, rtol=1e-4, atol=1e-4)


# --- quantizing while loading -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    model().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "mixed"])
def test_unquantized_weights_are_rounded_while_they_are_loaded(
    name: str, plain: Path, step_rows: Callable[..., AttentionBatch]
) -> None:
    scheme = SCHEMES[name]
    projections = {key: tensor for key, tensor in model().state_dict().items() if key.endswith("proj.weight")}
    of_16 = torch.bfloat16 if scheme.weights.number is Number.int4 else torch.float32  # scales of int4, in any model
    held = {key: scales.rounded(tensor, scheme.weights, of_16) for key, tensor in projections.items()}
    weights = {key: dequantize(found, scheme.weights) for key, found in held.items()}
    own = load(plain, quantization=name)
    check_products(own, weights)
    found, expected = logits(own, step_rows), transformers_logits(with_weights(weights, scheme.activations))
    assert error(found, expected) < (1e-5 if scheme.activations is None else FLIPS)
    assert error(expected, transformers_logits(model())) > 2e-3


def test_mixed_leaves_the_columns_with_the_largest_weights_alone() -> None:
    shape = LinearShape(200, {"a": 40, "b": 24}, True, Parallel.column)
    build = Build(torch.float32, CPU, TorchKernels(), stored_as(rounding("mixed", 128, True)))
    method = build.linear_method("", shape, build)
    assert isinstance(method, QuantizedLinear)
    weight, bias = torch.randn(64, 200), torch.randn(64)
    weight[50, 17] = 30.0
    weight[3, 150] = -40.0
    method.round(weight, bias)
    assert method.outlier_columns is not None
    columns = method.outlier_columns.tolist()
    assert {17, 150} <= set(columns)
    assert len(columns) == 8, "1 % of 200, in eights"
    x = torch.randn(5, 200)
    x[:, 17] *= 100  # would take all the range of its tokens
    rest = [column for column in range(200) if column not in columns]
    codes, scales = quantize_tokens(x[:, rest], SCHEMES["w8a8"].activations)
    products = (codes.float() * scales) @ dequantize(
        quantize(weight[:, rest], SCHEMES["w8a8"].weights), SCHEMES["w8a8"].weights
    ).T
    expected = products + x[:, columns] @ weight[:, columns].T + bias
    torch.testing.assert_close(method.apply(x), expected, rtol=1e-4, atol=1e-3)
    assert error(method.apply(x), x @ weight.T + bias) < 0.02


@pytest.mark.parametrize("name", SCHEMES)
def test_dummy_weights_are_those_of_the_unquantized_model_rounded(name: str) -> None:
    shape = model().config.to_dict() | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    exact = load_dummy(shape, "none")
    own, again = load_dummy(shape, name), load_dummy(shape, name)
    for one, other in zip(own.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.float(), other.float())
    assert own.weight_bytes() == outline(own.spec, torch.float32).weight_bytes() < exact.weight_bytes()
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    for layer in (0, 1):
        found, expected = (m.layers[layer].mlp.gate_up_proj.method.apply(x) for m in (own, exact))
        assert 1e-4 < error(found, expected) < (0.2 if "4" in name else 0.05)


def test_bytes_of_a_model_of_1_5_billion_weights() -> None:
    """Qwen2.5-1.5B in bf16, whose embeddings, 15 % of its bytes, stay as they are."""
    file = Path(__file__).parents[2] / "conf/model/qwen2_5_1_5b.yaml"
    shape = yaml.safe_load(file.read_text())["hf_config"]

    def size(**quantization: Any) -> int:
        config = ModelConfig(load_format="dummy", hf_config=shape, **quantization)
        return outline(load_spec(config), torch.bfloat16).weight_bytes()

    saved = {scheme: 1 - size(quantization=scheme) / size() for scheme in SCHEMES}
    assert saved.pop("w4a16") > 0.60
    assert min(saved.values()) > 0.40
    # The more accurate format of int4, whose zeros take a byte each, stays a little below 60 %.
    fine = size(quantization="w4a16", quantization_group=32, quantization_symmetric=False)
    assert 1 - fine / size() == pytest.approx(0.597, abs=5e-4)


def load_dummy(shape: dict[str, Any], name: str) -> Model:
    config = ModelConfig(load_format="dummy", hf_config=shape, quantization=name)
    return load_model(config, load_spec(config), torch.float32, CPU)


@pytest.mark.parametrize("name", ["w8a8", "mixed", "fp8"])
def test_where_activations_are_rounded_a_row_has_one_result_in_any_company(name: str) -> None:
    build = Build(torch.float32, CPU, TorchKernels(), stored_as(rounding(name, 128, True)))
    method = build.linear_method("", LinearShape(1024, {"a": 256}, False, Parallel.column), build)
    draw = torch.Generator().manual_seed(0)
    method.round(torch.randn(256, 1024, generator=draw), None)
    x = torch.randn(64, 1024, generator=draw)
    assert torch.equal(method.apply(x), torch.cat([method.apply(row[None]) for row in x]))


@pytest.mark.parametrize(("columns", "slow"), [(128, False), (64, True)])
def test_a_format_that_kernels_do_not_have_is_computed_by_torch(
    columns: int, slow: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    quantized._say_slow.cache_clear()
    shape, found = LinearShape(columns, {"a": 24}, False, Parallel.column), []
    for kernels in (TorchKernels(), TritonKernels()):
        build = Build(torch.float32, CPU, kernels, stored_as(rounding("w4a16", 32, False)))
        method = build.linear_method("", shape, build)
        method.round(torch.randn(24, columns, generator=torch.Generator().manual_seed(0)), None)
        found.append(method.apply(torch.ones(3, columns)))
    torch.testing.assert_close(*found)
    assert ("by torch operations, which is slow: products of int4" in caplog.text) == slow


def test_gpus_without_fp8_compute_it_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which says so, as of formats that kernels do not have."""
    pytest.importorskip("triton")
    kernels, fp8 = TritonKernels(), SCHEMES["fp8"]
    assert kernels.quantized_refusal(fp8.weights, fp8.activations, 128) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    found = kernels.quantized_refusal(fp8.weights, fp8.activations, 128)
    assert found == "fp8 takes GPUs of compute capability 8.9 and above"
    assert kernels.quantized_refusal(INT8, None, 128) is None


# --- keys and values in fp8 ---------------------------------------------------------------------------------------


def kv_folder(folder: Path, scales: dict[str, Tensor]) -> None:
    """An fp8 folder whose config asks for fp8 keys and values, with these scales by layer."""
    kv = {**FP8, "strategy": "tensor", "dynamic": False, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "format": "int-quantized", **WEIGHTS_ALONE["int8"]}}
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": groups,
        "kv_cache_scheme": kv,
        "ignore": ["lm_head"],
    }

    def tensors(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        quantized = quantize(weight, SCHEMES["w8a16"].weights)
        meant = dequantize(quantized, SCHEMES["w8a16"].weights)
        return {"weight": quantized.codes, "weight_scale": quantized.scales}, meant

    quantized_folder(folder, config, tensors)
    stored = load_file(folder / "model.safetensors")
    save_file(stored | scales, folder / "model.safetensors")


def test_keys_and_values_are_kept_in_fp8_with_a_folders_scales(
    tmp_path: Path, step_rows: Callable[..., AttentionBatch]
) -> None:
    attention = "model.layers.{}.self_attn.{}_scale"
    scales = {attention.format(0, "k"): torch.tensor([0.5]), attention.format(0, "v"): torch.tensor(0.25)}
    scales |= {attention.format(1, "k"): torch.tensor([0.5, 1, 2, 4]), attention.format(1, "v"): torch.ones(1)}
    kv_folder(tmp_path, scales)
    own = load(tmp_path)
    assert own.kv_layout.heads is not None
    assert own.kv_layout.heads[0].dtype is torch.float8_e4m3fn
    assert own.kv_scales is not None
    assert own.kv_scales[:, :, 0].tolist() == [[0.5, 0.25], [0.5, 1.0]]
    assert own.kv_scales[1, 0].tolist() == [0.5, 1, 2, 4]
    plain = json.loads((tmp_path / "config.json").read_text())
    del plain["quantization_config"]["kv_cache_scheme"]
    (tmp_path / "config.json").write_text(json.dumps(plain))
    exact = load(tmp_path)  # which passes over the scales
    assert exact.kv_scales is None
    assert 1e-4 < error(logits(own, step_rows), logits(exact, step_rows)) < 0.1
    forced = load(tmp_path, CacheConfig(dtype="fp8"))
    assert torch.equal(forced.kv_scales, own.kv_scales)


def test_a_scale_for_keys_that_is_missing_or_senseless_is_told(tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.self_attn.{kind}_scale" for layer in (0, 1) for kind in "kv"]
    kv_folder(tmp_path, {name: torch.ones(1) for name in names[:-1]})
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.v_scale is missing.*kv_cache_scheme.*copy it again"):
        load(tmp_path)
    kv_folder(tmp_path, {name: torch.zeros(1) for name in names})
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.k_scale is \[0\.0\]: scales are finite and above 0"):
        load(tmp_path)


# --- folders that are not whole -----------------------------------------------------------------------------------


@pytest.fixture
def broken(tmp_path: Path) -> Callable[..., None]:
    """Loads a GPTQ folder of which a tensor is missing (None) or another one."""
    config, tensors = FOLDERS["gptq"]
    quantized_folder(tmp_path, config, tensors)

    def loaded(name: str, tensor: Tensor | None) -> None:
        stored = load_file(tmp_path / "model.safetensors")
        stored.pop(name, None)
        save_file(stored if tensor is None else stored | {name: tensor}, tmp_path / "model.safetensors")
        load(tmp_path)

    return loaded


GATE = "model.layers.1.mlp.gate_proj"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (f"{GATE}.scales", None, r"gate_proj\.scales, expected with shape \(4, 192\), is missing"),
        (f"{GATE}.qweight", None, r"gate_proj\.qweight, .* is missing"),
        (f"{GATE}.scales", torch.ones(2, 192), r"gate_proj\.scales in .* has shape \(2, 192\); .*\(4, 192\)"),
        (f"{GATE}.qweight", torch.ones(16, 192), "is torch.float32; supported are int32"),
        (f"{GATE}.scales", torch.full((4, 192), torch.inf), r"1\.mlp\.gate_proj: scales holds numbers .* not finite"),
        (f"{GATE}.weight", torch.ones(192, 128), r"gate_proj\.weight .*which this architecture does not have.*gptq"),
        (f"{GATE}.bias", torch.ones(192), r"gate_proj\.bias is not zero"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(
    broken: Callable[..., None], name: str, tensor: Tensor | None, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        broken(name, tensor)


def test_biases_of_zeros_are_passed_over(broken: Callable[..., None]) -> None:
    broken(f"{GATE}.bias", torch.zeros(192))


def test_a_folder_that_was_not_written_to_its_end_is_refused(tmp_path: Path) -> None:
    config, tensors = FOLDERS["awq"]
    quantized_folder(tmp_path, config, tensors)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="may be cut short: fetch or copy it again"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(whole)
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelError, match=r"has no model-00002-of-00002\.safetensors"):
        load(tmp_path)


def test_a_quantized_folder_is_not_quantized_again_nor_run_by_transformers(tmp_path: Path) -> None:
    config, tensors = FOLDERS["awq"]
    quantized_folder(tmp_path, config, tensors)
    with pytest.raises(ModelError, match=r"model.quantization=fp8: .* is quantized already \(awq: int4 .*=none"):
        load(tmp_path, quantization="fp8")
    with pytest.raises(ModelError, match=r"transformers' code is not supported.*model.implementation=ours"):
        load(tmp_path, implementation="transformers")


def test_what_cannot_be_quantized_while_it_is_loaded(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"model.quantization=w8a8: .* transformers' code.*Set model.quantization=none"
    ):
        load(plain, quantization="w8a8", implementation="transformers")
    with pytest.raises(ConfigError, match="a dry model has no weights"):
        ModelConfig(load_format="dry", quantization="w8a8")
    with pytest.raises(ConfigError, match=r"model\.quantization_group must be 32, 64 or 128, got 16"):
        ModelConfig(quantization_group=16)
    made = model()
    made.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.nan
    made.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj: a weight that is not finite"):
        load(tmp_path, quantization="w8a16")


def test_orders_that_differ_within_a_product_are_refused(tmp_path: Path) -> None:
    config, tensors = FOLDERS["gptq, act-order"]
    quantized_folder(tmp_path, config, tensors)
    stored, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.self_attn.k_proj.g_idx"
    save_file(stored | {name: stored[name].flip(0).contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"0\.self_attn: q_proj, k_proj, v_proj have different orders.*desc_act=false"):
        load(tmp_path)


def test_a_weight_that_is_absorbed_is_read_from_blocks_of_fp8_and_kept_whole(tmp_path: Path) -> None:
    """As DeepSeek-V3's folder has kv_b_proj."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=90, hidden_size=48, intermediate_size=64, num_hidden_layers=1, first_k_dense_replace=1,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=20, kv_lora_rank=24, qk_nope_head_dim=12,
        qk_rope_head_dim=8, v_head_dim=18, architectures=["DeepseekV3ForCausalLM"],
    )  # fmt: skip
    form, tensors, meant = WeightFormat(Number.fp8, columns=16, rows=16), {}, {}
    for name, weight in transformers.DeepseekV3ForCausalLM(config).state_dict().items():
        if "proj" in name:
            stored, meant[name] = fp8(form, "weight_scale_inv")(weight)
            tensors |= {name.removesuffix("weight") + key: value.contiguous() for key, value in stored.items()}
        else:
            tensors[name] = weight.contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"quantization_config": blocks}))
    attention = load(tmp_path).layers[0].self_attn
    assert torch.equal(attention.up.flatten(0, 1), meant["model.layers.0.self_attn.kv_b_proj.weight"])
    assert set(attention.kv_b_proj.method.weights()) == {"weight"}
    assert isinstance(attention.o_proj.method, QuantizedLinear)
