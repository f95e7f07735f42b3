"""--config: a file says what flags say, and which models there are. What is wrong is said before anything loads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mini_infer.cli.serve import main, parse
from mini_infer.core.config import LoadFormat
from mini_infer.core.errors import ConfigError
from mini_infer.serving.settings import ServerSettings


def settings(folder: Path, text: str, *flags: str, **variables: str) -> ServerSettings:
    path = folder / "models.yaml"
    path.write_text(text)
    return parse(["--config", str(path), *flags], variables)


def test_a_file_of_one_model_is_its_flags(tmp_path: Path) -> None:
    text = """
port: 9000
model: tiny-draft
max-queued: 5
gpu-memory-utilization: 0.5          # vLLM's name
enable-prefix-caching: false
scheduler: {max_num_seqs: 3}
model.hf_config: {a: {b: 1}}
load-format: dummy
speculation.method: none
"""
    found = settings(tmp_path, text, "--port", "9001", MINI_INFER_PORT="9002", MINI_INFER_MAX_QUEUED="6")
    flags = ["--port=9001", "--max-queued=6", "--model=tiny-draft", "--cache.gpu_memory_utilization=0.5"]
    flags += ["--cache.prefix_caching=false", "--scheduler.max_num_seqs=3", '--model.hf_config={"a": {"b": 1}}']
    flags.append("--model.load_format=dummy")
    assert found == parse(flags, {})


def test_models_have_what_the_server_says_and_their_own(tmp_path: Path) -> None:
    text = """
max_queued: 7
cache.memory_gib: 0.5
models:
  chat: {model: tiny-target, aliases: [gpt, gpt-4], cache: {memory_gib: 0.25}}
  small: {model: tiny-draft, aliases: mini, max_queued: 3}
"""
    chat, small = settings(tmp_path, text, "--request-timeout", "9").models
    assert (chat.names, small.names, small.model_name) == (["chat", "gpt", "gpt-4"], ["small", "mini"], "small")
    assert [model.model for model in (chat, small)] == ["tiny-target", "tiny-draft"]
    assert [model.max_queued for model in (chat, small)] == [7, 3]
    assert [model.engine.cache.memory_gib for model in (chat, small)] == [0.25, 0.5]
    assert [model.request_timeout for model in (chat, small)] == [9, 9]
    (listed,) = settings(tmp_path, "models: {a: {model: x, lora: [b=/b, c=/c], gpus: [0, 1]}}").models
    assert (listed.engine.lora.adapters, listed.gpus) == ({"b": "/b", "c": "/c"}, "0,1")
    dry = settings(tmp_path, "models: {a: {}, b: {model: tiny-target, dry_run: false}}", "--dry-run").models
    assert [model.engine.model.load_format for model in dry] == [LoadFormat.dry, LoadFormat.auto]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot: 3", "unknown argument '--prot=3'; did you mean --port?"),
        (
            "models: {a: {model: x, cache: {blok_size: 3}}}",
            "model 'a': unknown argument '--cache.blok_size=3'; did you",
        ),
        ("models: {a: {model: x, cache.block_size: many}}", "model 'a': cache.block_size must be an integer"),
        ("models: {a: {model: x, max_queued: 0}}", "model 'a': max_queued must be above 0"),
        ("models: {a: {model: x, port: 1}}", "model 'a': port is the server's"),
        ("models: {a: {max_queued: 3}}", "model 'a': it does not say what to load"),
        ("models: {a: {model: x, served_model_name: b}}", "its name is 'a' already"),
        ("models:\n  a: {model: x}\n  a: {model: y}", "line 3: 'a' stands there twice"),
        ("models:\n  ? [a, b]\n  : {model: x}", "line 2: a name must be a text"),
        ("models: {a: {model: x}, b: {model: y, aliases: a}}", "two models have the name 'a'"),
        ("models: {a: {model: x}}\nmodel: y", "model.path is a model's own"),
        ("models: {a: {model: x, trust-remote-code: true}}", "--trust-remote-code is vLLM's"),
        ("models: [a, b]", "models must hold names"),
        ("models: {a: }", "model 'a' must hold names"),
        ("config: other.yaml", "a file cannot name another one"),
        ("port: [", "line 1: "),
        ("models: {a: {dry_run: true}, b: {dry_run: true, parallel.launcher: ray}}", "parallel.launcher=ray"),
    ],
)
def test_mistakes_are_named_with_their_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings(tmp_path, text)
    assert said in str(error.value)


def test_a_model_that_is_not_there_is_said_before_anything_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "models.yaml"
    path.write_text("port: 0\nmodels: {a: {model: tiny-target}, b: {model: tiny-targte}, c: {model: /nowhere}}")
    loaded = set(sys.modules)
    assert main(["--config", str(path)]) == 2
    assert "model 'b': model.path=tiny-targte: there is no such model; did you mean tiny-target?" in (
        capsys.readouterr().err
    )
    assert "mini_infer.serving.processes.supervisor" not in set(sys.modules) - loaded
    assert main(["--config", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err
