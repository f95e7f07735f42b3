"""Mixtures of experts: what a config says, what a folder holds, where tokens go, and experts in fewer bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quantized_folders import gptq
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.attention.context import AttentionBatch, AttentionContext, ModelAttention
from mini_infer.attention.torch_sdpa import SdpaBackend
from mini_infer.cache.kv_store import KVStore
from mini_infer.core.config import ModelConfig
from mini_infer.core.errors import ModelError
from mini_infer.kernels.interface import Norm, RouterSpec, Stream, TokenPlaces
from mini_infer.kernels.moe.reference import route_reference
from mini_infer.kernels.ops import InvariantKernels, Kernels, TorchKernels, TritonKernels
from mini_infer.modeling.loader import load_model, load_spec
from mini_infer.modeling.model import Model
from mini_infer.modeling.moe import MoE
from mini_infer.modeling.moe_config import deepseek
from mini_infer.modeling.spec import ExpertNames, MLPSpec, MoESpec

CPU = torch.device("cpu")
QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 90,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
TOKENS = torch.arange(10) * 7 % 90


def dummy(changes: dict[str, Any] | None = None, **options: Any) -> ModelConfig:
    return ModelConfig(load_format="dummy", hf_config=QWEN3 | (changes or {}), **options)


def make(config: ModelConfig, kernels: Kernels | None = None) -> Model:
    return load_model(config, load_spec(config), torch.float32, CPU, kernels=kernels)


@pytest.fixture
def run(step_rows: Callable[..., AttentionBatch]) -> Callable[[Model], Tensor]:
    """Logits of TOKENS: a prompt of eight, and two decode steps of one."""

    @torch.inference_mode()
    def logits(model: Model) -> Tensor:
        backend, results = SdpaBackend(), []
        attention = ModelAttention(
            KVStore(model.kv_layout, num_blocks=4, block_size=4, device=CPU),
            model.spec.windows,
            model.spec.attention.scale,
        )
        for start, count in ((0, 8), (8, 1), (9, 1)):
            batch = step_rows([(start, count, [2, 0, 3])], int(count == 1), 4)
            context = AttentionContext(batch, attention, backend, backend)
            hidden = model.forward(TOKENS[start : start + count], batch.positions, context)
            results.append(model.compute_logits(hidden))
        return torch.cat(results)

    return logits


class TestConfig:
    def test_reads_published_ones(self) -> None:
        sparse = MoESpec(RouterSpec(4, 2, normalize=True), 128, names=ExpertNames(shared="shared_expert"))
        spec = load_spec(dummy({"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}))
        assert [layer.feed_forward for layer in spec.layers] == [MLPSpec(128), sparse, MLPSpec(128), MLPSpec(128)]
        assert not spec.through_transformers

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 of 4 experts"),
            ({"num_experts_per_tok": 0}, "num_experts_per_tok=0 of 4"),
            ({"moe_intermediate_size": 0}, "moe_intermediate_size=0 must be at least 1"),
            ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 3.0}, r"clip_qkv=3\.0 is not supported"),
        ],
    )
    def test_refuses(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ModelError, match=message):
            load_spec(dummy(changes))

    def test_deepseeks_first_layers_are_dense(self) -> None:
        config = transformers.DeepseekV3Config(num_hidden_layers=5, n_shared_experts=2)
        dense, sparse = deepseek(config, "config.json")[2:4]
        assert dense == MLPSpec(config.intermediate_size)
        assert isinstance(sparse, MoESpec)
        assert sparse.shared == MLPSpec(2 * config.moe_intermediate_size)

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"topk_method": "lottery"}, "topk_method='lottery' is no router that is known here: greedy, group_limi"),
            ({"scoring_func": "tanh"}, "scoring_func='sigmoid', not 'tanh'"),
            ({"topk_group": 9}, "topk_group=9 of n_group=8"),
            ({"n_group": 7}, "n_group=7 groups of 256"),
            ({"num_experts_per_tok": 129}, "129 of topk_group=4 groups of 32 experts"),
            ({"topk_method": "greedy"}, "norm_topk_prob=true with topk_method='greedy'"),
        ],
    )
    def test_refuses_routers_that_it_does_not_know(self, values: dict[str, Any], message: str) -> None:
        config = transformers.DeepseekV3Config()
        for name, value in values.items():
            setattr(config, name, value)
        with pytest.raises(ModelError, match=message):
            deepseek(config, "config.json")


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("version", [2, 3])
def test_routes_are_those_of_deepseeks_code(version: int, groups: int) -> None:
    torch.manual_seed(version + groups)
    shape = {"hidden_size": 32, "n_routed_experts": 16, "num_experts_per_tok": 3, "n_group": groups, "topk_group": 1}
    if version == 2:
        method = "group_limited_greedy" if groups > 1 else "greedy"
        config = transformers.DeepseekV2Config(**shape, topk_method=method, routed_scaling_factor=1.7)
        router = DeepseekV2TopkRouter(config)
    else:
        config = transformers.DeepseekV3Config(**shape)
        router = DeepseekV3TopkRouter(config)
        router.e_score_correction_bias.normal_(std=0.2)
    router.weight.data.normal_()
    x = torch.randn(20, 32)
    logits, weights, ids = router(x)
    spec = next(f.router for f in deepseek(config, "config.json") if isinstance(f, MoESpec))
    tokens = TokenPlaces(torch.zeros(20, dtype=torch.int64), torch.zeros(20, dtype=torch.int64))
    own_ids, own = route_reference(logits, getattr(router, "e_score_correction_bias", None), spec, tokens)
    order, own_order = ids.argsort(1), own_ids.argsort(1)
    assert torch.equal(own_ids.gather(1, own_order), ids.gather(1, order).int())
    torch.testing.assert_close(own.gather(1, own_order), weights.gather(1, order))


def test_missing_experts_are_named_all_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    config = transformers.Qwen3MoeConfig(**{key: QWEN3[key] for key in QWEN3 if key != "architectures"})
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    gone = [f"model.layers.1.mlp.experts.{name}.weight" for name in ("0.gate_proj", "2.up_proj", "3.down_proj")]
    for name in gone:
        tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError) as error:
        make(ModelConfig(path=str(folder)))
    assert all(name in str(error.value) for name in gone)
    assert "are missing" in str(error.value)


@pytest.mark.parametrize("kernels", [TritonKernels, InvariantKernels])
def test_kernels_compute_what_torch_does(kernels: type, run: Callable[[Model], Tensor]) -> None:
    shape = {"num_hidden_layers": 1, "moe_intermediate_size": 48, "hidden_size": 64}
    torch.testing.assert_close(run(make(dummy(shape), kernels())), run(make(dummy(shape))), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 2])
def test_shared_experts_add_the_same_whether_they_ride_along_or_not(tokens: int) -> None:
    shape = {"n_shared_experts": 2, "n_routed_experts": 4, "hidden_size": 64, "moe_intermediate_size": 48}
    attention = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    shape |= {**attention, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "n_group": 1}
    shape |= {
        "v_head_dim": 16,
        "first_k_dense_replace": 0,
        "num_hidden_layers": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
    }
    x, places = torch.randn(tokens, 64), TokenPlaces(torch.arange(tokens), torch.arange(tokens))
    got = []
    for kernels in (TritonKernels(), TorchKernels()):
        (layer,) = (part for part in make(dummy(shape), kernels).modules() if isinstance(part, MoE))
        y, residual = layer(Stream(x, None, Norm(torch.ones(64), 1e-6)), places)
        got.append(y if residual is None else y + residual)
    torch.testing.assert_close(*got, rtol=1e-4, atol=1e-5)


class TestRouting:
    def test_is_drawn_by_token_and_position_alone(self, run: Callable[[Model], Tensor]) -> None:
        learned, uniform, again = (run(make(dummy(routing=name))) for name in ("learned", "uniform", "uniform"))
        assert torch.equal(uniform, again)
        assert not torch.equal(uniform, learned)
        assert not torch.equal(uniform, run(make(dummy(routing="zipf"))))

    def test_layers_draw_for_themselves(self) -> None:
        seeds = {layer.feed_forward.router.seed for layer in load_spec(dummy(routing="uniform", seed=3)).layers}
        other = {layer.feed_forward.router.seed for layer in load_spec(dummy(routing="uniform", seed=4)).layers}
        assert len(seeds | other) == 4

    def test_a_model_without_experts_has_none(self) -> None:
        config = dummy({"architectures": ["Qwen3ForCausalLM"]}, routing="uniform")
        with pytest.raises(ModelError, match=r"model\.routing=uniform: Qwen3ForCausalLM has no experts"):
            load_spec(config)


class TestQuantized:
    @pytest.mark.parametrize(
        ("scheme", "most"), [("w8a8", 0.03), ("w8a16", 0.02), ("fp8", 0.12), ("fp8_block", 0.12), ("w4a16", 0.25)]
    )
    def test_experts_of_every_scheme_stay_close(self, scheme: str, most: float, run: Callable[[Model], Tensor]) -> None:
        """By routes that no rounding changes."""
        own = make(dummy(quantization=scheme, routing="uniform"))
        whole = make(dummy(routing="uniform"))
        assert own.weight_bytes() < 0.55 * whole.weight_bytes()
        expected = run(whole)
        assert (run(own) - expected).norm() / expected.norm() < most

    @pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "MixtralForCausalLM"])
    def test_a_folder_computes_what_its_numbers_say(
        self, architecture: str, tmp_path: Path, run: Callable[[Model], Tensor]
    ) -> None:
        config = {**QWEN3, "architectures": [architecture], "num_local_experts": 4}
        whole = make(dummy(config))
        store, tensors = gptq(4, 64, symmetric=True), {}
        for name, tensor in whole.checkpoint_tensors().items():
            assert tensor.memory is not None
            if name.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight")):
                own, meant = store(tensor.memory.contiguous())
                tensor.memory.copy_(meant)
                tensors |= {name.removesuffix("weight") + key: value.contiguous() for key, value in own.items()}
            else:
                tensors[name] = tensor.memory.contiguous()
        save_file(tensors, tmp_path / "model.safetensors")
        stored = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
        torch.testing.assert_close(run(make(ModelConfig(path=str(tmp_path)))), run(whole), rtol=1e-4, atol=1e-5)

    def test_outlier_columns_are_refused(self) -> None:
        with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts: gate_proj, up_proj .* without outlier columns"):
            make(dummy(quantization="mixed"))


class TestCounts:
    def engine(self, **model: Any) -> LLMEngine:
        values = {"path": "made up", "load_format": "dummy", "hf_config": QWEN3, "device": "cpu", **model}
        cache = {"num_blocks": 32, "block_size": 8, "prefix_caching": False}
        return LLMEngine(EngineConfig.from_dict({"model": values, "cache": cache}))

    def test_of_each_step_stand_in_its_record(self) -> None:
        engine = self.engine(count_experts=True)
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        engine.generate([[1, 2, 3, 4, 5], [7, 8]], params)
        for record in engine.records:
            computed = record.prefill_tokens + record.verified_tokens
            assert [sum(layer) for layer in record.expert_tokens] == [2 * computed] * 2
            assert record.expert_imbalance is not None
            assert 1 <= record.expert_imbalance <= 2, "two of four experts at most take all"
        engine.close()

    def test_padding_behind_fewer_drafts_counts_nothing(self) -> None:
        model = {"path": "tiny-moe", "count_experts": True, "max_model_len": 128, "device": "cpu"}
        drafts = {"method": "ngram", "num_tokens": 4, "ngram_min": 1, "adaptive": False}
        sections = {"model": model, "scheduler": {"overlap": "always"}, "speculation": drafts}
        engine = LLMEngine(EngineConfig.from_dict(sections))
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        engine.generate([[5, 6, 7, 8] * 6, list(range(20, 31)), [9] * 12], params)
        assert any(len(set(record.drafted)) > 1 for record in engine.records), "rows have equally many drafts"
        for record in engine.records:
            computed = record.prefill_tokens + record.verified_tokens
            assert {sum(layer) for layer in record.expert_tokens} == {4 * computed}
        engine.close()

    def test_nobody_counts_unless_asked(self) -> None:
        engine = self.engine()
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        assert all(not record.expert_tokens and record.expert_imbalance is None for record in engine.records)
        engine.close()

    def test_padding_counts_nothing(self, step_rows: Callable[..., AttentionBatch]) -> None:
        model = make(dummy(count_experts=True))
        store, backend = KVStore(model.kv_layout, num_blocks=4, block_size=4, device=CPU), SdpaBackend()
        batch = step_rows([(0, 3, [1]), (0, 2, [3])], 0, 4)  # the last block is for padding
        attention = ModelAttention(store, model.spec.windows, model.spec.attention.scale)
        with torch.inference_mode():
            model.forward(TOKENS[:5], batch.positions, AttentionContext(batch, attention, backend, backend))
        assert model.expert_counts is not None
        assert model.expert_counts.sum(1).tolist() == [2 * 3] * 2
