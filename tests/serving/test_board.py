"""The dashboard's expressions over a Prometheus that scrapes a server of several API processes as ops/prometheus.yml
says: `pytest -m clients`, with Debian's `prometheus` installed."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from http_server import ROOT, Server, http_client, running, wait_for

PANELS = json.loads((ROOT / "ops/grafana/dashboards/mini-infer.json").read_text())["panels"]
# Requests wait, and KV memory runs out.
FLAGS = (
    "--api-processes",
    "2",
    "--scheduler.max_num_seqs",
    "4",
    "--model.dry.step_ms",
    "5",
    "--cache.num_blocks",
    "60",
)

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus"),
]


@contextmanager
def scraping(server: Server, folder: Path) -> Iterator[httpx.Client]:
    """Every second; else as operators are told to."""
    config = yaml.safe_load((ROOT / "ops/prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{server.port}"]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = (f"--web.listen-address={address}", "--config.file=prometheus.yml", "--storage.tsdb.path=data")
    with open(folder / "log", "w") as log, http_client(f"http://{address}") as client:
        process = subprocess.Popen(["prometheus", *options], cwd=folder, stdout=log, stderr=log)
        try:
            yield client
        finally:
            process.terminate()
            process.wait(20)


def asked(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
    """The values, as Grafana would get them for all models."""
    query = expression.replace("$model", ".*").replace("$__rate_interval", "6s")
    try:
        return client.get("/api/v1/query", params={"query": query}).raise_for_status().json()["data"]["result"]
    except httpx.TransportError:  # it is starting
        return []


def load(server: Server) -> None:
    """Some of every kind, from connections of their own: to both API processes."""

    def ask(number: int) -> None:
        with http_client(server.url) as client:
            prompt = "the same beginning " * 8 + str(number % 3)
            client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 5 + number % 300, "ignore_eos": True})
            client.post("/v1/completions", json={"prompt": "x", "max_tokens": 0})

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(ask, range(0, 600, 13)))


def test_every_panel_has_data_with_several_api_processes(tmp_path: Path) -> None:
    with running(*FLAGS) as server, scraping(server, tmp_path) as prometheus:
        load(server)
        missing = {target["expr"] for panel in PANELS for target in panel["targets"]}

        def all_have_data() -> bool:
            load(server)
            for expression in list(missing):
                if any(float(each["value"][1]) == float(each["value"][1]) for each in asked(prometheus, expression)):
                    missing.remove(expression)
            return not missing

        try:
            wait_for(all_have_data, timeout=60)
        except AssertionError:
            raise AssertionError(f"no data: {missing}") from None
        (steps,) = asked(prometheus, "sum(rate(mini_infer:engine_steps_total[6s]))")
        assert 0 < float(steps["value"][1]) < 400, "both processes tell the same engine's, which counts once"
        told = {
            each["metric"]["status"] for each in asked(prometheus, "sum by (status) (mini_infer:http_responses_total)")
        }
        assert {"200", "400"} <= told
