"""Models through transformers' own code: what the probe finds out, logits, weights, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from experiments.lab.judge.logit_gate import probe_batch
from mini_infer import EngineConfig, LLMEngine
from mini_infer.core.config import ModelConfig
from mini_infer.core.errors import ConfigError, ModelError
from mini_infer.modeling.loader import load_model, load_spec, outline
from mini_infer.modeling.spec import ModelSpec
from mini_infer.modeling.transformers_model import TransformersModel

CPU = torch.device("cpu")
LENGTH = 45
SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
DEEPSEEK = MLA | MOE | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 9}

# model_type -> what its config has beside SMALL
SERVED: dict[str, dict[str, Any]] = {
    "gemma": {},
    "gemma2": ALTERNATING
    | {"query_pre_attn_scalar": 20, "attn_logit_softcapping": None, "final_logit_softcapping": 2.0},
    "gemma3_text": ALTERNATING | {"query_pre_attn_scalar": 20},
    "gemma4_text": ALTERNATING | {"global_head_dim": 32, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 97},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {"sliding_window": 9},
    "olmo": {"clip_qkv": 2.0},
    "olmo2": {},
    "gpt_neox": {"rotary_pct": 0.25},
    "gpt2": {"n_inner": 96, "scale_attn_by_inverse_layer_idx": True},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 32, "init_std": 0.2},
    "starcoder2": {"sliding_window": 9},
    "stablelm": {"use_qkv_bias": True},
    "cohere": {"logit_scale": 0.5},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.3},
    "ernie4_5_moe": MOE | {"moe_num_experts": 4, "moe_k": 2},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": DEEPSEEK | {"num_key_value_heads": 4, "head_dim": 8},
}


def hf_config(model_type: str, **changes: Any) -> dict[str, Any]:
    """A small config.json of this type. Names that the type does not know are left out."""
    known = AutoConfig.for_model(model_type)
    names = {*known.to_dict(), *known.attribute_map}
    values = {name: value for name, value in (SMALL | changes).items() if name in names or name in changes}
    config = AutoConfig.for_model(model_type, **values)
    architecture = AutoModelForCausalLM._model_mapping[type(config)].__name__
    return config.to_dict() | {"architectures": [architecture]}


def dummy(model_type: str, **changes: Any) -> ModelConfig:
    model = {"load_format": "dummy", "hf_config": hf_config(model_type, **changes)}
    return ModelConfig(**model, implementation=implementation(model_type))  # type: ignore[arg-type]


def implementation(model_type: str) -> str:
    """By which it runs through transformers' code: of the served ones one has code of ours, too."""
    return "transformers" if model_type == "deepseek_v3" else "auto"


def save_checkpoint(model_type: str, folder: Path, **changes: Any) -> Any:
    """A random checkpoint, in which norms and biases are random too; returns transformers' model of it."""
    values = hf_config(model_type, **changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values), dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def make_model(config: ModelConfig, dtype: torch.dtype = torch.float32) -> TransformersModel:
    model = load_model(config, load_spec(config), dtype, CPU)
    assert isinstance(model, TransformersModel)
    return model


@pytest.mark.parametrize("model_type", SERVED)
def test_logits_equal_transformers(model_type: str, tmp_path: Path) -> None:
    """Of a long and a short prompt, and of what follows them, token by token and in one batch. The reference has an
    attention mask, as `generate` gives one: without, some of transformers' code forgets to be causal."""
    reference = save_checkpoint(model_type, tmp_path, **SERVED[model_type])
    model = {"path": str(tmp_path), "device": "cpu", "implementation": implementation(model_type)}
    engine = LLMEngine(EngineConfig.from_dict({"model": model}))
    assert engine.startup.implementation == "transformers"
    tokens = torch.randint(1, SMALL["vocab_size"], (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
    deviation = float(expected.std())
    assert deviation > 0.05, "logits this flat would prove little"
    found = probe_batch(engine, [(tokens[0].tolist(), 30), (tokens[1].tolist(), 1)])
    engine.close()
    for row, split in enumerate((30, 1)):
        torch.testing.assert_close(found[row], expected[row, split - 1 :], rtol=0, atol=1e-4 * deviation)


class TestSpec:
    def test_what_attention_must_know(self) -> None:
        spec = load_spec(dummy("gemma3_text", **SERVED["gemma3_text"]))
        assert (spec.architecture, spec.through_transformers) == ("Gemma3ForCausalLM", True)
        assert spec.windows == (9, None, 9, None)
        assert (spec.attention.num_heads, spec.attention.num_kv_heads, spec.attention.head_dim) == (4, 2, 16)
        assert spec.attention.scale == pytest.approx(20**-0.5)
        assert (spec.vocab_size, spec.hidden_size, spec.max_model_len, spec.eos_token_ids) == (97, 64, 64, ())

    def test_values_smaller_than_keys_are_kept_at_the_size_of_keys(self) -> None:
        attention = load_spec(dummy("deepseek_v3", **SERVED["deepseek_v3"])).attention
        assert (attention.num_kv_heads, attention.head_dim) == (4, 24)

    def test_hidden_states_may_be_narrower_than_layers(self) -> None:
        assert load_spec(dummy("opt", **SERVED["opt"])).hidden_size == 32

    def test_a_window_beyond_all_positions_is_none(self) -> None:
        assert load_spec(dummy("starcoder2", sliding_window=64)).windows == (None,) * 4

    def test_known_architectures_are_ours_unless_asked(self) -> None:
        values = hf_config("llama")

        def spec(**options: Any) -> ModelSpec:
            return load_spec(ModelConfig(load_format="dummy", hf_config=values, **options))  # type: ignore[arg-type]

        assert not spec().through_transformers
        assert not spec(implementation="ours").through_transformers
        assert spec(implementation="transformers").through_transformers

    def test_ours_does_not_fall_back(self) -> None:
        config = ModelConfig(load_format="dummy", hf_config=hf_config("gpt2"), implementation="ours")  # type: ignore[arg-type]
        with pytest.raises(ModelError, match=r"GPT2LMHeadModel; model\.implementation=ours supports Llama"):
            load_spec(config)

    def test_the_option_is_checked(self) -> None:
        with pytest.raises(ConfigError, match=r"model\.implementation|implementation.*auto, ours, transformers"):
            EngineConfig.from_dict({"model": {"implementation": "vllm"}})


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("bloom", {}, "BloomForCausalLM.* ALiBi"),
        ("mpt", {}, "MptForCausalLM.* ALiBi"),
        ("falcon", {"alibi": True}, "FalconForCausalLM.* ALiBi"),
        ("falcon", {}, "FalconForCausalLM.* attends by itself"),
        ("mamba", {}, r"MambaForCausalLM.* keep a state"),
        ("rwkv", {}, "RwkvForCausalLM.* keep a state"),
        ("jamba", {}, "JambaForCausalLM.* keep a state"),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, r"keep a state \(conv\)"),
        ("llama4_text", {}, "chunked_attention"),
        ("gemma2", {"attn_logit_softcapping": 30.0}, "soft-caps .*attn_logit_softcapping: null"),
        ("gpt_oss", {}, "attention sinks"),
        ("bart", {}, "encoder-decoder"),
        ("bert", {}, "sees later tokens"),
        ("gemma3", {}, "more than text"),
        ("diffllama", {}, r"attend once each .*\[0, 0, 1, 1"),
        ("modernbert-decoder", {"bos_token_id": 1, "eos_token_id": 2}, "no position_ids"),
        ("jetmoe", {}, "waits for results on the host"),
        ("olmo", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic changes"),
        ("glm", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized"),
    ],
)
def test_what_cannot_be_served_says_why(model_type: str, changes: dict[str, Any], reason: str) -> None:
    values = AutoConfig.for_model(model_type).to_dict() if model_type == "gemma3" else hf_config(model_type, **changes)
    values.setdefault("architectures", None)
    values["architectures"] = values["architectures"] or ["Gemma3ForConditionalGeneration"]
    with pytest.raises(ModelError, match=reason) as caught:
        load_spec(ModelConfig(load_format="dummy", hf_config=values))  # type: ignore[arg-type]
    assert str(caught.value).startswith("model.hf_config: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "nothing_known"}, "unsupported architecture GPT2LMHeadModel .model_type='nothing_known'"),
        ({"model_type": None}, "unsupported architecture.*supported are LlamaForCausalLM"),
        ({"architectures": ["GPT2ForTokenClassification"]}, "unsupported architecture GPT2ForTokenClassification"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "unsupported architecture T5"),
        ({"n_embd": 63}, "63"),
    ],
)
def test_configs_of_no_causal_language_model(changes: dict[str, Any], message: str) -> None:
    values = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_head": 4, "n_embd": 64}
    with pytest.raises(ModelError, match=message):
        load_spec(ModelConfig(load_format="dummy", hf_config=values | changes))  # type: ignore[arg-type]


class TestWeights:
    def test_bytes_are_known_without_memory(self) -> None:
        config = dummy("gpt2")
        model = make_model(config, torch.bfloat16)
        shape = outline(load_spec(config), torch.bfloat16)
        assert shape.device.type == "meta"
        assert shape.weight_bytes() == model.weight_bytes() == sum(p.nbytes for p in model.parameters())
        assert shape.kv_layout == model.kv_layout

    def test_dummy_weights_are_seeded_and_norms_are_one(self) -> None:
        a, b = (make_model(dummy("gemma")) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
        for name, tensor in a.checkpoint_tensors().items():
            assert tensor.memory is not None
            if "norm" in name:
                assert not tensor.memory.any(), "Gemma adds one to them"
            else:
                assert 0.015 < tensor.memory.std() < 0.025
                assert torch.equal(tensor.memory, tensor.memory.bfloat16().float())

    def test_checkpoint_tensors_fill_every_weight(self) -> None:
        model = make_model(dummy("gpt2"))
        for tensor in model.checkpoint_tensors().values():
            tensor.load(torch.zeros(tensor.shape))
        assert not any(parameter.any() for parameter in model.parameters())

    def test_a_missing_tensor_is_named(self, tmp_path: Path) -> None:
        save_checkpoint("gpt2", tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        name = next(name for name in tensors if name.endswith("h.1.mlp.c_fc.weight"))
        del tensors[name]
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match=r"h\.1\.mlp\.c_fc\.weight is missing from"):
            make_model(ModelConfig(path=str(tmp_path)))

    def test_a_misshaped_tensor_is_named(self, tmp_path: Path) -> None:
        save_checkpoint("gpt2", tmp_path)
        values = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(values | {"n_inner": 32}))
        with pytest.raises(ModelError, match=r"cannot load .*"):
            make_model(ModelConfig(path=str(tmp_path)))

    @pytest.mark.parametrize("keep", [0, 100])
    def test_a_file_cut_short(self, tmp_path: Path, keep: int) -> None:
        save_checkpoint("gpt2", tmp_path)
        file = tmp_path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:keep])
        with pytest.raises(ModelError, match=r"cannot read .*may be cut short: fetch or copy it again"):
            make_model(ModelConfig(path=str(tmp_path)))

    def test_no_weights(self, tmp_path: Path) -> None:
        save_checkpoint("gpt2", tmp_path)
        (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
        with pytest.raises(ModelError, match=r"has no model\.safetensors; convert"):
            make_model(ModelConfig(path=str(tmp_path)))


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation gives."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


class _NoAttention:
    """A context whose attention gives its queries back, and which remembers what was stored."""

    def __init__(self) -> None:
        self.stored: list[int] = []

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.stored.append(layer)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        assert q.is_contiguous()
        return q


def test_no_mask_is_made() -> None:
    """A step of T tokens of many sequences makes nothing of T x T elements, whatever its positions."""
    tokens, model = 1024, make_model(dummy("gemma3_text", **ALTERNATING))
    context: Any = _NoAttention()
    with _Largest() as largest, torch.inference_mode():
        model.forward(torch.ones(tokens, dtype=torch.int64), torch.arange(tokens) % 50, context)
    assert context.stored == [0, 1, 2, 3]
    assert largest.elements <= tokens * 97


def test_transformers_is_left_as_it_was() -> None:
    """Its own attention functions are there still, and a model made beside ours computes with them."""
    make_model(dummy("gpt2"))
    beside = AutoModelForCausalLM.from_config(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11))
    assert beside.config._attn_implementation == "sdpa"
    assert beside(torch.tensor([[1, 2]])).logits.shape == (1, 2, 11)
