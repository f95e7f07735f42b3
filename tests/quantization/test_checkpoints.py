"""What a quantization_config says, and what is wrong with one."""

import pytest
import torch

from mini_infer.core.errors import ModelError
from mini_infer.quantization.checkpoint_config import checkpoint_format, rounding
from mini_infer.quantization.checkpoints import AWQ, GPTQ, CompressedTensors, FP8Blocks, Rounded
from mini_infer.quantization.formats import (
    FP8,
    INT8,
    SCHEMES,
    ActivationFormat,
    Number,
    Scheme,
    WeightFormat,
    quantize,
    spread_scales,
)
from mini_infer.quantization.packing import pack_words

UP, Q, HEAD = "model.layers.3.mlp.up_proj", "model.layers.3.self_attn.q_proj", "lm_head"
INT = {"num_bits": 8, "type": "int", "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FLOAT = {"num_bits": 8, "type": "float", "strategy": "channel"}


def compressed(kind="pack-quantized", targets=("Linear",), ignore=(HEAD,), more=None, **group):
    groups = {"group_0": {"targets": list(targets), **group}} | (more or {})
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": groups,
        "ignore": list(ignore),
    }


def read(config):
    return checkpoint_format(config, "config.json")


def test_compressed_tensors_by_class_expression_and_name():
    eight, four = {"weights": INT}, {"targets": ["re:.*self_attn.*", "model.layers.0.mlp.up_proj"], "weights": INT4}
    form = read(compressed(ignore=[HEAD, "re:.*layers.7.mlp", "model.layers.2.mlp.up_proj"], more={"b": four}, **eight))
    assert form.layer(UP) == CompressedTensors(Scheme(INT8), packed=True)
    assert form.layer(Q) == CompressedTensors(Scheme(WeightFormat(Number.int4, 32)), packed=True)
    assert form.layer("model.layers.0.mlp.up_proj") == form.layer(Q), "a name counts before a class"
    for name in (HEAD, "model.layers.7.mlp.up_proj", "model.layers.2.mlp.up_proj"):
        assert form.layer(name) is None
    assert form.describe() == "compressed-tensors: int4 weights in groups of 32, int8 weights"


def test_compressed_tensors_of_every_scheme():
    tokens = {"strategy": "token", "dynamic": True}
    int8_tokens, fp8_tokens = {"num_bits": 8, "type": "int"} | tokens, {"num_bits": 8, "type": "float"} | tokens
    groups = {"strategy": "group", "group_size": 128}
    cases = [
        ("int-quantized", {"weights": INT, "input_activations": int8_tokens}, SCHEMES["w8a8"]),
        ("float-quantized", {"weights": FLOAT, "input_activations": fp8_tokens}, SCHEMES["fp8"]),
        ("naive-quantized", {"weights": FLOAT, "input_activations": fp8_tokens}, SCHEMES["fp8"]),
        ("pack-quantized", {"weights": INT}, SCHEMES["w8a16"]),
        ("pack-quantized", {"weights": INT4 | {"group_size": 128}}, SCHEMES["w4a16"]),
        (
            "float-quantized",
            {
                "weights": FLOAT | {"strategy": "block", "block_structure": [128, 128]},
                "input_activations": fp8_tokens | groups,
            },
            SCHEMES["fp8_block"],
        ),
    ]
    for kind, group, scheme in cases:
        layer = read(compressed(kind, **group)).layer(UP)
        assert layer.scheme == scheme
        assert layer.packed == (kind == "pack-quantized")


def test_gptq_awq_and_fp8():
    form = read({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": True})
    zeros = WeightFormat(Number.int4, 128, symmetric=False)
    assert form.layer(UP) == GPTQ(Scheme(zeros), sorted_columns=True)
    assert form.layer(UP).act_order
    assert form.layer(HEAD) is None
    form = read({"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": True})
    assert form.layer(UP).scheme == Scheme(INT8)
    assert not form.layer(UP).act_order, "one group has no order"
    form = read(
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 64,
            "dynamic": {r"-:.*\.3\.mlp": {}},
            "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]],
        }
    )
    assert form.layer(UP) is None
    assert form.layer(Q).scheme.weights.columns == 64
    assert form.layer("model.layers.3.self_attn.o_proj") is None
    form = read({"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["self_attn"]})
    assert form.layer(UP) == AWQ(Scheme(zeros))
    assert form.layer(Q) is None
    form = read({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]})
    assert form.layer(UP) == FP8Blocks(SCHEMES["fp8_block"])
    form = read({"quant_method": "fp8", "activation_scheme": "static"})
    assert form.layer(UP) == FP8Blocks(Scheme(FP8, ActivationFormat(Number.fp8)))
    assert "each token has its own" in form.describe()


def test_rounding_takes_groups_and_zeros():
    form = rounding("w4a16", 32, False)
    assert form.layer(UP) == Rounded(Scheme(WeightFormat(Number.int4, 32, symmetric=False)))
    assert form.layer(HEAD) is None
    assert form.describe() == "w4a16, rounded while loading: int4 weights in groups of 32 with zeros"
    assert rounding("mixed", 32, False).layer(UP).scheme == SCHEMES["mixed"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("int8", "quantization_config must be a mapping, got 'int8'"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'; supported are compressed-tensors, mini-infer, gptq"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3; supported are 4, 8"),
        ({"quant_method": "gptq", "bits": 8, "sym": False}, "bits=8 with sym=false.*sym=true"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'; supported are gptq, gptq_v2"),
        ({"quant_method": "gptq", "bits": 4, "lm_head": True}, "lm_head=true"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size must be -1 .* or at least 1, got 0"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:a": {"bits": 8}}}, "settings of their own"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv'; supported are gemm"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point is False; supported are True"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": "a"}, "must be a list of names, got 'a'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"two sizes, such as \[128, 128\]; got \[128\]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'; supported are e4m3"),
        (compressed("marlin-24", weights=INT), "group_0: format is 'marlin-24'; supported are pack-quantized"),
        (compressed(weights=INT | {"num_bits": 2}), "group_0.weights: num_bits is 2; supported are 4, 8"),
        (compressed(weights=INT | {"symmetric": False}), "symmetric=false with 8 bits"),
        (compressed(weights=FLOAT | {"num_bits": 4}), "num_bits is 4; supported are 8"),
        (compressed(weights=INT4, input_activations=INT | {"strategy": "token"}), "int8 activations beside int4"),
        (compressed(weights=INT, input_activations=INT | {"symmetric": False, "strategy": "token"}), "symmetric is"),
        (compressed(weights=INT, output_activations=INT), "output_activations are not supported"),
        (compressed(weights=INT, ignore=()), "lm_head is quantized"),
        (compressed(weights=INT, targets=["Conv2d"]), "target 'Conv2d' is not supported; supported are Linear"),
        (compressed(weights=INT, targets=["re:("]), "is no regular expression"),
        (compressed(weights=INT) | {"quantization_status": "initialized"}, "'initialized'; supported are compressed"),
        (compressed(weights=INT) | {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config is not supported"),
        (
            compressed(weights=INT) | {"kv_cache_scheme": {"num_bits": 8, "type": "int"}},
            "kv_cache_scheme: type is 'int'",
        ),
        (compressed(), "group_0.weights must be a mapping, got None"),
    ],
)
def test_what_is_not_supported_names_itself_and_a_way_out(config, message):
    with pytest.raises(ModelError, match=message) as caught:
        read(config)
    assert str(caught.value).startswith("config.json: quantization_config")
    if "must be a mapping" not in message:
        assert "take the original weights, which model.quantization (w8a8, w8a16" in str(caught.value)


# --- tensors ------------------------------------------------------------------------------------------------------

GROUPS = WeightFormat(Number.int4, 32)
DTYPES = (torch.bfloat16, torch.float32)


def gptq_tensors():
    return {
        "qweight": pack_words(torch.full((8, 64), 9), 4).T,
        "qzeros": pack_words(torch.full((2, 8), 7), 4),
        "scales": torch.full((2, 8), 0.5),
        "g_idx": torch.arange(64, dtype=torch.int32) // 32,
    }


def test_a_weight_is_read():
    weight = GPTQ(Scheme(GROUPS)).read(gptq_tensors(), torch.float32).weight
    assert torch.equal(weight.codes, torch.ones(8, 64, dtype=torch.int8))
    assert torch.equal(weight.scales, torch.full((8, 2), 0.5))
    assert weight.zeros is None


@pytest.mark.parametrize(
    ("layer", "changes", "message"),
    [
        (GPTQ(Scheme(GROUPS)), {"scales": torch.full((2, 8), torch.nan)}, "scales holds numbers that are not finite"),
        (GPTQ(Scheme(GROUPS), first_version=False), {}, "qzeros are not all 8, as sym=true has them"),
        (GPTQ(Scheme(GROUPS)), {"g_idx": torch.arange(64) % 2}, "g_idx sorts the columns.*desc_act=false"),
        (GPTQ(Scheme(GROUPS), True), {"g_idx": torch.zeros(64)}, "g_idx does not put 32 columns into each group"),
    ],
)
def test_numbers_that_cannot_be_right(layer, changes, message):
    with pytest.raises(ModelError, match=message):
        layer.read(gptq_tensors() | changes, torch.float32)


def test_codes_of_fp8_that_are_not_numbers():
    codes = torch.ones(4, 4).to(torch.float8_e4m3fn)
    codes[1, 1] = torch.nan
    with pytest.raises(ModelError, match="weight holds numbers that are not finite: the folder is damaged"):
        FP8Blocks(SCHEMES["fp8"]).read({"weight": codes, "weight_scale": torch.ones(1)}, torch.float32)
    with pytest.raises(ModelError, match="neither weight_scale_inv nor weight_scale"):
        FP8Blocks(SCHEMES["fp8"]).read({"weight": codes}, torch.float32)


def test_weights_that_are_not_finite_are_not_rounded():
    with pytest.raises(ModelError, match="not finite"):
        Rounded(SCHEMES["w8a16"]).read({"weight": torch.full((2, 2), torch.inf)}, torch.float32)


def test_the_shape_in_a_packed_folder_is_that_of_its_words():
    tensors = {
        "weight_packed": pack_words(torch.zeros(8, 64), 4),
        "weight_shape": torch.tensor([8, 32]),
        "weight_scale": torch.ones(8, 2),
    }
    with pytest.raises(ModelError, match="weight_shape says 8 x 32, which is not the shape of weight_packed"):
        CompressedTensors(Scheme(GROUPS), packed=True).read(tensors, torch.float32)


@pytest.mark.parametrize("layer", [GPTQ, AWQ, CompressedTensors])
def test_groups_that_do_not_divide(layer):
    with pytest.raises(ModelError, match="groups of 32 columns do not divide its 80 inputs"):
        layer(Scheme(GROUPS)).tensors(64, 80)


def test_words_that_are_not_full():
    with pytest.raises(ModelError, match="12 outputs and 64 inputs do not fill words of 8 codes"):
        GPTQ(Scheme(GROUPS)).tensors(12, 64)


def test_codes_are_made_for_the_scales_that_are_kept():
    weight, form = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)), GROUPS
    kept, other = (Rounded(Scheme(form)).read({"weight": weight}, dtype).weight for dtype in DTYPES)
    assert torch.equal(kept.scales, other.scales), "a model in fp32 is a reference"
    assert torch.equal(kept.codes, other.codes)
    assert torch.equal(kept.scales, kept.scales.bfloat16().float())

    def error(codes):
        return (codes.float() * spread_scales(kept.scales, form, weight.shape) - weight).norm()

    assert error(kept.codes) < error(quantize(weight, form).codes)
