"""Random histories of an engine that decodes and one that computes prompts for it, on the dry model: whatever is late,
ends or dies, every request gets the tokens that it gets alone, and no block is lost on either side.

The dry model derives each token from the chain of all tokens before it, read through the block table: a block that
arrived wrong, in part, or in somebody else's place changes every token that follows.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from engine_pair import PREFILL, Pair, shuffled_turns
from integrity import check_scheduler

from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.core.config import replace
from mini_infer.core.model_config import DRY_TOKEN_BYTES
from mini_infer.core.plan import StepPlan, StepResult
from mini_infer.core.request import FinishReason, TokenLogprob
from mini_infer.runtime.scheduler.prefix_loads import LoadCosts
from mini_infer.transfer.protocol import Ask

MAX_LEN = 40
FAULTS = ["none", "none", "cut", "lose a write", "kill prefill", "kill decode", "fail prefill", "fail decode"]
HISTORIES_A_PAIR = 25  # engines live on: what one history leaves behind shows in the next


def config(rng: random.Random, files: Path | None = None) -> EngineConfig:
    """`files`: where it may keep prefixes."""
    block_size = rng.choice([1, 3, 4, 16])
    least = -(-MAX_LEN // block_size)
    seqs = rng.randint(1, 5)
    caching = rng.random() < 0.7
    tiers: dict[str, Any] = {}
    if caching and rng.random() < 0.5:
        tiers["host_prefix_gib"] = rng.randint(1, 2 * least) * block_size * DRY_TOKEN_BYTES / 2**30
        if files is not None and rng.random() < 0.5:
            tiers["disk_prefix_path"] = str(files)
    return EngineConfig.from_dict(
        {
            "model": {"load_format": "dry", "dry": {"max_model_len": MAX_LEN}},
            "cache": {
                "block_size": block_size,
                "num_blocks": least + rng.randint(0, 2 * least),
                "prefix_caching": caching,
                "watermark": rng.choice([0.0, 0.1]),
                **tiers,
            },
            "scheduler": {
                "max_num_seqs": seqs,
                "max_num_batched_tokens": seqs + rng.randint(0, 30),
                "policy": rng.choice(["fcfs", "priority"]),
                "preemption": rng.choice(["recompute", "recompute", "swap"]),
                "overlap": rng.choice(["never", "always"]),
            },
            "parallel": {
                "connector": rng.choice(["memory", "stream", "nixl"]),
                "hand_over": rng.choice(["always", "always", "auto"]),
            },
        }
    )


PREFIXES = [[65 + i % 20 for i in range(30)], [97] * 30]


@cache
def made_up(seed: int) -> tuple[list[int], SamplingParams]:
    rng = random.Random(seed)
    tail = [rng.randint(32, 126) for _ in range(rng.randint(0, 6))]
    prompt = rng.choice(PREFIXES)[: rng.randint(0, 30)] + tail or [33]
    params = SamplingParams(
        n=rng.choice([1, 1, 1, 2]),
        temperature=rng.choice([0.0, 1.5]),
        max_tokens=rng.randint(1, 12),
        seed=rng.randint(0, 3),
        logprobs=rng.choice([None, None, 1]),
        presence_penalty=rng.choice([0.0, 1.5]),
        repetition_penalty=rng.choice([1.0, 2.5]),
        grammar=rng.choice([None, None, None, ("regex", "[A-F]{2,9}(x|yz)*")]),
        prompt_logprobs=rng.choice([None, None, None, None, 1]),
    )
    return prompt, params


@cache
def alone() -> LLMEngine:
    dry = {"load_format": "dry", "dry": {"max_model_len": MAX_LEN}}
    return LLMEngine(EngineConfig.from_dict({"model": dry, "cache": {"num_blocks": 64, "prefix_caching": False}}))


Sampled = tuple[int, TokenLogprob | None]


@cache
def sampled_alone(seed: int) -> list[list[Sampled]]:
    prompt, params = made_up(seed)
    return [
        sampled(completion.token_ids, completion.logprobs)
        for completion in alone().generate([prompt], params)[0].outputs
    ]


def sampled(tokens: list[int], logprobs: list[TokenLogprob] | None) -> list[Sampled]:
    return list(zip(tokens, [None] * len(tokens) if logprobs is None else logprobs, strict=True))


class Planted(Exception):
    pass


def planted(_: object) -> None:
    raise Planted


def live(rng: random.Random, pair: Pair) -> None:
    """A history, from an idle pair to an idle pair."""
    fault, fault_at = rng.choice(FAULTS), rng.randint(0, 12)
    arrivals = [(rng.randint(0, 10), rng.randint(0, 59), rng.random() < 0.2) for _ in range(rng.randint(1, 6))]
    gone: set[str] = set()
    found: dict[str, dict[int, list[Sampled]]] = {}
    reasons: dict[str, set[FinishReason | None]] = {}
    for turn in itertools.count():
        assert turn < 2000, "the engines make no progress"
        for number, (at, seed, leaves) in enumerate(arrivals):
            name = f"r{number}"
            if at == turn:
                prompt, params = made_up(seed)
                found[name], reasons[name] = {}, set()
                about = {"priority": rng.randint(0, 2), "cache_salt": rng.choice(["", "", "salt"])}
                pair.decode.add_request(prompt, params, request_id=name, prefill_at=PREFILL, **about)
            if leaves and turn == at + 4:
                gone.add(name)
                pair.decode.abort(name)
        engine = pair.prefill if fault == "fail prefill" else pair.decode if fault == "fail decode" else None
        runner = None if engine is None else engine.executor.runner
        if turn == fault_at:
            if fault == "cut":
                for wire in pair.wires:
                    wire.cut()
            elif fault == "lose a write":
                pair.lose_a_write()
            elif fault == "kill prefill":
                pair.kill_prefill()
            elif fault == "kill decode":
                gone.update(found)
                pair.kill_decode()
            elif runner is not None:
                runner.launch = planted  # type: ignore[method-assign]
        if turn == fault_at + 6 and pair.sender is None:
            pair.start_prefill()
        with contextlib.suppress(Planted):
            shuffled_turns(rng, pair)
        with contextlib.suppress(Planted):
            for output in pair.step():
                for completion in output.outputs:
                    new = sampled(completion.token_ids_delta, completion.logprobs_delta)
                    found[output.request_id].setdefault(completion.index, []).extend(new)
                    reasons[output.request_id].add(completion.finish_reason)
        if turn == fault_at + 2 and runner is not None:
            vars(runner).pop("launch", None)
        check_scheduler(pair.decode.scheduler)
        if turn > 15 and not pair.decode.has_unfinished_requests():
            break
    pair.settle()
    for number, (_, seed, _) in enumerate(arrivals):
        name = f"r{number}"
        for index, expected in enumerate(sampled_alone(seed)):
            got = found[name].get(index, [])
            failed = FinishReason.error in reasons[name]
            assert not failed or fault == "fail decode"
            whole = not failed and name not in gone
            assert got == (expected if whole else expected[: len(got)]), (name, fault)
    pair.check_empty()


def test_an_engine_that_is_unlike_computes_nothing_for_others(nixl: None, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(0)
    pair = Pair(config(rng))
    assert pair.sender is not None
    pair.sender._about = {**pair.sender._about, "cache.block_size": "999"}
    for number in range(2):
        prompt, params = made_up(number)
        pair.decode.add_request(prompt, params, request_id=f"r{number}", prefill_at=PREFILL)
        while pair.decode.has_unfinished_requests():
            pair.step()
            shuffled_turns(rng, pair)
    pair.settle()
    pair.check_empty()
    assert pair.receiver.num_received == 0
    assert pair.receiver.num_failed == 2
    assert [r.message for r in caplog.records if "unlike" in r.message] == [
        "prompts are computed here, since the engine for prompts is unlike this one: cache.block_size is "
        f"{pair.decode.config.cache.block_size} there and 999 here"
    ]


def test_nothing_is_left_of_an_engine_whose_memory_not_all_ranks_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    pair = Pair(replace(config(rng), parallel={"connector": "memory", "hand_over": "always"}))
    assert pair.sender is not None
    pusher, connect = pair.sender._pusher, pair.sender._pusher.connect
    monkeypatch.setattr(pusher, "connect", lambda *about: connect(*about) and False)
    prompt, params = made_up(0)
    pair.decode.add_request(prompt, params, request_id="r", prefill_at=PREFILL)
    while pair.decode.has_unfinished_requests():
        pair.step()
        shuffled_turns(rng, pair)
    assert pair.receiver.num_failed == 1
    assert not pusher._ends


def test_nobody_is_asked_to_write_where_a_step_under_way_still_does(nixl: None) -> None:
    """A request ends while the device computes a step of it, and its blocks are the next one's."""
    settings = {"scheduler": {"overlap": "always", "max_num_seqs": 4}, "cache": {"block_size": 4, "num_blocks": 24}}
    parallel = {"connector": "memory", "hand_over": "always"}
    rng = random.Random(0)
    pair = Pair(replace(config(rng), **settings, parallel=parallel))
    pair.decode.add_request([65] * 9, SamplingParams(max_tokens=12, ignore_eos=True), request_id="a")
    pair.step()
    pair.step()
    (under_way,) = pair.decode.scheduler.planned.values()
    assert [request.request_id for request in under_way.rows] == ["a"]
    table = list(under_way.rows[0].block_table)
    said: list[list[Ask]] = []
    runner = pair.decode.executor.runner
    collect = runner.collect

    def late(plan: StepPlan) -> StepResult:
        said.append([message for wire in pair.wires for message, _ in wire.there if isinstance(message, Ask)])
        return collect(plan)

    runner.collect = late  # type: ignore[method-assign]
    pair.decode.abort("a")
    prompt, params = made_up(1)
    prompt = [66] * 9 + prompt
    pair.decode.add_request(prompt, params, request_id="b", prefill_at=PREFILL)
    pair.step()
    assert said == [[]], "the step of a is over before anybody is asked"
    pair.step()
    (ask,) = [message for wire in pair.wires for message, _ in wire.there if isinstance(message, Ask)]
    assert set(ask.blocks) & set(table), "as this test means it"
    tokens: list[int] = []
    while pair.decode.has_unfinished_requests():
        shuffled_turns(rng, pair)
        tokens += [token for output in pair.step() for each in output.outputs for token in each.token_ids_delta]
    assert tokens == alone().generate([prompt], params)[0].outputs[0].token_ids
    pair.settle()
    pair.check_empty()


def test_a_step_of_the_last_one_is_over_before_the_engine_is_idle(nixl: None) -> None:
    """Also one that is not needed any more, since whoever comes next may be asked for at once."""
    settings = {"scheduler": {"overlap": "always"}, "cache": {"num_blocks": 24}}
    pair = Pair(replace(config(random.Random(0)), **settings))
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    *others, last = alone().generate([[65] * 9], greedy)[0].outputs[0].token_ids
    assert last not in others
    runner, counted = pair.decode.executor.runner, Counter[str]()

    def count(name: str, own: Any, plan: StepPlan) -> Any:
        counted[name] += 1
        return own(plan)

    for name in ("launch", "collect"):
        setattr(runner, name, partial(count, name, getattr(runner, name)))
    stopped = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[last])
    pair.decode.add_request([65] * 9, stopped, request_id="a")
    while pair.decode.has_unfinished_requests():
        pair.step()
    assert not pair.decode.scheduler.planned
    assert counted == {"launch": 4, "collect": 4}, "one more than it has tokens"


def test_one_that_is_not_sent_yet_is_taken_back_at_once(nixl: None) -> None:
    settings = {"scheduler": {"overlap": "always"}, "cache": {"block_size": 4, "num_blocks": 24}}
    pair = Pair(replace(config(random.Random(0)), **settings, parallel={"connector": "memory", "hand_over": "always"}))
    pair.decode.add_request([65] * 9, SamplingParams(max_tokens=12, ignore_eos=True), request_id="a")
    pair.step()
    pair.decode.add_request([66] * 9, SamplingParams(max_tokens=2), request_id="b", prefill_at=PREFILL)
    plan = pair.decode.scheduler.schedule()
    assert [step for step, _ in pair.decode.scheduler._elsewhere._asks] == [plan.step]
    pair.decode.abort("b")
    assert not pair.decode.scheduler._elsewhere._asks
    assert not pair.decode.scheduler.kv.transfers
    assert not any(wire.there for wire in pair.wires)


def run(seed: int, histories: int, files: Path) -> Counter[str]:
    """What came from elsewhere: prompts from the other engine, tokens from tiers."""
    rng, came = random.Random(seed), Counter[str]()
    for first in range(0, histories, HISTORIES_A_PAIR):
        pair = Pair(config(rng, files))
        for _ in range(min(HISTORIES_A_PAIR, histories - first)):
            live(rng, pair)
        for engine in (*pair.dead, pair.decode):
            came["prompts"] += engine.receiver.num_received
            for tier in ("host", "disk"):
                came[tier] += sum(getattr(record, f"{tier}_hit_tokens") for record in engine.records)
        pair.kill_prefill()
        pair.receiver.close()
    return came


@pytest.fixture
def loads_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the clock says."""
    monkeypatch.setattr(LoadCosts, "loading_pays", lambda *known: True)


def test_no_token_changes_and_no_block_is_lost(nixl: None, loads_pay: None, tmp_path: Path) -> None:
    came = run(9, 50, tmp_path)
    assert came["prompts"] > 20
    assert min(came["host"], came["disk"]) > 20


@pytest.mark.soak
def test_ten_thousand_histories(nixl: None, loads_pay: None, tmp_path: Path) -> None:
    came = run(2, 10_000, tmp_path)
    assert came["prompts"] > 5_000
    assert min(came["host"], came["disk"]) > 1_000


def test_records_tell_of_hits_of_a_prompt_whose_rest_is_computed_elsewhere(nixl: None) -> None:
    """Nothing is computed in the step that admits it."""
    cache = {
        "block_size": 4,
        "num_blocks": 64,
        "prefix_caching": True,
        "host_prefix_gib": None,
        "disk_prefix_path": None,
    }
    parallel = {"connector": "memory", "hand_over": "always"}
    pair = Pair(replace(config(random.Random(0)), cache=cache, parallel=parallel))
    cached = []
    for tail in (66, 67):
        params = SamplingParams(max_tokens=2, temperature=0)
        pair.decode.add_request([65] * 24 + [tail] * 8, params, prefill_at=PREFILL, stream=False)
        while pair.decode.has_unfinished_requests():
            cached += [output.outputs[0].metrics.num_cached_tokens for output in pair.step()]  # type: ignore[union-attr]
            pair.step_prefill()
            for wire in list(pair.wires):
                pair.deliver(wire, back=False)
                pair.deliver(wire, back=True)
    assert cached == [0, 24]
    assert sum(record.prefix_hit_tokens for record in pair.decode.records) == 24
    assert sum(record.prefix_queried_tokens for record in pair.decode.records) == 64
