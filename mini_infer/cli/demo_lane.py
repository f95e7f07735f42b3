"""One engine of the demonstration: it is fed arrivals, and observed through its StepRecords."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from mini_infer.core.config import EngineConfig
from mini_infer.core.plan import KVUsage, StepRecord
from mini_infer.core.request import RequestOutput, SamplingParams
from mini_infer.runtime.llm_engine import LLMEngine

WINDOW_S = 0.5  # of the rate of tokens


@dataclass(frozen=True)
class Arrival:
    time: float  # seconds on the lane's clock
    prompt: list[int]  # token ids
    output_tokens: int


class LaneClock:
    """Seconds of a lane's own work. It stands still while somebody else's is done, so that two lanes that take turns
    in one thread do not disturb each other's figures."""

    def __init__(self) -> None:
        self._passed = 0.0
        self._since: float | None = None

    def __call__(self) -> float:
        return self._passed + (0.0 if self._since is None else time.perf_counter() - self._since)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._passed, self._since = self(), None

    def set(self, seconds: float) -> None:
        self._passed = seconds


class Lane:
    """An engine with a clock of its own, what is to arrive, and what has been seen."""

    def __init__(self, name: str, config: EngineConfig, arrivals: Sequence[Arrival]) -> None:
        self.name = name
        self.clock = LaneClock()
        self.num_requests = len(arrivals)
        self.num_finished = 0
        self.record: StepRecord | None = None  # the last
        self.preemptions = 0
        self.sampled_tokens = 0
        self.longest_gap_s = 0.0  # between two tokens of one request
        self.answers: dict[str, list[int]] = {}  # token ids of finished requests
        self.engine = LLMEngine(config, clock=self.clock)
        self._due = deque(sorted(arrivals, key=lambda arrival: arrival.time))
        self._arrived: dict[str, float] = {}
        self._last_token: dict[str, float] = {}
        self._ttfts: dict[str, float] = {}
        self._recent: deque[tuple[float, int]] = deque()  # (end, sampled tokens) of the last steps
        self._steps = 0
        self._queried = self._hits = 0
        self._warm_up()
        self.engine.observers.append(self._observe)

    @property
    def done(self) -> bool:
        return not self._due and not self.engine.has_unfinished_requests()

    def advance(self) -> None:
        """One step, with whatever has arrived by now."""
        if not self.engine.has_unfinished_requests() and self._due:
            self.clock.set(max(self.clock(), self._due[0].time))
        with self.clock.running():
            while self._due and self._due[0].time <= self.clock():
                self._add(self._due.popleft())
            outputs = self.engine.step()
        for output in outputs:
            self._take(output)

    def close(self) -> None:
        self.engine.close()

    # --- what has been seen ---------------------------------------------------------------------------------------

    @property
    def kv(self) -> KVUsage:
        """As the last step was planned; before the first and after the last, as it is."""
        return self.record.kv if self.record and not self.done else self.engine.scheduler.usage()

    @property
    def num_running(self) -> int:
        return self.record.num_running + self.record.num_prefilling if self.record else 0

    @property
    def num_waiting(self) -> int:
        """For a place in the batch, for the first time or again."""
        return self.record.num_waiting + self.record.num_swapped if self.record else 0

    @property
    def seconds(self) -> float:
        return self.clock()

    @property
    def tokens_per_s(self) -> float:
        """Over the last WINDOW_S; when all is done, over all of it."""
        if self.done:
            return self.sampled_tokens / max(self.seconds, 1e-9)
        return sum(count for _, count in self._recent) / min(max(self.seconds, 1e-9), WINDOW_S)

    @property
    def ttft_s(self) -> float:
        """Median so far; 0 before the first token."""
        return median(self._ttfts.values()) if self._ttfts else 0.0

    @property
    def hit_share(self) -> float:
        """Of the prompt tokens looked up in the prefix cache."""
        return self._hits / max(self._queried, 1)

    @property
    def mean_running(self) -> float:
        """Requests that got a token, in the mean of all steps."""
        return self.sampled_tokens / max(self._steps, 1)

    def _observe(self, record: StepRecord) -> None:
        self.record = record
        self.preemptions += len(record.preempted)
        self.sampled_tokens += record.sampled_tokens
        self._queried += record.prefix_queried_tokens
        self._hits += record.prefix_hit_tokens
        self._steps += 1
        self._recent.append((record.end_time, record.sampled_tokens))
        while self._recent[0][0] < record.end_time - WINDOW_S:
            self._recent.popleft()

    # --- requests -------------------------------------------------------------------------------------------------

    def _add(self, arrival: Arrival) -> None:
        params = SamplingParams(temperature=0, max_tokens=arrival.output_tokens, ignore_eos=True)
        request_id = self.engine.add_request(arrival.prompt, params, arrival_time=arrival.time)
        self._arrived[request_id] = arrival.time

    def _take(self, output: RequestOutput) -> None:
        (completion,) = output.outputs
        request_id = output.request_id
        if completion.token_ids_delta:
            now = self.clock()
            self._ttfts.setdefault(request_id, now - self._arrived[request_id])
            self.longest_gap_s = max(self.longest_gap_s, now - self._last_token.get(request_id, now))
            self._last_token[request_id] = now
        if output.finished:
            self.num_finished += 1
            self.answers[request_id] = completion.token_ids

    def _warm_up(self) -> None:
        """What only the first steps cost is none of the mechanism's."""
        self.engine.generate([[1] * 48], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        self.clock.set(0.0)
