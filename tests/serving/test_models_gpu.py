"""Two models share a GPU: each has its own part of the memory, and finds it again after its engine has died."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from http_server import Server, running, wait_for
from model_shapes import SHAPES

SHARE = 0.2
SHAPE = SHAPES["qwen3"] | {"max_position_embeddings": 32768}  # 1,024 requests of it could fill any GPU
OVERHEAD = 4 * 2**30  # weights, the largest step, graphs and the driver's context, at most


def kv_bytes(server: Server) -> list[int]:
    return [model["startup"]["kv_bytes"] for model in server.http.get("/healthz").json()["models"]]


def answers(server: Server, model: str) -> bool:
    return server.post("/v1/completions", model=model, prompt=[1, 2, 3], max_tokens=4).status_code == 200


@pytest.mark.gpu
def test_each_model_has_its_share_of_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    content = {
        "dry_run": False,
        "model.load_format": "dummy",
        "model.hf_config": SHAPE,
        "scheduler.max_num_seqs": 1024,
        "cache.gpu_memory_utilization": SHARE,
        "models": {name: {"model": name, "gpus": "0"} for name in ("first", "second")},
    }
    path.write_text(json.dumps(content))  # which is YAML, too
    total = torch.cuda.mem_get_info()[1]
    with running("--dry-run", "false", "--config", str(path)) as server:
        before = kv_bytes(server)
        assert all(SHARE * total - OVERHEAD < each < SHARE * total for each in before)
        if "PYTEST_XDIST_WORKER" not in os.environ:  # else other tests have a part of the GPU, too
            assert total - torch.cuda.mem_get_info()[0] < 2 * SHARE * total + OVERHEAD
        killed = server.http.get("/healthz").json()["models"][0]["engine_pid"]
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: server.http.get("/healthz").json()["status"] == "degraded")
        assert answers(server, "second")
        wait_for(lambda: answers(server, "first"), timeout=120)
        assert all(abs(now - then) < 2**28 for now, then in zip(kv_bytes(server), before, strict=True))
