"""Logits of small random checkpoints equal those of transformers, however the tokens are cut into steps."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from mini_infer.attention.backend import Requirements, select_backend
from mini_infer.attention.context import AttentionContext
from mini_infer.cache.kv_store import KVStore
from mini_infer.core.config import AttentionChoice, AttentionConfig, EngineConfig, MLAForm, ModelConfig
from mini_infer.kernels.ops import TorchKernels
from mini_infer.modeling.decoder import Decoder
from mini_infer.modeling.linear_methods.base import Build
from mini_infer.modeling.linear_methods.unquantized import Unquantized
from mini_infer.modeling.loader import as_served, load_model, load_spec

CPU = torch.device("cpu")
LENGTH = 45
BLOCK = 4
TOLERANCE = 1e-4  # of logits whose standard deviation is asserted to be about 1

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


@dataclass(frozen=True)
class Case:
    name: str
    config_class: type
    settings: dict[str, Any] = field(default_factory=dict)
    sharded: bool = False
    old_rope: bool = False  # config.json as transformers 4 wrote it: rope_theta, rope_scaling, torch_dtype
    mla: str = "auto"


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


QWEN_MOE = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
LLAMA3 = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16)
YARN_MSCALE = rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.3)
YARN_LITE = rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.707, mscale_all_dim=0.707)
GROUPS = {"topk_method": "group_limited_greedy", "n_shared_experts": 1}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 18,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}

CASES = [
    Case("llama", LlamaConfig),
    Case("llama-tied-sharded", LlamaConfig, {"tie_word_embeddings": True}, sharded=True),
    Case("llama-biases", LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    Case("llama-head-dim", LlamaConfig, {"head_dim": 32}),
    Case("llama-one-kv-head", LlamaConfig, {"num_key_value_heads": 1}),
    Case("llama-all-kv-heads", LlamaConfig, {"num_key_value_heads": 4}),
    Case("llama-linear", LlamaConfig, rope("linear", factor=3.0)),
    Case("llama-llama3", LlamaConfig, LLAMA3),
    Case("llama-llama3-old", LlamaConfig, LLAMA3, old_rope=True),
    Case("llama-yarn", LlamaConfig, YARN),
    Case(
        "llama-yarn-all-options",
        LlamaConfig,
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            beta_fast=8.0,
            beta_slow=0.5,
            truncate=False,
            mscale=1.3,
            mscale_all_dim=0.6,
        ),
    ),
    Case(
        "llama-yarn-attention-factor",
        LlamaConfig,
        rope("yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.7),
    ),
    Case("qwen2", Qwen2Config, rope("default") | {"tie_word_embeddings": True}),
    Case("qwen2-yarn-old", Qwen2Config, YARN, old_rope=True),
    Case("qwen2-untied-sharded", Qwen2Config, sharded=True),
    Case(
        "qwen2-window-above-layer-1",
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    Case(
        "qwen2-layer-types",
        Qwen2Config,
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    Case("qwen2-window-switched-off", Qwen2Config, {"use_sliding_window": False, "sliding_window": 6}),
    Case("qwen3", Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
    Case("qwen3-biases-llama3", Qwen3Config, {"head_dim": 16, "attention_bias": True} | LLAMA3, sharded=True),
    Case(
        "qwen3-window",
        Qwen3Config,
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "head_dim": 8},
    ),
    Case("mistral-window", MistralConfig, {"sliding_window": 10}, sharded=True),
    Case("mistral-window-1", MistralConfig, {"sliding_window": 1}),
    Case("mistral-head-dim-tied", MistralConfig, {"sliding_window": None, "head_dim": 32, "tie_word_embeddings": True}),
    Case("mistral-yarn", MistralConfig, {"sliding_window": 20} | YARN),
    Case("mixtral-window", MixtralConfig, {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 10}),
    Case("mixtral-one-expert-a-token", MixtralConfig, {"num_experts_per_tok": 1}, sharded=True),
    Case(
        "qwen2-moe-dense-layer",
        Qwen2MoeConfig,
        QWEN_MOE | {"shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    ),
    Case("qwen3-moe", Qwen3MoeConfig, QWEN_MOE | {"head_dim": 32, "norm_topk_prob": True}),
    Case("qwen3-moe-every-second", Qwen3MoeConfig, QWEN_MOE | {"decoder_sparse_step": 2, "head_dim": 16}),
    Case("olmoe", OlmoeConfig, {"num_experts": 6, "num_experts_per_tok": 2}),
    Case("deepseek-v2", DeepseekV2Config, MLA | {"q_lora_rank": None, "routed_scaling_factor": 1.7}),
    Case("deepseek-v2-lite", DeepseekV2Config, MLA | {"q_lora_rank": None} | YARN_LITE, old_rope=True),
    Case("deepseek-v2-old-rope-absorbed", DeepseekV2Config, MLA | YARN_MSCALE | GROUPS, old_rope=True, mla="absorbed"),
    Case("deepseek-v2-biases-latent", DeepseekV2Config, MLA | {"attention_bias": True}, mla="latent"),
    Case("deepseek-v2-naive", DeepseekV2Config, MLA | {"q_lora_rank": None} | YARN, mla="naive"),
    Case("deepseek-v3", DeepseekV3Config, MLA | YARN_MSCALE, sharded=True),
    Case("deepseek-v3-halves-absorbed", DeepseekV3Config, MLA | {"rope_interleave": False}, mla="absorbed"),
    Case(
        "deepseek-v3-latent",
        DeepseekV3Config,
        MLA | {"q_lora_rank": None, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
        mla="latent",
    ),
    Case("deepseek-v3-naive", DeepseekV3Config, MLA | YARN_MSCALE | {"rope_interleave": False}, mla="naive"),
]


class PagedModel:
    """A loaded model with a small KV store in which no sequence's blocks are adjacent or in order."""

    def __init__(self, folder: Path, step_rows: Any, mla: str) -> None:
        config = ModelConfig(path=str(folder))
        attention = AttentionConfig(mla=MLAForm(mla), mla_crossover=12)
        self.spec = as_served(load_spec(config), EngineConfig(config, attention=attention))
        self.model = load_model(config, self.spec, torch.float32, CPU)
        self._rows = step_rows
        self.store = self.new_store()
        needs = Requirements(
            self.store.layout, BLOCK, torch.float32, CPU, any(self.spec.windows), latent=self.spec.attention.latent
        )
        self._prefill = select_backend(AttentionChoice.auto, "prefill", needs).backend
        self._decode = select_backend(AttentionChoice.auto, "decode", needs).backend
        self._free: list[int] = torch.randperm(96, generator=torch.Generator().manual_seed(0)).tolist()

    def new_store(self) -> KVStore:
        return KVStore(self.model.kv_layout, num_blocks=96, block_size=BLOCK, device=CPU)

    def table(self) -> list[int]:
        """Blocks for one sequence of LENGTH tokens."""
        need = -(-LENGTH // BLOCK)
        taken, self._free = self._free[:need], self._free[need:]
        return taken

    @torch.inference_mode()
    def step(self, rows: list[tuple[list[int], int, int, list[int]]], num_decode_rows: int) -> list[torch.Tensor]:
        """rows: (sequence, start, count, block table). Returns each row's logits [count, vocab]."""
        batch = self._rows([row[1:] for row in rows], num_decode_rows, BLOCK, unused_block=rows[0][3][0])
        context = AttentionContext(batch, self.model.attention(self.store), self._prefill, self._decode)
        tokens = torch.tensor([t for sequence, start, count, _ in rows for t in sequence[start : start + count]])
        logits = self.model.compute_logits(self.model.forward(tokens, batch.positions, context))
        assert logits.dtype == torch.float32
        return list(logits.split([count for _, _, count, _ in rows]))


@dataclass(frozen=True)
class Loaded:
    paged: PagedModel
    sequences: list[list[int]]
    expected: list[torch.Tensor]  # [LENGTH, vocab] of each


def save_checkpoint(case: Case, folder: Path) -> Any:
    """A random checkpoint of realistic scale; returns transformers' model of it."""
    torch.manual_seed(len(case.name))
    config = case.config_class(**(SMALL | case.settings), attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.normal_(mean=1.0, std=0.2)
        elif name.endswith("bias"):
            parameter.data.normal_(std=0.5)
        else:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.2)  # which decides who is chosen
    model.save_pretrained(folder, **({"max_shard_size": "60KB"} if case.sharded else {}))
    assert (folder / "model.safetensors.index.json").exists() == case.sharded
    if case.old_rope:
        values = json.loads((folder / "config.json").read_text())
        scaling = values.pop("rope_parameters")
        values["rope_theta"] = scaling.pop("rope_theta")
        if "yarn" in case.name:
            scaling["type"] = scaling.pop("rope_type")
        values["rope_scaling"] = scaling
        values["torch_dtype"] = values.pop("dtype")
        (folder / "config.json").write_text(json.dumps(values))
    return model


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, step_rows: Any) -> Loaded:
    folder = tmp_path_factory.mktemp(request.param.name)
    reference = save_checkpoint(request.param, folder)
    tokens = torch.randint(0, SMALL["vocab_size"], (4, LENGTH))
    with torch.inference_mode():
        expected = reference(tokens).logits
    assert 0.5 < expected.std() < 3, "logits this flat or this steep would prove little"
    return Loaded(PagedModel(folder, step_rows, request.param.mla), tokens.tolist(), list(expected))


@pytest.fixture(autouse=True)
def fresh_cache(loaded: Loaded) -> None:
    """Each test starts with an empty store, so that it cannot read what another one wrote."""
    loaded.paged.store = loaded.paged.new_store()
    loaded.paged._free = torch.randperm(96, generator=torch.Generator().manual_seed(0)).tolist()


def assert_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < TOLERANCE


def test_several_prompts_in_one_step(loaded: Loaded) -> None:
    counts = [LENGTH, 1, 17]
    rows = [(loaded.sequences[i], 0, count, loaded.paged.table()) for i, count in enumerate(counts)]
    for i, logits in enumerate(loaded.paged.step(rows, 0)):
        assert_equal(logits, loaded.expected[i][: counts[i]])


def test_unequal_chunks(loaded: Loaded) -> None:
    table = loaded.paged.table()
    for start, count in ((0, 7), (7, 26), (33, LENGTH - 33)):
        (logits,) = loaded.paged.step([(loaded.sequences[0], start, count, table)], 0)
        assert_equal(logits, loaded.expected[0][start : start + count])


def test_token_by_token(loaded: Loaded) -> None:
    """Beyond the windows, and over the bounds of some blocks."""
    table = loaded.paged.table()
    for position in range(22):
        (logits,) = loaded.paged.step([(loaded.sequences[0], position, 1, table)], 1)
        assert_equal(logits, loaded.expected[0][position : position + 1])


def test_decodes_and_prefills_in_one_step(loaded: Loaded) -> None:
    tables = [loaded.paged.table() for _ in range(4)]
    a, b, c, d = loaded.sequences
    loaded.paged.step([(a, 0, 30, tables[0]), (b, 0, 3, tables[1]), (c, 0, 11, tables[2])], 0)
    rows = [(a, 30, 1, tables[0]), (b, 3, 1, tables[1]), (c, 11, 20, tables[2]), (d, 0, 13, tables[3])]
    for (_, start, count, _), logits, expected in zip(rows, loaded.paged.step(rows, 2), loaded.expected, strict=True):
        assert_equal(logits, expected[start : start + count])


def test_decode_rows_of_several_tokens(loaded: Loaded) -> None:
    """As verification of drafts needs them."""
    tables = [loaded.paged.table() for _ in range(2)]
    a, b = loaded.sequences[:2]
    loaded.paged.step([(a, 0, 20, tables[0]), (b, 0, 5, tables[1])], 0)
    rows = [(a, 20, 4, tables[0]), (b, 5, 4, tables[1])]
    for (_, start, count, _), logits, expected in zip(
        rows, loaded.paged.step(rows, 2), loaded.expected[:2], strict=True
    ):
        assert_equal(logits, expected[start : start + count])


def test_every_parameter_has_its_place_in_the_checkpoint(loaded: Loaded) -> None:
    model = Decoder(loaded.paged.spec, 1, Build(torch.float32, CPU, TorchKernels(), Unquantized.create))
    for parameter in model.parameters():
        parameter.fill_(1.0)
    tensors = model.checkpoint_tensors()
    assert sum(math.prod(tensor.shape) for tensor in tensors.values()) == sum(p.numel() for p in model.parameters())
    for tensor in tensors.values():
        tensor.load(torch.zeros(tensor.shape))
    assert not any(parameter.any() for parameter in model.parameters())
