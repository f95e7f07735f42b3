"""Several API processes behind one port."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import psutil
import pytest
from forking import forks
from http_server import DRY, Server, http_client, refusal, running, wait_for

from experiments.lab.load.subject import cpu_seconds

TEXT = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 8000, "ignore_eos": True}
SLOW = ("--api-processes", "2", "--model.dry.step_ms", "10", "--model.dry.max_model_len", "20000")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(*SLOW, "--scheduler.max_num_seqs", "2", "--max-queued", "2") as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in "".join(server.log)


def clients(server: Server, stack: ExitStack, count: int) -> list[httpx.Client]:
    """Each with a connection of its own."""
    return [stack.enter_context(http_client(server.url)) for _ in range(count)]


def api_pid(client: httpx.Client) -> int:
    return client.get("/healthz").json()["api_pid"]


def one_on_each(server: Server, stack: ExitStack) -> list[httpx.Client]:
    """A client on each of the two processes."""
    pair = clients(server, stack, 2)
    while api_pid(pair[0]) == api_pid(pair[1]):  # where an earlier connection has just ended
        pair[1] = clients(server, stack, 1)[0]
    return pair


def stream(client: httpx.Client, stack: ExitStack, **body: Any) -> Iterator[str]:
    """The lines of a stream that has begun."""
    response = stack.enter_context(client.stream("POST", TEXT, json={**LONG, "stream": True, **body}))
    assert response.status_code == 200, response.read()
    lines = (line for line in response.iter_lines() if line)
    next(lines)
    return lines


def test_connections_are_dealt_evenly(server: Server) -> None:
    with ExitStack() as stack:
        dealt = clients(server, stack, 12)
        pids = [api_pid(client) for client in dealt]
        counts = Counter(pids)
        assert sorted(counts.values()) in ([6, 6], [5, 7])  # an earlier connection may still be open
        assert server.http.get("/healthz").json()["api_processes"] == 2
        gone = pids[0]
        for client, pid in zip(dealt, pids, strict=True):
            if pid == gone:
                client.close()
        time.sleep(0.2)
        # Who has fewest open gets the next ones, though it has had its turn.
        assert {api_pid(client) for client in clients(server, stack, 4)} == {gone}


def test_any_process_answers_for_the_whole_engine(server: Server) -> None:
    with ExitStack() as stack:
        pair = one_on_each(server, stack)
        for client in (*pair, pair[1]):
            assert client.post(TEXT, json={**LONG, "max_tokens": 8}).status_code == 200

        def told(client: httpx.Client) -> list[str]:
            return [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]

        wait_for(lambda: told(pair[0]) == told(pair[1]))
        lines = told(pair[0])
        ended = [float(line.split()[-1]) for line in lines if line.startswith("mini_infer:request_success_total{")]
        (count,) = (float(x.split()[-1]) for x in lines if x.startswith("mini_infer:e2e_request_latency_seconds_count"))
        assert sum(ended) == count >= 3
        assert not any(line.startswith("process_") for line in lines), "these would be one process's"


def test_the_lab_counts_the_cpu_time_of_all(server: Server) -> None:
    with ExitStack() as stack:
        pair = one_on_each(server, stack)
        about = {"api_pid": server.process.pid, "engine_pids": [pair[0].get("/healthz").json()["engine_pid"]]}
        wait_for(lambda: all(cpu_seconds(about)) and all(client.get("/healthz").is_success for client in pair))
        known = [psutil.Process(pid).cpu_times() for pid in (server.process.pid, *map(api_pid, pair))]
        api_s, engine_s = cpu_seconds(about)
        least = sum(times.user + times.system for times in known)
        assert api_s > least - 1e-6 > 0  # ticks of 10 ms, added up in another order
        engine = psutil.Process(about["engine_pids"][0]).cpu_times()
        assert 0 < engine_s <= engine.user + engine.system
    assert cpu_seconds({"api_pid": 2**22 + 1, "engine_pids": [1]}) == (0.0, 0.0)  # it has ended


def test_the_queue_has_one_end_for_all(server: Server) -> None:
    held = []  # a response is closed with its lines
    with ExitStack() as stack:
        for client in one_on_each(server, stack):
            held.append(stream(client, stack))
        threads = stack.enter_context(ThreadPoolExecutor())
        waiting = [
            threads.submit(client.post, TEXT, json={**LONG, "timeout": 2}) for client in one_on_each(server, stack)
        ]
        wait_for(lambda: server.metrics()["num_requests_waiting"] == 2)
        for client in one_on_each(server, stack):
            response = client.post(TEXT, json=LONG)
            assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
        assert [each.result().status_code for each in waiting] == [504, 504]
    server.wait_until_idle()


def test_processes_without_descriptors_close_silent_connections_and_answer(server: Server) -> None:
    with ExitStack() as stack:
        processes = [psutil.Process(api_pid(client)) for client in one_on_each(server, stack)]
        limits = [process.rlimit(psutil.RLIMIT_NOFILE) for process in processes]
        try:
            for process, (_, hard) in zip(processes, limits, strict=True):
                process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 2, hard))
            before = [process.cpu_times().user for process in processes]
            silent = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(40)]
            assert all(client.get("/readyz").status_code == 200 for client in clients(server, stack, 8))
            spent = [process.cpu_times().user - user for process, user in zip(processes, before, strict=True)]
        finally:
            for process, (soft, hard) in zip(processes, limits, strict=True):
                process.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
        assert max(spent) < 2
        assert select.select(silent, [], [], 10)[0], "none was closed"
    assert 1 <= sum("connections cannot be taken: " in line for line in server.log) <= 2, "once for each process"


def test_sigterm_lets_all_finish_and_a_process_that_dies_is_replaced() -> None:
    with running(*SLOW, "--shutdown-timeout", "2") as server, ExitStack() as stack:
        pair = one_on_each(server, stack)
        pids = [api_pid(client) for client in pair]
        lost, kept = stream(pair[0], stack), stream(pair[1], stack)
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lost)
        wait_for(lambda: server.metrics()["num_requests_running"] == 1)
        next(kept)

        def pids_now() -> set[int]:
            with ExitStack() as short:
                return {api_pid(client) for client in clients(server, short, 4)}

        wait_for(lambda: len(pids_now()) == 2 and pids[0] not in pids_now(), timeout=30)
        ending = [stream(client, stack, max_tokens=60) for client in one_on_each(server, stack)]
        processes = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGINT)
        for process in processes:  # a terminal's Ctrl-C reaches all of them
            process.send_signal(signal.SIGINT)
        assert [list(lines)[-1] for lines in ending] == ["data: [DONE]"] * 2
        assert "shutting_down" in list(kept)[-1]
        assert server.wait() == 0
        assert not psutil.wait_procs(processes, timeout=3)[1]
        log = "".join(server.log)
        assert "an API process was killed by SIGKILL: its streams are lost, and another takes its place" in log
        assert "Traceback" not in log


def test_a_client_waits_while_all_processes_are_replaced_and_one_fails_to_start() -> None:
    with running(*SLOW) as server:
        engine = server.http.get("/healthz").json()["engine_pid"]

        def processes() -> set[int]:
            return {child.pid for child in psutil.Process(server.process.pid).children()} - {engine}

        def ask() -> int:
            while True:
                # The one that is killed may have taken it in: the connection is reset, or closed.
                with contextlib.suppress(httpx.ReadError, httpx.RemoteProtocolError):
                    body = {**LONG, "max_tokens": 2}
                    return httpx.post(server.url + TEXT, json=body, timeout=60).status_code

        first = processes()
        os.kill(engine, signal.SIGSTOP)  # so that none serves too soon
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        with ThreadPoolExecutor(1) as thread:  # nobody else comes, who would wake the supervisor
            waiting = thread.submit(ask)
            wait_for(lambda: len(processes() - first) == 2)
            os.kill(min(processes() - first), signal.SIGKILL)
            os.kill(engine, signal.SIGCONT)
            assert waiting.result() == 200
        assert server.stop() == 0
        assert "an API process was killed by SIGKILL before it served, and another" in "".join(server.log)


def test_a_dead_engine() -> None:
    with running(*SLOW) as server, ExitStack() as stack:
        pair = one_on_each(server, stack)
        lines = [stream(client, stack) for client in pair]
        os.kill(server.http.get("/healthz").json()["engine_pid"], signal.SIGKILL)
        for each in lines:
            assert "engine_dead" in list(each)[-1]
        for client in one_on_each(server, stack):
            health = client.get("/healthz")
            assert (health.status_code, health.json()["status"]) == (503, "dead")
            assert client.post(TEXT, json=LONG).status_code == 503
        assert server.wait() == 1
        assert "the engine process was killed by SIGKILL" in "".join(server.log)


def test_a_supervisor_that_is_killed_leaves_nobody() -> None:
    with running(*SLOW) as server:
        processes = psutil.Process(server.process.pid).children(recursive=True)
        assert len(processes) == 3
        server.process.kill()
        assert not psutil.wait_procs(processes, timeout=10)[1]


def test_a_process_that_dies_before_it_served_ends_all() -> None:
    process = forks().server([*DRY, "--api-processes", "2"], os.environ)
    children: list[psutil.Process] = []

    def started(count: int) -> bool:
        children[:] = psutil.Process(process.pid).children()
        return len(children) >= count

    wait_for(lambda: started(1))
    children[0].suspend()  # the engine, without which none serves
    wait_for(lambda: started(3))
    children[1].kill()
    children[0].resume()
    assert process.stdout is not None
    with process.stdout:
        said = process.stdout.read()
    assert process.wait(15) == 1
    assert "an API process was killed by SIGKILL before it served" in said
    assert not psutil.wait_procs(children, timeout=1)[1]


def test_settings_that_the_engine_refuses_are_one_message() -> None:
    code, said = refusal(*DRY, "--api-processes", "2", "--model.max_model_len", "9999999")
    assert code == 2
    assert said.startswith("mini-infer-serve: error: model.max_model_len=9999999 is beyond")
    assert said.count("\n") == 1
