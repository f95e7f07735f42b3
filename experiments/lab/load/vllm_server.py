"""vLLM's own OpenAI server with a variant's settings: what runs in the process that holds it.

It gets the engine's settings as vllm.py gives them to its engine. Random weights come with a tokenizer of made-up
words, which it needs to start; requests bring token ids, and its answers are made into text as any other's are.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from experiments.lab.load.subject import Server
from experiments.lab.peers.vllm import engine_arguments, import_vllm, set_routing
from mini_infer.core.config import EngineConfig

HOST = "127.0.0.1"
MODEL = "the-model"
POLL_S = 0.2
ONLY_ON = ("disable_log_stats",)  # flags without a --no-
OWN = (  # tells how much of a prompt was cached; neither logs requests nor samples as the checkpoint's authors liked
    f"--served-model-name={MODEL}",
    f"--host={HOST}",
    "--enable-prompt-tokens-details",
    "--uvicorn-log-level=warning",
    "--generation-config=vllm",
)


def open_peer(config: EngineConfig, settings: Mapping[str, Any]) -> Server:
    """Raises PeerAbsent where vLLM cannot be imported, ConfigError for what it does not have, and RuntimeError where it
    ends before it serves; its log says why."""
    version = import_vllm().__version__
    folder = Path(tempfile.mkdtemp())  # in that of this process, and gone with it
    arguments = engine_arguments(config, folder)
    if config.model.hf_config is not None:
        arguments["tokenizer"] = write_tokenizer(folder / "tokenizer", config.model.hf_config["vocab_size"])
    arguments |= {"api_server_count": settings["api_processes"], "data_parallel_size": config.parallel.replicas}
    arguments |= settings["args"]
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    set_routing(config)
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", arguments.pop("model"), *OWN]
    server = Server("vllm serve", subprocess.Popen([*command, f"--port={port}", *flags(arguments)]))
    url = f"http://{HOST}:{port}"
    while True:
        try:
            urllib.request.urlopen(f"{url}/v1/models", timeout=POLL_S).close()
            break
        except OSError:
            server.check()
            time.sleep(POLL_S)
    # What has computed most so far has loaded the model.
    children = psutil.Process(server.process.pid).children()
    engine = max(children, key=lambda child: sum(child.cpu_times()[:2]))
    # Settings stand in the report, and no folders of this process.
    told = {name: value for name, value in arguments.items() if name != "tokenizer" and value is not None}
    server.about = {"url": url, "model": MODEL, "api_pid": server.process.pid, "engine_pids": [engine.pid]}
    server.about["settings"] = {"server": "vllm serve", "vllm": version, **told}
    return server


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Of EngineArgs' names its command's. What is None is left to it."""
    found = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found += [f"--{flag}"] if value else [] if name in ONLY_ON else [f"--no-{flag}"]
        elif value is not None:
            found.append(f"--{flag}={json.dumps(value) if isinstance(value, dict | list) else value}")
    return found


def write_tokenizer(folder: Path, size: int) -> str:
    """A tokenizer of `size` words, such as w17, in the format of the tokenizers library. Returns its folder."""
    words = {f"w{index}": index for index in range(size)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return str(folder)
