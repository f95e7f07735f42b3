"""Several models behind one server: each with engines, names and limits of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from http_server import Server, http_client, running, samples, wait_for

TEXT = "/v1/completions"
DRY_MODELS = """
dry_run: true
model.dry: {step_ms: 10, max_model_len: 20000}
api_processes: 2
models:
  first:
    aliases: [gpt, gpt-4]
    max_queued: 1
    scheduler.max_num_seqs: 1
    model.dry.max_model_len: 10000
  second: {parallel.replicas: 2}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("config") / "models.yaml"
    path.write_text(DRY_MODELS)
    with running("--config", str(path)) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in "".join(server.log)


def health(server: Server) -> dict[str, Any]:
    with http_client(server.url) as client:
        return client.get("/healthz").json()


def about(server: Server, name: str) -> dict[str, Any]:
    return next(model for model in health(server)["models"] if model["model"] == name)


def pids(server: Server, name: str) -> list[int]:
    return [replica["engine_pid"] for replica in about(server, name)["replicas"]]


def ask(server: Server, model: str | None, **body: Any) -> httpx.Response:
    """Over a connection of its own: either API process may answer."""
    with http_client(server.url) as client:
        return client.post(TEXT, json={"model": model, "prompt": "hello", "max_tokens": 2, **body})


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    return response.json()["error"]


def counted(server: Server, name: str, **labels: str) -> float:
    """The samples with these labels, added up."""
    found = samples(server.http.get("/metrics").text, name)
    return sum(sample.value for sample in found if labels.items() <= sample.labels.items())


def wait_until_whole(server: Server) -> None:
    wait_for(lambda: all(health(server)["status"] == "ok" for _ in range(4)), timeout=30)


# --- which model --------------------------------------------------------------------------------------------------


def test_a_request_names_its_model(server: Server) -> None:
    for name, told in (("first", "first"), ("gpt-4", "first"), ("second", "second")):
        assert ask(server, name).json()["model"] == told
    listed = server.http.get("/v1/models").json()["data"]
    assert [(card["id"], card["max_model_len"]) for card in listed] == [("first", 10000), ("second", 20000)]
    assert server.http.get("/v1/models/gpt").json()["id"] == "first"
    assert server.post("/tokenize", model="second", prompt="abc").json()["max_model_len"] == 20000


def test_other_names_are_refused_with_those_that_there_are(server: Server) -> None:
    unknown = error(ask(server, "secnd"), 404)
    assert unknown["code"] == "model_not_found"
    assert "did you mean 'second'?" in unknown["message"]
    for name in ("first", "gpt", "gpt-4", "second"):
        assert repr(name) in unknown["message"]
    assert "dry" not in unknown["message"], "both models' own name, so nobody's"
    assert "model is missing" in error(ask(server, None), 400)["message"]
    assert error(server.http.get("/v1/models/third"), 404)["code"] == "model_not_found"


def test_metrics_carry_the_models_name(server: Server) -> None:
    ask(server, "second", prompt="x", max_tokens=5, ignore_eos=True)
    error(ask(server, "first", max_tokens=-1), 400)

    wait_for(lambda: counted(server, "generation_tokens_total", model_name="second") >= 5)
    wait_for(lambda: counted(server, "http_responses_total", model_name="second", path=TEXT, status="200") >= 1)
    wait_for(lambda: counted(server, "http_responses_total", model_name="", path="/metrics") >= 1)
    assert counted(server, "replica_up", model_name="first") == 1
    assert counted(server, "replica_up", model_name="second") == 2


# --- limits and losses are a model's own --------------------------------------------------------------------------


def test_a_full_model_leaves_the_other_one_alone(server: Server) -> None:
    endless = {"model": "first", "prompt": "hello", "max_tokens": 9000, "ignore_eos": True, "stream": True}
    with ThreadPoolExecutor(1) as threads:
        with http_client(server.url) as client, client.stream("POST", TEXT, json=endless) as response:
            lines = response.iter_lines()  # held: the response is closed with it
            next(lines)
            waiting = threads.submit(ask, server, "first")
            wait_for(lambda: counted(server, "num_requests_waiting", model_name="first") == 1)
            refused = ask(server, "first")
            assert error(refused, 429)["code"] == "queue_full"
            assert ask(server, "second").status_code == 200
            assert not waiting.done()
        assert waiting.result(10).status_code == 200
    wait_for(lambda: counted(server, "requests_refused_total", model_name="first", reason="queue_full") == 1)
    assert counted(server, "requests_refused_total", model_name="second") == 0


def test_a_killed_model_comes_back_and_the_other_one_serves_on(server: Server) -> None:
    (killed,) = pids(server, "first")
    body = {"model": "second", "prompt": "hello", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with http_client(server.url) as client, client.stream("POST", TEXT, json=body) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: about(server, "first")["status"] == "dead")
        down = error(ask(server, "first"), 503)
        assert down["code"] == "engine_dead"
        assert "model 'first'" in down["message"]
        state = health(server)
        assert (state["status"], about(server, "second")["status"]) == ("degraded", "ok")
        assert server.http.get("/readyz").status_code == 200
        assert ask(server, "second").status_code == 200
        assert list(lines)[-1] == "data: [DONE]"
    wait_until_whole(server)
    assert pids(server, "first") != [killed]
    assert ask(server, "first").status_code == 200


def test_an_api_process_begins_while_a_model_does_not_answer(server: Server) -> None:
    (engine,) = pids(server, "first")
    with ExitStack() as stack:  # connections that are open at one moment are dealt evenly
        clients = [stack.enter_context(http_client(server.url)) for _ in range(4)]
        before = {client.get("/healthz").json()["api_pid"] for client in clients}
    assert len(before) == 2
    os.kill(engine, signal.SIGSTOP)
    try:
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(pid) for pid in before if psutil.pid_exists(pid)], timeout=5)
        assert ask(server, "second").status_code == 200
        loading = error(ask(server, "first"), 503)
        assert loading["code"] == "model_loading"
        state = about(server, "first")
        assert (state["status"], state["max_model_len"]) == ("loading", None)
        assert [card["max_model_len"] for card in server.http.get("/v1/models").json()["data"]] == [None, 20000]
    finally:
        os.kill(engine, signal.SIGCONT)
    wait_until_whole(server)
    assert ask(server, "first").status_code == 200


# --- real ones ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_shipped_models_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text("""
model.threads: 1
models:
  big: {model: tiny-target, cache: {memory_gib: 0.02}}
  small: {model: tiny-draft, cache: {memory_gib: 0.01}}
""")
    with running("--dry-run", "false", "--config", str(path)) as server:
        answers = {
            name: ask(server, name, prompt="def main():\n", max_tokens=12, temperature=0).json()["choices"][0]["text"]
            for name in ("big", "small")
        }
        chat = server.post(
            "/v1/chat/completions", model="small", max_tokens=4, messages=[{"role": "user", "content": "hi"}]
        )
        assert chat.status_code == 200
        big, small = (about(server, name)["startup"] for name in ("big", "small"))
    assert "" not in answers.values()
    assert answers["big"] != answers["small"]
    assert big["weight_bytes"] > 4 * small["weight_bytes"]
    assert big["kv_bytes"] > small["kv_bytes"]
