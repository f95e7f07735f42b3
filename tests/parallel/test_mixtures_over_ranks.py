"""Mixtures of experts and latents that ranks share: every family, what a rank reads, and every mechanism."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import cells
from integrity import check_scheduler
from safetensors.torch import save_file
from test_expert import FORMS, OVER_GROUPS, generated, one_process, together
from torch import Tensor

from mini_infer import ConfigError, EngineConfig, LLMEngine, SamplingParams
from mini_infer.attention.backend import Requirements, select_backend
from mini_infer.attention.context import AttentionBatch, AttentionContext
from mini_infer.cache.kv_store import KVStore
from mini_infer.core.config import AttentionChoice, AttentionConfig, Dispatch, MLAForm, ModelConfig
from mini_infer.core.errors import ModelError
from mini_infer.modeling.loader import as_served, load_model, load_spec
from mini_infer.modeling.model import Model
from mini_infer.modeling.sharding import of_each_rank, require_shared_experts
from mini_infer.parallel.context import ONE_RANK, ParallelContext
from mini_infer.parallel.expert import ALL_EXPERTS, ExpertRanks

MakeEngine = Callable[..., LLMEngine]
CPU, TOKENS = torch.device("cpu"), torch.arange(11) * 7 % 89

SMALL: dict[str, Any] = {
    "vocab_size": 89,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENTS = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}
NO_Q_LATENT = {"q_lora_rank": None, "attention_bias": False}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {"model_type": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 16, "mlp_only_layers": [1]},
    "Qwen3Moe": {"model_type": "qwen3_moe", **EXPERTS, "head_dim": 16, "norm_topk_prob": True},
    "Olmoe": {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV2": {"model_type": "deepseek_v2", **LATENTS, **NO_Q_LATENT, "topk_method": "group_limited_greedy"},
    "DeepseekV3": {"model_type": "deepseek_v3", **LATENTS, "rope_parameters": YARN},
}


def dummy(family: str, **changes: Any) -> dict[str, Any]:
    shape = {"architectures": [f"{family}ForCausalLM"], **SMALL, **FAMILIES[family], **changes}
    return {"path": "made up", "load_format": "dummy", "hf_config": shape}


def part(
    config: ModelConfig, parallel: ParallelContext = ONE_RANK, experts: ExpertRanks = ALL_EXPERTS, mla: str = "auto"
) -> Model:
    served = EngineConfig(config, attention=AttentionConfig(mla=MLAForm(mla), mla_crossover=2))
    spec = of_each_rank(as_served(load_spec(config), served), parallel.size, whole_experts=experts.context.size > 1)
    return load_model(config, spec, torch.float32, CPU, 16, parallel=parallel, experts=experts)


@pytest.fixture
def logits(step_rows: Callable[..., AttentionBatch]) -> Callable[[Model], Tensor]:
    """Of TOKENS: a prompt in two chunks, and two decode steps of one."""

    @torch.inference_mode()
    def of(model: Model) -> Tensor:
        store, results = KVStore(model.kv_layout, num_blocks=4, block_size=4, device=CPU), []
        spec = model.spec
        needs = Requirements(store.layout, 4, torch.float32, CPU, any(spec.windows), latent=spec.attention.latent)
        backends = [select_backend(AttentionChoice.auto, kind, needs).backend for kind in ("prefill", "decode")]
        for start, count in ((0, 7), (7, 2), (9, 1), (10, 1)):
            batch = step_rows([(start, count, [2, 0, 3])], int(count == 1), 4)
            context = AttentionContext(batch, model.attention(store), *backends)
            results.append(model.compute_logits(model.forward(TOKENS[start:][:count], batch.positions, context)))
        return torch.cat(results)

    return of


class TestFamilies:
    @pytest.mark.parametrize(
        ("family", "size"), [*((family, 2) for family in FAMILIES), ("Olmoe", 4), ("Qwen2Moe", 4), ("DeepseekV3", 4)]
    )
    def test_ranks_compute_what_one_process_does(
        self, family: str, size: int, logits: Callable[[Model], Tensor]
    ) -> None:
        """Four ranks have two KV heads: each is on two of them."""
        config = ModelConfig(**dummy(family))
        expected = logits(part(config))
        for found in together(size, lambda own: logits(part(config, own))):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("family", ["Qwen2Moe", "DeepseekV3"])
    def test_ranks_may_share_heads_and_whole_experts(self, family: str, logits: Callable[[Model], Tensor]) -> None:
        config = ModelConfig(**dummy(family))
        expected = logits(part(config))
        for found in together(2, lambda own: logits(part(config, own, ExpertRanks(own)))):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("form", OVER_GROUPS)
    @pytest.mark.parametrize("family", FAMILIES)
    def test_ranks_may_share_experts_alone(
        self, family: str, form: Dispatch, logits: Callable[[Model], Tensor]
    ) -> None:
        config = ModelConfig(**dummy(family))
        expected = logits(part(config))
        for found in together(2, lambda own: logits(part(config, experts=ExpertRanks(own, form)))):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("form", ["naive", "latent", "absorbed"])
    def test_every_form_of_latents_has_its_heads(self, form: str, logits: Callable[[Model], Tensor]) -> None:
        config = ModelConfig(**dummy("DeepseekV3"))
        expected, caches = logits(part(config, mla=form)), []

        def work(own: ParallelContext) -> Tensor:
            model = part(config, own, mla=form)
            caches.append(sum(math.prod(plane.shape) for plane in model.kv_layout.layers[0]))
            return logits(model)

        for found in together(2, work):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert set(caches) == ({2 * (20 + 16)} if form == "naive" else {24 + 8}), "latents are every rank's"


class TestFolders:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("whole_experts", [False, True])
    def test_a_rank_reads_what_it_would_have_drawn(self, tmp_path: Path, family: str, whole_experts: bool) -> None:
        config = ModelConfig(**dummy(family))
        tensors = {name: t.memory.clone().contiguous() for name, t in part(config).checkpoint_tensors().items()}
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config.hf_config))
        for rank in range(2):
            own = ParallelContext(rank, 2)
            experts = ExpertRanks(own) if whole_experts else ALL_EXPERTS
            drawn, read = (part(each, own, experts) for each in (config, ModelConfig(path=str(tmp_path))))
            weights = dict(read.named_parameters())
            for name, weight in drawn.named_parameters():
                assert torch.equal(weights[name], weight), name

    def test_missing_experts_are_named_all_at_once_by_every_rank(self, tmp_path: Path) -> None:
        config = ModelConfig(**dummy("Qwen3Moe"))
        tensors = {name: t.memory.clone().contiguous() for name, t in part(config).checkpoint_tensors().items()}
        gone = [f"model.layers.1.mlp.experts.{name}.weight" for name in ("0.gate_proj", "2.up_proj", "3.down_proj")]
        for name in gone:
            del tensors[name]
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config.hf_config))
        for rank in range(2):
            with pytest.raises(ModelError, match="are missing") as error:
                part(ModelConfig(path=str(tmp_path)), ParallelContext(rank, 2))
            assert all(name in str(error.value) for name in gone)


WIDE = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}


class TestQuantized:
    @pytest.mark.parametrize("scheme", ["w8a16", "w4a16", "fp8_block"])
    def test_ranks_have_parts_of_the_numbers_of_one_process(
        self, scheme: str, logits: Callable[[Model], Tensor]
    ) -> None:
        changes = WIDE | ({"head_dim": 128} if scheme == "fp8_block" else {})
        config = ModelConfig(**dummy("Qwen3Moe", **changes), quantization=scheme, quantization_group=64)
        expected = logits(part(config))
        for found in together(2, lambda own: logits(part(config, own))):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("scheme", ["w8a8", "w4a16", "fp8"])
    def test_whole_experts_are_those_of_one_process(self, scheme: str, logits: Callable[[Model], Tensor]) -> None:
        config = ModelConfig(**dummy("Qwen3Moe", **WIDE), quantization=scheme, quantization_group=64)
        expected = logits(part(config))
        for found in together(2, lambda own: logits(part(config, experts=ExpertRanks(own)))):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    def test_scales_of_whole_rows_are_read_from_folders(self, tmp_path: Path) -> None:
        config = ModelConfig(**dummy("Qwen3Moe", **WIDE))
        tensors = {name: t.memory.clone().contiguous() for name, t in part(config).checkpoint_tensors().items()}
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config.hf_config))
        read, drawn = {"path": str(tmp_path)}, dummy("Qwen3Moe", **WIDE)
        models = [part(ModelConfig(**each, quantization="w8a16"), ParallelContext(1, 2)) for each in (read, drawn)]
        scales = [model.layers[0].mlp.experts.weights.down.scales for model in models]
        assert torch.equal(*scales)
        assert scales[0].shape == (4, 256, 1)

    def test_widths_that_scales_cannot_follow_are_refused(self) -> None:
        narrow = dummy("Qwen3Moe", **WIDE | {"moe_intermediate_size": 384})
        with pytest.raises(ConfigError, match=r"experts\.0 has 192 inputs a rank, no multiple of 128: take fewer"):
            part(ModelConfig(**narrow, quantization="w8a16"), ParallelContext(0, 2))


class TestRefusals:
    def test_counts_that_do_not_divide_are_named(self) -> None:
        spec = load_spec(ModelConfig(**dummy("Qwen2Moe")))
        message = r"tensor=3 does not divide Qwen2MoeForCausalLM's 4 heads, 2 KV heads .* 16, 32, 48 .* work: 1, 2, 4$"
        with pytest.raises(ConfigError, match=message):
            of_each_rank(spec, 3)
        of_each_rank(spec, 4)
        with pytest.raises(ConfigError, match=r"tensor=4 .* 16, 18, 48 intermediate numbers.* work: 1, 2$"):
            of_each_rank(load_spec(ModelConfig(**dummy("Qwen2Moe", moe_intermediate_size=18))), 4)
        of_each_rank(load_spec(ModelConfig(**dummy("Qwen2Moe", moe_intermediate_size=18))), 4, whole_experts=True)
        with pytest.raises(ConfigError, match=r"redundant_experts=6: 2 ranks that share 4 experts .* have 4 of each"):
            require_shared_experts(spec, 2, 6)

    def test_layouts_that_are_none(self) -> None:
        for parallel, message in (
            ({"tensor": 2, "expert": 4}, r"tensor=2 and parallel\.expert=4: .* to 1 or 4, or parallel\.expert=1"),
            ({"redundant_experts": 2}, r"redundant_experts=2 with parallel\.expert=1.* is to be 2 or more, or to 0"),
            ({"expert": 2, "redundant_experts": 3}, r"redundant_experts=3 with parallel\.expert=2.* a multiple of"),
        ):
            with pytest.raises(ConfigError, match=message):
                EngineConfig.from_dict({"parallel": parallel})


# --- engines --------------------------------------------------------------------------------------------------------

TEXTS = ["def read(path):\n    with open(", "import os\n\nclass Cache:", "for i in range(", "import os\n\nclass Cache:"]
TEXTS += ["def a():\n    return 1\n\ndef b():\n    return 2\n\ndef c():\n    return"] * 2
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SHORT = {"num_blocks": 20, "block_size": 4}
MECHANISMS: dict[str, dict[str, Any]] = {
    "chunks, hits, recompute, overlap": {
        "cache": SHORT,
        "scheduler": {"max_num_batched_tokens": 8, "max_num_seqs": 4, "overlap": "always"},
    },
    "swap, drafts": {
        "cache": {**SHORT, "num_host_blocks": 16, "prefix_caching": False},
        "scheduler": {"preemption": "swap"},
        "speculation": {"method": "ngram", "num_tokens": 3, "adaptive": False},
    },
}
ALL = "2 stages of 2 ranks that share experts"
EVERYTHING = "2 stages of 2 ranks that share experts, too"
LAYOUTS = {
    "2 ranks": {"tensor": 2},
    "2 ranks that share experts, too": {"tensor": 2, "expert": 2},
    ALL: {"tensor": 1, "expert": 2, "pipeline": 2},
    EVERYTHING: {"tensor": 2, "expert": 2, "pipeline": 2},
}


@pytest.fixture(scope="module")
def of_one_process() -> list[list[int]]:
    engine = LLMEngine(EngineConfig.from_dict({"model": "tiny-moe", "seed": 0, "cache": {"num_blocks": 64}}))
    return [output.outputs[0].token_ids for output in engine.generate(TEXTS, GREEDY)]


def _often(name: str, layout: str) -> bool:
    return layout != EVERYTHING and ("swap" in name) == (layout == "2 ranks")


CASES = cells(product(MECHANISMS, LAYOUTS), [cell for cell in product(MECHANISMS, LAYOUTS) if _often(*cell)])


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_every_mechanism_over_ranks(
    make_engine: MakeEngine, of_one_process: list[list[int]], name: str, layout: str
) -> None:
    settings = {"model": {"path": "tiny-moe", "max_model_len": 64}, **MECHANISMS[name]}
    engine = make_engine(**settings, parallel=LAYOUTS[layout])
    assert [output.outputs[0].token_ids for output in engine.generate(TEXTS, GREEDY)] == of_one_process
    check_scheduler(engine.scheduler)
    records = engine.records
    assert any(record.preempted for record in records)
    if "swap" in name:
        assert any(record.swapped_in_blocks for record in records)
        assert any(record.accepted for record in records)
    else:
        assert any(record.num_prefilling for record in records), "no prompt was cut into chunks"
        assert "stages" in layout or sum(record.prefix_hit_tokens for record in records) > 0
    sizes = {"tensor": 1, "expert": 1, **LAYOUTS[layout]}
    assert (engine.startup.tensor_parallel, engine.startup.expert_parallel) == (sizes["tensor"], sizes["expert"])


NARROW = WIDE | {"moe_intermediate_size": 128}
MIXTURES = {family: dummy(family) for family in FAMILIES if family != "DeepseekV2"}  # test_expert.py has it
MIXTURES |= {
    f"Qwen3Moe, {scheme}": dummy("Qwen3Moe", **NARROW) | {"quantization": scheme, "quantization_group": 64}
    for scheme in ("w8a8", "w4a16", "fp8")
}


@pytest.mark.parametrize(("name", "form"), cells(product(MIXTURES, FORMS), [("Qwen3Moe, w8a8", Dispatch.grouped)]))
@pytest.mark.usefixtures("plain_sampler")
def test_batch_invariant_engines_agree_to_the_bit(make_engine: MakeEngine, name: str, form: Dispatch) -> None:
    pytest.importorskip("triton")
    sections: dict[str, Any] = {"model": MIXTURES[name], "numerics": "batch_invariant"}
    engine = make_engine(tensor=1, parallel={"expert": 2, "dispatch": form}, **sections)
    assert generated(engine) == generated(one_process(**sections))
