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
from functools import partial
from typing import Any

from experiments.lab.measure.schedule import Schedule, Sent
from experiments.lab.measure.traces import RequestTrace, Served
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
        self._items = items
        self._sleep = sleep
        self._prompts = [list(item.prompt) for item in items]
        self._params = [SamplingParams(temperature=0, max_tokens=item.output_tokens, ignore_eos=True) for item in items]
        self._index_of = {self._name(index): index for index in range(len(items))}
        self._sent: dict[int, Sent] = {}
        self._traces: dict[int, RequestTrace] = {}
        self._last_error = ""

    def _name(self, index: int) -> str:
        return f"{self._items[index].name or 'request'}-{index}"

    def run(self, concurrency: int) -> Served:
        engine = self._engine
        records: list[StepRecord] = []
        observe = records.append
        engine.observers.append(observe)
        try:
            start = engine.clock()
            schedule = Schedule(self._items, start, concurrency)
            self._loop(schedule)
            end = engine.clock()
        finally:
            engine.observers.remove(observe)
        traces = tuple(self._traces[index] for index in range(len(self._items)))
        first = min((trace.arrival for trace in traces), default=start)
        return Served(traces, first, end, tuple(records), in_flight_s=schedule.in_flight_s)

    def _loop(self, schedule: Schedule) -> None:
        engine, clock = self._engine, self._engine.clock
        failures = 0
        while len(self._traces) < len(self._items):
            arrived = schedule.deliver(clock, partial(self._send, schedule))
            due = schedule.next_due()
            if engine.has_unfinished_requests():
                try:
                    outputs, failures = engine.step(), 0
                except Exception as error:
                    failures += 1
                    if failures > len(self._items):  # each should have ended a request
                        raise
                    outputs, self._last_error = [], f"{type(error).__name__}: {error}"
                schedule.answered(clock())
                for output in outputs:
                    if output.finished:
                        self._end(schedule, output)
            elif due is not None:
                self._sleep(max(0.0, due - clock()))
            elif not arrived:  # else the engine has refused all that arrived, and others may take their places
                raise RuntimeError("the engine has nothing to do, and requests are missing")

    def _send(self, schedule: Schedule, index: int, sent: Sent) -> None:
        item = self._items[index]
        self._sent[index] = sent
        try:
            self._engine.add_request(
                self._prompts[index],
                self._params[index],
                request_id=self._name(index),
                priority=item.priority,
                arrival_time=sent.arrival,
                stream=False,
            )
        except RequestError as error:
            self._note(index, str(error))
            self._drop_followers(schedule, index)

    def _end(self, schedule: Schedule, output: RequestOutput) -> None:
        index = self._index_of[output.request_id]
        completion = output.outputs[0]
        assert completion.metrics is not None
        metrics, tokens = completion.metrics, tuple(completion.token_ids)
        error = self._why(completion.finish_reason)
        self._note(
            index,
            error,
            token_times=metrics.token_times,
            token_ids=tokens,
            cached_tokens=metrics.num_cached_tokens,
            first_scheduled=metrics.first_scheduled_time,
            preemptions=metrics.num_preemptions,
        )
        if error:
            self._drop_followers(schedule, index)
            return
        for follower in schedule.ended(index, metrics.token_times[-1]):
            self._prompts[follower] = [*self._prompts[index], *tokens, *self._prompts[follower]]

    def _why(self, reason: object) -> str:
        """Why a request ended, if not as it should have."""
        name = getattr(reason, "value", reason)
        if name == "error":
            return self._last_error or "the engine could not finish it"
        return "it was aborted" if name == "abort" else ""

    def _drop_followers(self, schedule: Schedule, index: int) -> None:
        for follower in schedule.lose(index):
            self._note(follower, "the request that it follows has no answer")

    def _note(self, index: int, error: str, **answer: Any) -> None:
        """What came of a request; of one that was never sent it counts as having arrived now."""
        item = self._items[index]
        now = self._engine.clock()
        self._traces[index] = RequestTrace(
            prompt_tokens=len(self._prompts[index]),
            asked_tokens=item.output_tokens,
            request_id=self._name(index),
            name=item.name,
            **self._sent.get(index, Sent(now, None, now))._asdict(),
            shared_tokens=item.shared_tokens,
            error=error,
            **{"token_times": (), "token_ids": (), **answer},
        )


def drive(engine: LLMEngine, items: Sequence[Item], concurrency: int, *, sleep: Sleep = time.sleep) -> Served:
    """Serves `items` greedily, each with exactly its output length.

    Args:
        concurrency: places of the closed loop; open-loop requests take none.
    """
    return Drive(engine, items, sleep).run(concurrency)
