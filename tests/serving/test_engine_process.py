"""The engine process: turn by turn over bare sockets, and how it starts and ends."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from integrity import check_scheduler
from msgspec import structs
from served import (
    ENDLESS,
    PROMPT,
    SHORT,
    HandDrivenClient,
    HandDrivenServer,
    add,
    dry_config,
    idle,
    served_in_a_thread,
    until,
    whole,
    with_engine,
)

from mini_infer import ConfigError, EngineConfig, LLMEngine, SamplingParams
from mini_infer.assets.adapters import write_adapter
from mini_infer.core.config import replace
from mini_infer.core.errors import RankError
from mini_infer.core.sampling_params import Grammar
from mini_infer.modeling.peft_folder import PeftFolder
from mini_infer.runtime.text.grammar import CompiledGrammar
from mini_infer.serving.link.wire import DEADLINE, Abort, ChangeAdapter, Done, Failed, Outputs, PromptLogprobs, Refused
from mini_infer.serving.processes import engine_process
from mini_infer.serving.processes.async_engine import AsyncEngine, EngineDead
from mini_infer.serving.processes.launch import MAX_QUEUED
from mini_infer.serving.stats import Stats

MakeServer = Callable[..., HandDrivenServer]


# --- who ends, and what it costs the others ---------------------------------------------------------------------------


def test_an_abort_frees_the_blocks_within_a_step(hand_driven: MakeServer) -> None:
    server = hand_driven()
    client = server.connect()
    client.say(add(0), add(1))
    server.turn(3)
    assert server.used_blocks() == 2
    client.say(Abort(0), Abort(0), Abort(77))
    server.turn()
    assert server.used_blocks() == 1
    client.hear()
    server.turn()
    assert [delta.number for event in client.hear() if isinstance(event, Outputs) for delta in event.deltas] == [1]
    client.say(add(2), Abort(2), Abort(1))
    server.turn()
    assert server.used_blocks() == 0
    stats = [event for event in client.hear() if isinstance(event, Stats)]
    assert (stats[-1].num_requests_running, stats[-1].num_requests_waiting, stats[-1].kv_used_blocks) == (0, 0, 0)
    assert not server.engine.has_unfinished_requests()


def test_a_connection_that_ends_aborts_its_requests_alone(hand_driven: MakeServer) -> None:
    server = hand_driven()
    leaves, stays = server.connect(), server.connect()
    leaves.say(add(0), add(1))
    stays.say(add(0))
    server.turn(2)
    assert server.used_blocks() == 3
    leaves.sock.close()
    server.turn()
    assert server.used_blocks() == 1
    stays.hear()
    server.turn()
    assert any(isinstance(event, Outputs) for event in stays.hear())


def test_nonsense_ends_the_connection_that_said_it(hand_driven: MakeServer) -> None:
    server = hand_driven()
    mad, sane = server.connect(), server.connect()
    sane.say(add(0))
    mad.sock.sendall(b"\x03\x00\x00\x00abc")
    server.turn(2)
    assert mad.sock.recv(2**16)
    assert mad.sock.recv(1) == b""
    assert server.used_blocks() == 1


def test_a_client_that_does_not_read_costs_bounded_memory(hand_driven: MakeServer) -> None:
    server = hand_driven(dry_config(max_model_len=1024))
    slow, quick = server.connect(), server.connect()
    slow.hear()
    (connection,) = (c for c in server.server._connections if c.name == "0")
    connection._unsent = memoryview(b"")
    for sock in (slow.sock, connection.sock):
        sock.setsockopt(1, 7, 1)  # SO_SNDBUF: the smallest there is
    num_tokens = 1000
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    slow.say(*(add(i, params) for i in range(32)))
    quick.say(add(0, params))
    server.turn(2)
    while server.engine.has_unfinished_requests():
        server.turn()
        assert len(connection.deltas) <= 32
        quick.hear()
    assert connection.deltas, "the socket took it all: this test tests nothing"
    got = dict.fromkeys(range(32), 0)
    while set(got.values()) != {num_tokens}:
        for event in slow.hear():
            for delta in event.deltas if isinstance(event, Outputs) else ():
                got[delta.number] += len(delta.token_ids)
        if connection.deltas or connection._unsent:
            server.turn()
    assert not connection.deltas


def test_a_fault_of_the_engine_costs_one_request(hand_driven: MakeServer) -> None:
    server = hand_driven()
    client = server.connect()
    client.say(add(0), add(1, params={"no_such_parameter": 1}))
    server.turn(3)
    refused = [event for event in client.hear() if isinstance(event, Refused)]
    assert [(event.number, event.internal) for event in refused] == [(1, True)]
    assert "no_such_parameter" in refused[0].message
    assert server.used_blocks() == 1


@pytest.mark.parametrize("overlap", ["always", "never"])
def test_whatever_comes_everybody_is_answered_and_nothing_is_left(hand_driven: MakeServer, overlap: str) -> None:
    rng = random.Random(overlap)
    config = replace(dry_config(max_num_seqs=8, max_model_len=256), scheduler={"overlap": overlap})
    server = hand_driven(replace(config, cache={"num_blocks": 24}))
    clients = [server.connect() for _ in range(3)]
    asked: list[dict[int, int]] = [{} for _ in clients]  # number -> completions that have not ended

    def listen() -> None:
        for client, open_requests in zip(clients, asked, strict=True):
            for event in client.hear():
                if isinstance(event, Refused) and event.number in open_requests:
                    open_requests[event.number] = 0
                for delta in event.deltas if isinstance(event, Outputs) else ():
                    if delta.number in open_requests:  # else it was aborted
                        open_requests[delta.number] -= delta.finish_reason is not None

    for number in range(300):
        which = rng.randrange(3)
        params = SamplingParams(n=rng.choice([1, 1, 3]), max_tokens=rng.randint(1, 60), ignore_eos=True)
        command = add(number, params, prompt=[rng.randrange(200)] * rng.choice([0, 1, 20, 100]))
        command.streaming = rng.random() < 0.7
        command.deadline_time = time.perf_counter() + rng.choice([0.0, 0.01, 60])
        clients[which].say(command)
        asked[which][number] = params.n
        if rng.random() < 0.3:
            aborted = rng.choice(list(asked[which]))
            clients[which].say(Abort(aborted))
            del asked[which][aborted]
        server.turn()
        check_scheduler(server.engine.scheduler)
        listen()
    clients.pop().sock.close()
    asked.pop()
    server.turn_until_idle()
    listen()
    assert {left for open_requests in asked for left in open_requests.values()} == {0}
    assert server.used_blocks() == 0
    assert not server.server._owners
    assert not server.server._newcomers.num_completions
    assert not server.server._expired


# --- what is observed ---------------------------------------------------------------------------------------------


def test_every_connection_is_told_everything(hand_driven: MakeServer) -> None:
    server = hand_driven()
    first, deaf = server.connect(), server.connect()
    first.say(add(0, SHORT))
    server.turn_until_idle()
    first.say(add(1))
    server.turn(3)
    first.say(Abort(1))
    server.turn_until_idle()
    late = server.connect()
    last = [[event for event in client.hear() if isinstance(event, Stats)][-1] for client in (first, deaf, late)]
    assert last[0] == last[1] == last[2]
    assert {reason: count for reason, count in last[0].ended.items() if count} == {"length": 1, "abort": 1}


def test_stats_add_up(hand_driven: MakeServer) -> None:
    server = hand_driven()
    client = server.connect()
    for number in range(3):
        client.say(add(number, SHORT, prompt=[1] * 64))
        server.turn_until_idle()
    client.say(add(3))
    server.turn(3)
    client.say(Abort(3))
    server.turn_until_idle()
    last = [event for event in client.hear() if isinstance(event, Stats)][-1]
    assert last.ended == {"stop": 0, "length": 3, "abort": 1, "error": 0, "deadline": 0}
    assert last.prompt_tokens == 3 * 64 + len(PROMPT)
    assert (last.prefix_cache_queries, last.prefix_cache_hits) == (3 * 64 + len(PROMPT), 96)
    assert last.engine_steps == len(server.engine.records)
    counts = {name: sum(histogram.counts) for name, histogram in last.histograms.items()}
    total = {name: histogram.sum for name, histogram in last.histograms.items()}
    aborted = last.generation_tokens - 3 * 8
    assert counts.pop("inter_token_latency_seconds") == 3 * 7 + aborted - 1
    moved = [counts.pop(f"request_kv_transfer_{part}seconds") for part in ("", "exposed_")]
    assert moved == [0, 0], "no other engine has computed anything"
    assert set(counts.values()) == {4}
    assert total["request_prompt_tokens"] == last.prompt_tokens
    assert total["request_generation_tokens"] == last.generation_tokens
    parts = ["request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"]
    assert sum(total[part] for part in parts) == pytest.approx(total["e2e_request_latency_seconds"])
    assert total["time_to_first_token_seconds"] == pytest.approx(total[parts[0]] + total[parts[1]])
    assert 0 < total["inter_token_latency_seconds"] <= total["request_decode_time_seconds"]


# --- the queue --------------------------------------------------------------------------------------------------------


def test_who_comes_when_too_many_wait_is_refused(hand_driven: MakeServer) -> None:
    server = hand_driven(dry_config(max_num_seqs=2), max_queued=3)
    one, other = server.connect(), server.connect()
    one.say(add(0), add(1))  # these run
    one.say(add(2), add(3, SamplingParams(n=3)))  # the second one is more than may wait
    server.turn(2)
    other.say(add(0), add(1), add(2))
    server.turn(2)
    refused = [event for client in (one, other) for event in client.hear() if isinstance(event, Refused)]
    assert [(event.number, event.message) for event in refused] == [
        (3, "1 requests wait, and 3 may: try again later"),
        (2, "3 requests wait, and 3 may: try again later"),
    ]
    assert all(event.retry_after == 1.0 for event in refused)
    one.say(Abort(2), add(4))
    server.turn(2)
    assert not [event for event in one.hear() if isinstance(event, Refused)]
    one.sock.close()
    other.sock.close()
    server.turn()
    assert server.connect().hear()
    assert not server.server._newcomers.num_completions


def test_streams_get_past_a_long_prompts_log_probabilities(hand_driven: MakeServer) -> None:
    """In one frame they would fill the connection, and what comes behind them would wait for turn after turn."""
    server = hand_driven()
    client = server.connect()
    scored = SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=64)
    client.say(add(0), add(1, scored, [5] * 400), add(2, scored, [6] * 400))
    parts: dict[int, list[bytes]] = {1: [], 2: []}
    turns = 0
    while turns < 3 or server.engine.scheduler.num_unfinished > 1 or server.server._late:
        server.turn()
        turns += 1
        outputs = [event for event in client.hear() if isinstance(event, Outputs)]
        told = [delta for each in outputs for delta in each.deltas]
        assert sum(delta.prompt_logprobs.num_bytes for delta in told if delta.prompt_logprobs is not None) < 2**17
        assert turns < 3 or 0 in {delta.number for delta in told}
        for delta in told:
            if delta.prompt_logprobs is not None:
                parts[delta.number] += delta.prompt_logprobs.parts
                assert delta.prompt_logprobs.more == (not delta.token_ids)
                assert delta.prompt_logprobs.parts, "it says nothing"
    for each in parts.values():
        assert len(list(PromptLogprobs(each))) == 400
    client.say(add(3, scored, [7] * 400))
    while not server.server._late:
        server.turn()
        client.hear()
    client.say(Abort(3))
    server.turn()
    assert not server.server._late, "nobody reads the others"
    told = [delta for event in client.hear() if isinstance(event, Outputs) for delta in event.deltas]
    assert [delta.finish_reason for delta in told if delta.number == 3][-1] is not None
    # Who expires is told so, not what of it could still be written.
    for number, streaming in ((4, True), (5, False)):
        asked = add(number, SamplingParams(max_tokens=1000, ignore_eos=True, prompt_logprobs=64), [8 + number] * 400)
        client.say(structs.replace(asked, streaming=streaming, deadline_time=asked.arrival_time + 60))
        server.turn(8)  # the prompt is computed in seven steps
        client.hear()
        server.server._deadlines = [(0.0, request_id) for _, request_id in server.server._deadlines]
        server.turn(2)
        told = [delta for event in client.hear() if isinstance(event, Outputs) for delta in event.deltas]
        assert [delta.finish_reason for delta in told if delta.number == number][-1] == DEADLINE
        assert not server.server._late
        assert not server.server._unwritten


def test_times_of_requests_that_have_ended_are_forgotten(hand_driven: MakeServer) -> None:
    server = hand_driven()
    client = server.connect()
    for number in range(100):
        asked = add(number, {"max_tokens": 1})
        client.say(structs.replace(asked, deadline_time=asked.arrival_time + 1e9))
        server.turn_until_idle()
        client.hear()
    assert not server.server._owners
    assert len(server.server._deadlines) <= 65


# --- adapters ---------------------------------------------------------------------------------------------------------


def test_steps_go_on_while_an_adapter_is_read(
    hand_driven: MakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a", {}, rank=4, alpha=4)
    read, may_go_on = PeftFolder.read, threading.Event()

    def slowly(path: str, max_rank: int) -> PeftFolder:
        assert may_go_on.wait(10)
        return read(path, max_rank)

    monkeypatch.setattr(PeftFolder, "read", slowly)
    server = hand_driven(replace(dry_config(), lora={"max_adapters": 1}))
    client = server.connect()
    client.say(add(0), ChangeAdapter(1, "a", folder), ChangeAdapter(2, "b", folder + "x"))
    server.turn(5)
    told = client.hear()
    assert sum(len(event.deltas) for event in told if isinstance(event, Outputs)) >= 3
    assert not [event for event in told if isinstance(event, Done | Refused)]
    assert not list(server.engine.adapters)
    may_go_on.set()
    answers: list[Any] = []
    while len(answers) < 2:
        server.turn()
        answers += [event for event in client.hear() if isinstance(event, Done | Refused)]
    done, refused = answers
    assert list(server.engine.adapters) == ["a"]
    assert (done.number, refused.number) == (1, 2)
    assert "there is no such folder" in refused.message


# --- grammars ---------------------------------------------------------------------------------------------------------


def test_a_grammar_is_compiled_while_the_others_go_on(hand_driven: MakeServer) -> None:
    server = hand_driven()
    compile_grammar, may_go_on = server.engine.grammars.compile, threading.Event()

    def slow(grammar: Grammar, num_bytes: int = 0) -> CompiledGrammar:
        if threading.current_thread() is not threading.main_thread():
            assert may_go_on.wait(10)
        return compile_grammar(grammar, num_bytes)

    server.engine.grammars.compile = slow  # type: ignore[method-assign]
    client = server.connect()
    with_grammar = {"grammar": ["regex", "[0-9]{5}"], "max_tokens": 20}
    client.say(add(0), add(1, with_grammar), add(2, with_grammar), add(3, {"grammar": ["regex", "["]}))
    server.turn(3)
    client.say(Abort(2))
    server.turn(3)
    assert len(server.server._owners) == 1
    assert server.server._newcomers.num_completions == 2
    may_go_on.set()
    events: list[object] = []
    while not any(isinstance(e, Outputs) and any(d.number == 1 and d.finish_reason for d in e.deltas) for e in events):
        server.turn()
        events += client.hear()
    texts = [d.text for e in events if isinstance(e, Outputs) for d in e.deltas if d.number == 1]
    assert len("".join(texts)) == 5
    assert "".join(texts).isdigit()
    while server.server._newcomers.num_completions:
        server.turn()
    events += client.hear()
    assert [e.number for e in events if isinstance(e, Refused)] == [2, 3]
    client.say(add(4, {"grammar": ["regex", "["]}))
    server.turn()
    assert [e.number for e in client.hear() if isinstance(e, Refused)] == [4], "it is known"
    (kept,) = server.server._newcomers._refused.values()
    assert kept.__traceback__ is None, "whose frames would keep requests"
    assert 2 not in {d.number for e in events if isinstance(e, Outputs) for d in e.deltas}


# --- beginnings and ends ------------------------------------------------------------------------------------------


def test_start_says_what_the_engine_is_and_close_ends_it() -> None:
    async def main() -> int:
        engine = await AsyncEngine.start(dry_config(max_model_len=100))
        assert (engine.info.model, engine.info.max_model_len, engine.info.vocab_size) == ("dry", 100, 512)
        assert EngineConfig.from_dict(engine.info.settings) == dry_config(max_model_len=100)
        assert engine.info.startup["sampler"]
        assert engine.encode("hello") == list(b"hello")
        running = engine.submit(PROMPT, SamplingParams(max_tokens=None, ignore_eos=True))
        await engine.close()
        assert [delta async for delta in running if delta.finish_reason] == []
        return engine.info.pid

    assert not psutil.pid_exists(asyncio.run(main()))


def test_an_engine_that_cannot_start_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    bad = EngineConfig.from_dict({"model": {"load_format": "dry", "max_model_len": 10_000}})
    with pytest.raises(ConfigError, match=r"model\.max_model_len=10000 is beyond the model's own limit"):
        asyncio.run(AsyncEngine.start(bad))
    assert capfd.readouterr().err == "", "the message is for the caller"
    with pytest.raises(EngineDead, match="not ready within"):
        asyncio.run(AsyncEngine.start(dry_config(), startup_timeout=1e-6))  # a forked engine takes milliseconds
    with pytest.raises(EngineDead, match="no engine process listens at /nowhere"):
        asyncio.run(AsyncEngine.connect("/nowhere"))


def test_an_engine_that_fails_before_its_parent_has_connected_says_why(tmp_path: Path) -> None:
    bad = EngineConfig.from_dict({"model": {"load_format": "dry", "max_model_len": 10_000}})
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as thread:
        listener.bind(path := str(tmp_path / "engine"))
        listener.listen()
        end = thread.submit(engine_process.run, bad, listener, MAX_QUEUED)
        assert not wait([end], 0.2).done, "the engine has failed, and nobody knows yet"
        parent = HandDrivenClient(path)
        with pytest.raises(SystemExit) as exit:
            end.result(10)
        assert exit.value.code == engine_process.CANNOT_START, "it prints nothing itself"
        (said,) = parent.hear()
        parent.sock.close()
        assert isinstance(said, Failed)
        assert "model.max_model_len=10000 is beyond" in said.message


def test_a_killed_engine_process_ends_every_stream_with_an_error() -> None:
    async def main() -> None:
        engine = await AsyncEngine.start(dry_config())
        deaths: list[str] = []
        engine.on_death = deaths.append
        streams = [engine.submit(PROMPT, ENDLESS) for _ in range(3)]
        await asyncio.gather(*(stream.ready() for stream in streams))
        os.kill(engine.info.pid, signal.SIGINT)  # as a terminal's Ctrl-C, which the parent decides about
        os.kill(engine.info.pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDead, match="the engine process was killed by SIGKILL"):
                await whole(stream)
        assert deaths == [engine.failure]
        with pytest.raises(EngineDead, match="SIGKILL"):
            engine.submit(PROMPT, SHORT)
        await idle(engine)
        await engine.close()

    asyncio.run(main())


def test_the_engine_process_ends_with_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "from mini_infer import EngineConfig\n"
        "from mini_infer.serving.processes.launch import EngineProcess\n"
        "process = EngineProcess(EngineConfig.from_dict({'model': {'load_format': 'dry'}}))\n"
        "print(process.pid, process.socket_path, flush=True)\n"
        "input()\n"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    ) as parent:
        assert parent.stdout is not None
        pid, path = parent.stdout.readline().split()
        child = psutil.Process(int(pid))

        async def use(engine: AsyncEngine) -> None:
            stream = engine.submit(PROMPT, ENDLESS)
            await stream.ready()
            parent.kill()
            with pytest.raises(EngineDead, match="the engine process has closed the connection"):
                await whole(stream)

        with_engine(path, use)
    assert psutil.wait_procs([child], timeout=5)[1] == []
    assert not Path(path).parent.exists()


def failing(engine: LLMEngine, times: int, error: Exception | None = None) -> LLMEngine:
    """Its first launches fail."""
    launch, left = engine.executor.runner.launch, [times]

    def planted(plan: object) -> object:
        if left[0]:
            left[0] -= 1
            raise error or RuntimeError("planted")
        return launch(plan)  # type: ignore[arg-type]

    engine.executor.runner.launch = planted  # type: ignore[method-assign, assignment]
    return engine


def test_a_step_that_fails_costs_its_requests_and_no_more(tmp_path: Path) -> None:
    async def use(engine: AsyncEngine) -> None:
        assert [delta.finish_reason for delta in await whole(engine.submit(PROMPT, SHORT))] == ["error"]
        assert [delta.finish_reason for delta in await whole(engine.submit(PROMPT, SHORT))] == ["length"]
        await until(lambda: engine.stats.kv_used_blocks == 0)

    with served_in_a_thread(tmp_path, failing(LLMEngine(dry_config()), times=1)) as path:
        with_engine(path, use)


def test_an_engine_without_hope_ends_and_says_why(tmp_path: Path) -> None:
    async def use(engine: AsyncEngine) -> None:
        for _ in range(2):
            assert [delta.finish_reason for delta in await whole(engine.submit(PROMPT, SHORT))] == ["error"]
        with pytest.raises(EngineDead, match="the engine process has closed the connection: RuntimeError: planted"):
            await whole(engine.submit(PROMPT, SHORT))

    with served_in_a_thread(tmp_path, failing(LLMEngine(dry_config()), times=99)) as path:
        with_engine(path, use)


def test_an_engine_that_has_lost_a_rank_ends_at_once(tmp_path: Path) -> None:
    async def use(engine: AsyncEngine) -> None:
        with pytest.raises(EngineDead, match="has closed the connection: RankError: rank 1 was killed by SIGKILL"):
            await whole(engine.submit(PROMPT, SHORT))

    lost = RankError("rank 1 was killed by SIGKILL")
    with served_in_a_thread(tmp_path, failing(LLMEngine(dry_config()), times=99, error=lost)) as path:
        with_engine(path, use)


@pytest.mark.parametrize("end", [None, engine_process.Restarting("not in time"), RuntimeError("a fault")], ids=str)
def test_however_it_ends_the_executor_is_closed(end: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its threads would go on writing files, and the process with them."""
    closed: list[bool] = []

    class Server:
        def __init__(self, *arguments: object) -> None:
            pass

        def serve(self) -> None:
            if end is not None:
                raise end

    engine = SimpleNamespace(executor=SimpleNamespace(close=lambda: closed.append(True)))
    monkeypatch.setattr(engine_process, "LLMEngine", lambda *arguments, **options: engine)
    monkeypatch.setattr(engine_process, "settle", lambda *arguments: None)
    monkeypatch.setattr(engine_process, "EngineServer", Server)
    raised = pytest.raises(RuntimeError, match="a fault") if type(end) is RuntimeError else nullcontext()
    with socket.socket() as listener, raised:
        engine_process.run(dry_config(), listener, 1)
    assert closed == [True]
