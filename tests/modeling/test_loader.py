from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from mini_infer import assets
from mini_infer.assets import SHIPPED, shipped_path
from mini_infer.core.config import ModelConfig
from mini_infer.core.errors import ConfigError, ModelError
from mini_infer.modeling import model_files
from mini_infer.modeling.decoder import Decoder
from mini_infer.modeling.layers import RMSNorm
from mini_infer.modeling.loader import load_model, load_spec, resolve_device, resolve_dtype
from mini_infer.modeling.model import Model
from mini_infer.modeling.rope import RopeSpec
from mini_infer.modeling.spec import AttentionSpec, LayerSpec, MLPSpec

CPU = torch.device("cpu")

# The layout of a Qwen2.5 config.json as it is published, with small sizes.
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "max_window_layers": 2,
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 100,
}


def dummy(**changes: Any) -> ModelConfig:
    hf_config = {key: value for key, value in (QWEN25 | changes).items() if value != "absent"}
    return ModelConfig(load_format="dummy", hf_config=hf_config)


def make_model(config: ModelConfig, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Decoder:
    return load_model(config, load_spec(config), dtype, device)


def weights(model: Model) -> dict[str, torch.Tensor]:
    """By their names in a checkpoint."""
    return {name: tensor.memory for name, tensor in model.checkpoint_tensors().items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint that loads, for tests that then break it."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN25))
    model = make_model(dummy())
    save_file({name: t.contiguous() for name, t in weights(model).items()}, tmp_path / "model.safetensors")
    return tmp_path


def change_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replaces tensors by name (with _ for .), or removes them where None."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def load(folder: Path) -> Decoder:
    return make_model(ModelConfig(path=str(folder)))


class TestSpec:
    def test_reads_a_published_config(self) -> None:
        spec = load_spec(dummy())
        attention = AttentionSpec(4, 2, 16, scale=0.25, rope=RopeSpec(theta=1e6), qkv_bias=True)
        assert spec.layers == (LayerSpec(attention, MLPSpec(96)),) * 2
        assert (spec.windows, spec.tie_word_embeddings, spec.norm_eps) == ((None, None), False, 1e-6)
        assert (spec.max_model_len, spec.dtype, spec.eos_token_ids) == (128, torch.bfloat16, (2,))

    def test_eos_ids_of_both_files(self, folder: Path) -> None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2, 7]}))
        assert load_spec(ModelConfig(path=str(folder))).eos_token_ids == (2, 5, 7)

    def test_no_eos(self) -> None:
        assert load_spec(dummy(eos_token_id=None)).eos_token_ids == ()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM, Qwen2ForCausalLM"),
            ({"architectures": "absent"}, "none given"),
            ({"hidden_size": "absent", "vocab_size": "absent"}, "missing vocab_size, hidden_size"),
            ({"hidden_size": "wide"}, "hidden_size"),
            ({"hidden_act": "gelu"}, "hidden_act is 'gelu'.*silu"),
            ({"num_key_value_heads": 3}, "num_attention_heads=4.*num_key_value_heads=3"),
            ({"head_dim": 15}, "head_dim=15 is odd"),
            ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported.*yarn"),
            ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
            (
                {"quantization_config": {"quant_method": "bitsandbytes"}},
                "bitsandbytes.*compressed-tensors, mini-infer, gptq, awq, fp8",
            ),
            ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ],
    )
    def test_refusals(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ModelError, match=message) as caught:
            load_spec(dummy(**changes))
        assert str(caught.value).startswith("model.hf_config")


class TestFolder:
    def test_missing_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="there is no such folder"):
            load_spec(ModelConfig(path=str(tmp_path / "nowhere")))

    def test_no_config(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"has no config\.json"):
            load_spec(ModelConfig(path=str(tmp_path)))

    @pytest.mark.parametrize("text", ["{", "[]", "\x00"])
    def test_broken_config(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"config\.json"):
            load_spec(ModelConfig(path=str(tmp_path)))

    def test_hub_name_that_cannot_be_had(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import huggingface_hub

        def offline(*args: Any, **kwargs: Any) -> str:
            raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nlong advice")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
        monkeypatch.setattr(model_files, "_asked", lambda path: "")
        with pytest.raises(ModelError, match=r"some/model.*LocalEntryNotFoundError: no connection\).*tiny-target"):
            load_spec(ModelConfig(path="some/model"))

    def test_hub_name_without_weights(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        """Dummy weights need no safetensors from the hub."""
        import huggingface_hub

        asked: list[list[str]] = []

        def download(name: str, allow_patterns: list[str], local_files_only: bool) -> str:
            assert not local_files_only
            asked.append(allow_patterns)
            return str(folder)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        monkeypatch.setattr(model_files, "_asked", lambda path: "")
        for load_format in ("dummy", "auto"):
            assert load_spec(ModelConfig(path="some/model", load_format=load_format)).vocab_size == 100
        assert ["model*.safetensors" in patterns for patterns in asked] == [False, True]

    def test_shipped_names(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        assert SHIPPED == ("tiny-target", "tiny-draft", "tiny-moe")
        assert shipped_path("tiny-draft") == Path(assets.__file__).parent / "tiny-draft"
        assert shipped_path("other") is None
        monkeypatch.setattr("mini_infer.modeling.model_files.shipped_path", lambda name: tmp_path)
        with pytest.raises(ModelError, match=r"tiny-target is not there.*mini_infer\.assets\.train"):
            load_spec(ModelConfig(path="tiny-target"))


class TestWeights:
    def test_loads_and_converts(self, folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
        save_file(tensors, folder / "model.safetensors")
        loaded = weights(load(folder))
        assert set(loaded) == set(tensors)
        for name, tensor in loaded.items():
            assert tensor.dtype is torch.float32
            assert torch.equal(tensor, tensors[name].float())

    def test_ignores_buffers_and_a_tied_head(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(QWEN25 | {"tie_word_embeddings": True}))
        change_weights(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
        model = load(folder)
        assert model.lm_head is model.embed_tokens

    def test_missing_weight(self, folder: Path) -> None:
        change_weights(folder, **{"model.layers.1.mlp.up_proj.weight": None})
        with pytest.raises(
            ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*\(96, 64\).*missing.*model\.safete"
        ):
            load(folder)

    def test_several_missing_weights(self, folder: Path) -> None:
        change_weights(folder, **{"lm_head.weight": None, "model.norm.weight": None})
        with pytest.raises(ModelError, match=r"lm_head\.weight, .*model\.norm\.weight, .* are missing from"):
            load(folder)

    def test_unexpected_weight(self, folder: Path) -> None:
        change_weights(folder, **{"model.layers.0.self_attn.o_proj.bias": torch.ones(64)})
        with pytest.raises(ModelError, match=r"model\.safetensors holds .*o_proj\.bias \(64,\)"):
            load(folder)

    def test_misshaped_weight(self, folder: Path) -> None:
        change_weights(folder, **{"model.layers.0.self_attn.k_proj.weight": torch.ones(64, 64)})
        with pytest.raises(ModelError, match=r"k_proj\.weight in .*has shape \(64, 64\); .*\(32, 64\)"):
            load(folder)

    def test_integer_weight(self, folder: Path) -> None:
        change_weights(folder, **{"model.norm.weight": torch.ones(64, dtype=torch.int8)})
        with pytest.raises(ModelError, match=r"model\.norm\.weight.*int8"):
            load(folder)

    def test_no_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(ModelError, match=r"has no model\.safetensors; convert pytorch_model\.bin"):
            load(folder)

    @pytest.mark.parametrize("keep", [0, 6, 100, -20])
    def test_corrupt_weights(self, folder: Path, keep: int) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:keep])
        with pytest.raises(ModelError, match=r"cannot read .*model\.safetensors"):
            load(folder)

    def test_missing_shard(self, folder: Path) -> None:
        index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ModelError, match=r"has no model-00002-of-00002\.safetensors"):
            load(folder)

    @pytest.mark.parametrize("text", ["{}", "{", '{"weight_map": 3}'])
    def test_broken_index(self, folder: Path, text: str) -> None:
        (folder / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ModelError, match=r"index\.json"):
            load(folder)


class HostAllocations(TorchDispatchMode):
    """Counts the bytes of every result that an operation leaves on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.device.type == "cpu":
            self.largest = max(self.largest, out.numel() * out.element_size())
        return out


class TestDummy:
    def test_weights_have_their_shapes_and_scale(self) -> None:
        model = make_model(dummy(), torch.bfloat16)
        assert (model.lm_head.weight.shape, model.lm_head.weight.dtype) == ((100, 64), torch.bfloat16)
        for module in model.modules():
            if isinstance(module, RMSNorm):
                assert (module.weight == 1).all()
        weight = model.layers[0].mlp.gate_up_proj.weight
        assert weight.shape == (192, 64)
        assert 0.015 < weight.float().std() < 0.025
        assert model.layers[1].self_attn.qkv_proj.bias.any()

    def test_the_seed_decides(self) -> None:
        a, b = make_model(dummy()), make_model(dummy())
        assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
        config = ModelConfig(load_format="dummy", hf_config=QWEN25, seed=1)
        assert not torch.equal(a.embed_tokens.weight, make_model(config).embed_tokens.weight)

    def test_a_seed_gives_the_weights_that_it_always_gave(self) -> None:
        """Committed results were measured with them. Each sum depends on every number's place."""
        for changes, expected in (
            ({}, -6134.2042),
            ({"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True}, -5861.0959),
            ({"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}, -9998.6241),
        ):
            found = 0.0
            for tensor in weights(make_model(dummy(**changes))).values():
                numbers = tensor.double().flatten()
                found += float(numbers @ (torch.arange(len(numbers)) % 101 - 50.0).double())
            assert found == pytest.approx(expected, abs=0.1)

    def test_from_a_folder_without_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        model = make_model(ModelConfig(path=str(folder), load_format="dummy"))
        assert torch.equal(model.embed_tokens.weight, make_model(dummy()).embed_tokens.weight)

    def test_filled_where_they_lie(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No parameter is made elsewhere and copied: all that touches the host is the rotary frequencies."""
        monkeypatch.setattr(torch, "Generator", lambda device: _NoGenerator())
        meta = torch.device("meta")
        with HostAllocations() as host:
            model = make_model(dummy(), device=meta)
        assert all(parameter.device == meta for parameter in model.parameters())
        assert host.largest <= 64  # 8 frequencies

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_filled_on_the_gpu(self) -> None:
        with HostAllocations() as host:
            model = make_model(dummy(), device=torch.device("cuda"))
        assert model.embed_tokens.weight.is_cuda
        assert 0.015 < model.embed_tokens.weight.std() < 0.025
        assert host.largest <= 64


class _NoGenerator:
    """The meta device has no generator; normal_ takes None."""

    def manual_seed(self, seed: int) -> None:
        return None


class TestResolve:
    def test_dtype(self) -> None:
        spec = load_spec(dummy())
        assert resolve_dtype(ModelConfig(), spec, CPU) is torch.float32
        assert resolve_dtype(ModelConfig(), spec, torch.device("cuda")) is torch.bfloat16
        assert resolve_dtype(ModelConfig(dtype="float16"), spec, CPU) is torch.float16

    def test_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert resolve_device(ModelConfig()) == CPU
        with pytest.raises(ConfigError, match=r"model\.device=cuda"):
            resolve_device(ModelConfig(device="cuda"))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert resolve_device(ModelConfig()) == torch.device("cuda")
        assert resolve_device(ModelConfig(device="cpu")) == CPU

    def test_rotary_table_is_as_long_as_the_model_runs(self) -> None:
        config = dummy()
        model = load_model(config, load_spec(config), torch.float32, CPU, max_len=20)
        assert model.rotary.table.shape == (20, 32)

    @pytest.mark.parametrize(
        ("rope", "length"),
        [
            ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
            ({"rope_type": "linear", "factor": 2.0}, 256),
            (
                {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
                128,
            ),
        ],
    )
    def test_rope_scaling_lengthens_the_model(self, rope: dict[str, Any], length: int) -> None:
        assert load_spec(dummy(rope_scaling=rope)).max_model_len == length

    def test_no_end_of_sequence_spelled_minus_one(self) -> None:
        assert load_spec(dummy(eos_token_id=-1)).eos_token_ids == ()

    def test_dtype_that_the_config_does_not_tell_is_the_files(self, tmp_path: Path) -> None:
        config = transformers.Qwen2Config(
            **{k: v for k, v in QWEN25.items() if k not in ("architectures", "model_type")}
        )
        transformers.Qwen2ForCausalLM(config).to(torch.float16).save_pretrained(tmp_path)
        values = json.loads((tmp_path / "config.json").read_text())
        for key in ("dtype", "torch_dtype"):
            values.pop(key, None)
        (tmp_path / "config.json").write_text(json.dumps(values))
        config = ModelConfig(path=str(tmp_path))
        spec = load_spec(config)
        assert spec.dtype is None
        assert resolve_dtype(config, spec, torch.device("cuda")) is torch.float16
