"""A number format of its own attaches to a decoder from outside: here int8 weights, which decline all fusion."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mini_infer.attention.context import AttentionBatch, AttentionContext, ModelAttention
from mini_infer.attention.torch_sdpa import SdpaBackend
from mini_infer.cache.kv_store import KVStore
from mini_infer.core.config import ModelConfig
from mini_infer.core.errors import ModelError
from mini_infer.kernels.interface import Kernels, Stream
from mini_infer.kernels.ops import TorchKernels, TritonKernels
from mini_infer.modeling.decoder import Decoder
from mini_infer.modeling.linear_methods.base import Build, LinearMethod, LinearShape, empty_parameter
from mini_infer.modeling.linear_methods.unquantized import Unquantized
from mini_infer.modeling.loader import load_model, load_spec
from mini_infer.modeling.model import CheckpointTensor, Model

CPU = torch.device("cpu")
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": True,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 90,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
DUMMY = ModelConfig(load_format="dummy", hf_config=SHAPE)


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> int8 [N, K] and a scale [N, 1] for each output."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


class Int8(LinearMethod):
    """Weights are quantized while they are loaded."""

    def __init__(self, name: str, shape: LinearShape, build: Build) -> None:
        self._shape, self._build = shape, build
        options = {"device": build.device}
        self.weight = empty_parameter(shape.out_size, shape.in_size, dtype=torch.int8, **options)
        self.scale = empty_parameter(shape.out_size, 1, dtype=torch.float32, **options)
        self.bias = empty_parameter(shape.out_size, dtype=build.dtype, **options) if shape.bias else None

    def weights(self) -> dict[str, nn.Parameter]:
        bias = {} if self.bias is None else {"bias": self.bias}
        return {"weight": self.weight, "scale": self.scale} | bias

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        tensors, start = {}, 0
        for name, size in self._shape.parts.items():
            rows = slice(start, start + size)
            tensors[f"{name}.weight"] = CheckpointTensor((size, self._shape.in_size), partial(self._load, rows))
            if self.bias is not None:
                tensors[f"{name}.bias"] = CheckpointTensor.copied_to(self.bias[rows])
            start += size
        return tensors

    def apply(self, x: Tensor) -> Tensor:
        return F.linear(x, (self.weight * self.scale).to(x.dtype), self.bias)

    def fill_dummy(self, draw: Callable[[Tensor], None]) -> None:
        weight = torch.empty(self.weight.shape, dtype=self._build.dtype, device=self._build.device)
        draw(weight)
        self._load(slice(None), weight)
        if self.bias is not None:
            draw(self.bias)

    def _load(self, rows: slice, weight: Tensor) -> None:
        numbers, scale = quantized(weight.float())
        self.weight[rows], self.scale[rows] = numbers, scale


class Int8Activations(Int8):
    """The norm quantizes too, a scale for each token: a fusion of its own."""

    def norm_apply(self, stream: Stream, silu_mul: bool) -> tuple[Tensor, Tensor]:
        x, residual, (weight, eps) = stream
        total = x if residual is None else residual + x
        numbers, scale = quantized(F.rms_norm(total, weight.shape, weight, eps))
        y = (numbers.double() @ self.weight.double().T).float() * scale * self.scale.T
        y = y if self.bias is None else y + self.bias
        gate, up = y.chunk(2, dim=-1)
        return (F.silu(gate) * up if silu_mul else y), total


def all_but_down_proj(name: str, shape: LinearShape, build: Build) -> LinearMethod:
    """As a checkpoint that names layers to be left alone."""
    alone = name == "model.layers.1.mlp" and "down_proj" in shape.parts
    return (Unquantized.create if alone else Int8)(name, shape, build)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in load_model(DUMMY, load_spec(DUMMY), torch.float32, CPU).checkpoint_tensors().items():
        scale, mean = (0.2, 1.0) if "norm" in name else (tensor.shape[-1] ** -0.5, 0.0)
        tensors[name] = torch.randn(tensor.shape, generator=generator) * scale + mean
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def load(folder: Path, kernels: Kernels | None = None, method: Any = Unquantized.create) -> Model:
    config = ModelConfig(path=str(folder))
    return load_model(config, load_spec(config), torch.float32, CPU, kernels=kernels, linear_method=method)


@torch.inference_mode()
def logits(model: Model, step_rows: Callable[..., AttentionBatch]) -> Tensor:
    """Of a prompt, a chunk behind it and a decode row."""
    attention, backend = model.spec.attention, SdpaBackend()
    store = KVStore(model.kv_layout, num_blocks=6, block_size=4, device=CPU)
    results = []
    for start, count, num_decode_rows in ((0, 7, 0), (7, 5, 0), (12, 1, 1)):
        batch = step_rows([(start, count, [4, 1, 3, 0])], num_decode_rows, 4)
        context = AttentionContext(batch, ModelAttention(store, model.spec.windows, attention.scale), backend, backend)
        tokens = torch.arange(start, start + count) * 7 % 90
        results.append(model.compute_logits(model.forward(tokens, batch.positions, context)))
    return torch.cat(results)


@pytest.mark.parametrize("kernels", [TorchKernels, TritonKernels])
def test_int8_weights_attach_without_an_edit_in_the_decoder(
    kernels: type[TorchKernels], folder: Path, step_rows: Callable[..., AttentionBatch]
) -> None:
    if kernels is TritonKernels:
        pytest.importorskip("triton")
    exact = logits(load(folder), step_rows)
    found = logits(load(folder, kernels(), all_but_down_proj), step_rows)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("proj.weight") and name != "model.layers.1.mlp.down_proj.weight":
            numbers, scale = quantized(tensor)
            tensors[name] = numbers * scale
    save_file(tensors, folder / "model.safetensors")
    expected = logits(load(folder), step_rows)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (expected - exact).abs().max() > 1e-2, "int8 weights that change nothing would prove little"


def test_a_method_may_fuse_the_norm_in_its_own_way(
    folder: Path, step_rows: Callable[..., AttentionBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(load(folder, method=Int8), step_rows)
    norms: list[Stream] = []
    kernels = TorchKernels()
    monkeypatch.setattr(kernels, "add_rms_norm", lambda x: norms.append(x) or TorchKernels.add_rms_norm(kernels, x))
    found = logits(load(folder, kernels, Int8Activations), step_rows)
    assert 0 < (found - expected).norm() / expected.norm() < 0.05
    assert len(norms) == 3, "of each step the last norm alone, behind which no product of a layer stands"


def test_a_method_says_what_it_takes(folder: Path) -> None:
    products = {"qkv": (64 * 128, 128), "o": (64 * 64, 64), "gate_up": (64 * 192, 192), "down": (96 * 64, 64)}
    biases, norms, tables = 128 + 64, 2 * 64 + 2 * 16, 2 * 90 * 64
    layer = sum(numbers + 4 * outs for numbers, outs in products.values())
    expected = 2 * layer + 4 * (2 * (biases + norms) + 64 + tables) + 3 * 96 * 64 - 4 * 64  # a down_proj is not int8
    assert load(folder, method=all_but_down_proj).weight_bytes() == expected
    build = Build(torch.float32, torch.device("meta"), TorchKernels(), all_but_down_proj)
    assert Decoder(load_spec(DUMMY), 1, build).weight_bytes() == expected


def test_a_transform_has_no_memory_to_show_and_its_shape_is_checked(folder: Path) -> None:
    tensors = load(folder, method=all_but_down_proj).checkpoint_tensors()
    assert tensors["model.layers.0.self_attn.q_proj.weight"].memory is None
    assert tensors["model.layers.0.self_attn.k_proj.weight"].shape == (32, 64)
    assert tensors["model.layers.1.mlp.down_proj.weight"].memory is not None
    changed = load_file(folder / "model.safetensors") | {"model.layers.0.self_attn.k_proj.weight": torch.ones(64, 64)}
    save_file(changed, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"k_proj\.weight in .*has shape \(64, 64\); .*\(32, 64\)"):
        load(folder, method=all_but_down_proj)


def test_dummy_weights_of_another_format() -> None:
    a, b = (load_model(DUMMY, load_spec(DUMMY), torch.float32, CPU, linear_method=Int8) for _ in range(2))
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(x, y)
    method = a.layers[1].mlp.gate_up_proj.method
    assert 0.015 < (method.weight * method.scale).std() < 0.025
