"""The runner between scheduler and device: what it waits for."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.core.plan import PromptLogprobs, Push, StepPlan, Transfer
from mini_infer.runtime.graphs.step_graphs import BatchDescriptor
from mini_infer.runtime.worker import model_runner


class FakeEvents:
    """Stands for a device that is done with nothing before somebody waits for it."""

    def __init__(self) -> None:
        self.waiting: list[FakeEvents.Event] = []
        self.waited = 0

    class Event:
        def __init__(self, events: FakeEvents) -> None:
            self._events = events

        def synchronize(self) -> None:
            self._events.waiting.remove(self)
            self._events.waited += 1

    def record(self, device: object) -> Event:
        self.waiting.append(self.Event(self))
        return self.waiting[-1]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> FakeEvents:
    fake = FakeEvents()
    monkeypatch.setattr(model_runner, "record_event", fake.record)
    return fake


def make(overlap: str = "always", **sections: Any) -> LLMEngine:
    scheduler = {"overlap": overlap, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    return LLMEngine(EngineConfig.from_dict({"model": {"load_format": "dry"}, "scheduler": scheduler, **sections}))


@pytest.mark.parametrize(("overlap", "most"), [("always", 1), ("never", 0)])
def test_no_chunk_of_a_prompt_lets_the_host_run_ahead(events: FakeEvents, overlap: str, most: int) -> None:
    """A chunk that samples nothing is waited for as any step is: twenty of them are never in flight at once."""
    engine = make(overlap)
    engine.add_request([65 + i % 20 for i in range(320)], SamplingParams(temperature=0, max_tokens=4))
    while engine.has_unfinished_requests():
        engine.step()
        assert len(events.waiting) <= most
    assert events.waited >= 20 + 3


@pytest.mark.parametrize("speculation", [{}, {"method": "ngram", "num_tokens": 2, "adaptive": False}])
def test_every_launched_step_has_an_event_of_its_own(events: FakeEvents, speculation: dict[str, Any]) -> None:
    engine = make(speculation=speculation)
    prompts = [[65, 66, 67] * 9, [70] * 40, [80, 81]]
    engine.generate(prompts, SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=0))
    assert events.waited == len(engine.records) > 0


def test_a_plan_without_rows_is_waited_for(events: FakeEvents) -> None:
    runner = make(scheduler={"preemption": "swap"}).executor.runner
    launched = runner.launch(StepPlan(0, [], [], [], [], 0, transfers=[Transfer(1, True, [(0, 0)])]))
    assert len(events.waiting) == 1
    assert runner.collect(launched).tokens == []
    assert not events.waiting


def test_rows_with_adapters_run_no_graph_that_has_none() -> None:
    """Where memory was left for the graphs of steps without adapters alone."""
    runner: Any = make().executor.runner
    drafts = StepPlan.alike(2, 4, 3, decode=True)
    runner._follows = True
    runner.graphs._captured = {BatchDescriptor(2, 3): None}
    assert runner._rows_alone(drafts) in runner.graphs._captured
    runner._model.adapters = SimpleNamespace(active=True)
    assert runner._rows_alone(drafts) == BatchDescriptor(2, 3, adapted=True)
    assert runner._rows_with_drafts(drafts)[1] == BatchDescriptor(2, 3, adapted=True)


@pytest.mark.parametrize("overlap", ["always", "never"])
def test_the_next_step_finds_the_memory_of_the_logits_free(overlap: str) -> None:
    """They take more than anything else, and in another step's way they would leave a hole that fits nothing."""
    shape = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16}
    shape |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    engine = make(overlap, model={"load_format": "dummy", "hf_config": shape, "device": "cpu"})
    model: Any = engine.executor.runner.model
    forward, compute_logits, given, alive = model.forward, model.compute_logits, [], []

    def noted_forward(*args: Any) -> Any:
        alive.append(sum(logits() is not None for logits in given))
        return forward(*args)

    def noted_logits(*args: Any) -> Any:
        logits = compute_logits(*args)
        given.append(weakref.ref(logits))
        return logits

    model.forward, model.compute_logits = noted_forward, noted_logits
    engine.generate([[1] * 20, [2] * 9, [3] * 4], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert len(given) >= 6
    assert not any(alive), alive


def test_a_prompt_that_was_found_but_for_its_last_token_is_a_row_like_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no step of another kind, for which all others would wait, and what it gets is the same."""
    shape = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    engine = make(model={"load_format": "dummy", "hf_config": shape, "device": "cpu"}, cache={"prefix_caching": True})
    runner: Any = engine.executor.runner
    prompts = [[1 + i % 60 for i in range(first, first + 16)] + [7] for first in (0, 20, 40)]
    params = [
        SamplingParams(temperature=temperature, seed=1, max_tokens=5, ignore_eos=True, logprobs=3)
        for temperature in (0.0, 1.0, 0.7)
    ]
    apart = [engine.generate([prompt], one)[0].outputs[0] for prompt, one in zip(prompts, params, strict=True)]
    ran, run = list[tuple[int, int]](), runner.graphs.run
    monkeypatch.setattr(runner.graphs, "fit", lambda rows, length, adapted: BatchDescriptor(rows + 1, length, adapted))
    monkeypatch.setattr(runner.graphs, "run", lambda d, *drafts: ran.append(d[:2]) or run(d, *drafts))
    since = len(engine.records)
    found = [output.outputs[0] for output in engine.generate(prompts, params)]
    assert [each.token_ids for each in found] == [each.token_ids for each in apart]
    for one, other in zip(found, apart, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert [entry.logprob for entry in one.logprobs] == pytest.approx([entry.logprob for entry in other.logprobs])
    assert sum(record.prefix_hit_tokens for record in list(engine.records)[since:]) == 3 * 16
    assert len(ran) == len(engine.records) - since, "every step was one of rows alone"


def test_when_a_step_with_prompts_is_one_of_rows_alone() -> None:
    one_left = StepPlan(0, [0, 1], [5, 16], [1, 1], [True, True], num_decode_rows=1)
    assert one_left.as_decode_rows() == one_left._replace(num_decode_rows=2)
    running = StepPlan.alike(2, 4, 3, decode=True)
    assert running.as_decode_rows() is running
    others = [
        one_left._replace(counts=[1, 2]),
        one_left._replace(samples=[True, False]),  # the first token of a longer prompt
        one_left._replace(counts=[2, 1], num_drafts=1),
        one_left._replace(keeps_up=True),  # a draft model wants the prompt
        one_left._replace(pushes=[Push(1, [(0, 0)])]),  # layer by layer to another engine
        one_left._replace(prompt_logprobs=[PromptLogprobs(1, 1, 0)]),
    ]
    assert [plan.as_decode_rows() for plan in others] == [None] * len(others)
