"""A server with an engine for prompts and one that decodes: the same answers as of one engine, whoever of them dies."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from forking import forks
from http_server import Server, http_client, refusal, running, wait_for

from mini_infer import LLMEngine, SamplingParams
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError
from mini_infer.serving.processes.gpus import environments

TEXT = "/v1/completions"
ROLES = ("--parallel.prefill", "1", "--parallel.decode", "1")
PROMPT = "def fibonacci(n):\n    " + "".join(f"if n == {n}:\n        return {n}\n    " for n in range(12))
CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 7, "n": 2},
    {"temperature": 0.8, "seed": 3, "presence_penalty": 1.0, "repetition_penalty": 1.3, "logprobs": 2},
    {"regex": "[a-z]{3,8}( [a-z]+)*"},
]


# --- the same answers ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Prompts are computed chunk by chunk, by two ranks."""
    forks().imports("transformers.models.qwen2.tokenization_qwen2")  # seconds, for each of the engines
    chunks = ("--scheduler.max_num_seqs", "8", "--scheduler.max_num_batched_tokens", "64", "--model.threads", "1")
    ranks = ("--parallel.prefill_tensor", "2", "--parallel.hand_over", "always")
    flags = ("--model", "tiny-target", "--model.device", "cpu", *ranks, *ROLES, *chunks)
    server = Server(("--port", "0", "--shutdown-timeout", "5", *flags))
    yield server
    server.http.close()
    processes = psutil.Process(server.process.pid).children(recursive=True)
    assert server.stop() == 0
    assert not psutil.wait_procs(processes, timeout=3)[1]


def answer(server: Server, number: int) -> list[tuple[str, Any]]:
    """Texts and tokens' log-probabilities."""
    case = CASES[number]
    body = {**case, "temperature": case.get("temperature", 0), "max_tokens": 24, "prompt": prompt_of(number)}
    grammar = body.pop("regex", None)
    extra = {} if grammar is None else {"structured_outputs": {"regex": grammar}}
    choices = server.complete(**body, **extra)["choices"]
    return [(c["text"], c["logprobs"] and c["logprobs"]["token_logprobs"]) for c in choices]


def prompt_of(number: int) -> str:
    return f"# {number}\n{PROMPT}"


def answer_of_one_engine(engine: LLMEngine, number: int) -> list[tuple[str, Any]]:
    case = CASES[number]
    given = {**case, "temperature": case.get("temperature", 0), "max_tokens": 24}
    grammar = given.pop("regex", None)
    params = SamplingParams(**given, grammar=None if grammar is None else ("regex", grammar))
    (output,) = engine.generate([prompt_of(number)], params)
    return [
        (c.text, None if c.logprobs is None else pytest.approx([e.logprob for e in c.logprobs], abs=1e-4))
        for c in output.outputs
    ]


def test_answers_are_those_of_one_engine(server: Server) -> None:
    engine = LLMEngine(EngineConfig.from_dict({"model": {"path": "tiny-target", "device": "cpu", "threads": 1}}))
    before = server.metrics()
    for number, case in enumerate(CASES):
        assert answer(server, number) == answer_of_one_engine(engine, number), case
    after = server.metrics()
    gained = {name: after[name] - before[name] for name in after if name in before}
    assert gained["kv_transfers_total"] == len(CASES)
    assert gained["kv_transfers_failed_total"] == 0
    assert gained["kv_transfer_bytes_total"] > 0
    assert gained["request_kv_transfer_seconds_count"] >= len(CASES)
    assert after["request_kv_transfer_exposed_seconds_sum"] < 1
    engine.close()


def test_what_the_decoding_engine_has_is_not_sent(server: Server) -> None:
    whole = "".join(chr(97 + n * n % 26) for n in range(300))
    server.complete(whole[:200], max_tokens=1)
    before = server.metrics()["kv_transfer_bytes_total"]
    server.complete(whole, max_tokens=1)
    part = server.metrics()["kv_transfer_bytes_total"] - before
    server.complete(whole[::-1], max_tokens=1)
    everything = server.metrics()["kv_transfer_bytes_total"] - before - part
    assert 0 < part < 0.6 * everything


# --- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_engine_that_loses_a_rank_starts_anew(server: Server) -> None:
    """Nobody asks it for anything when the rank is lost."""
    old = pids(server)
    decode = psutil.Process(old[1])
    server.complete("what the lost one computes " * 9, max_tokens=2)  # they have met, whichever test comes first
    opened, before = decode.num_fds(), server.metrics()["kv_transfers_total"]
    (rank,) = psutil.Process(old[0]).children()
    rank.kill()
    wait_until_whole(server, unlike=old[0])
    assert not psutil.wait_procs([rank], timeout=3)[1]
    assert server.complete("what its successor computes " * 9, max_tokens=2)["usage"]["completion_tokens"] == 2
    assert server.metrics()["kv_transfers_total"] == before + 1
    assert decode.num_fds() <= opened, "nothing of the lost one is left where it was met"


@pytest.fixture(scope="module")
def dry() -> Iterator[Server]:
    """A prompt of 2,000 tokens takes half a second, in chunks of 256."""
    times = ("--model.dry.step_ms", "5", "--model.dry.prefill_token_us", "250", "--model.dry.max_model_len", "20000")
    chunks = ("--scheduler.max_num_batched_tokens", "256", "--parallel.hand_over", "always")
    with running(*ROLES, *times, *chunks, "--parallel.connector", "stream") as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in "".join(server.log)


def pids(server: Server) -> list[int]:
    with http_client(server.url) as client:
        return [replica["engine_pid"] for replica in client.get("/healthz").json()["replicas"]]


def wait_until_whole(server: Server, unlike: int) -> None:
    def is_whole() -> bool:
        with http_client(server.url) as client:
            return client.get("/healthz").json()["status"] == "ok" and unlike not in pids(server)

    wait_for(is_whole, timeout=120)  # where others compute, too, a model and its ranks take a while


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_an_engine_that_is_killed_in_the_middle_costs_no_answer(dry: Server, victim: str) -> None:
    """At other moments and by other ways: test_handover_faults.py."""
    prompt = f"{victim} " * 160
    alone = LLMEngine(EngineConfig.from_dict({"model": {"load_format": "dry", "dry": {"max_model_len": 20000}}}))
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    pid, before = pids(dry)[victim == "decode"], dry.metrics()

    def some_of_it_has_come() -> bool:
        now = dry.metrics()
        return now["num_requests_receiving"] == 1 and now["prompt_tokens_total"] > before["prompt_tokens_total"]

    with ThreadPoolExecutor(1) as threads:
        body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
        asked = threads.submit(lambda: httpx.post(dry.url + TEXT, json=body, timeout=60, verify=False))
        wait_for(some_of_it_has_come)
        os.kill(pid, signal.SIGKILL)
        response = asked.result()
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == alone.generate([prompt], params)[0].outputs[0].text
    wait_until_whole(dry, unlike=pid)
    dry.wait_until_idle()


def test_a_stream_whose_engine_is_killed_ends_with_one_error(dry: Server) -> None:
    pid = pids(dry)[1]
    body = {"prompt": "hello", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with http_client(dry.url) as client, client.stream("POST", TEXT, json=body) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        threading.Timer(0.05, os.kill, (pid, signal.SIGKILL)).start()
        last = list(lines)[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_dead"
    answers = [dry.post(TEXT, prompt="hello", max_tokens=2).status_code for _ in range(2)]
    assert answers == [200, 200], "the engine for prompts decodes while nobody else is there"
    wait_until_whole(dry, unlike=pid)


# --- settings -----------------------------------------------------------------------------------------------------


def test_settings_that_cannot_work_are_refused() -> None:
    code, said = refusal("--dry-run", "--port", "0", "--parallel.prefill", "1")
    assert (code, "parallel.decode=0: there are engines of both kinds or of none" in said) == (2, True)
    for settings, message in (
        ({"parallel": {"prefill": 1, "decode": 1, "replicas": 2}}, "instead of parallel.replicas=2"),
        ({"parallel": {"prefill": 1, "decode": 1, "tensor": 2, "connector": "stream"}}, "one rank sends to one other"),
        ({"parallel": {"prefill": 1, "decode": 1, "prefill_tensor": 2, "connector": "stream"}}, "to one other"),
        ({"parallel": {"prefill": 1, "decode": 1, "launcher": "ray"}}, "set parallel.connector=stream"),
        ({"parallel": {"prefill_tensor": 2}}, "is of engines for prompts"),
        (
            {"parallel": {"decode": 1}, "cache": {"layout": "contiguous", "prefix_caching": False}},
            "only the blocks of the model itself",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineConfig.from_dict(settings)
    with pytest.raises(ConfigError, match="behind mini-infer-serve, and this is one engine"):
        LLMEngine(EngineConfig.from_dict({"model": {"load_format": "dry"}, "parallel": {"prefill": 1, "decode": 1}}))


def test_each_engine_has_a_gpu_of_its_own_and_sees_the_others() -> None:
    config = EngineConfig.from_dict({"model": {"device": "cuda"}, "parallel": {"prefill": 1, "decode": 2}})
    seen = [each["CUDA_VISIBLE_DEVICES"] for each in environments(config, {}, lambda _: 3)]
    assert seen == ["0,1,2", "1,0,2", "2,0,1"]
    ranks = EngineConfig.from_dict(
        {"model": {"device": "cuda"}, "parallel": {"prefill": 1, "decode": 2, "prefill_tensor": 2, "tensor": 1}}
    )
    seen = [each["CUDA_VISIBLE_DEVICES"] for each in environments(ranks, {}, lambda _: 4)]
    assert seen == ["0,1,2,3", "2,0,1,3", "3,0,1,2"]
    with pytest.raises(ConfigError, match=r"parallel.prefill=1 and parallel.decode=2 .* needs 3 GPUs, and 2"):
        environments(config, {}, lambda _: 2)
