"""numerics=batch_invariant over ranks: any number of them gives the same tokens and log-probabilities, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_shapes import SMALL_LLAMA

from mini_infer import ConfigError, LLMEngine, SamplingParams
from mini_infer.core.config import ModelConfig, Numerics
from mini_infer.kernels.invariant_linear import CHUNKS, Tile, invariant_linear, num_chunks
from mini_infer.kernels.ops import select_kernels
from mini_infer.modeling.loader import load_model, load_spec
from mini_infer.modeling.sharding import of_each_rank
from mini_infer.parallel.context import ParallelContext, tree_sum

pytestmark = [
    pytest.mark.usefixtures("plain_sampler"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning"),
]
MakeEngine = Callable[..., LLMEngine]

SHAPE = SMALL_LLAMA | {"attention_bias": True, "mlp_bias": True}


@pytest.mark.parametrize(("in_size", "chunks"), [(16, 4), (48, 4), (96, 8), (448, 8)])
def test_ranks_have_branches_of_one_sum(in_size: int, chunks: int) -> None:
    assert num_chunks(in_size, 4) == chunks
    generator = torch.Generator().manual_seed(in_size)
    x, weight = torch.randn(5, in_size, generator=generator), torch.randn(70, in_size, generator=generator)
    bias = torch.randn(70, generator=generator)
    whole = invariant_linear(x, weight, bias, chunks=chunks)
    torch.testing.assert_close(whole, x @ weight.T + bias)
    ranks = 2
    while ranks <= chunks:
        branches = []
        for own_x, own_weight in zip(x.chunk(ranks, 1), weight.chunk(ranks, 1), strict=True):
            branch = torch.empty(5, 70)
            branches.append(
                invariant_linear(own_x.contiguous(), own_weight.contiguous(), None, branch, chunks=chunks // ranks)
            )
        assert torch.equal(tree_sum(torch.stack(branches)) + bias, whole)
        ranks *= 2


@pytest.mark.parametrize(("in_size", "chunks"), [(48, 4), (1152, 8)])
def test_programs_have_branches_of_one_sum(in_size: int, chunks: int) -> None:
    x, weight, bias = torch.randn(5, in_size), torch.randn(70, in_size), torch.randn(70)
    one = invariant_linear(x, weight, bias, chunks=chunks, tile=Tile(32, 64, 32, 4, 2))
    for parts in (2, 4, 8):
        tile = Tile(32, 64, 32, 4, 2, parts=parts)
        assert torch.equal(invariant_linear(x, weight, bias, chunks=chunks, tile=tile), one), parts


def test_a_row_of_chunks_does_not_depend_on_the_others() -> None:
    x, weight = torch.randn(40, 128), torch.randn(64, 128)
    whole = invariant_linear(x, weight, chunks=CHUNKS)
    assert torch.equal(invariant_linear(x[7:9], weight, chunks=CHUNKS), whole[7:9])


LATENTS: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 0,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "vocab_size": 101,
    "max_position_embeddings": 128,
}
MIXTURE = {  # whose shared expert has a gate
    **SHAPE,
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
NO_SHARED_EXPERTS = {
    **SHAPE,
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "attention_bias": False,
    "hidden_size": 64,
    "num_key_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
PROMPTS = [[5, 9, 2, 77, 31], [8] * 9, [5, 9, 2, 77, 31, 4]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=5),
    SamplingParams(temperature=0.9, seed=3, max_tokens=2, ignore_eos=True, logprobs=5),
    SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=5, prompt_logprobs=2),
]


def answers(make_engine: MakeEngine, shape: dict[str, Any], parallel: dict[str, int], asked: slice) -> list[Any]:
    engine = make_engine(
        model={"path": "made up", "load_format": "dummy", "hf_config": shape},
        parallel=parallel,
        numerics="batch_invariant",
        scheduler={"max_num_batched_tokens": 8, "max_num_seqs": 4},
    )
    assert ("in two shots above 4" in engine.startup.all_reduce) == (engine.startup.tensor_parallel > 2)
    outputs = engine.generate(PROMPTS[asked], PARAMS[asked])
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]


def test_any_ranks_and_stages_give_the_same_bits(make_engine: MakeEngine) -> None:
    """Four ranks send sums of few rows in one shot, and of more in two."""
    layouts = ({"tensor": 1}, {"tensor": 4}, {"tensor": 2, "pipeline": 2})
    shape = {**SHAPE, "num_hidden_layers": 2}
    one, *others = (answers(make_engine, shape, layout, slice(1, 3)) for layout in layouts)
    assert [other == one for other in others] == [True, True]


@pytest.mark.parametrize(
    ("shape", "layouts"),
    [
        pytest.param(LATENTS, [{"tensor": 2}, {"tensor": 2, "expert": 2}], id="latents"),
        pytest.param(MIXTURE, [{"tensor": 2}], id="mixture"),
        pytest.param(NO_SHARED_EXPERTS, [{"tensor": 2}], id="mixture without shared experts"),
    ],
)
def test_experts_and_latents_that_ranks_share_give_the_bits_of_one(
    make_engine: MakeEngine, shape: dict[str, Any], layouts: list[dict[str, int]]
) -> None:
    one, *others = (answers(make_engine, shape, parallel, slice(1, 2)) for parallel in ({"tensor": 1}, *layouts))
    assert all(other == one for other in others)


def test_more_ranks_than_chunks_are_refused() -> None:
    """Three divide the heads, and no balanced tree."""
    shape = {**SHAPE, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    config = ModelConfig(path="made up", load_format="dummy", hf_config=shape)
    kernels, cpu = select_kernels(config.kernels, torch.device("cpu"), Numerics.batch_invariant), torch.device("cpu")
    spec = of_each_rank(load_spec(config), 3)
    with pytest.raises(ConfigError, match=r"have 8 chunks, which parallel\.tensor=3 ranks cannot share"):
        load_model(config, spec, torch.float32, cpu, 16, kernels, parallel=ParallelContext(0, 3))
