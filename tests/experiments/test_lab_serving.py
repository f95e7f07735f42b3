"""The load client against servers that are made up, and against mini-infer's own in processes of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from types import SimpleNamespace

import pytest
from small_runs import served_by

from experiments.lab.load import client, subject
from experiments.lab.load.client import Client, Target
from experiments.lab.load.connection import read_answer
from experiments.lab.measure import traces
from experiments.lab.measure.kinds import ClientSettings, HTTPSettings, Kind, PeerAbsent, PeerError, PeerSettings
from experiments.lab.measure.subjects import EngineSubject
from experiments.lab.workloads import Item
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("peers_are_forked")

DRY = EngineConfig.from_dict(
    {
        "model": {"path": "dry", "load_format": "dry", "device": "cpu", "dry": {"max_model_len": 256}},
        "cache": {"num_blocks": 64},
    }
)
ITEMS = [Item(tuple(range(20 + i, 60 + i)), 5 + i, name="a" if i else "") for i in range(6)]
USAGE = {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}


def event(**values):
    return b"data: " + json.dumps(values).encode() + b"\n\n"


def tokens(*ids, text="", **more):
    return event(choices=[{"text": text, "token_ids": list(ids)}], **more)


DONE = b"data: [DONE]\n\n"
END = event(choices=[], usage=USAGE) + DONE

# --- events ------------------------------------------------------------------------------------------------------


def test_a_token_counts_when_the_end_of_its_event_is_read():
    second = tokens(8, 9)
    answer = read_answer([(1.0, tokens(7, usage=None)), (2.0, second[:20]), (3.0, second[20:]), (4.0, END)])
    assert (answer.token_ids, answer.token_times) == ([7, 8, 9], [1.0, 3.0, 3.0])
    assert (answer.cached_tokens, answer.error) == (16, "")


def scheduled(*reads):
    answer = read_answer(reads)
    return traces.first_scheduled(answer.token_times, answer.spans)


def test_a_server_of_ours_tells_when_it_has_scheduled_a_request():
    usage = USAGE | {"spans": {"queue": 0.3, "prefill": 0.2}}
    told = lambda: event(choices=[], usage=usage) + DONE  # noqa: E731
    assert scheduled((1.0, tokens(7, 8, 9)), (4.0, told())) == 1.0 - 0.2
    usage["spans"] |= {"transfer_exposed": 0.1, "decode_wait": 0.05, "first_decode_step": 0.02, "transfer": 0.15}
    assert scheduled((1.0, tokens(7, 8, 9)), (4.0, told())) == pytest.approx(1.0 - 0.37)
    assert scheduled((1.0, tokens(7, 8, 9)), (4.0, END)) is None
    assert scheduled((4.0, told())) is None, "there was no token"


def test_lines_may_end_in_crlf_and_comments_are_skipped():
    answer = read_answer([(1.0, b": ping\r\n\r\n" + tokens(1, 2, 3).replace(b"\n", b"\r\n")[:-1]), (2.0, b"\n" + END)])
    assert (answer.token_ids, answer.token_times, answer.error) == ([1, 2, 3], [2.0] * 3, "")


def test_without_token_ids_the_running_usage_counts_and_else_each_event():
    def said(text, count=None):
        return event(choices=[{"text": text}], usage=count and {"completion_tokens": count})

    counted = read_answer([(1.0, said("ab", 2)), (2.0, said("", 2)), (3.0, said("c", 3)), (4.0, END)])
    assert (counted.token_times, counted.token_ids, counted.error) == ([1.0, 1.0, 3.0], [], "")
    assert read_answer([(float(n), said("x")) for n in range(3)] + [(4.0, END)]).token_times == [0.0, 1.0, 2.0]
    unknown = read_answer([(1.0, said("a")), (2.0, said("bc")), (4.0, END)])
    assert "generated 3 tokens and its events account for 2: it must know `return_token_ids`" in unknown.error


def test_what_is_no_complete_answer_is_an_error():
    assert (
        read_answer([(1.0, tokens(1)), (2.0, event(error={"message": "the engine died"}))]).error == "the engine died"
    )
    assert read_answer([(1.0, tokens(1))]).error == "the stream ended before its last event"
    assert "is none of the completions API" in read_answer([(1.0, b"data: 7\n\n"), (2.0, DONE)]).error


# --- one process, and a server that is made up ---------------------------------------------------------------------


def drive(items, answer, places=1, hang_up=False, cut=None):
    """What a client finds where `answer(body)` gives the stream; `hang_up` closes each connection behind an answer, and
    the answer of number `cut` lacks its last byte."""
    bodies = []

    async def handle(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                bodies.append(json.loads(await reader.readexactly(length)))
                data = answer(bodies[-1])
                status, data = (b"200 OK", data) if isinstance(data, bytes) else (b"400 Bad Request", data[0])
                is_cut = len(bodies) == cut
                writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data) + is_cut, data))
                if hang_up or is_cut:
                    break
        writer.close()

    job = Client(None)  # whose loop is the server's, too
    listener = job._loop.run_until_complete(asyncio.start_server(handle, "127.0.0.1", 0))
    job._target = Target("127.0.0.1", listener.sockets[0].getsockname()[1], "/v1/completions", "made-up")
    job.prepare(items, range(len(items)), "salt", places)
    job.go(time.perf_counter() + 0.01)
    listener.close()
    served, cpu_s, tells_cached = job.outcome()
    handlers = asyncio.all_tasks(job._loop)
    for task in handlers:
        task.cancel()
    job._loop.run_until_complete(asyncio.wait(handlers) if handlers else asyncio.sleep(0))
    job._loop.close()
    return SimpleNamespace(traces=served.requests, cpu_s=cpu_s, tells_cached=tells_cached, end=served.end), bodies


def three(body):
    return tokens(1, 2, 3) + END


def test_a_request_says_exactly_what_is_wanted():
    outcome, (body,) = drive([Item((5, 6), 3, priority=2)], three)
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"], body["temperature"]) == ([5, 6], 3, True, 0)
    assert (body["model"], body["cache_salt"], body["priority"], body["stream"]) == ("made-up", "salt", 2, True)
    (trace,) = outcome.traces
    assert (trace.token_ids, trace.cached_tokens, trace.prompt_tokens, trace.error) == ((1, 2, 3), 16, 2, "")
    assert outcome.tells_cached
    assert trace.sent is None  # a closed loop has no schedule to keep


def test_a_connection_that_the_server_had_closed_is_replaced():
    outcome, bodies = drive([Item((n,), 3) for n in range(3)], three, hang_up=True)
    assert [trace.error for trace in outcome.traces] == [""] * 3
    assert [body["prompt"] for body in bodies] == [[0], [1], [2]]


def test_an_answer_that_has_begun_is_not_asked_for_again():
    outcome, bodies = drive([Item((n,), 3) for n in range(2)], three, cut=2)
    assert [trace.error for trace in outcome.traces] == ["", "the connection was lost: the server closed it"]
    assert len(bodies) == 2


def test_a_refusal_and_a_stream_that_breaks_off_are_told():
    answers = {0: [b'{"error": "no"}'], 1: tokens(1), 2: tokens(1, 2, 3) + END}
    outcome, _ = drive([Item((n,), 3) for n in range(3)], lambda body: answers[body["prompt"][0]])
    assert [trace.error for trace in outcome.traces] == [
        'HTTP status 400: {"error": "no"}',
        "the stream ended before its last event",
        "",
    ]


def test_a_turn_follows_the_answer_that_it_belongs_to():
    items = [Item((5,), 3), Item((6,), 3, follows=0, think_s=0.02), Item((7,), 3), Item((8,), 3, follows=2)]
    outcome, bodies = drive(items, lambda body: three(body) if body["prompt"] != [7] else [b"no"], places=2)
    assert [5, 1, 2, 3, 6] in [body["prompt"] for body in bodies]
    first, second, _, lost = outcome.traces
    assert 0.02 <= second.arrival - first.token_times[-1] < 1.0
    assert (lost.error, lost.token_times) == ("the request that it follows has no answer, or none with token ids", ())


def test_arrivals_are_kept_whoever_is_busy():
    items = [Item((n,), 3, arrival_s=0.03 * n) for n in range(4)]
    outcome, _ = drive(items, three)
    begin = outcome.traces[0].arrival
    assert [trace.arrival - begin for trace in outcome.traces] == pytest.approx([0, 0.03, 0.06, 0.09])
    assert all(trace.sent is not None and trace.sent >= trace.arrival for trace in outcome.traces)


def test_nobody_listens():
    job = Client(Target("127.0.0.1", 1, "/v1/completions", "x"))
    with contextlib.closing(job._loop), pytest.raises(OSError, match="1"):
        job.prepare([Item((1,), 1)], [0], "", 1)


# --- several processes ---------------------------------------------------------------------------------------------


def test_requests_are_dealt_out_evenly_and_conversations_stay_together():
    items = [Item((1,), 1), Item((2,), 1), Item((3,), 1, follows=0), Item((4,), 1), Item((5,), 1, follows=2)]
    assert client.deal(items, 2) == [[0, 2, 3, 4], [1]]
    assert client.deal(items[:1], 2) == [[0], []]


@pytest.mark.parametrize(("in_flight", "cpus", "expected"), [(1, 16, 1), (64, 16, 1), (256, 16, 4), (256, 4, 2)])
def test_how_many_processes_load(in_flight, cpus, expected, monkeypatch):
    monkeypatch.setattr(client, "usable_cores", lambda: cpus)
    nobody = Target("127.0.0.1", 1, "/", "x")
    assert client.Clients(nobody, ClientSettings())._count(in_flight) == expected
    assert client.Clients(nobody, ClientSettings(processes=3))._count(in_flight) == min(3, in_flight)


# --- mini-infer's own server ---------------------------------------------------------------------------------------


def own_server():
    return contextlib.closing(served_by(Kind.served, DRY, PeerSettings(client=ClientSettings(processes=2))))


@pytest.fixture(scope="module")
def served():
    with own_server() as found:
        yield found


def test_clients_get_the_engines_tokens_and_what_the_host_spent(served):
    expected = EngineSubject(DRY).serve(ITEMS, 4).requests
    before = time.perf_counter()
    for _ in range(2):
        found = served.serve(ITEMS, 4)
        assert [r.token_ids for r in found.requests] == [r.token_ids for r in expected]
        served.forget()
    assert [r.request_id for r in found.requests][:2] == ["request-0", "a-1"]
    for request in found.requests:
        assert before < found.start <= request.arrival < request.token_times[0]
        assert list(request.token_times) == sorted(request.token_times)
        assert request.token_times[-1] <= found.end
        assert request.arrival < request.first_scheduled < request.token_times[0]
    rows = traces.request_rows("served", "", 0, found)
    assert all(row.queue_s + row.prefill_s == pytest.approx(row.first_token_s - row.arrival_s) for row in rows)
    host = found.host
    assert host.tells_cached
    assert host.client_s > 0
    assert 0 < host.client_busy <= 1.5
    assert host.api_s >= 0
    assert host.engine_s >= 0


def test_prefixes_are_shared_in_a_pass_and_not_beyond(served):
    served.forget()
    assert sum(r.cached_tokens for r in served.serve(ITEMS[:1], 1).requests) == 0
    assert sum(r.cached_tokens for r in served.serve(ITEMS[:1], 1).requests) == 32
    served.forget()
    assert sum(r.cached_tokens for r in served.serve(ITEMS[:1], 1).requests) == 0


def test_a_request_that_the_server_refuses_fails_alone(served):
    too_long, fine = served.serve([Item(tuple(range(300)), 2), Item((5, 6), 2)], 2).requests
    assert too_long.error.startswith("HTTP status 400")
    assert "context_length_exceeded" in too_long.error
    assert (fine.error, len(fine.token_ids)) == ("", 2)


def test_the_same_client_loads_any_server_by_its_url(served):
    url = served._server.about["url"]
    settings = PeerSettings(http=HTTPSettings(url=f"{url}/v1"))
    other = subject.open_subject(Kind.http, settings, None)
    try:
        found = other.serve(ITEMS[:2], 2)
        assert [len(r.token_ids) for r in found.requests] == [5, 6]
        assert [r.first_scheduled for r in found.requests] == [None] * 2, "others are not asked what they may not know"
        assert found.host.api_s is None
        assert (other.alive, other.about["model"]) == (True, "dry")
    finally:
        other.close()
    assert not other.alive
    assert served.alive


@pytest.mark.parametrize(
    ("url", "kind", "message"),
    [
        ("http://127.0.0.1:1", PeerAbsent, r"no OpenAI server answers at peers\.http\.url=http://127\.0\.0\.1:1"),
        ("ftp://example", PeerAbsent, "no OpenAI server answers"),
        (None, ConfigError, r"needs peers\.http\.url, such as"),
    ],
)
def test_a_server_that_is_not_there(url, kind, message):
    with pytest.raises(kind, match=message):
        subject.find(HTTPSettings(url=url))
    with pytest.raises(ConfigError, match="must begin with http://"):
        subject.find(HTTPSettings(url="https://example", model="x"))


def test_every_setting_of_the_engine_becomes_a_flag():
    config = EngineConfig.from_dict(
        {
            "model": {"path": "x", "hf_config": {"a": [1]}, "load_format": "dummy"},
            "cache": {"block_size": 32},
            "graphs": {"capture": "never"},
        }
    )
    flags = subject.flags(config)
    assert {"--model=x", '--model.hf_config={"a": [1]}', "--cache.block_size=32", "--graphs.capture=never"} <= set(
        flags
    )
    from mini_infer.cli.serve import parse

    assert parse(flags, {}).models[0].engine == config


def test_a_server_that_dies_is_an_error_with_its_code():
    with own_server() as served:
        os.kill(served._server.about["api_pid"], signal.SIGKILL)
        with pytest.raises(PeerError):
            served.serve(ITEMS[:1], 1)
        assert not served.alive
