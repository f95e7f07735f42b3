"""Random traffic through every pair of mechanisms (with -m soak: every combination): nothing is lost, and no request's
tokens change.

The dry model derives each token from the chain of all tokens before it, read through the block table, so one wrong
block, stale slot or lost swap shows in the output.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from integrity import check_scheduler
from pairwise import pairwise

from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.core.config import DryConfig, Policy
from mini_infer.core.model_config import DRY_TOKEN_BYTES
from mini_infer.core.plan import Draft, StepPlan, StepResult, Transfer
from mini_infer.core.request import CompletionOutput, FinishReason, Request, RequestOutput, TokenLogprob
from mini_infer.runtime.executor.dry import DryModel
from mini_infer.runtime.scheduler.prefix_loads import LoadCosts
from mini_infer.runtime.scheduler.scheduler import Scheduler
from mini_infer.runtime.worker.model_runner import Runner
from mini_infer.speculative.draft_model import DraftKV, DraftModel

MAX_LEN = 48
PREFIXES = [[65 + i % 20 for i in range(40)], [65 + i % 20 for i in range(18)] + [50] * 22, [97] * 40]


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str
    stream: bool
    abort_after: int | None  # steps after its arrival


def made_up(seed: int) -> tuple[list[int], SamplingParams]:
    rng = random.Random(seed)
    pick = rng.choice
    prefix = pick(PREFIXES)
    tail = [rng.randint(32, 126) for _ in range(rng.randint(0, 6))]
    prompt = (prefix[: rng.randint(0, len(prefix))] + tail)[: MAX_LEN - 1] or [33]
    return prompt, SamplingParams(
        n=pick([1, 1, 1, 3]),
        temperature=pick([0.0, 0.0, 1.5]),
        max_tokens=pick([rng.randint(1, 30), None]),
        min_tokens=pick([0, 1]),
        ignore_eos=pick([False, True]),
        seed=rng.randint(0, 3),
        stop_token_ids=pick([(), (65, 66, 67)]),
        stop=pick([(), (), ("a",), ("A", "ab", "Z"), ("e", "x1")]),
        include_stop_str_in_output=pick([False, True]),
        logprobs=pick([None, None, 1]),
        presence_penalty=pick([0.0, 0.0, 1.5]),
        frequency_penalty=pick([0.0, 0.0, 2.0]),
        repetition_penalty=pick([1.0, 1.0, 2.5]),
        logit_bias=pick([(), (), {65: 5.0, 66: -100.0}]),
        grammar=pick([None, None, None, "json_object", ("regex", "[A-F]{2,9}(x|yz)*")]),
        prompt_logprobs=pick([None, None, None, 0, 2]),
    )


# Each is run alone once, and in the company of any others in many histories.
REQUESTS = [made_up(seed) for seed in range(160)]


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    prompt, params = draw(st.sampled_from(REQUESTS))
    return Arrival(
        step=draw(st.integers(0, 25)),
        prompt=prompt,
        params=params,
        priority=draw(st.integers(0, 2)),
        cache_salt=draw(st.sampled_from(["", "", "salt"])),
        stream=draw(st.booleans()),
        abort_after=draw(st.one_of(st.none(), st.none(), st.integers(0, 20))),
    )


@st.composite
def machines(draw: st.DrawFn) -> dict[str, Any]:
    block_size = draw(st.sampled_from([1, 3, 4, 16]))
    smallest = -(-MAX_LEN // block_size)
    max_num_seqs = draw(st.integers(1, 6))
    return {
        "cache": {
            "block_size": block_size,
            "num_blocks": smallest + draw(st.integers(0, 2 * smallest)),
            "watermark": draw(st.sampled_from([0.0, 0.1])),
        },
        "scheduler": {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_seqs + draw(st.integers(0, 40)),
            "policy": draw(st.sampled_from([policy.value for policy in Policy])),
            "overlap": draw(st.sampled_from(["never", "always"])),
        },
        "stages": draw(st.integers(1, 3)),
        "swap": {"num_host_blocks": draw(st.one_of(st.none(), st.integers(1, smallest)))},
        "transfer_polls": draw(st.sampled_from([0, 1, 4])),
        "host_prefixes": draw(st.one_of(st.none(), st.integers(1, 4 * smallest))),  # blocks
        "files": draw(st.booleans()),
        "drafts": {
            "most": draw(st.sampled_from([0, 1, 3, 8])),
            "right": draw(st.sampled_from([0.5, 0.9, 1.0])),
            "model": draw(st.booleans()),
        },
    }


def make_engine(cache: dict[str, object], scheduler: dict[str, object], drafts: int = 0) -> LLMEngine:
    """With drafts there is room behind the longest request for so many tokens of padding."""
    dry = {"load_format": "dry", "dry": {"max_model_len": MAX_LEN}}
    speculation = {"method": "ngram", "num_tokens": drafts, "adaptive": False} if drafts else {}
    sections = {"model": dry, "cache": cache, "scheduler": scheduler, "speculation": speculation}
    return LLMEngine(EngineConfig.from_dict(sections))


class Inexact(DryModel):
    """A draft model: the target, but for some of its tokens. The states of its tokens are its own."""

    def __init__(self, right: float, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        super().__init__(DryConfig(), num_blocks, block_size, num_host_blocks)
        self._right = right

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().compute_logits(hidden)
        wrong = hidden % 100 >= 100 * self._right
        return torch.where(wrong[:, None], logits.roll(1, dims=1), logits)


class LateTransfers:
    """Copies as late as may be, so that blocks which were given away too early show: a transfer is made, and has ended,
    so many polls after its start."""

    def __init__(self, transfers: Any, polls: int) -> None:
        self._transfers, self._polls, self._num_polls = transfers, polls, 0
        self._waiting: deque[tuple[Transfer, int]] = deque()  # with the poll that ends each, oldest first

    def start(self, transfer: Transfer) -> None:
        self._waiting.append((transfer, self._num_polls + self._polls))
        self._make_due(wait=False)

    def poll(self, wait: bool = False) -> tuple[int, ...]:
        self._num_polls += 1
        self._make_due(wait)
        return self._transfers.poll(wait)

    def failed(self, ended: Sequence[int]) -> dict[int, list[int]]:
        return self._transfers.failed(ended)

    def _make_due(self, wait: bool) -> None:
        while self._waiting and (wait or self._waiting[0][1] <= self._num_polls):
            self._transfers.start(self._waiting.popleft()[0])


class BothModels:
    """Transfers of a target's blocks and of its draft model's: the latter arrive first."""

    def __init__(self, target: DryModel, draft: DryModel) -> None:
        self._target, self._draft = target, draft

    def start(self, transfer: Transfer) -> None:
        self._target.start(transfer)
        self._draft.start(transfer._replace(files=()))  # what comes from files has no draft's part, as DraftKV has it

    def poll(self, wait: bool = False) -> tuple[int, ...]:
        self._draft.poll(wait=True)
        return self._target.poll(wait)

    def failed(self, ended: Sequence[int]) -> dict[int, list[int]]:
        return self._target.failed(ended)


def with_draft_model(engine: LLMEngine, right: float) -> None:
    """Gives the engine one that computes what the scheduler asks it to."""
    runner, kv, states = engine.executor.runner, engine.scheduler.kv, engine.executor.runner._states
    draft = Inexact(right, kv.num_blocks, kv.block_size, kv.num_host_blocks)
    drafter = DraftModel(
        draft,  # type: ignore[arg-type]
        DraftKV(states.padding_index, states.max_model_len, kv.block_size, kv.num_blocks + 1, kv.num_host_blocks),
        states,
        runner._sampler,
        vocab_size=engine.vocab_size,
        max_tokens=engine.config.scheduler.max_num_batched_tokens,
    )
    transfers = BothModels(runner._model, draft)
    engine.executor.runner = Runner(runner._model, states, runner._sampler, transfers, drafter, follows=True)


@dataclass
class Produced:
    """What one completion has given its caller."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: FinishReason | None = None

    def take(self, completion: CompletionOutput) -> None:
        assert self.reason is None, "an output after the end"
        self.tokens += completion.token_ids_delta
        self.text += completion.text_delta
        self.logprobs += completion.logprobs_delta or []
        self.reason = completion.finish_reason
        assert (self.tokens, self.text) == (completion.token_ids, completion.text)
        if completion.logprobs is not None:
            assert [entry.token_id for entry in self.logprobs] == self.tokens


@dataclass
class Answer:
    """What one request has given its caller."""

    completions: list[Produced]
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def cut_short(self) -> bool:
        return any(completion.reason in (FinishReason.abort, FinishReason.error) for completion in self.completions)

    def take(self, output: RequestOutput) -> None:
        for completion in output.outputs:
            self.completions[completion.index].take(completion)
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "the prompt's log-probabilities came twice"
            self.prompt_logprobs = output.prompt_logprobs


class Oracle:
    """Proposes what the request will produce, as far as it tells the truth, or how many tokens a draft model is to
    propose. It knows nothing of a request's end, and changes its mind about whether there will be drafts."""

    def __init__(self, traffic: list[Arrival], most: int, right: float, model: bool) -> None:
        self._traffic, self.most, self._right = traffic, most, right
        self._random = random.Random(most)
        self.needs_tokens = not model
        self.num_booked = 0

    @property
    def waits(self) -> bool:
        return self.needs_tokens and self._random.random() < 0.7

    @property
    def keeps_up(self) -> bool:
        return self._random.random() < 0.7

    def plan(self, requests: Sequence[Request], prompts: bool) -> dict[int, Draft]:
        drafts = {}
        for index, request in enumerate(requests):
            length = self._random.randint(0, self.most)
            if not length or request.constraint is not None:
                continue
            if not self.needs_tokens:
                drafts[index] = Draft(length)
            elif request.num_in_flight == 1:
                drafts[index] = Draft(length, self._next(request, length))
        return drafts

    def _next(self, request: Request, length: int) -> list[int]:
        arrival = self._traffic[int(request.request_id[1:])]
        known = request.output_token_ids
        for completion in output_alone(arrival.prompt, arrival.params).outputs:
            if completion.token_ids[: len(known)] == known:
                tokens = completion.token_ids[len(known) : len(known) + length]
                return [
                    t if self._random.random() < self._right else 65 for t in tokens + [66] * (length - len(tokens))
                ]
        raise AssertionError(f"{request} is off its way")

    def book(self, rows: Sequence[Request], plan: StepPlan, result: StepResult, seconds: float | None) -> None:
        self.num_booked += plan.num_drafts
        for count, tokens in zip(plan.counts[: plan.num_decode_rows], result.tokens, strict=False):
            assert 1 <= len(tokens) <= count <= self.most + 1

    def forget(self, request: Request) -> None:
        pass


class Coin(LoadCosts):
    """Loads what host memory and files hold, or does not."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def loading_pays(self, source: Hashable, blocks: int, tokens: int) -> bool:
        return self._random.random() < 0.8


class SomeFiles(dict[bytes, bytes]):
    """Block files, without a disk: some cannot be written, and some are found broken when they are read."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def write(self, block_hash: bytes, parts: Sequence[memoryview]) -> bool:
        if self._random.random() < 0.9:
            self[block_hash] = bytes(parts[0])
        return block_hash in self

    def touch(self, hashes: Iterable[bytes]) -> None: ...

    def read(self, block_hash: bytes, parts: Sequence[memoryview]) -> bool:
        known = self.pop(block_hash) if self._random.random() < 0.2 else self.get(block_hash)
        parts[0][:] = self._random.randbytes(len(parts[0])) if known is None or block_hash not in self else known
        return block_hash in self


ROOMY = {"block_size": 16, "num_blocks": 100, "prefix_caching": False}
alone: dict[tuple, RequestOutput] = {}


def output_alone(prompt: list[int], params: SamplingParams) -> RequestOutput:
    """The request's output when nobody else is there and memory is plenty."""
    key = (tuple(prompt), params)
    if key not in alone:
        alone[key] = roomy_engine().generate([prompt], params)[0]
    return alone[key]


@functools.cache
def roomy_engine() -> LLMEngine:
    return make_engine(ROOMY, {"max_num_seqs": 4, "max_num_batched_tokens": 1024})


def drive(engine: LLMEngine, traffic: list[Arrival], failing_step: int | None, failing_verb: str) -> dict[str, Answer]:
    """Runs the traffic with integrity checked after every step. Returns each request's answer."""
    produced: dict[str, Answer] = {}
    runner = engine.executor.runner
    working = getattr(runner, failing_verb)
    for step in itertools.count():
        assert step < 3000, "the engine makes no progress"
        for number, arrival in enumerate(traffic):
            request_id = f"r{number}"
            if arrival.step == step:
                produced[request_id] = Answer([Produced() for _ in range(arrival.params.n)])
                engine.add_request(
                    arrival.prompt,
                    arrival.params,
                    request_id=request_id,
                    priority=arrival.priority,
                    cache_salt=arrival.cache_salt,
                    stream=arrival.stream,
                )
            if arrival.abort_after is not None and step == arrival.step + arrival.abort_after:
                engine.abort(request_id)
                check_scheduler(engine.scheduler)
        setattr(runner, failing_verb, planted_failure if step == failing_step else working)
        with contextlib.suppress(PlantedFailure):
            for output in engine.step():
                produced[output.request_id].take(output)
        check_scheduler(engine.scheduler)
        if not engine.has_unfinished_requests() and step > 45:
            return produced
    raise AssertionError


class PlantedFailure(Exception):
    pass


def planted_failure(_: object) -> None:
    raise PlantedFailure


AXES = ["continuous", "static"], [True, False], ["prefix", "plain", "contiguous"], ["recompute", "swap"]
OTHERS = [c for c in itertools.product(*AXES) if c not in pairwise(*AXES)]


@pytest.mark.parametrize(
    ("batching", "chunked", "cache", "preemption"),
    [*pairwise(*AXES), *(pytest.param(*c, marks=pytest.mark.soak) for c in OTHERS)],
)
@settings(settings.get_profile("heavy"))
@given(
    machine=machines(),
    traffic=st.lists(arrivals(), min_size=1, max_size=8),
    failing_step=st.one_of(st.none(), st.none(), st.integers(1, 20)),
    failing_verb=st.sampled_from(["launch", "collect"]),
)
def test_traffic_changes_no_token_and_loses_no_block(
    batching: str,
    chunked: bool,
    cache: str,
    preemption: str,
    machine: dict[str, Any],
    traffic: list[Arrival],
    failing_step: int | None,
    failing_verb: str,
) -> None:
    scheduler = {**machine["scheduler"], "batching": batching, "chunked_prefill": chunked, "preemption": preemption}
    if not chunked:
        scheduler["max_num_batched_tokens"] = MAX_LEN
    memory = {
        **machine["cache"],
        **(machine["swap"] if preemption == "swap" else {}),
        "prefix_caching": cache == "prefix",
        "layout": "contiguous" if cache == "contiguous" else "paged",
    }
    if cache == "prefix" and machine["host_prefixes"]:
        block_bytes = memory["block_size"] * DRY_TOKEN_BYTES
        memory["host_prefix_gib"] = machine["host_prefixes"] * block_bytes / 2**30
    oracle = Oracle(traffic, **machine["drafts"])
    engine = make_engine(memory, scheduler, oracle.most)
    if "host_prefix_gib" in memory and machine["files"]:
        engine.executor.files = engine.executor.runner._model._files = SomeFiles(len(traffic))  # type: ignore
    engine.executor.stages = machine["stages"]
    if machine["stages"] > 1 and oracle.most:  # as a Worker has it
        engine.executor.overlap = False
    if oracle.most and machine["drafts"]["model"]:
        with_draft_model(engine, machine["drafts"]["right"])
    runner = engine.executor.runner
    runner.transfers = LateTransfers(runner.transfers, machine["transfer_polls"])  # type: ignore[assignment]
    make_scheduler = engine._make_scheduler

    def make_speculating_scheduler() -> Scheduler:
        made = make_scheduler()
        made.speculator = oracle
        made._loads.costs = Coin(len(traffic))  # type: ignore[assignment]
        return made

    engine.core._make_scheduler = make_speculating_scheduler
    engine.core.scheduler = make_speculating_scheduler()
    produced = drive(engine, traffic, failing_step, failing_verb)

    for number, arrival in enumerate(traffic):
        expected = output_alone(arrival.prompt, arrival.params)
        answer = produced[f"r{number}"]
        for got, whole in zip(answer.completions, expected.outputs, strict=True):
            assert got.reason is not None, "a completion never finished"
            if got.reason is FinishReason.abort:
                assert arrival.abort_after is not None
            elif got.reason is FinishReason.error:
                assert failing_step is not None
            else:
                assert (got.tokens, got.text, got.reason) == (whole.token_ids, whole.text, whole.finish_reason)
            # Who ends early has produced a beginning of what it would have produced.
            assert got.tokens == whole.token_ids[: len(got.tokens)]
        if answer.prompt_logprobs is not None or not (answer.cut_short or expected.prompt_logprobs is None):
            assert answer.prompt_logprobs == expected.prompt_logprobs
    kv = engine.scheduler.kv
    for transfer_id in engine.executor.runner.transfers.poll(wait=True):  # of requests that ended meanwhile
        kv.end_transfer(transfer_id)
    assert failing_step is not None or not kv.transfers.local, "a transfer was never started, or its end never told"
    for transfer_id in kv.transfers.local:
        kv.end_transfer(transfer_id)
    usage = engine.scheduler.usage()
    assert usage.used_blocks == usage.used_slots == usage.host_blocks_used == 0
    assert engine.scheduler.num_unfinished == 0
    assert sum(sum(r.accepted) for r in engine.records) <= sum(sum(r.drafted) for r in engine.records)
    if failing_step is None and not any(a.abort_after is not None for a in traffic):
        assert sum(sum(r.drafted) for r in engine.records) == oracle.num_booked
    assert not engine._outputs.unfinished()


def test_records_tell_of_preemptions_in_steps_that_compute_nothing() -> None:
    """Who needs a block is the last and gives way, while the one before it waits for what its grammar reads."""
    memory = {"block_size": 4, "num_blocks": 8, "watermark": 0.0, "prefix_caching": False}
    dry = {"load_format": "dry", "dry": {"max_model_len": 32}}
    scheduler = {"overlap": "always", "max_num_seqs": 2}
    engine = LLMEngine(EngineConfig.from_dict({"model": dry, "cache": memory, "scheduler": scheduler}))
    constrained = SamplingParams(max_tokens=20, temperature=0, grammar=("regex", "[a-z]{30}"))
    free = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    outputs = engine.generate([[65], [66] * 2], [constrained, free])
    counts = [output.outputs[0].metrics.num_preemptions for output in outputs]  # type: ignore[union-attr]
    assert sum(len(record.preempted) for record in engine.records) == sum(counts) > 0
