"""Two stages on one GPU, in one process: hidden states, tokens, graphs and overlap as between two."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.core.limits import settle_limits
from mini_infer.core.plan import StepPlan, StepResult
from mini_infer.parallel.context import ParallelContext
from mini_infer.runtime import llm_engine
from mini_infer.runtime.executor.base import Executor
from mini_infer.runtime.worker import worker as workers

pytestmark = pytest.mark.gpu

PROMPTS = ["def read(path):\n    with open(", "import os\n\nclass Cache:", "for i in range("] * 3
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=48, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, prompt_logprobs=1),
] * 3


class OwnPipe:
    """Of both stages, which run one after the other."""

    def __init__(self) -> None:
        self.hidden: deque[torch.Tensor] = deque()
        self.tokens: deque[torch.Tensor] = deque()

    def send(self, hidden: torch.Tensor) -> None:
        self.hidden.append(hidden)

    def receive(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        hidden = self.hidden.popleft()
        assert (hidden.shape, hidden.dtype) == (shape, dtype)
        return hidden

    def tell(self, token_ids: torch.Tensor) -> None:
        self.tokens.append(token_ids)

    def hear(self, count: int) -> torch.Tensor:
        token_ids = self.tokens.popleft()
        assert token_ids.shape == (count,)
        return token_ids


class InOneProcess(Executor):
    step_costs: Any = None  # without drafts nobody asks

    def __init__(self, config: EngineConfig) -> None:
        pipe: Any = OwnPipe()
        stages = [workers.Worker(config, ParallelContext(stage=stage, stages=2, pipe=pipe)) for stage in (0, 1)]
        self._first, self._last = stages
        spec = self._last.target.spec
        self.limits = settle_limits(config, spec.max_model_len, 10**6, 1)
        for stage in stages:
            stage.load(self.limits.max_model_len)
            stage.allocate(self.limits)
            stage.capture()
        self.tokenizer, self.vocab_size = self._last.tokenizer, spec.vocab_size
        self.eos_token_ids = self._last.eos_token_ids
        self.overlap, self.stages, self.startup = self._last.overlap, 2, self._last.report()

    def launch(self, plan: StepPlan) -> Any:
        return self._first.runner.launch(plan), self._last.runner.launch(plan)

    def collect(self, handle: Any) -> StepResult:
        self._first.runner.collect(handle[0])
        return self._last.runner.collect(handle[1])


def answers(**sections: Any) -> list[Any]:
    values = {"model": {"path": "tiny-target"}, "seed": 0, "cache": {"num_blocks": 256}, **sections}
    engine = LLMEngine(EngineConfig.from_dict(values))
    outputs = engine.generate(PROMPTS, PARAMS)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"scheduler": {"overlap": "never"}},
        {"graphs": {"capture": "never"}},
        {"scheduler": {"max_num_batched_tokens": 16, "max_num_seqs": 8}},
        {"cache": {"num_blocks": 20, "num_host_blocks": 64}, "scheduler": {"preemption": "swap"}},
    ],
)
def test_two_stages_give_the_bits_of_one(monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any]) -> None:
    model = {"path": "tiny-target", "max_model_len": 128}
    expected = answers(numerics="batch_invariant", model=model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(workers, "resolve_device", lambda *given: device)
    monkeypatch.setattr(llm_engine, "make_executor", InOneProcess)
    assert answers(numerics="batch_invariant", model=model, **sections) == expected
