"""Several engines behind one server: who gets a request, and what becomes of it when an engine dies or is restarted."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from http_server import Server, http_client, refusal, running, samples, wait_for
from served import PROMPT, SHORT, TIMEOUT_S, dry_config, idle, whole

from mini_infer import EngineConfig, LLMEngine
from mini_infer.core.errors import ConfigError
from mini_infer.serving.link.wire import Add, FrameReader, FrameWriter, Ready, command_decoder
from mini_infer.serving.processes.async_engine import MOST_RERUNS, AsyncEngine, EngineDead
from mini_infer.serving.processes.gpus import environments
from mini_infer.serving.processes.launch import PREFIX

TEXT = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 8000, "ignore_eos": True}
SLOW = ("--parallel.replicas", "2", "--model.dry.step_ms", "10", "--model.dry.max_model_len", "20000")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Two replicas, each of which runs two requests at once, and two API processes. Prompts take time."""
    flags = (*SLOW, "--api-processes", "2", "--scheduler.max_num_seqs", "2", "--max-queued", "4")
    chunks = ("--model.dry.prefill_token_us", "200", "--scheduler.max_num_batched_tokens", "512")
    with running(*flags, *chunks) as server:
        yield server
        processes = psutil.Process(server.process.pid).children(recursive=True)
        assert len(processes) == 4
        assert server.stop() == 0
        assert not psutil.wait_procs(processes, timeout=3)[1]
        assert "Traceback" not in "".join(server.log)


@pytest.fixture(autouse=True)
def _all_serve_before_and_after(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        shared = request.getfixturevalue("server")
        wait_until_whole(shared)
        shared.check_unharmed()


def health(server: Server) -> dict[str, Any]:
    with http_client(server.url) as client:
        return client.get("/healthz").json()


def pids(server: Server) -> list[int]:
    return [replica["engine_pid"] for replica in health(server)["replicas"]]


def wait_until_whole(server: Server, unlike: list[int] | None = None) -> None:
    """All replicas serve, as every API process sees it, and none is one of these processes."""

    def is_whole() -> bool:
        seen = [health(server) for _ in range(4)]
        found = {replica["engine_pid"] for each in seen for replica in each["replicas"]}
        return all(each["status"] == "ok" for each in seen) and not found & set(unlike or [])

    wait_for(is_whole, timeout=30)


def by_replica(server: Server, name: str) -> dict[str, float]:
    """A gauge's or a counter's samples."""
    with http_client(server.url) as client:
        found = samples(client.get("/metrics").text, name)
    return {sample.labels["replica"]: sample.value for sample in found}


def stream(server: Server, stack: ExitStack, **body: Any) -> Iterator[str]:
    """The lines of a stream that has begun."""
    client = stack.enter_context(http_client(server.url))
    response = stack.enter_context(client.stream("POST", TEXT, json={**LONG, "stream": True, **body}))
    assert response.status_code == 200, response.read()
    lines = (line for line in response.iter_lines() if line)
    next(lines)
    return lines


def fill(server: Server, stack: ExitStack, **body: Any) -> list[Iterator[str]]:
    """Four streams, two on each replica. One API process knows of another's when the engines have told it."""
    held = []
    for count in range(1, 5):
        held.append(stream(server, stack, **body))
        when_running(server, count)
    assert when_running(server, 4) == {"0": 2, "1": 2}
    return held


def when_running(server: Server, count: int) -> dict[str, float]:
    wait_for(lambda: sum(by_replica(server, "num_requests_running").values()) == count)
    return by_replica(server, "num_requests_running")


def ask(server: Server, threads: ThreadPoolExecutor, **body: Any) -> Future[httpx.Response]:
    return threads.submit(lambda: httpx.post(server.url + TEXT, json={**LONG, **body}, timeout=60, verify=False))


# --- where requests go --------------------------------------------------------------------------------------------


def test_every_replica_serves_and_says_so(server: Server) -> None:
    with ExitStack() as stack:
        held = fill(server, stack)
        assert by_replica(server, "replica_up") == {"0": 1, "1": 1}
        for lines in held:
            next(lines)
    wait_for(lambda: by_replica(server, "num_requests_running") == {"0": 0, "1": 0})  # they are gone: aborted


def test_a_conversation_stays_with_the_replica_that_knows_it(server: Server) -> None:
    before = by_replica(server, "prefix_cache_hits_total")
    said = "".join(f"{number} " for number in range(150))
    for _ in range(4):
        answer = server.complete(said, max_tokens=8, ignore_eos=True)
        said += answer["choices"][0]["text"] + " and more of what is said"
    after = by_replica(server, "prefix_cache_hits_total")
    gained = sorted(after[number] - before[number] for number in after)
    assert gained[0] == 0
    assert gained[1] >= 3 * 512


def test_the_queue_has_one_end_for_all_replicas(server: Server) -> None:
    with ExitStack() as stack:
        held = fill(server, stack)
        threads = stack.enter_context(ThreadPoolExecutor(8))
        waiting = [ask(server, threads, timeout=2, prompt=f"{number}") for number in range(4)]
        wait_for(lambda: by_replica(server, "num_requests_waiting") == {"0": 2, "1": 2})
        for _ in range(3):  # whoever it is sent to first
            refused = server.post(TEXT, **LONG)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert int(refused.headers["retry-after"]) >= 1
        assert [each.result().status_code for each in waiting] == [504] * 4
        assert held


def test_a_full_replica_passes_on_what_another_can_take() -> None:
    """Both API processes send a prompt to whoever holds it, until that one has no place left."""
    flags = ("--scheduler.max_num_seqs", "1", "--max-queued", "2", "--api-processes", "2")
    with running(*SLOW, *flags) as server, ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(8))
        prompt = "the same beginning " * 20
        answers = [ask(server, threads, prompt=prompt, max_tokens=100) for _ in range(4)]
        assert [answer.result().status_code for answer in answers] == [200] * 4
        assert min(by_replica(server, "generation_tokens_total").values()) >= 100


# --- an engine dies -----------------------------------------------------------------------------------------------


def test_an_engine_that_is_killed_costs_only_the_streams_that_it_had(server: Server) -> None:
    with ExitStack() as stack:
        lost = stream(server, stack)
        (victim,) = (number for number, busy in when_running(server, 1).items() if busy)
        kept = stream(server, stack)
        old = pids(server)
        os.kill(old[int(victim)], signal.SIGKILL)
        last = list(lost)[-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "engine_dead"
        assert error["message"].startswith(f"replica {victim}: the engine process")
        next(kept)
        answer = server.post(TEXT, prompt="hello", max_tokens=2)  # there is always one that serves
        assert answer.status_code == 200
        assert server.http.get("/readyz").status_code == 200
    wait_until_whole(server, unlike=[old[int(victim)]])
    assert pids(server)[1 - int(victim)] == old[1 - int(victim)], "the other has not been touched"


@pytest.mark.parametrize("phase", ["queued", "prefill", "not streamed"])
def test_what_has_not_begun_to_stream_is_run_again_elsewhere(server: Server, phase: str) -> None:
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(8))
        if phase == "queued":  # behind four that run
            held = fill(server, stack, max_tokens=300)
            asked = [ask(server, threads, stream=True, max_tokens=5, prompt=f"{n}") for n in range(2)]
            wait_for(lambda: sum(by_replica(server, "num_requests_waiting").values()) == 2)
            victim = int(max(by_replica(server, "num_requests_waiting").items(), key=lambda each: each[1])[0])
        else:
            prompt = {"prefill": "a" * 5000, "not streamed": "a"}[phase]  # a second of prefill
            asked = [ask(server, threads, stream=phase == "prefill", prompt=prompt, max_tokens=60)]
            busy = when_running(server, 1)
            victim = int(next(number for number, running in busy.items() if running))
        old = pids(server)
        os.kill(old[victim], signal.SIGKILL)
        for each in asked:
            response = each.result()
            assert response.status_code == 200
            assert "engine_dead" not in response.text
            if phase == "not streamed":
                assert response.json()["usage"]["completion_tokens"] == 60
            else:
                assert response.text.endswith("data: [DONE]\n\n")
        if phase == "queued":
            assert sum("engine_dead" in "".join(lines) for lines in held) == 2
    wait_until_whole(server, unlike=[old[victim]])


def test_while_all_are_down_requests_are_refused_and_then_served_again(server: Server) -> None:
    with ExitStack() as stack:
        lines = stream(server, stack)
        old = pids(server)
        for pid in old:
            os.kill(pid, signal.SIGSTOP)  # else the first is back before the second is gone
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        assert "engine_dead" in list(lines)[-1]
        for _ in range(3):
            response = server.post(TEXT, **{**LONG, "max_tokens": 2})
            assert response.status_code in (200, 503)
            if response.status_code == 503:
                assert response.json()["error"]["code"] == "engine_dead"
    wait_until_whole(server, unlike=old)


def test_an_engine_that_hangs_is_ended_and_replaced() -> None:
    with running(*SLOW, "--hang-timeout", "2") as server, ExitStack() as stack:
        lines = stream(server, stack)
        busy = when_running(server, 1)
        old = pids(server)
        victim = next(int(number) for number, running in busy.items() if running)
        os.kill(old[victim], signal.SIGSTOP)
        assert "engine_dead" in list(lines)[-1]
        wait_until_whole(server, unlike=[old[victim]])
        assert pids(server)[1 - victim] == old[1 - victim]
        assert server.stop() == 0
        assert f"replica {victim} has not said anything for 2 s, and is ended" in "".join(server.log)


def test_an_api_process_that_is_killed_frees_what_it_asked_of_all_replicas(server: Server) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(http_client(server.url))
        pid = client.get("/healthz").json()["api_pid"]
        lines = stream(server, stack)
        os.kill(pid, signal.SIGKILL)
        client.close()
        server.http.close()
        server.http = http_client(server.url)

        def others() -> set[int]:
            with suppress(httpx.TransportError):  # handed over to it in its last moment
                return {health(server)["api_pid"] for _ in range(6)} - {pid}
            return set()

        wait_for(lambda: len(others()) == 2, timeout=30)
        with suppress(httpx.RemoteProtocolError):  # it may have been that process's
            next(lines)
    server.wait_until_idle()


def test_a_request_that_kills_engine_after_engine_is_given_up(tmp_path: Path) -> None:
    """Stand-ins for engines, which end whenever they are asked anything."""
    asked = 0
    ready = Ready("dry", 4096, 512, dry_config().to_dict(), {}, 1)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        writer.write(FrameWriter().frame(ready))
        frames = FrameReader()
        while data := await reader.read(2**16):
            commands = [command_decoder.decode(frame) for frame in frames.feed(data)]
            asked += sum(isinstance(command, Add) for command in commands)
            if asked:
                break
        writer.close()

    async def main() -> None:
        paths = [str(tmp_path / f"{number}") for number in range(5)]
        servers = [await asyncio.start_unix_server(serve, path) for path in paths]
        engine = await AsyncEngine.connect(*paths)
        with pytest.raises(EngineDead, match=r"replica \d: the engine process has closed the connection"):
            await whole(engine.submit(PROMPT, SHORT))
        assert asked == 1 + MOST_RERUNS
        await idle(engine)
        await engine.close()
        for each in servers:
            each.close()

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))


def test_a_supervisor_that_is_killed_leaves_nobody() -> None:
    with running(*SLOW) as server, ExitStack() as stack:
        stream(server, stack)
        processes = psutil.Process(server.process.pid).children(recursive=True)
        assert len(processes) == 3
        (folder,) = {Path(c.laddr).parent for p in processes for c in p.net_connections("unix") if PREFIX in c.laddr}
        server.process.kill()
        assert not psutil.wait_procs(processes, timeout=10)[1]
        assert not folder.exists()


# --- rolling restart ----------------------------------------------------------------------------------------------


def test_a_rolling_restart_loses_nothing(server: Server) -> None:
    old = pids(server)
    with ThreadPoolExecutor(3) as threads:

        def go_on() -> list[str]:
            said = []
            while time.monotonic() < until[0]:
                with http_client(server.url) as client:
                    response = client.post(TEXT, json={**LONG, "max_tokens": 4, "stream": True})
                said.append(response.text[-30:] if response.status_code == 200 else response.text)
            return said

        until = [time.monotonic() + 60]
        clients = [threads.submit(go_on) for _ in range(3)]
        server.process.send_signal(signal.SIGHUP)
        server.process.send_signal(signal.SIGHUP)  # it is under way already
        try:
            wait_until_whole(server, unlike=old)
        finally:
            until[0] = 0
        said = [each for client in clients for each in client.result()]
    assert len(said) > 10
    assert {each[-6:] for each in said} == {"ONE]\n\n"}, [each for each in said if not each.endswith("ONE]\n\n")]


def test_a_replica_drains_for_as_long_as_it_may_and_what_takes_longer_is_told_so() -> None:
    with running(*SLOW, "--shutdown-timeout", "2") as server, ExitStack() as stack:
        lines = stream(server, stack)
        victim = next(int(number) for number, busy in when_running(server, 1).items() if busy)
        old = pids(server)
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: health(server)["replicas"][victim]["status"] != "ok")
        seen = health(server)
        assert (seen["status"], seen["replicas"][1 - victim]["status"]) == ("ok", "ok")
        expected = {"replica": victim, "engine_pid": old[victim], "status": "draining", "reason": None}
        assert seen["replicas"][victim] == expected
        assert server.complete(max_tokens=2)["usage"]["completion_tokens"] == 2  # the other one's
        assert "it was restarted, and the request did not finish within the time left to it" in list(lines)[-1]
        wait_until_whole(server, unlike=old)
        assert server.stop() == 0
        assert "Traceback" not in "".join(server.log)


def test_where_a_replica_does_not_come_back_the_rest_stay_as_they_are(tmp_path: Path) -> None:
    """Until it does: then it is their turn."""
    folder = tmp_path / "prefixes"
    tier = ("--cache.disk_prefix_path", str(folder), "--cache.host_prefix_gib", "0.001")
    with running(*SLOW, *tier) as server:
        old = pids(server)
        shutil.rmtree(folder)
        folder.touch()
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "".join(server.log).count("replica 0: it could not be started again") == 2, timeout=30)
        seen = health(server)
        assert (seen["status"], [each["status"] for each in seen["replicas"]]) == ("degraded", ["down", "ok"])
        assert seen["replicas"][1]["engine_pid"] == old[1]
        assert server.complete(max_tokens=2)["usage"]["completion_tokens"] == 2
        folder.unlink()
        wait_until_whole(server, unlike=old)
        assert server.stop() == 0


# --- starting -----------------------------------------------------------------------------------------------------


def test_settings_that_the_engines_refuse_are_one_message() -> None:
    code, said = refusal("--dry-run", "--parallel.replicas", "2", "--model.max_model_len", "9999999")
    assert code == 2
    assert said.startswith("mini-infer-serve: error: model.max_model_len=9999999 is beyond")
    assert said.count("\n") == 1


def test_one_engine_alone_takes_no_replicas() -> None:
    with pytest.raises(ConfigError, match="replicas are engines behind mini-infer-serve"):
        LLMEngine(EngineConfig.from_dict({"model": {"load_format": "dry"}, "parallel": {"replicas": 2}}))
    with pytest.raises(ConfigError, match=r"parallel\.replicas"):
        EngineConfig.from_dict({"parallel": {"replicas": 0}})


@pytest.mark.parametrize(
    ("visible", "device", "load_format", "expected"),
    [
        (None, "cuda", "auto", ["0", "1"]),
        ("3, GPU-5,7", "auto", "auto", ["3", "GPU-5"]),
        (None, "cpu", "auto", [None, None]),
        ("0", "auto", "dry", ["0", "0"]),
    ],
)
def test_each_replica_sees_its_own_gpu(
    visible: str | None, device: str, load_format: str, expected: list[str | None]
) -> None:
    config = EngineConfig.from_dict(
        {"model": {"device": device, "load_format": load_format}, "parallel": {"replicas": 2}}
    )
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = environments(config, environment, lambda _: 2 if visible is None else len(visible.split(",")))
    assert [each.get("CUDA_VISIBLE_DEVICES") for each in found] == expected


def test_too_few_gpus_are_one_message() -> None:
    config = EngineConfig.from_dict({"model": {"device": "cuda"}, "parallel": {"replicas": 4}})
    with pytest.raises(ConfigError, match=r"replicas=4 with parallel\.tensor=1 needs 4 GPUs, and 3 are visible here"):
        environments(config, {}, lambda _: 3)
    pairs = EngineConfig.from_dict({"model": {"device": "cuda"}, "parallel": {"replicas": 2, "tensor": 2}})
    assert [found["CUDA_VISIBLE_DEVICES"] for found in environments(pairs, {}, lambda _: 5)] == ["0,1", "2,3"]
    with pytest.raises(ConfigError, match="needs 4 GPUs, and 3 are visible here"):
        environments(pairs, {}, lambda _: 3)
    on_a_cpu = EngineConfig.from_dict({"parallel": {"replicas": 4}})
    assert environments(on_a_cpu, {"A": "b"}, lambda _: 0) == [{"A": "b"}] * 4


# --- many ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replicas", "streams", "step_ms"), [(3, 90, 100), pytest.param(8, 2000, 1500, marks=pytest.mark.soak)]
)
def test_many_streams_at_once(replicas: int, streams: int, step_ms: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, streams + 500)), hard))
    tokens = 15
    flags = ("--parallel.replicas", str(replicas), "--model.dry.step_ms", str(step_ms), "--log-level", "warning")
    body = json.dumps({"prompt": "hello", "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    message = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body

    async def client(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(message)
        try:
            return await reader.read(-1)
        finally:
            writer.close()

    async def load(server: Server) -> list[bytes]:
        return await asyncio.gather(*(client(server.port) for _ in range(streams)))

    with running(*flags) as server, ThreadPoolExecutor(1) as thread:
        answers = thread.submit(asyncio.run, load(server))
        wait_for(lambda: sum(by_replica(server, "num_requests_running").values()) == streams, timeout=60)
        each = by_replica(server, "num_requests_running").values()
        assert max(each) - min(each) <= 2, "equal prompts of less than a chunk are dealt evenly"
        assert all(answer.count(b"data: ") >= 3 and answer.rstrip().endswith(b"0") for answer in answers.result(120))
        assert all(b"[DONE]" in answer and b'"error"' not in answer for answer in answers.result())
        assert by_replica(server, "generation_tokens_total") != {}
        assert sum(by_replica(server, "generation_tokens_total").values()) == streams * tokens
