"""Which layers each stage of a pipeline has: all of them together, read or drawn by nobody else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mini_infer import ConfigError, EngineConfig
from mini_infer.core.config import ModelConfig
from mini_infer.modeling import checkpoint
from mini_infer.modeling.loader import load_model, load_spec
from mini_infer.modeling.model import Model
from mini_infer.modeling.stages import of_stage, split
from mini_infer.parallel.context import ParallelContext

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 400,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MIXTURE = {
    **SHAPE,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "shipped, whose tables are tied": {"path": "tiny-target"},
    "random": {"hf_config": SHAPE},
    "random, tied": {"hf_config": {**SHAPE, "tie_word_embeddings": True}},
    "random, int8": {"hf_config": SHAPE, "quantization": "w8a16"},
    "random, outlier columns": {"hf_config": SHAPE, "quantization": "mixed"},
    "random experts": {"hf_config": MIXTURE},
    "random experts, int4": {"hf_config": MIXTURE, "quantization": "w4a16"},
}


def model_config(**options: Any) -> ModelConfig:
    return ModelConfig(**(options if "path" in options else {"path": "made up", "load_format": "dummy", **options}))


def part_of(config: ModelConfig, stage: int = 0, stages: int = 1) -> Model:
    parallel = ParallelContext(stage=stage, stages=stages)
    spec = of_stage(load_spec(config), torch.float32, parallel)
    return load_model(config, spec, torch.float32, torch.device("cpu"), 16, parallel=parallel)


def weights(model: Model) -> dict[str, torch.Tensor]:
    """By the name that each has in the whole model."""
    named = {}
    for name, weight in model.named_parameters():
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            name = f"layers.{int(index) + model.spec.first_layer}.{rest}"
        named[name] = weight
    return named


@pytest.mark.parametrize("name", MODELS)
def test_stages_have_the_weights_of_the_whole_model(name: str) -> None:
    config = model_config(**MODELS[name])
    whole, parts = weights(part_of(config)), [part_of(config, stage, 3) for stage in range(3)]
    assert [(part.spec.is_first, part.spec.is_last) for part in parts] == [(True, False), (False, False), (False, True)]
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        own = weights(part)
        assert not own.keys() & found.keys()
        found |= own
    table = found.pop("lm_head.weight")
    assert torch.equal(table, whole.get("lm_head.weight", whole["embed_tokens.weight"]))
    assert found.keys() == whole.keys() - {"lm_head.weight"}
    for key, weight in found.items():
        assert torch.equal(weight, whole[key]), key


def test_a_stage_reads_its_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    read, bytes_read = checkpoint._read, [0, 0]

    def counted(*given: Any) -> torch.Tensor:
        tensor = read(*given)
        bytes_read[stage] += tensor.nbytes
        return tensor

    monkeypatch.setattr(checkpoint, "_read", counted)
    parts = []
    for stage in range(2):
        parts.append(part_of(model_config(path="tiny-target"), stage, 2))
    assert [2 * count for count in bytes_read] == [part.weight_bytes() for part in parts]  # read in bf16
    assert [part.kv_layout.num_layers for part in parts] == [3, 3]


def test_layers_are_split_by_bytes() -> None:
    assert split([1] * 6, 2) == [(0, 3), (3, 6)]
    assert split([5, 1, 1, 1, 1, 1], 2) == [(0, 1), (1, 6)]
    assert split([3, 1, 1, 1, 1, 4], 3) == [(0, 1), (1, 5), (5, 6)]
    assert split([1, 1, 1], 3) == [(0, 1), (1, 2), (2, 3)]
    large_tables = model_config(hf_config={**SHAPE, "vocab_size": 4000})
    layers = [part_of(large_tables, stage, 3).spec.num_layers for stage in range(3)]
    assert layers == [2, 2, 1]  # of which the last one has the head


def test_what_cannot_be_in_stages_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pipeline=7: each stage needs a layer, and .* has 6 .* to 6 or less$"):
        part_of(model_config(path="tiny-target"), 0, 7)
    through = model_config(hf_config=SHAPE, implementation="transformers")
    with pytest.raises(ConfigError, match="transformers' code, which computes all layers in one go"):
        of_stage(load_spec(through), torch.float32, ParallelContext(stages=2))
    with pytest.raises(ConfigError, match=r"parallel\.pipeline=2: a dry model has nothing that ranks could share"):
        EngineConfig.from_dict({"model": {"load_format": "dry"}, "parallel": {"pipeline": 2}})
    with pytest.raises(ConfigError, match="each stage would count the experts of its own layers"):
        EngineConfig.from_dict({"model": {"count_experts": True}, "parallel": {"pipeline": 2}})
