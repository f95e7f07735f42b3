"""What each rank has of a model: its own part of every weight, read without the rest."""

from __future__ import annotations

import json
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "modeling"))

from quantized_folders import INT, INT4, awq, compressed_tensors_folder, fp8, gptq, quantized_folder

from mini_infer import ConfigError
from mini_infer.core.config import ModelConfig, Quantization
from mini_infer.core.errors import ModelError
from mini_infer.modeling import checkpoint
from mini_infer.modeling.kv_scales import KVScales
from mini_infer.modeling.loader import load_model, load_spec
from mini_infer.modeling.model import Model
from mini_infer.modeling.model_files import resolve_folder
from mini_infer.modeling.sharding import of_each_rank
from mini_infer.modeling.stages import of_stage
from mini_infer.parallel.context import ParallelContext
from mini_infer.quantization.formats import Number, WeightFormat

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": True,
    "mlp_bias": True,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 91,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def part_of(config: ModelConfig, rank: int, size: int, stage: int = 0, stages: int = 1) -> Model:
    own = ParallelContext(rank, size, stage=stage, stages=stages)
    spec = of_stage(of_each_rank(load_spec(config), size), torch.float32, own)
    return load_model(config, spec, torch.float32, CPU, 16, parallel=own)


def check_parts(config: ModelConfig, size: int) -> None:
    """Each rank's products are its part of the whole model's, exactly, or add up to them."""
    whole, ranks = part_of(config, 0, 1), [part_of(config, rank, size) for rank in range(size)]
    layer, layers = whole.layers[0], [model.layers[0] for model in ranks]
    spec, own = whole.spec.attention, ranks[0].spec.attention
    numbers = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    x, attended = numbers[:, :256], numbers[:, : spec.num_heads * spec.head_dim]

    heads = layer.self_attn.qkv_proj.method.apply(x).unflatten(1, (-1, spec.head_dim))
    q, k, v = heads.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), 1)
    for rank, other in enumerate(layers):
        of_q = slice(rank * own.num_heads, (rank + 1) * own.num_heads)
        first = rank * spec.num_kv_heads // size
        of_kv = slice(first, first + own.num_kv_heads)
        expected = torch.cat((q[:, of_q], k[:, of_kv], v[:, of_kv]), 1).flatten(1)
        assert_alike(other.self_attn.qkv_proj.method.apply(x), expected)

    gate_up = layer.mlp.gate_up_proj.method.apply(x).unflatten(1, (2, size, -1))
    for rank, other in enumerate(layers):
        assert_alike(other.mlp.gate_up_proj.method.apply(x), gate_up[:, :, rank].flatten(1))

    for name, inputs in (("self_attn.o_proj", attended), ("mlp.down_proj", numbers)):
        parts = zip(layers, inputs.chunk(size, 1), strict=True)
        total = sum(other.get_submodule(name).method.apply(part.contiguous()) for other, part in parts)
        assert_alike(total, layer.get_submodule(name).method.apply(inputs))


def assert_alike(found: Any, expected: torch.Tensor) -> None:
    """But for the order of sums."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_dummy_weights_are_parts_of_the_whole_models(size: int) -> None:
    """Four ranks have two KV heads: each is on two of them."""
    check_parts(ModelConfig(path="made up", load_format="dummy", hf_config=SHAPE), size)


def test_the_vocabulary_is_padded() -> None:
    config = ModelConfig(path="made up", load_format="dummy", hf_config=SHAPE)
    whole, ranks = part_of(config, 0, 1), [part_of(config, rank, 4) for rank in range(4)]
    for name in ("embed_tokens", "lm_head"):
        table = torch.cat([getattr(model, name).weight for model in ranks])
        assert torch.equal(table, torch.cat((getattr(whole, name).weight, torch.zeros(1, 256))))


FOLDERS: dict[str, tuple[dict[str, Any], Any]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, gptq(4, 32, True)),
    "gptq with zeros": ({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False}, gptq(4, 64, False)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq(32)),
    "fp8 in blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 64]},
        fp8(WeightFormat(Number.fp8, 64, 32), "weight_scale_inv"),
    ),
}
PACKED = {
    "int4 in groups": {**INT4, "strategy": "group", "group_size": 32},
    "int4 with zeros": {**INT4, "strategy": "group", "group_size": 64, "symmetric": False},
    "int4, a scale a row": {**INT4, "strategy": "channel"},
    "int8": {**INT, "strategy": "channel"},
}
LARGER = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2}


@pytest.mark.parametrize("name", FOLDERS)
def test_codes_and_scales_go_with_their_rows_and_groups(tmp_path: Path, name: str) -> None:
    config, tensors = FOLDERS[name]
    quantized_folder(tmp_path, config, tensors, **LARGER)
    check_parts(ModelConfig(path=str(tmp_path)), 2)


@pytest.mark.parametrize("name", PACKED)
def test_words_of_codes_go_with_their_rows_and_groups(tmp_path: Path, name: str) -> None:
    pytest.importorskip("compressed_tensors")
    groups = {"group_0": {"targets": ["Linear"], "weights": PACKED[name]}}
    compressed_tensors_folder(tmp_path, groups, changes=LARGER)
    check_parts(ModelConfig(path=str(tmp_path)), 2)


@pytest.mark.parametrize("quantization", ["w8a16", "w4a16", "fp8_block"])
@pytest.mark.parametrize("dummy", [True, False])
def test_rounding_while_loading_gives_every_rank_the_whole_rows_scales(
    tmp_path: Path, quantization: str, dummy: bool
) -> None:
    assert quantization in [choice.value for choice in Quantization]
    shape = {**SHAPE, "num_attention_heads": 4, "head_dim": 128}  # scales of 128 outputs go to one rank
    options: dict[str, Any] = {"path": "made up", "load_format": "dummy", "hf_config": shape}
    if not dummy:
        plain = part_of(ModelConfig(**options), 0, 1)
        tensors = {name: t.memory.clone().contiguous() for name, t in plain.checkpoint_tensors().items()}
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(shape))
        options = {"path": str(tmp_path)}
    check_parts(ModelConfig(quantization=quantization, **options), 2)


def test_act_order_and_outliers_are_refused_by_name(tmp_path: Path) -> None:
    quantized_folder(
        tmp_path,
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True},
        gptq(4, 32, True, act_order=True),
        **LARGER,
    )
    with pytest.raises(ConfigError, match=r"self_attn: ranks cannot share .* act-order \(desc_act=true\).*one rank"):
        part_of(ModelConfig(path=str(tmp_path)), 0, 2)
    mixed = ModelConfig(path="made up", load_format="dummy", hf_config=SHAPE, quantization="mixed")
    with pytest.raises(ConfigError, match="outlier columns, which may be anywhere"):
        part_of(mixed, 0, 2)
    small = ModelConfig(
        path="x", load_format="dummy", quantization="w8a16", hf_config={**SHAPE, "intermediate_size": 384}
    )
    with pytest.raises(ConfigError, match="mlp has 192 inputs a rank, no multiple of 128: take fewer ranks"):
        part_of(small, 0, 2)


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of every tensor, or parts of one, that are read from a file."""
    read, seen = checkpoint._read, Counter[str]()

    def counted(tensors: Any, name: str, *part: Any) -> torch.Tensor:
        tensor = read(tensors, name, *part)
        seen[name] += tensor.nbytes
        return tensor

    monkeypatch.setattr(checkpoint, "_read", counted)
    return seen


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name = request.param
    if name in FOLDERS:
        quantized_folder(tmp_path, *FOLDERS[name], **LARGER)
    elif name in PACKED:
        pytest.importorskip("compressed_tensors")
        groups = {"group_0": {"targets": ["Linear"], "weights": PACKED[name]}}
        compressed_tensors_folder(tmp_path, groups, changes=LARGER)
    return str(tmp_path) if name in FOLDERS or name in PACKED else name


def readers(name: str, size: int, stages_with_tables: int) -> int:
    """How many ranks read the same of a tensor, in models of two KV heads."""
    of_rows = ("norm.weight", ".g_idx", ".weight_shape", "o_proj.weight_scale", "down_proj.weight_scale")
    if name.endswith(of_rows):
        return size
    if name == "model.embed_tokens.weight":
        return stages_with_tables
    return size // 2 if "k_proj." in name or "v_proj." in name else 1


@pytest.mark.parametrize(
    ("folder", "size", "stages"),
    [
        ("tiny-target", 2, 1),
        ("tiny-target", 4, 1),
        ("tiny-target", 2, 2),
        ("gptq", 2, 1),
        ("awq", 2, 2),
        ("fp8 in blocks", 2, 1),
        ("int4, a scale a row", 2, 1),
    ],
    indirect=["folder"],
)
def test_a_rank_reads_its_own_part_of_the_files(bytes_read: Counter[str], folder: str, size: int, stages: int) -> None:
    config = ModelConfig(path=folder)
    part_of(config, 0, 1)
    whole = dict(bytes_read)
    assert sum(whole.values()) == pytest.approx((resolve_folder(folder) / "model.safetensors").stat().st_size, rel=0.05)
    bytes_read.clear()
    shares = [[] for _ in range(stages)]
    for stage, rank in product(range(stages), range(size)):
        before = bytes_read.total()
        part_of(config, rank, size, stage, stages)
        shares[stage].append(bytes_read.total() - before)
    assert all(len(set(of_stage)) == 1 for of_stage in shares)
    assert {name: count / whole[name] for name, count in bytes_read.items()} == {
        name: readers(name, size, stages if folder == "tiny-target" else 1) for name in whole
    }


def test_a_tensor_of_another_shape_is_named_for_a_rank_too(tmp_path: Path) -> None:
    plain = part_of(ModelConfig(path="made up", load_format="dummy", hf_config=SHAPE), 0, 1)
    tensors = {name: t.memory.clone().contiguous() for name, t in plain.checkpoint_tensors().items()}
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(256, 256)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    with pytest.raises(ModelError, match=r"down_proj.weight in .* \(256, 256\); the config asks for \(256, 512\)"):
        part_of(ModelConfig(path=str(tmp_path)), 1, 2)


def test_models_that_ranks_cannot_share_are_refused() -> None:
    through = ModelConfig(path="made up", load_format="dummy", hf_config=SHAPE, implementation="transformers")
    with pytest.raises(ConfigError, match="runs through transformers' code, whose layers ranks cannot share"):
        of_each_rank(load_spec(through), 2)


def test_scales_of_keys_go_with_their_heads() -> None:
    scales = torch.ones(1, 2, 1)
    stored = KVScales(scales, ["attn"], True, ParallelContext(1, 2), heads=2)
    tensors = stored.checkpoint_tensors()
    tensors["attn.k_scale"].load(torch.tensor([2.0, 3.0]))
    tensors["attn.v_scale"].load(torch.tensor(5.0))
    assert scales.flatten().tolist() == [3.0, 5.0]
    assert (2,) in tensors["attn.k_scale"].other_shapes
