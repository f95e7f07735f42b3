"""Greedy tokens of models with multi-head latent attention against transformers', in every form, with every mechanism
switched on and memory short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from against_transformers import CLEAR, LATENTS, Tokens, greedy, made_up_prompts, saved
from safetensors.torch import load_file, save_file

from experiments.lab.judge.logit_gate import probe_logits
from mini_infer import ConfigError, EngineConfig, LLMEngine, SamplingParams
from mini_infer.runtime.graphs.mixed import MixedAttention

VOCAB, NEW_TOKENS = 61, 16
PROMPTS = made_up_prompts(VOCAB)
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "q_lora_rank": 20,
    "n_group": 2,
    "topk_group": 1,
    **LATENTS,
    **CLEAR,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
FORMS = ["naive", "latent", "absorbed", "auto"]
SHORT: dict[str, Any] = {"cache": {"num_blocks": 16, "block_size": 8, "watermark": 0.0}}
BUSY: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 23, "overlap": "always"}
MACHINES: dict[str, dict[str, Any]] = {
    "recompute": {**SHORT, "scheduler": BUSY},
    "swap": {
        "cache": SHORT["cache"] | {"prefix_caching": False},
        "scheduler": BUSY | {"preemption": "swap"},
        "speculation": {"method": "ngram", "num_tokens": 3, "ngram_min": 1, "adaptive": False},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepseek")


@pytest.fixture(scope="module")
def expected(folder: Path) -> Tokens:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**SMALL, rope_parameters=YARN)
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    tokens = saved(model, folder, PROMPTS, NEW_TOKENS)
    # As the published folders have it: a layer behind the last, which predicts further tokens.
    weights = load_file(folder / "model.safetensors") | {"model.layers.2.eh_proj.weight": torch.ones(3, 6)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return tokens


def make(folder: Path, form: str, machine: dict[str, Any], **more: Any) -> LLMEngine:
    attention = {"mla": form, "mla_crossover": 9}
    return LLMEngine(
        EngineConfig.from_dict(
            {"model": {"path": str(folder), "device": "cpu"}, "attention": attention, **machine, **more}
        )
    )


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("form", FORMS)
def test_greedy_tokens_equal_transformers(folder: Path, expected: Tokens, form: str, machine: str) -> None:
    engine = make(folder, form, MACHINES[machine])
    assert greedy(engine, PROMPTS, NEW_TOKENS) == expected
    records = engine.records
    assert any(record.preempted for record in records)
    assert any(record.num_prefilling for record in records), "no prompt was cut into chunks"
    if machine == "swap":
        assert sum(r.swapped_out_blocks for r in records) == sum(r.swapped_in_blocks for r in records) > 0
        assert any(sum(record.accepted) for record in records)
    else:
        assert sum(r.prefix_hit_tokens for r in records) > 0
    engine.close()


def test_the_cache_of_latents_is_as_small_as_its_layout_says(folder: Path, expected: list[list[int]]) -> None:
    sizes = {}
    for form in ("naive", "auto"):
        engine = make(folder, form, SHORT)
        startup = engine.startup
        sizes[form] = startup.kv_token_bytes
        assert startup.kv_token_bytes_of_heads == 2 * 4 * (20 + 18) * 4
        assert startup.kv_bytes == 16 * 8 * startup.kv_token_bytes
        engine.close()
    assert sizes == {"naive": 2 * 4 * (20 + 18) * 4, "auto": 2 * (24 + 8) * 4}


@pytest.mark.usefixtures("plain_sampler")
@pytest.mark.parametrize(
    ("form", "dtype"),
    [("auto", "auto"), ("latent", "auto"), ("absorbed", "auto"), ("latent", "fp8"), ("absorbed", "fp8")],
)
def test_tokens_are_the_same_to_the_bit_in_any_company(
    folder: Path, expected: list[list[int]], form: str, dtype: str
) -> None:
    pytest.importorskip("triton")
    machine = {
        "cache": SHORT["cache"] | {"num_blocks": 8, "dtype": dtype},
        "scheduler": {"max_num_seqs": 3, "max_num_batched_tokens": 13},
    }
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=2)
    asked = [list(range(n)) for n in (3, 11)]
    plain = make(folder, form, {"cache": {"prefix_caching": False, "dtype": dtype}}, numerics="batch_invariant")
    alone = [plain.generate([prompt], params)[0].outputs[0] for prompt in asked]
    plain.close()
    engine = make(folder, form, machine, numerics="batch_invariant")
    assert engine.startup.attention_decode.startswith("batch_invariant")
    for _ in range(2):  # the second time prefixes hit
        together = [output.outputs[0] for output in engine.generate(asked, params)]
        assert [(o.token_ids, o.logprobs) for o in together] == [(o.token_ids, o.logprobs) for o in alone]
    engine.close()


@pytest.mark.parametrize("name", MACHINES)
def test_latents_in_8_bits_are_the_same_in_every_form_and_close_to_whole_ones(
    folder: Path, expected: Tokens, name: str
) -> None:
    machine = {**MACHINES[name], "cache": MACHINES[name]["cache"] | {"dtype": "fp8"}}
    found = {}
    for form in ("latent", "absorbed", "auto"):
        engine = make(folder, form, machine)
        assert engine.startup.kv_token_bytes == 2 * (24 + 8)
        found[form] = greedy(engine, PROMPTS, NEW_TOKENS)
        assert (name == "swap") == any(record.swapped_in_blocks for record in engine.records)
        assert (name == "swap") == any(sum(record.accepted) for record in engine.records)
        engine.close()
    assert found["latent"] == found["absorbed"] == found["auto"]
    first = [tokens[0] == whole[0] for tokens, whole in zip(found["auto"], expected, strict=True)]
    assert sum(first) >= 6, "of 8"
    assert found["auto"] != expected, "nothing was rounded"


@pytest.mark.parametrize("form", ["auto", "absorbed", "naive"])
def test_steps_with_prompts_are_captured_in_pieces(folder: Path, form: str) -> None:
    engine = make(folder, form, {})
    backends = engine.executor.runner.model._backends  # type: ignore[union-attr]
    assert not MixedAttention.captures(backends.prefill.backend, backends.decode.backend)
    engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("split", [1, 77, 300])
def test_captured_steps_give_the_logits_of_eager_ones(split: int) -> None:
    """In DeepSeek's sizes of heads, with experts."""
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    wide = {"hidden_size": 512, "moe_intermediate_size": 256, "num_attention_heads": 16, "num_key_value_heads": 16}
    shape = SMALL | sizes | wide | {"vocab_size": 5003, "q_lora_rank": 192, "max_position_embeddings": 4096}
    shape |= {"architectures": ["DeepseekV3ForCausalLM"], "initializer_range": 0.02, "rope_parameters": YARN}
    ids = torch.randint(0, 5003, (split + 20,), generator=torch.Generator().manual_seed(1)).tolist()
    found = []
    for graphs in ({"max_prefill_tokens": 0}, {"capture": "never"}, {}):
        model = {"path": "made up", "load_format": "dummy", "hf_config": shape, "dtype": "bfloat16"}
        engine = LLMEngine(EngineConfig.from_dict({"model": model, "graphs": graphs, "cache": {"num_blocks": 256}}))
        assert bool(engine.startup.graphs.batch_sizes) == ("capture" not in graphs)
        assert engine.startup.prefill_graphs.in_pieces == (graphs == {})
        found.append(probe_logits(engine, ids, split))
        engine.close()
    captured, eager, padded = found
    assert torch.equal(captured, eager)
    assert ((padded - eager).norm() / eager.norm()) < 1e-2, "in pieces, which are padded and round otherwise"


def test_what_cannot_be_is_refused(folder: Path, expected: list[list[int]]) -> None:
    with pytest.raises(
        ConfigError, match=r"attention.mla=absorbed: Qwen2ForCausalLM has no multi-head latent attention"
    ):
        LLMEngine(EngineConfig.from_dict({"model": {"path": "tiny-target"}, "attention": {"mla": "absorbed"}}))
    for form, machine, why in (
        ("naive", {"cache": {"dtype": "fp8"}}, "cache.dtype=fp8: DeepseekV3ForCausalLM has keys and values of two"),
        (
            "latent",
            {"numerics": "batch_invariant", "attention": {"mla": "latent", "decode": "triton"}},
            "not batch-inv",
        ),
    ):
        with pytest.raises(ConfigError, match=why):
            LLMEngine(EngineConfig.from_dict({"model": {"path": str(folder)}, "attention": {"mla": form}, **machine}))
