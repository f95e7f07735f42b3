"""Clients that nobody here wrote, from their packages: `pytest -m clients`. It installs them, which takes minutes."""

from __future__ import annotations

import json
import shutil
import subprocess
import venv
from pathlib import Path

import pytest
from http_server import ROOT, Server

FOREIGN = Path(__file__).parent / "foreign"
PYTHON_PACKAGES = ("instructor", "langchain", "langchain-openai", "litellm")
NODE_PACKAGES = ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "openai", "zod")

pytestmark = pytest.mark.clients


def run(*command: str | Path, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def installed(folder: Path, *packages: str) -> Path:
    """The programs of an environment of their own."""
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    run(programs / "python", "-m", "pip", "install", "--quiet", *packages, cwd=folder)
    return programs


def test_python_clients(shared_server: Server, tmp_path: Path) -> None:
    python = installed(tmp_path, *PYTHON_PACKAGES) / "python"
    run(python, FOREIGN / "python_clients.py", shared_server.url, cwd=tmp_path)


def test_guidellm_out_of_the_box(shared_server: Server, tmp_path: Path) -> None:
    """It installs torch, gigabytes of it. The tokenizer is for the prompts that it makes up."""
    options = {
        "--backend": f"kind=openai_http,target={shared_server.url}",
        "--tokenizer": f"kind=huggingface_auto,model={ROOT / 'mini_infer/assets/tiny-target'}",
        "--data": "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "--profile": "kind=concurrent,streams=4",
        "--constraint": "kind=max_requests,count=16",
        "--output": "kind=json,path=told.json",
    }
    words = [word for option in options.items() for word in option]
    run(installed(tmp_path, "guidellm") / "guidellm", "run", *words, "--disable-progress", cwd=tmp_path)
    (told,) = json.loads((tmp_path / "told.json").read_text())["benchmarks"]
    assert told["metrics"]["request_totals"] == {"successful": 16, "errored": 0, "incomplete": 0, "total": 16}
    assert all(request["output_tokens"] == 8 for request in told["requests"]["successful"])


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
def test_node_clients(shared_server: Server, tmp_path: Path) -> None:
    run("npm", "install", "--silent", *NODE_PACKAGES, cwd=tmp_path)
    for script in FOREIGN.glob("*.mjs"):
        run("node", shutil.copy(script, tmp_path), shared_server.url, cwd=tmp_path)
