"""Adapters behind the server: named by `model`, listed, counted, loaded and unloaded while it serves."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from http_server import Server, running, samples, wait_for

from mini_infer.assets.adapters import random_adapter, write_adapter
from mini_infer.cli.serve import parse
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError, RequestError
from mini_infer.core.model_config import ModelConfig
from mini_infer.serving.api.adapters import LoadAdapter, load
from mini_infer.serving.api.errors import ApiError
from mini_infer.serving.api.gateway import Gateway
from mini_infer.serving.api.service import Service
from mini_infer.serving.link.wire import ChangeAdapter
from mini_infer.serving.processes.async_engine import AsyncEngine
from mini_infer.serving.settings import ModelSettings, ServerSettings

MODEL = "tiny-draft"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("adapters")
    made = [random_adapter(ModelConfig(path=MODEL), rank=4, seed=seed, scale=0.7) for seed in range(2)]
    return [write_adapter(root / str(i), tensors, rank=4, alpha=4) for i, tensors in enumerate(made)]


@pytest.fixture(scope="module")
def server(folders: list[str]) -> Iterator[Server]:
    flags = ("--dry-run", "false", "--model", MODEL, "--model.device", "cpu", "--cache.num_blocks", "64")
    template = Path(folders[0]).parent / "template.jinja"
    text = "{{ mood }}{% for m in messages %}{{ m.content }}{{ 1 // (m.content | length) }}{% endfor %}"
    template.write_text(text)
    own = ("--lora.max_adapters", "2", "--lora", f"sql={folders[0]}", "--lora-loading")
    with running(*flags, *own, "--chat-template", str(template)) as server:
        yield server
        assert server.stop() == 0


def answer(server: Server, model: str, path: str = "/v1/completions", **body: Any) -> tuple[str, str]:
    """(what the answer says who made it, its text)"""
    response = server.post(path, model=model, max_tokens=8, temperature=0, **body)
    assert response.status_code == 200, response.text
    told = response.json()
    return told["model"], told["choices"][0]["text"]


def change(server: Server, what: str, **body: str) -> httpx.Response:
    return server.post(f"/v1/{what}_lora_adapter", **body)


def counted(server: Server, name: str) -> dict[str, float]:
    found = samples(server.http.get("/metrics").text, f"{name}_total")
    return {sample.labels["adapter"]: sample.value for sample in found}


def test_a_requests_model_chooses_an_adapter(server: Server) -> None:
    plain = answer(server, MODEL, prompt="def f(")
    own = answer(server, "sql", prompt="def f(")
    assert plain[0] == MODEL
    assert own[0] == "sql"
    assert own[1] != plain[1]
    models = server.http.get("/v1/models").json()["data"]
    assert [(model["id"], model["parent"]) for model in models] == [(MODEL, None), ("sql", MODEL)]
    assert server.http.get("/v1/models/sql").json()["parent"] == MODEL
    wait_for(lambda: counted(server, "adapter_requests").get("sql") == 1)
    assert counted(server, "adapter_generation_tokens") == {"sql": 8}


def test_a_template_of_the_servers_own_whose_failure_is_logged(server: Server) -> None:
    def asked(content: str, **more: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return server.post("/v1/chat/completions", messages=messages, max_tokens=1, **more)

    plain, moody = asked("x"), asked("x", chat_template_kwargs={"mood": "0123456789"})
    assert moody.json()["usage"]["prompt_tokens"] > plain.json()["usage"]["prompt_tokens"] + 2
    assert asked("").status_code == 500
    wait_for(lambda: "ZeroDivisionError: " in "".join(server.log))
    assert "500 internal: the server failed at this request" in "".join(server.log)


def test_adapters_come_and_go(server: Server, folders: list[str]) -> None:
    assert server.post("/v1/completions", model="new", prompt="x").status_code == 404
    assert change(server, "load", lora_name="new", lora_path=folders[1]).status_code == 200
    new, old = answer(server, "new", prompt="def f("), answer(server, "sql", prompt="def f(")
    assert new[1] != old[1]
    assert change(server, "unload", lora_name="new").status_code == 200
    refused = server.post("/v1/completions", model="new", prompt="x")
    assert refused.status_code == 404
    assert "this server has 'tiny-draft' or 'mini-infer' or 'sql'" in refused.json()["error"]["message"]
    assert answer(server, "sql", prompt="def f(") == old


@pytest.mark.parametrize(
    ("what", "body", "status", "message"),
    [
        ("load", {"lora_name": "a", "lora_path": "/no/such/folder"}, 400, "there is no such folder"),
        ("load", {"lora_name": "a", "lora_path": "~no-such-user/folder"}, 400, "cannot be read"),
        ("load", {"lora_name": "a", "lora_path": "/" + "a" * 300}, 400, "cannot be read"),
        ("load", {"lora_name": "a", "lora_path": "/" + "a" * 5000}, 400, "lora_path"),
        ("load", {"lora_name": MODEL, "lora_path": "/x"}, 400, "is the name of a model"),
        ("load", {"lora_name": "a b", "lora_path": "/x"}, 400, "lora_name"),
        ("load", {"lora_name": "a"}, 400, "lora_path"),
        ("unload", {"lora_name": "a"}, 404, "there is no adapter 'a'"),
    ],
)
def test_what_cannot_be_is_an_error_that_costs_nobody(
    what: str, body: dict[str, str], status: int, message: str, server: Server
) -> None:
    refused = change(server, what, **body)
    assert refused.status_code == status
    assert message in refused.text
    server.check_unharmed()


def test_a_rank_beyond_the_engines_says_which_setting(server: Server, tmp_path: Path) -> None:
    tensors = random_adapter(ModelConfig(path=MODEL), rank=32, seed=0, targets="o_proj")
    folder = write_adapter(tmp_path / "a", tensors, rank=32, alpha=4)
    refused = change(server, "load", lora_name="a", lora_path=folder)
    assert refused.status_code == 400
    assert "has rank 32, and lora.max_rank=16: raise that to 32" in refused.text


def test_requests_load_nothing_unless_the_server_is_told_to() -> None:
    with running() as server:
        refused = change(server, "load", lora_name="a", lora_path="/x")
        assert refused.status_code == 403
        assert "--lora-loading" in refused.json()["error"]["message"]


def test_a_replica_that_was_started_again_is_asked_for_no_adapter_that_it_lacks(
    folders: list[str], tmp_path: Path
) -> None:
    """And whoever has them loaded is held to the limits of his key."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("usual: {key: usual}\nonce: {key: once, requests_per_minute: 1}")
    flags = ("--parallel.replicas", "2", "--lora.max_adapters", "1", "--lora-loading", "--api-keys", str(keys))
    with running(*flags) as server:
        server.http.headers["authorization"] = "Bearer once"
        assert change(server, "load", lora_name="other", lora_path="/no/such/folder").status_code == 400
        refused = change(server, "load", lora_name="new", lora_path=folders[0])
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        server.http.headers["authorization"] = "Bearer usual"

        def replicas() -> list[dict[str, Any]]:
            return server.http.get("/healthz").json()["replicas"]

        assert change(server, "load", lora_name="new", lora_path=folders[0]).status_code == 200
        killed = replicas()[0]["engine_pid"]
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: replicas()[0]["engine_pid"] != killed and replicas()[0]["status"] == "ok", timeout=30)
        assert {answer(server, "new", prompt="x")[0] for _ in range(6)} == {"new"}
        assert server.http.get("/v1/models/new").json()["id"] == "new"
        assert change(server, "unload", lora_name="new").status_code == 200, "one of them has none"
        assert server.http.get("/v1/models/new").status_code == 404


class Told:
    """A replica that refuses a folder's adapters."""

    def __init__(self, refused: str, **adapters: str) -> None:
        self.number, self.failure, self.refused = 0, None, refused
        self.stats = SimpleNamespace(adapters=adapters)

    async def change_adapter(self, asked: ChangeAdapter) -> str | None:
        for _ in range(random.randrange(4)):  # its answer takes its time
            await asyncio.sleep(0)
        had: str | None = self.stats.adapters.pop(asked.name, None)
        if asked.path == self.refused:
            self.stats.adapters |= {} if had is None else {asked.name: had}
            raise RequestError("no", "lora_path")
        if asked.path is not None:
            self.stats.adapters[asked.name] = asked.path
        return had


def test_what_one_replica_refuses_none_has() -> None:
    engine = AsyncEngine.__new__(AsyncEngine)
    replicas = [Told("", b="/old"), Told(""), Told("/bad", b="/old")]
    engine.replicas, engine._num_submitted = replicas, 0  # type: ignore[assignment]
    before = [dict(each.stats.adapters) for each in replicas]
    for name in ("a", "b"):
        with pytest.raises(RequestError):
            asyncio.run(engine.change_adapter(name, "/bad"))
        assert [each.stats.adapters for each in replicas] == before
    asyncio.run(engine.change_adapter("b", None))
    assert not any(each.stats.adapters for each in replicas)


def test_a_request_waits_for_a_full_replica_and_goes_to_none_that_lacks_its_adapter() -> None:
    """The one that has it has refused it, being full; the other has been started again."""
    engine = AsyncEngine.__new__(AsyncEngine)
    replicas = [Told(""), Told("", new="/new")]
    for number, replica in enumerate(replicas):
        replica.number, replica.takes_requests = number, True  # type: ignore[attr-defined]
    engine.replicas, engine._num_prefill = replicas, 0  # type: ignore[assignment]
    asked = SimpleNamespace(add=SimpleNamespace(adapter="new"), refused_by={1})
    assert not engine._place(asked)  # type: ignore[arg-type]


def test_of_several_who_change_an_adapter_at_once_each_replica_hears_the_same_one_last() -> None:
    gateway = Gateway(ServerSettings(lora_loading=True, models=(model("m"),)))
    replicas, engine = (
        [Told("/bad") if number == 2 else Told("") for number in range(3)],
        AsyncEngine.__new__(AsyncEngine),
    )
    engine.replicas, engine._num_submitted = replicas, 0  # type: ignore[assignment]
    gateway.models[0].service = SimpleNamespace(engine=engine, adapters={})  # type: ignore[assignment]
    gateway.callers = SimpleNamespace(take=lambda *counted: lambda *ended: None)  # type: ignore[assignment]
    paths = ["/1", "/2", "/bad", "/3"]

    async def change() -> None:
        for _ in range(50):
            random.shuffle(paths)
            bodies = [LoadAdapter(lora_name="a", lora_path=path) for path in paths]
            done = await asyncio.gather(*(load(gateway, body) for body in bodies), return_exceptions=True)
            refused = [path for path, each in zip(paths, done, strict=True) if isinstance(each, Exception)]
            assert refused == ["/bad"]
            assert len({each.stats.adapters["a"] for each in replicas}) == 1

    asyncio.run(change())


def test_no_two_api_processes_change_adapters_at_once() -> None:
    with tempfile.TemporaryFile() as shared:
        gateway = Gateway(ServerSettings(models=(model("m"),)), shared.fileno())
        other = (
            "import sys; from mini_infer.serving.keys import ADAPTERS, locked\n"
            f"print(locked({shared.fileno()}, ADAPTERS), flush=True); sys.stdin.read()"
        )
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        holder = subprocess.Popen([sys.executable, "-c", other], pass_fds=[shared.fileno()], text=True, **pipes)  # type: ignore[call-overload]
        assert holder.stdout.readline() == "True\n"
        entered: list[float] = []

        async def enter() -> None:
            async with gateway.changing_adapters():
                entered.append(time.monotonic())

        async def change() -> float:
            ours = asyncio.create_task(enter())
            await asyncio.sleep(0.1)
            assert not entered
            holder.stdin.close()
            left = time.monotonic()
            await asyncio.wait_for(ours, 10)
            await enter()
            return left

        left = asyncio.run(change())
        holder.wait()
        holder.stdout.close()
        assert left < entered[0] < entered[1]


# --- without engines --------------------------------------------------------------------------------------------------


def model(name: str, **adapters: str) -> ModelSettings:
    lora = {"max_adapters": len(adapters), "adapters": adapters}
    return ModelSettings(served_model_name=name, engine=EngineConfig.from_dict({"lora": lora}))


def test_adapters_of_a_model_that_is_being_loaded_are_known() -> None:
    gateway = Gateway(ServerSettings(models=(model("a", sql="/sql"), model("b", chat="/chat"))))
    found = gateway.find("chat")
    assert found.name == "b"
    with pytest.raises(ApiError, match="the model 'b' is being loaded") as refusal:
        found.require()
    assert (refusal.value.status, refusal.value.code) == (503, "model_loading")


def test_names_of_adapters_are_nobody_elses() -> None:
    for other in (model("sql"), model("b", sql="/other"), model("a", a="/x")):
        with pytest.raises(ConfigError, match=r"the adapter '(sql|a)' has the name of"):
            ServerSettings(models=(model("c", sql="/sql"), other))
    settings = ServerSettings(lora_loading=True, models=(model("a", sql="/sql"), model("b")))
    with pytest.raises(ApiError, match="'sql' is an adapter of the model 'a'"):
        asyncio.run(load(Gateway(settings), LoadAdapter(lora_name="sql", lora_path="/x", model="b")))


def test_a_request_whose_adapter_was_unloaded_meanwhile_is_not_the_models() -> None:
    service = Service.__new__(Service)
    service._gateway = Gateway(ServerSettings(models=(model("a"),)))
    assert [service.adapter(name) for name in (None, "a", "unloaded")] == [None, None, "unloaded"]


def test_flags_make_settings() -> None:
    lora = parse(["tiny-draft", "--lora", "a=/x", "--lora", "b=/y=z"], {}).models[0].engine.lora
    assert (lora.max_adapters, lora.adapters) == (2, {"a": "/x", "b": "/y=z"})
    theirs = [
        "tiny-draft",
        "--enable-lora",
        "--lora-modules",
        "a=/x",
        "b=/y",
        "--max-loras",
        "1",
        "--max-lora-rank",
        "64",
    ]
    lora = parse(theirs, {}).models[0].engine.lora
    assert (lora.max_adapters, lora.max_rank, lora.adapters) == (1, 64, {"a": "/x", "b": "/y"})
    with pytest.raises(ConfigError, match="--lora takes NAME=PATH"):
        parse(["tiny-draft", "--lora", "a"], {})
