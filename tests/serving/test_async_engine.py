"""AsyncEngine against an engine process that all tests here share."""

from __future__ import annotations

import asyncio

import psutil
import pytest
from served import ENDLESS, PROMPT, SHORT, TIMEOUT_S, dry_config, idle, until, whole, with_engine

from mini_infer import LLMEngine, RequestError, SamplingParams
from mini_infer.serving.link.wire import Delta
from mini_infer.serving.processes.async_engine import AsyncEngine, EngineDead, QueueFull
from mini_infer.serving.processes.launch import EngineProcess


@pytest.mark.parametrize("streaming", [True, False])
def test_tokens_texts_and_logprobs_equal_generate(engine_process: EngineProcess, streaming: bool) -> None:
    prompts = [list(b"hello"), list(b"a" * 100), list("naïve 日本".encode())]
    params = [
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=2.0, seed=3, max_tokens=60, logprobs=2, ignore_eos=True),
        SamplingParams(n=3, seed=5, temperature=3.0, max_tokens=50, stop=["a", "b"], stop_token_ids=[70]),
    ]
    expected = LLMEngine(dry_config()).generate(prompts, params)

    async def use(engine: AsyncEngine) -> list[list[Delta]]:
        streams = [engine.submit(p, own, streaming=streaming) for p, own in zip(prompts, params, strict=True)]
        results = await asyncio.gather(*map(whole, streams))
        for stream, output in zip(streams, expected, strict=True):
            assert stream.usage.prompt_tokens == len(output.prompt_token_ids)
            assert stream.usage.completion_tokens == sum(len(c.token_ids) for c in output.outputs)
        return results

    for completions, output in zip(with_engine(engine_process.socket_path, use), expected, strict=True):
        assert [(d.index, d.text, d.token_ids, d.logprobs, d.finish_reason, d.stop_reason) for d in completions] == [
            (c.index, c.text, c.token_ids, c.logprobs, c.finish_reason and c.finish_reason.value, c.stop_reason)
            for c in output.outputs
        ]


def test_deltas_come_as_the_tokens_do(engine_process: EngineProcess) -> None:
    async def use(engine: AsyncEngine) -> None:
        stream = engine.submit(PROMPT, ENDLESS)
        deltas = [await anext(stream) for _ in range(10)]
        stream.abort()
        assert all(delta.finish_reason is None for delta in deltas)
        # Tokens that come while nobody reads are one delta: how many there are by then is the machine's affair.
        assert sum(len(delta.token_ids) for delta in deltas) < dry_config().model.dry.max_model_len // 2
        assert len([delta async for delta in stream]) <= 1, "nothing comes after an abort"

    with_engine(engine_process.socket_path, use)


def test_a_thousand_requests_at_once(engine_process: EngineProcess) -> None:
    async def use(engine: AsyncEngine) -> None:
        streams = [engine.submit([i % 250, *PROMPT], SHORT, streaming=i % 2 == 0) for i in range(1000)]
        results = await asyncio.gather(*map(whole, streams))
        assert {len(delta.token_ids) for (delta,) in results} == {8}
        assert results[0][0].token_ids == results[250][0].token_ids
        await idle(engine)
        await until(lambda: engine.stats.kv_used_blocks == 0)

    with_engine(engine_process.socket_path, use)


def test_a_slow_reader_finds_one_delta_a_completion(engine_process: EngineProcess) -> None:
    async def use(engine: AsyncEngine) -> None:
        params = SamplingParams(n=2, temperature=0, max_tokens=30, ignore_eos=True, logprobs=0)
        stream = engine.submit(PROMPT, params)
        await idle(engine)
        deltas = [delta async for delta in stream]
        assert [delta.index for delta in deltas] == [0, 1]
        assert [len(delta.token_ids) for delta in deltas] == [30, 30]
        assert [len(delta.logprobs or ()) for delta in deltas] == [30, 30]
        assert len(deltas[0].text) == 30

    with_engine(engine_process.socket_path, use)


def test_the_prefix_cache_is_told(engine_process: EngineProcess) -> None:
    async def use(engine: AsyncEngine) -> None:
        first = engine.submit([9] * 64, SHORT, cache_salt="mine")
        await whole(first)
        again = engine.submit([9] * 64, SHORT, cache_salt="mine")
        await whole(again)
        assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 48)

    with_engine(engine_process.socket_path, use)


def test_a_refusal_costs_nobody_else_anything(engine_process: EngineProcess) -> None:
    async def use(engine: AsyncEngine) -> None:
        good = engine.submit(PROMPT, SHORT)
        bad = [engine.submit(PROMPT, SamplingParams(stop_token_ids=[10**6])), engine.submit([], SHORT)]
        with pytest.raises(RequestError, match="stop token id 1000000 is out of range") as refusal:
            await bad[0].ready()
        assert refusal.value.param == "stop_token_ids"
        with pytest.raises(RequestError, match="empty"):
            await anext(bad[1])
        with pytest.raises(RequestError, match="at most 4095"):
            engine.submit([1] * 4096, SHORT)
        with pytest.raises(RequestError, match="surrogates"):
            engine.submit(PROMPT, SHORT, cache_salt="\ud800")
        with pytest.raises(RequestError, match="cannot be sent"):
            engine.submit(PROMPT, SamplingParams(max_tokens=2**64))
        with pytest.raises(RequestError, match="priority must be an integer"):
            await whole(engine.submit(PROMPT, SHORT, priority=0.5))  # type: ignore[arg-type]
        for no_token in ("x", True):  # which would pass for 1 once it is packed
            with pytest.raises(RequestError, match=f"prompt token 1 is {no_token!r}"):
                await whole(engine.submit([1, no_token], SHORT))  # type: ignore[list-item]
        ((delta),) = await whole(good)
        assert len(delta.token_ids) == 8
        await idle(engine)

    with_engine(engine_process.socket_path, use)


def test_deadlines(engine_process: EngineProcess) -> None:
    async def use(engine: AsyncEngine) -> None:
        late, punctual = engine.submit(PROMPT, ENDLESS, deadline_s=0.05), engine.submit(PROMPT, SHORT, deadline_s=30)
        never = engine.submit(PROMPT, SamplingParams(n=2, max_tokens=None, ignore_eos=True), deadline_s=0.0)
        (cut,) = await whole(late)
        assert cut.finish_reason == "deadline"
        assert len(cut.text) > 0
        assert [delta.finish_reason for delta in await whole(punctual)] == ["length"]
        assert [delta.finish_reason for delta in await whole(never)] == ["deadline"] * 2
        await until(lambda: engine.stats.kv_used_blocks == 0)

    with_engine(engine_process.socket_path, use)


def test_a_cancelled_task_aborts(engine_process: EngineProcess) -> None:
    async def use(engine: AsyncEngine) -> None:
        tasks = [asyncio.ensure_future(whole(engine.submit(PROMPT, ENDLESS))) for _ in range(3)]
        await until(lambda: engine.stats.num_requests_running == 3)
        for task in tasks:
            task.cancel()
        await idle(engine)
        await until(lambda: engine.stats.num_requests_running == engine.stats.kv_used_blocks == 0)

    with_engine(engine_process.socket_path, use)


def test_the_queue_has_an_end_for_all_connections_together() -> None:
    async def main() -> None:
        engine = await AsyncEngine.start(dry_config(max_num_seqs=8), max_queued=2)
        other = await AsyncEngine.connect(engine.socket_path)
        running = [each.submit(PROMPT, ENDLESS) for each in (engine, other) for _ in range(4)]
        await asyncio.gather(*(stream.ready() for stream in running))
        waiting = [engine.submit(PROMPT, SHORT), other.submit(PROMPT, SHORT)]
        await until(lambda: engine.stats.num_requests_waiting == other.stats.num_requests_waiting == 2)
        for each in (engine, other):
            refused = each.submit(PROMPT, SHORT)
            with pytest.raises(QueueFull, match="2 requests wait, and 2 may") as full:
                await refused.ready()
            assert full.value.retry_after >= 1
        for stream in running:
            stream.abort()
        assert [len(d.token_ids) for stream in waiting for d in await whole(stream)] == [8, 8]
        # Nothing here waits for Stats: who may come is counted where the requests are.
        assert len(await whole(engine.submit(PROMPT, SamplingParams(n=11, max_tokens=2)))) == 11
        await other.close()
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))


def test_two_processes_at_once_and_what_one_does_the_other_sees(engine_process: EngineProcess) -> None:
    async def use(engine: AsyncEngine) -> None:
        other = await AsyncEngine.connect(engine.socket_path)
        streams = [each.submit(PROMPT, SHORT) for each in (engine, other, engine, other)]
        results = await asyncio.gather(*map(whole, streams))
        assert len({tuple(delta.token_ids) for (delta,) in results}) == 1
        running = other.submit(PROMPT, ENDLESS)
        await running.ready()
        await until(lambda: engine.stats.num_requests_running == 1)
        await other.close()
        with pytest.raises(EngineDead, match="closed"):
            other.submit(PROMPT, SHORT)
        await until(lambda: engine.stats.kv_used_blocks == 0)
        assert engine.failure is None

    with_engine(engine_process.socket_path, use)


def test_an_idle_engine_process_uses_no_cpu(engine_process: EngineProcess) -> None:
    async def use(engine: AsyncEngine) -> None:
        await whole(engine.submit(PROMPT, SHORT))
        await until(lambda: engine.stats.num_requests_running == 0)
        times = psutil.Process(engine_process.pid).cpu_times()
        await asyncio.sleep(0.4)
        later = psutil.Process(engine_process.pid).cpu_times()
        assert later.user + later.system - times.user - times.system <= 0.02

    with_engine(engine_process.socket_path, use)
