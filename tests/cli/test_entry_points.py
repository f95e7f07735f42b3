"""What the commands say to somebody who has just installed the package."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

import mini_infer
from mini_infer.cli import arguments, chat, demo, quantize, serve
from mini_infer.core.errors import ConfigError


@pytest.mark.parametrize("command", [chat, demo, quantize, serve])
def test_each_tells_its_version(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == f"{command.NAME} {mini_infer.__version__}"


def test_a_server_without_its_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(arguments.importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    for command in (serve, chat):
        assert command.main(["tiny-target"]) == 2
        said = capsys.readouterr().err
        assert "(uvicorn)" in said
        assert "pip install -e '.[serve]'" in said


def test_the_packages_that_are_asked_for_are_those_of_the_extra() -> None:
    from pathlib import Path

    text = (Path(mini_infer.__file__).parents[1] / "pyproject.toml").read_text()
    extra = text.partition("serve = [")[2].partition("]")[0]
    assert {name.replace("_", "-") for name in arguments.OF_SERVER} == {
        line.strip().strip('",').partition(">")[0] for line in extra.strip().splitlines()
    }


def test_the_model_is_the_first_word() -> None:
    assert serve.parse(["tiny-draft", "--port", "0"], {}).models[0].model == "tiny-draft"
    assert serve.parse(["--model", "tiny-draft"], {}).models[0].model == "tiny-draft"
    assert serve.parse(["serve", "tiny-draft"], {}).models[0].model == "tiny-draft"
    with pytest.raises(ConfigError, match="unknown argument 'tiny-moe'"):
        serve.parse(["tiny-draft", "tiny-moe"], {})


def test_a_conversation_needs_a_template(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from mini_infer.assets import shipped_path

    source = shipped_path("tiny-draft")
    assert source is not None
    for file in source.iterdir():
        if "template" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    assert chat.main([str(tmp_path)]) == 2
    assert "has no chat template" in capsys.readouterr().err
    assert len(serve.remarks(serve.parse([str(tmp_path)], {}))) == 1
