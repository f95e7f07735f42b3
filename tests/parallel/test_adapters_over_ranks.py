"""Adapters over ranks: the tokens of one process, and in batch-invariant numerics the numbers to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from integrity import check_scheduler
from model_shapes import SMALL_LLAMA
from test_expert import SHAPE as MIXTURE

from mini_infer import EngineConfig, LLMEngine, ModelError, SamplingParams
from mini_infer.assets.adapters import random_adapter, write_adapter
from mini_infer.core.model_config import ModelConfig

MakeEngine = Callable[..., LLMEngine]

PROMPTS = ["import os\n\nclass Cache:", "for i in range(", "import os\n\nclass Cache:"]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
MODEL = ModelConfig(path="tiny-target")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("adapters")
    made = [random_adapter(MODEL, rank=8, seed=seed, scale=0.7) for seed in range(2)]
    return [write_adapter(root / str(i), tensors, rank=8, alpha=8) for i, tensors in enumerate(made)]


def answers(engine: LLMEngine) -> list[list[int]]:
    outputs = engine.generate(PROMPTS, GREEDY, adapters=["one", None, "two"])
    check_scheduler(engine.scheduler)
    return [output.outputs[0].token_ids for output in outputs]


FOUR = pytest.param({"tensor": 2, "pipeline": 2}, marks=pytest.mark.soak)


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"tensor": 1, "pipeline": 2}, FOUR])
def test_ranks_give_the_tokens_of_one(
    layout: dict[str, int], folders: list[str], make_engine: MakeEngine, tmp_path: Path
) -> None:
    lora = {"max_adapters": 1, "adapters": {"one": folders[0]}}  # one slot: they take turns
    first = {name: t[:, :-1].contiguous() for name, t in random_adapter(MODEL, rank=8, seed=0, targets="q_proj").items()
             if ".layers.0." in name}  # fmt: skip
    wrong = write_adapter(tmp_path / "wrong", first, rank=8, alpha=8)
    found = []
    for parallel in ({"tensor": 1}, layout):
        engine = make_engine(parallel["tensor"], lora=lora, parallel=parallel, cache={"block_size": 4})
        bad = write_adapter(tmp_path / str(len(found)), {}, rank=99, alpha=8)
        with pytest.raises(ModelError, match="has rank 99"):
            engine.adapters.load("two", bad)
        with pytest.raises(ModelError, match=r"another model's|layers that ranks of other stages have"):
            engine.adapters.load("two", wrong)
        engine.adapters.load("two", folders[1])
        found.append([answers(engine), answers(engine)])
        engine.adapters.unload("one")
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found[0][0]}) == 3


def test_stages_of_random_weights_have_adapters_of_their_own_layers_alone(make_engine: MakeEngine) -> None:
    """Layers of other stages are made to be drawn, and forgotten."""
    shape = {**SMALL_LLAMA, "num_hidden_layers": 2}
    model = {"path": "made up", "load_format": "dummy", "hf_config": shape, "device": "cpu"}
    found = []
    for pipeline in (1, 2):
        engine = make_engine(1, model=model, lora={"max_adapters": 1, "dummy": 1}, parallel={"pipeline": pipeline})
        outputs = engine.generate([[3, 1, 4, 1, 5]] * 2, GREEDY, adapters=["dummy-0", None])
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")
def test_so_it_is_to_the_bit(make_engine: MakeEngine, tmp_path: Path) -> None:
    model = {"path": "made up", "load_format": "dummy", "hf_config": SMALL_LLAMA, "device": "cpu"}
    tensors = random_adapter(EngineConfig.from_dict({"model": model}).model, rank=4, seed=0)
    lora = {"max_adapters": 1, "adapters": {"one": write_adapter(tmp_path / "one", tensors, rank=4, alpha=4)}}
    params = {"temperature": 0, "max_tokens": 2, "ignore_eos": True, "logprobs": 3}
    found = []
    for tensor in (1, 2):
        engine = make_engine(tensor, model=model, numerics="batch_invariant", lora=lora)
        outputs = engine.generate([[3, 1, 4, 1, 5]] * 2, params, adapters=["one", None])
        found.append([(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_ranks_that_share_experts_leave_adapters_to_the_other_products(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Of shared experts a rank computes its own tokens, and adapters know all of the step's."""
    config, folders = EngineConfig.from_dict({"model": MIXTURE}).model, {}
    for name, targets in (("dense", "o_proj,layers.0.mlp.down_proj"), ("shared", "shared_experts.down_proj")):
        tensors = random_adapter(config, rank=4, seed=0, scale=2.0, targets=targets)
        folders[name] = write_adapter(tmp_path / name, tensors, rank=4, alpha=4)
    lora = {"max_adapters": 1, "adapters": {"dense": folders["dense"]}}
    found = []
    for expert in (1, 2):
        engine = make_engine(tensor=1, model=MIXTURE, lora=lora, parallel={"expert": expert})
        outputs = engine.generate([[3, 1, 4, 1, 5]] * 3, GREEDY, adapters=["dense", None, "dense"])
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
    with pytest.raises(ModelError, match=r"shared_experts\.down_proj.*of no product that adapters can be added to"):
        engine.adapters.load("shared", folders["shared"])
