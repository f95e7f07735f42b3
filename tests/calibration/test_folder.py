from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mini_infer import LLMEngine, SamplingParams
from mini_infer.calibration.folder import HIDDEN, RECIPE, UNFINISHED, quantize_folder
from mini_infer.calibration.layerwise import put_in, quantized_layers
from mini_infer.calibration.recipe import Method, Recipe
from mini_infer.calibration.streamed import StreamedDecoder
from mini_infer.calibration.text import calibration_ids, shipped_text
from mini_infer.cli.quantize import main
from mini_infer.core.config import CacheConfig, Device, DType, EngineConfig, ModelConfig
from mini_infer.core.errors import ConfigError, ModelError
from mini_infer.modeling.model_files import safetensors_files

CPU = torch.device("cpu")
TEXT = "\n".join(f"def f{i}(x):\n    return x * {i} + len('{i * i}')\n" for i in range(200))
FEW: dict[str, Any] = {"samples": 4, "length": 32, "group": 32}


def texts() -> Sequence[str]:
    return [TEXT]


def whole(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    return model(ids[None]).logits[0]


def read_all(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def ids_of(folder: Path, recipe: Recipe, text: Sequence[str] = (TEXT,)) -> Tensor:
    from transformers import AutoTokenizer

    return calibration_ids(text, AutoTokenizer.from_pretrained(folder), recipe.samples, recipe.length, recipe.seed)


RECIPES = [
    Recipe("w4a16", Method.rtn, **FEW),
    Recipe("w4a16", Method.gptq, **FEW),
    Recipe("w4a16", Method.gptq, **FEW, symmetric=False, act_order=False),
    Recipe("w4a16", Method.awq, **FEW),
    Recipe("w8a16", Method.rtn, **FEW),
    Recipe("w8a8", Method.rtn, **FEW),
    Recipe("w8a8", Method.smoothquant, **FEW),
    Recipe("fp8", Method.rtn, **FEW),
    Recipe("fp8_block", Method.rtn, **FEW),
    Recipe("w4a16", Method.rtn, **FEW, kept=("layers.0.mlp.down_proj", "v_proj")),
]


ENGINES = [
    Recipe("w4a16", Method.gptq, **FEW, symmetric=False),
    Recipe("w8a8", Method.smoothquant, **FEW),
    Recipe("fp8", Method.rtn, **FEW),
    Recipe("fp8_block", Method.rtn, **FEW),
    Recipe("mixed", Method.rtn, **FEW),
]


@pytest.fixture(scope="module")
def source(folder: Path, wide_folder: Path) -> Callable[[Recipe], Path]:
    """The folder that a recipe is for."""
    return lambda recipe: wide_folder if recipe.scheme == "fp8_block" else folder


@pytest.fixture(scope="module")
def quantized(source: Callable[[Recipe], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Recipe], Path]:
    """The folder that a recipe makes."""
    return cache(
        lambda recipe: quantize_folder(
            str(source(recipe)), tmp_path_factory.mktemp("quantized") / "out", recipe, texts, CPU
        )
    )


@pytest.fixture(scope="module")
def meant(source: Callable[[Recipe], Path]) -> Callable[[Recipe], Any]:
    """transformers' model with the weights that a recipe rounds to."""

    @cache
    def made(recipe: Recipe) -> Any:
        folder = source(recipe)
        model, ids = whole(folder), ids_of(folder, recipe)
        for layer, _ in quantized_layers(StreamedDecoder(folder, CPU), recipe, ids if recipe.needs_text else None):
            put_in(model, layer, recipe)
        return model

    return made


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.scheme}-{r.method.value}{'' if r.symmetric else '-z'}")
def test_transformers_computes_what_was_meant(source: Any, quantized: Any, meant: Any, recipe: Recipe) -> None:
    folder = source(recipe)
    found, expected, ids = whole(quantized(recipe)), meant(recipe), ids_of(folder, recipe)
    a, b = logits(found, ids[0]), logits(expected, ids[0])
    # Where activations are rounded, the library's scales of them are not ours: the largest is 127.5 of its steps.
    allowed = 1e-5 if recipe.formats.activations is None else 2e-2
    assert float((a - b).norm() / b.norm()) < allowed
    for name, parameter in expected.model.layers.state_dict().items():
        stored = found.model.layers.state_dict()[name]
        torch.testing.assert_close(stored, parameter.bfloat16().float() if "norm" in name else parameter)
    changed = float((b - logits(whole(folder), ids[0])).norm() / b.norm())
    assert 1e-4 < changed < (0.4 if recipe.scheme == "w4a16" else 0.1)


def test_layers_that_are_kept_are_told_of(folder: Path, quantized: Any) -> None:
    out = quantized(RECIPES[-1])
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    kept = {"lm_head", "model.layers.0.mlp.down_proj"} | {f"model.layers.{i}.self_attn.v_proj" for i in (0, 1)}
    assert set(config["ignore"]) == kept
    assert torch.equal(
        read_all(out)["model.layers.0.mlp.down_proj.weight"], read_all(folder)["model.layers.0.mlp.down_proj.weight"]
    )


def test_mixed_keeps_the_columns_with_the_largest_inputs(folder: Path, quantized: Any) -> None:
    tensors, original = read_all(quantized(ENGINES[-1])), read_all(folder)
    columns = tensors["model.layers.0.self_attn.q_proj.outlier_columns"]
    assert columns.tolist() == tensors["model.layers.0.self_attn.k_proj.outlier_columns"].tolist()
    assert columns.numel() == 8
    assert {0, 16, 32, 48} < set(columns.tolist())  # those whose norm is large
    name = "model.layers.0.self_attn.q_proj"
    assert torch.equal(tensors[f"{name}.outlier_weight"], original[f"{name}.weight"][:, columns])
    assert not tensors[f"{name}.weight"][:, columns].any()


@torch.no_grad()
@pytest.mark.parametrize("recipe", ENGINES, ids=lambda recipe: recipe.scheme)
def test_our_engine_computes_what_was_meant(source: Any, quantized: Any, meant: Any, recipe: Recipe) -> None:
    out, expected, ids = quantized(recipe), meant(recipe), ids_of(source(recipe), recipe)
    model = ModelConfig(path=str(out), device=Device.cpu, dtype=DType.float32)
    engine = LLMEngine(EngineConfig(model=model, cache=CacheConfig(num_blocks=16)))
    # Sums in another order, and a rounded activation is now and then the next code.
    allowed = 1e-4 if recipe.formats.activations is None else 2e-2
    try:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
        for row in ids:
            (output,) = engine.generate([row.tolist()], params)
            (found,) = output.outputs[0].logprobs
            of_all = torch.log_softmax(logits(expected, row)[-1], -1)
            assert len(found.top) == 5
            for token, value in found.top:
                assert value == pytest.approx(float(of_all[token]), abs=allowed)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("recipe", "layers", "lost"),
    [(RECIPES[kind], layers, 0) for kind in (0, 1) for layers in (0, 1, 2)] + [(RECIPES[1], 1, 1)],
    ids=[f"{kind}-{layers}" for kind in ("rtn", "gptq") for layers in (0, 1, 2)] + ["gptq-1, hidden states lost"],
)
def test_interrupted_it_goes_on_to_the_same_files(
    folder: Path, tmp_path: Path, quantized: Any, recipe: Recipe, layers: int, lost: int
) -> None:
    """lost: of the layers that were done, how many are done again."""
    expected, out = quantized(recipe), tmp_path / "out"

    def interrupt(done: int, total: int) -> None:
        if done == layers:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_folder(str(folder), out, recipe, texts, CPU, interrupt)
    assert not out.exists()
    unfinished = out.with_name(out.name + UNFINISHED)
    assert not (unfinished / "config.json").exists()
    with pytest.raises(ModelError):
        safetensors_files(unfinished)
    if lost:
        (unfinished / f"{layers}.{HIDDEN}").unlink()
    seen: list[int] = []
    quantize_folder(str(folder), out, recipe, texts, CPU, lambda done, total: seen.append(done))
    assert seen == list(range(layers - lost, 3))
    assert not unfinished.exists()
    files = {file.name for file in expected.iterdir()}
    assert {file.name for file in out.iterdir()} == files
    for name in files:
        assert (out / name).read_bytes() == (expected / name).read_bytes(), name


def test_begun_with_another_recipe(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_folder(str(folder), out, Recipe("w4a16", Method.rtn, **FEW), texts, CPU, interrupt)
    with pytest.raises(ConfigError, match="was begun with scheme=w4a16, and now scheme is fp8: remove that folder"):
        quantize_folder(str(folder), out, Recipe("fp8", Method.rtn, **FEW), texts, CPU)


def test_what_exists_is_left_alone(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        quantize_folder(str(folder), tmp_path, Recipe("fp8", Method.rtn), texts, CPU)


def test_a_text_that_is_too_short(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the calibration text has .* tokens, and --samples 128 --length 512 take"):
        quantize_folder(str(folder), tmp_path / "out", Recipe("w4a16", Method.gptq, 32), texts, CPU)


def test_groups_that_do_not_divide(folder: Path, tmp_path: Path) -> None:
    for recipe, way_out in ((Recipe("w4a16", Method.rtn, 128), "--group"), (Recipe("fp8_block", Method.rtn), "fp8")):
        with pytest.raises(ModelError, match=rf"q_proj has 64 .* groups of 128 do not divide: give .*{way_out}"):
            quantize_folder(str(folder), tmp_path / recipe.scheme, recipe, texts, CPU)


def test_a_folder_that_is_quantized_already(tmp_path: Path, quantized: Any) -> None:
    with pytest.raises(ModelError, match="is quantized already"):
        quantize_folder(str(quantized(ENGINES[2])), tmp_path / "again", Recipe("fp8", Method.rtn), texts, CPU)


@pytest.mark.parametrize("change", ["not finite", "missing"])
def test_weights_that_cannot_be_quantized(folder: Path, tmp_path: Path, change: str) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    tensors = read_all(broken)
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del tensors[name]
        message = f"has no tensor {name}"
    else:
        tensors[name][3, 3] = torch.inf
        message = f"{name} holds values that are not finite"
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        quantize_folder(str(broken), tmp_path / "out", Recipe("fp8", Method.rtn), texts, CPU)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("w4a16", Method.smoothquant),
            "--scheme w4a16 --method smoothquant do not go together: w4a16 is made by gptq",
        ),
        (("w8a8", Method.gptq), "w8a8 is made by smoothquant or rtn, and gptq makes w4a16"),
        (("w2a2", Method.rtn), "--scheme must be one of w8a8"),
        (("w4a16", Method.rtn, 48), "--group must be one of 32, 64, 128; got 48"),
    ],
)
def test_recipes_that_cannot_be(settings: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recipe(*settings)


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(TEXT)

    def arguments(out: str, *more: str) -> list[str]:
        scheme = ["--scheme", "w4a16", "--method", "awq", "--group", "32", "--samples", "2", "--length", "32"]
        return [str(folder), str(tmp_path / out), *scheme, "--device", "cpu", *more]

    given = arguments("out", "--text", str(tmp_path / "text.txt"))
    assert main(given) == 0
    told = capsys.readouterr()
    assert "w4a16 by awq" in told.out
    assert re.search(r"layers .* 2/2 ", told.err), "the progress bar, when it is done"
    assert main(given) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([str(folder), str(tmp_path / "x"), "--scheme", "w8a8", "--method", "gptq"]) == 2
    assert "do not go together" in capsys.readouterr().err
    assert main(arguments("default")) == 0
    recipe = Recipe("w4a16", Method.awq, group=32, samples=2, length=32)
    for out, text in (("out", [TEXT]), ("default", shipped_text())):
        ids = ids_of(folder, recipe, text)
        stored = json.loads((tmp_path / out / RECIPE).read_text())
        assert stored["text"] == hashlib.sha256(ids.numpy().tobytes()).hexdigest(), out
