"""What cannot work is said before torch is imported, and by name."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mini_infer.assets import shipped_path
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError, ModelError
from mini_infer.modeling import model_files
from mini_infer.runtime import preflight

ROOT = Path(__file__).resolve().parents[2]
POINTER = b"version https://git-lfs\noid sha256:0\nsize 12\n"


@pytest.fixture(autouse=True)
def no_gpu_and_no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shipped = shipped_path("tiny-draft")
    assert shipped is not None
    return Path(shutil.copytree(shipped, tmp_path / "my-model"))


def check(path: object = "tiny-target", **sections: dict[str, Any]) -> tuple[str, ...]:
    model = {"path": str(path), **sections.pop("model", {})}
    return preflight.check(EngineConfig.from_dict({"model": model, **sections}))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"graphs": {"capture": "always"}}, r"graphs\.capture=always needs a GPU.*Set graphs\.capture=auto"),
        ({"attention": {"decode": "triton"}}, r"attention\.decode=triton needs a GPU"),
        ({"attention": {"prefill": "flash_attn"}}, r"attention\.prefill=flash_attn"),
        ({"numerics": "batch_invariant"}, r"numerics=batch_invariant needs a GPU.*Set numerics=fast"),
        ({"model": {"device": "cuda"}}, r"model\.device=cuda needs a GPU, and none is visible here"),
        ({"model": {"kernels": "triton", "device": "cpu"}}, r"needs a GPU, and model\.device=cpu"),
        ({"model": {"max_model_len": 10**6}}, r"model\.max_model_len=1000000 is beyond the model's own limit of \d+"),
        ({"speculation": {"method": "draft", "draft": {"path": "tiny-drat"}}}, "did you mean tiny-draft"),
    ],
)
def test_settings_that_cannot_work_here(sections: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=said):
        check(**sections)


def test_engines_that_ray_starts_may_have_what_is_not_here() -> None:
    assert check(model={"device": "cuda"}, parallel={"launcher": "ray"}) == ()


def test_the_interpreter_runs_our_kernels_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert check(numerics="batch_invariant", attention={"decode": "triton"}) == ()


def test_lengths_that_positions_are_stretched_to_are_the_engines_to_judge() -> None:
    shape = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64}
    asked = {"load_format": "dummy", "max_model_len": 128}
    assert check(model={**asked, "hf_config": {**shape, "rope_scaling": {"type": "linear", "factor": 2.0}}}) == ()
    with pytest.raises(ConfigError, match="own limit of 64"):
        check(model={**asked, "hf_config": {**shape, "rope_scaling": None}})


def test_names_of_models_that_are_meant() -> None:
    with pytest.raises(ModelError, match="did you mean tiny-target"):
        check("tiny-targte")
    with pytest.raises(ModelError, match=r"/no/such/folder: there is no such folder$"):
        check("/no/such/folder")
    assert model_files.local_folder("me/tiny-target") is None, "may be on the hub"


def test_a_folder_beside_the_one_that_is_named(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"no such folder; did you mean .*my-model\?"):
        check(folder.with_name("my-modle"))


class TestFolder:
    def test_a_whole_one(self, folder: Path) -> None:
        assert check(folder) == ()

    @pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
    def test_a_pointer_of_git_lfs(self, folder: Path, name: str) -> None:
        (folder / name).write_bytes(POINTER)
        with pytest.raises(ModelError, match=rf"{name} is a Git-LFS pointer.*`git lfs pull`"):
            check(folder)

    def test_weights_that_end_too_early_or_are_none(self, folder: Path) -> None:
        file = folder / "model.safetensors"
        whole = file.read_bytes()
        for data in (whole[:-8], whole[:20], b"", whole + b"x", b"<!doctype html>", (2).to_bytes(8, "little") + b"[]"):
            file.write_bytes(data)
            with pytest.raises(ModelError, match=r"cannot read .*model\.safetensors.*cut short"):
                check(folder)

    def test_a_shard_that_is_missing(self, folder: Path) -> None:
        index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ModelError, match=r"has no model-2\.safetensors"):
            check(folder)
        assert check(folder, model={"load_format": "dummy"}) == ()

    def test_what_it_will_not_do_without_a_template_or_a_tokenizer(self, folder: Path) -> None:
        (folder / "chat_template.jinja").unlink()
        (said,) = check(folder)
        assert "has no chat template" in said
        settings = folder / "tokenizer_config.json"
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": "{{ messages }}"}))
        assert check(folder) == ()
        for file in folder.glob("tokenizer*"):
            file.unlink()
        (said,) = check(folder)
        assert "has no tokenizer" in said
        assert check(folder, model={"tokenizer": "tiny-target"}) == ()


class TestHub:
    @pytest.fixture(autouse=True)
    def empty_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        (tmp_path / "models--someone--good-model").mkdir()

    def test_one_that_is_told_not_to_be_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(ModelError, match=r"HF_HUB_OFFLINE.*; did you mean someone/good-model\?"):
            check("someone/god-model")

    def test_one_that_says_nothing_is_not_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            url = f"http://127.0.0.1:{mute.getsockname()[1]}/x"
            monkeypatch.setattr("huggingface_hub.hf_hub_url", lambda *names: url)
            monkeypatch.delenv("HF_HUB_ETAG_TIMEOUT", raising=False)
            monkeypatch.setattr(model_files, "_HUB_ANSWERS_S", 0.2)
            start = time.monotonic()
            with pytest.raises(ModelError, match=r"within 0\.2 s \(HF_HUB_ETAG_TIMEOUT=30 waits for longer"):
                check("someone/model")
            assert time.monotonic() - start < 2
            monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.5")
            with pytest.raises(ModelError, match=r"within 0\.5 s|timed out"):
                check("someone/model")

    def test_a_name_that_can_be_none(self) -> None:
        with pytest.raises(ModelError, match="hub does not give it either"):
            check("a b/c")


def test_the_first_words_come_without_torch() -> None:
    """Whatever finds these mistakes may not import what takes seconds."""
    program = (
        "import sys\n"
        "from mini_infer.cli import chat, demo, quantize, serve\n"
        "codes = [serve.main(['tiny-targte']), serve.main(['--graphs.capture', 'always']), chat.main(['/nowhere']),\n"
        "         quantize.main(['tiny-drat', 'out', '--scheme', 'w8a8']), demo.main(['--model', 'tiny-mo'])]\n"
        "import runpy\n"
        "for asked in ('quickstart model=/nowhere', 'flash_decode', 'quickstart system=vllm'):\n"
        "    sys.argv = ['run.py', *('experiment=' + asked).split()]\n"
        "    try:\n"
        "        runpy.run_path('run.py', run_name='__main__')\n"
        "    except SystemExit as end:\n"
        "        codes.append(end.code)\n"
        "print(codes, [name for name in ('torch', 'transformers', 'fastapi') if name in sys.modules])\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == [f"{[2] * 8} []"], done.stderr
    for said in (
        "did you mean tiny-target?",
        "graphs.capture=always needs a GPU",
        "/nowhere: there is no such folder",
        "did you mean tiny-draft?",
        "did you mean tiny-moe?",
        "model.device=cuda needs a GPU",
        "system=vllm: vLLM is measured on a GPU",
    ):
        assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_connector_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = EngineConfig.from_dict(
        {"model": {"load_format": "dry"}, "parallel": {"prefill": 1, "decode": 1, "connector": "nixl"}}
    )
    with pytest.raises(ConfigError, match=r"the package nixl is not installed. pip install -e '\.\[nixl\]', or set"):
        preflight.check(config)
