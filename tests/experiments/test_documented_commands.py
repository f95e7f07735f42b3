"""What the documents tell a reader to type is understood by the program that they name: what takes long is composed and
checked by its own entry point, the rest runs. tests/serving/test_documented_requests.py sends what asks a server."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from documented import ROOT, Command, blocks, commands
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from small_runs import DRY, FEW

from experiments import soak
from experiments.lab import commands as of_run_py
from experiments.lab.config import catalog, schema, typed
from mini_infer import EngineConfig, LLMEngine
from mini_infer.assets import adapters, evaluate, shipped_path, train
from mini_infer.assets.adapters import random_adapter, write_adapter
from mini_infer.cli import chat, demo, quantize, serve
from mini_infer.core.errors import MiniInferError
from mini_infer.core.model_config import ModelConfig

CONF = ROOT / "conf"
# What stands for something of the reader's.
MINE = str(shipped_path("tiny-target"))
READERS = {
    "PATH": MINE,
    "MODEL": MINE,
    "model=/path": f"model={MINE}",
    "model=/models/mine": f"model={MINE}",
    "model=PATH": f"model={MINE}",
    "workload.path=FILE": "workload.path=trace.csv",
    "experiment=NAME": "experiment=prefix_cache",
    "NAME": "prefix_cache",
    "A": "measure/mine/h200/default",
    "B": "measure/mine/h200/policy=shortest",
    "RUN": "simulator",
    "trial/results": "results",
    "experiment=glob(*)": "experiment=kv_memory",  # test_lab_configs.py composes every one
    "HEAD~3": "HEAD",  # a shallow clone has no more
    "experiment=block_size": "experiment=quickstart",  # test_readme.py runs it
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reader is: with what the pages have him write, and runs of his own."""
    place = tmp_path_factory.mktemp("place")
    (models,) = (block.text for block in blocks() if block.text.startswith("# models.yaml"))
    (place / "models.yaml").write_text(models)
    (place / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,10,5\n")
    stored = ROOT / "results" / "prefix_cache" / "tiny.in_process" / "cpu"
    for run in (
        "prefix_cache/tiny.in_process/cpu/default",
        "measure/mine/h200/default",
        "measure/mine/h200/policy=shortest",
    ):
        to = place / "results" / run
        to.parent.mkdir(parents=True, exist_ok=True)
        for file in stored.glob("default.*"):
            shutil.copy(file, to.with_name(file.name.replace("default", to.name, 1)))
    shutil.copytree(ROOT / "results" / "ceilings", place / "few" / "ceilings")
    tensors = random_adapter(ModelConfig(path="tiny-target"), rank=16, seed=0)
    write_adapter(place / "my-adapter", tensors, rank=16, alpha=16)
    return place


@pytest.fixture
def run(
    place: Path, run_py: Callable[..., int], compose_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, list[str]], None]:
    """Of a program, what was typed after its name."""
    monkeypatch.chdir(place)

    def understood(program: str, words: list[str]) -> None:
        match program:
            case "mini-infer-serve":
                assert words == ["--help"] or serve.parse([word for word in words if word != "..."], {}).models
            case "mini-infer-chat":
                _, rest = chat._parser().parse_known_args(words)
                assert serve.parse(rest, {}).models
            case "mini-infer-demo":
                demo._parser().parse_args(words)
            case "mini-infer-quantize":
                assert quantize._recipe(quantize._parser().parse_args(words))
            case "make":
                assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            case "pip":
                for extra in re.findall(r"\[(\w+)\]", " ".join(words)):
                    assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text()
            case "docker" if words[0] == "run":
                image = next(index for index, word in enumerate(words) if word.startswith("mini-infer"))
                assert serve.parse(words[image + 1 :], {}).models
            case "docker" | "kubectl":
                named = [words[words.index("-f") + 1]] if "-f" in words else []
                for file in named or ["compose.yaml" if words[0] == "compose" else "Dockerfile"]:
                    assert (ROOT / file).is_file()
            case "git" | "ray" | "python3":  # none of ours
                assert words[0] in ("apply", "start", "-m")
            case "python" if words == ["run.py", "..."]:  # whatever stands below
                pass
            case "python" if words[0] == "run.py":
                command(["experiment=quickstart" if word == "..." else word for word in words[1:]])
            case "python" if words[0] == "-m":
                module(words[1], words[2:])
            case "python":
                assert (ROOT / words[0]).is_file()
            case "curl":
                assert words[0].startswith("localhost:8000/")
            case _:
                pytest.fail("nobody here knows this program")

    def command(words: list[str]) -> None:
        """Of run.py: experiments are composed and made, as for a run, and not measured."""
        if words[0] in of_run_py.COMMANDS or words == ["--help"]:
            report = ["--results", "few", "--reports", "reports"]
            options = {"trace": ["--out", "trace.json"], "report": report}.get(words[0], [])
            if words[0] in ("trace", "compare", "stale") and not {"--results", "--rev"} & set(words):
                options += ["--results", "results"]
            if words[0] == "predict":  # of a run whose steps take what the dry model's do
                few = [*DRY, *FEW, "experiment.points.load=[burst]", "measure.processes=1", "measure.gates=false"]
                results = Path("predicted").absolute()
                places = [f"paths.results={results}", f"paths.reports={results}/reports", "paths.run=default"]
                assert run_py("experiment=simulator", *few, *places) == 0
                options += ["--results", str(results)]
            assert run_py(*words, *options) == 0
            return
        catalog.require_setting(words[0], CONF)
        first = [word for word in catalog.shorthand(words, CONF) if word != "-m" and not word.startswith("hydra")]
        for place, one in enumerate(OverridesParser.create().parse_overrides(first)):
            if one.is_sweep_override():
                first[place] = f"{one.get_key_element()}={next(one.sweep_string_iterator())}"
        chosen = next(word.partition("=")[2] for word in first if word.startswith("experiment="))
        config = typed.settle(compose_config(*first), chosen, first).config
        assert schema.experiment_class(config).from_config(config)

    def module(name: str, words: list[str]) -> None:
        class ReadItsArguments(Exception):
            pass

        def stop(*arguments: object) -> None:
            raise ReadItsArguments

        monkeypatch.setattr(sys, "argv", [name, *words])
        match name:
            case "mini_infer.assets.adapters":
                adapters.main()
            case "mini_infer.assets.train":
                train.parse_args(words)
            case "mini_infer.assets.evaluate" | "experiments.soak":
                monkeypatch.setattr(evaluate, "load", stop)
                monkeypatch.setattr(soak, "own_server", stop)
                with pytest.raises(ReadItsArguments):
                    evaluate.main() if "evaluate" in name else soak.main(words)
            case "pytest" | "experiments.gpu_tests" | "venv":
                assert all((ROOT / word).exists() for word in words if word.startswith("tests"))
            case _:
                pytest.fail("nobody here knows this module")

    return understood


@pytest.mark.usefixtures("quick_figures")
@pytest.mark.parametrize("command", commands(), ids=str)
def test_it_is_understood(command: Command, run: Callable[[str, list[str]], None]) -> None:
    program, *words = (READERS.get(word, word) for word in command.words)
    run(program.removeprefix(".venv/bin/"), words)


@pytest.mark.parametrize(
    "typed", ["mini-infer-sreve", "python -m mini_infer.asets", "python no.py", "mini-infer-serve --no", "make tests",
              "python run.py experiment=quikstart", "python run.py experiment=quickstart workload.cuont=1"],
)  # fmt: skip
def test_what_is_none_is_found(typed: str, run: Callable[[str, list[str]], None]) -> None:
    program, *words = typed.split()
    with pytest.raises((AssertionError, pytest.fail.Exception, MiniInferError, HydraException, OmegaConfBaseException)):
        run(program, words)


@pytest.mark.parametrize("block", list(blocks()), ids=lambda block: f"{block.page}:{block.line}")
def test_its_language_is_one_that_is_read(block: Any, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code with a title is that of a file (tests/docs), and that of a diff an exercise's."""
    monkeypatch.chdir(place)
    match block.language:
        case "python":
            code = block.text.replace("/models/Qwen2.5-7B-Instruct", MINE).replace("8192", "256")
            known = {"EngineConfig": EngineConfig, "LLMEngine": LLMEngine}  # as an earlier block has imported them
            exec(compile(code, f"{block.page}:{block.line}", "exec"), known)
        case "yaml":
            assert yaml.safe_load(block.text)
        case language:
            assert language in ("", "text", "diff") or language.startswith('python title="')
