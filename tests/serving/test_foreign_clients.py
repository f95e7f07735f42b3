"""Clients that nobody here wrote, from their packages: `pytest -m clients`. It installs them, which takes minutes."""

from __future__ import annotations

import shutil
import subprocess
import venv
from pathlib import Path

import pytest
from http_server import Server

FOREIGN = Path(__file__).parent / "foreign"
PYTHON_PACKAGES = ("instructor", "langchain", "langchain-openai", "litellm")
NODE_PACKAGES = ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod")

pytestmark = pytest.mark.clients


def run(*command: str | Path, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_python_clients(shared_server: Server, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", *PYTHON_PACKAGES, cwd=tmp_path)
    run(python, FOREIGN / "python_clients.py", shared_server.url, cwd=tmp_path)


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
def test_the_vercel_ai_sdk(shared_server: Server, tmp_path: Path) -> None:
    run("npm", "install", "--silent", *NODE_PACKAGES, cwd=tmp_path)
    script = shutil.copy(FOREIGN / "ai_sdk.mjs", tmp_path)
    run("node", script, shared_server.url, cwd=tmp_path)
