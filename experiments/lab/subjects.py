"""What can be measured: the engine, or a peer that serves the same requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from experiments.lab.metrics import RequestTrace, Served
from experiments.lab.workloads import Item
from mini_infer import LLMEngine, SamplingParams
from mini_infer.core.config import EngineConfig


class Kind(str, Enum):
    engine = "engine"  # mini-infer
    hf = "hf"  # transformers.generate over static, left-padded batches


class Subject(Protocol):
    def serve(self, items: Sequence[Item], concurrency: int) -> Served:
        """Greedy tokens for every item, in the items' order, with at most `concurrency` requests in flight."""
        ...

    def close(self) -> None: ...


class EngineSubject:
    """A closed loop around one engine: a request arrives when an earlier one has left."""

    def __init__(self, config: EngineConfig) -> None:
        self._engine = LLMEngine(config)

    def serve(self, items: Sequence[Item], concurrency: int) -> Served:
        engine = self._engine
        due = deque(enumerate(items))
        index_of: dict[str, int] = {}
        traces: dict[int, RequestTrace] = {}
        start = engine.clock()
        while len(traces) < len(items):
            while due and len(index_of) - len(traces) < concurrency:
                index, item = due.popleft()
                params = SamplingParams(temperature=0, max_tokens=item.output_tokens, ignore_eos=True)
                request_id = engine.add_request(list(item.prompt), params, arrival_time=engine.clock(), stream=False)
                index_of[request_id] = index
            for output in engine.step():
                if output.finished:
                    index = index_of[output.request_id]
                    metrics = output.outputs[0].metrics
                    assert metrics is not None
                    traces[index] = RequestTrace(
                        prompt_tokens=len(output.prompt_token_ids),
                        asked_tokens=items[index].output_tokens,
                        arrival=metrics.arrival_time,
                        token_times=metrics.token_times,
                        token_ids=tuple(output.outputs[0].token_ids),
                        cached_tokens=metrics.num_cached_tokens,
                    )
        end = engine.clock()
        return Served(tuple(traces[i] for i in range(len(items))), start, end)

    def close(self) -> None:
        self._engine.close()


def open_subject(kind: Kind, config: EngineConfig) -> Subject:
    if kind is Kind.hf:
        from experiments.lab.peers.hf import HFGenerate  # it imports all of transformers

        return HFGenerate(config.model)
    return EngineSubject(config)
