"""Drives an engine through a workload on schedule, and notes what came of every request.

Two kinds of request, which may be mixed:
    closed loop   no arrival time: the next one arrives when there is a place among `concurrency` in flight
    open loop     it arrives at its scheduled time, however many are in flight, and its latency starts then

A request that follows another one (multi-turn) arrives `think_s` after that answer's last token, with that prompt and
the tokens that were really generated in front of its own. It is closed loop or open as its conversation's first one.

The engine runs in this thread, so a request can only be handed over between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from experiments.lab.measure.schedule import Outcomes
from experiments.lab.measure.traces import Served
from experiments.lab.workloads import Item
from mini_infer import LLMEngine, SamplingParams
from mini_infer.core.errors import RequestError
from mini_infer.core.plan import StepRecord
from mini_infer.core.request import RequestOutput

Sleep = Callable[[float], None]


class Drive:
    """One pass. Prompts and parameters are made before the clock starts."""

    def __init__(self, engine: LLMEngine, items: Sequence[Item], sleep: Sleep) -> None:
        self._engine = engine
        self._sleep = sleep
        names = [f"{item.name or 'request'}-{index}" for index, item in enumerate(items)]
        self._outcomes = Outcomes(items, names, engine.clock)
        self._params = [SamplingParams(temperature=0, max_tokens=item.output_tokens, ignore_eos=True) for item in items]
        self._adapters: Sequence[str | None] = list(engine.adapters) or [None]  # requests have them in turn
        self._index_of = {name: index for index, name in enumerate(names)}
        self._failures, self._last_error = 0, ""

    def run(self, concurrency: int) -> Served:
        engine = self._engine
        records: list[StepRecord] = []
        observe = records.append
        engine.observers.append(observe)
        try:
            return self._outcomes.run(concurrency, self._send, self._advance, records)
        finally:
            engine.observers.remove(observe)

    def _advance(self, due: float | None) -> bool:
        engine = self._engine
        if not engine.has_unfinished_requests():
            if due is not None:
                self._sleep(max(0.0, due - engine.clock()))
            return due is not None
        try:
            outputs, self._failures = engine.step(), 0
        except Exception as error:
            self._failures += 1
            if self._failures > len(self._outcomes.items):  # each should have ended a request
                raise
            outputs, self._last_error = [], f"{type(error).__name__}: {error}"
        self._outcomes.answered()
        for output in outputs:
            if output.finished:
                self._end(output)
        return True

    def _send(self, index: int) -> None:
        outcomes = self._outcomes
        try:
            self._engine.add_request(
                outcomes.prompts[index],
                self._params[index],
                request_id=outcomes.names[index],
                priority=outcomes.items[index].priority,
                adapter=self._adapters[index % len(self._adapters)],
                arrival_time=outcomes.sent[index].arrival,
                stream=False,
            )
        except RequestError as error:
            outcomes.end(index, str(error))

    def _end(self, output: RequestOutput) -> None:
        completion = output.outputs[0]
        assert completion.metrics is not None
        metrics = completion.metrics
        self._outcomes.end(
            self._index_of[output.request_id],
            self._why(completion.finish_reason),
            metrics.token_times,
            completion.token_ids,
            cached_tokens=metrics.num_cached_tokens,
            first_scheduled=metrics.first_scheduled_time,
            preemptions=metrics.num_preemptions,
        )

    def _why(self, reason: object) -> str:
        """Why a request ended, if not as it should have."""
        name = getattr(reason, "value", reason)
        if name == "error":
            return self._last_error or "the engine could not finish it"
        return "it was aborted" if name == "abort" else ""


def drive(engine: LLMEngine, items: Sequence[Item], concurrency: int, *, sleep: Sleep = time.sleep) -> Served:
    """Serves `items` greedily, each with exactly its output length.

    Args:
        concurrency: places of the closed loop; open-loop requests take none.
    """
    return Drive(engine, items, sleep).run(concurrency)
