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
from mini_infer.core.plan import StepRecord
from mini_infer.core.request import FinishReason, RequestOutput


def drive(
    engine: LLMEngine,
    items: Sequence[Item],
    concurrency: int,
    *,
    tell: Callable[[int, int], None] = lambda ended, total: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Served:
    """Serves `items` greedily, each with exactly its output length. Prompts and parameters are made before the clock
    starts. The closed loop has `concurrency` places, the open one needs none. After each step `tell` is told how many
    requests have ended, of how many."""
    outcomes, records = Outcomes(items, engine.clock), list[StepRecord]()
    params = [SamplingParams(temperature=0, max_tokens=item.output_tokens, ignore_eos=True) for item in items]
    adapters: Sequence[str | None] = list(engine.adapters) or [None]  # requests have them in turn
    failures, last_error = 0, ""

    def send(index: int) -> None:
        engine.add_request(
            outcomes.prompts[index],
            params[index],
            request_id=outcomes.names[index],
            priority=items[index].priority,
            adapter=adapters[index % len(adapters)],
            arrival_time=outcomes.sent[index].arrival,
            stream=False,
        )

    def advance(due: float | None) -> bool:
        nonlocal failures, last_error
        if not engine.has_unfinished_requests():
            if due is not None:
                sleep(max(0.0, due - engine.clock()))
            return due is not None
        try:
            outputs, failures = engine.step(), 0
        except Exception as error:
            failures += 1
            if failures > len(items):  # each should have ended a request
                raise
            outputs, last_error = [], f"{type(error).__name__}: {error}"
        outcomes.answered()
        for output in outputs:
            if output.finished:
                end(output)
        tell(len(outcomes.traces), len(items))
        return True

    def end(output: RequestOutput) -> None:
        completion = output.outputs[0]
        metrics, reason = completion.metrics, completion.finish_reason
        assert metrics is not None
        failed = last_error or "the engine could not finish it"
        outcomes.end(
            outcomes.index_of[output.request_id],
            {FinishReason.error: failed, FinishReason.abort: "it was aborted"}.get(reason, "") if reason else "",
            metrics.token_times,
            completion.token_ids,
            cached_tokens=metrics.num_cached_tokens,
            first_scheduled=metrics.first_scheduled_time,
            preemptions=metrics.num_preemptions,
        )

    observe = records.append
    engine.observers.append(observe)
    try:
        return outcomes.run(concurrency, send, advance, records)
    finally:
        engine.observers.remove(observe)
