"""How many requests may wait, whichever process they come from: counted where they wait, and so exactly."""

from __future__ import annotations

import math
import time
from collections import deque

from mini_infer.runtime.scheduler.scheduler import Scheduler
from mini_infer.serving.processes.wire import Refused

RATE_WINDOW_S = 30.0
LONGEST_RETRY_S = 60.0


class QueueBound:
    """
    Args:
        max_queued: completions that may wait beyond those that run.
        max_running: completions that can run at once, if the KV memory suffices.
    """

    def __init__(self, max_queued: int, max_running: int) -> None:
        self._max_queued = max_queued
        self._max_running = max_running
        self._left_over = False  # the last step could not take in everybody
        self._finish_times: deque[float] = deque(maxlen=256)

    def stepped(self, scheduler: Scheduler) -> None:
        self._left_over = scheduler.num_waiting + scheduler.num_swapped > 0

    def finished(self, now: float) -> None:
        """A completion has ended."""
        self._finish_times.append(now)

    def refusal(self, number: int, num_completions: int, scheduler: Scheduler, num_newcomers: int) -> Refused | None:
        """Why a request must come again later; None where it may stay.

        Args:
            number: the request's, for the answer.
            num_newcomers: completions that the scheduler does not know yet.
        """
        queued = scheduler.num_waiting + scheduler.num_swapped + num_newcomers
        unfinished = scheduler.num_unfinished + num_newcomers
        if self._left_over and queued:
            waiting = would_wait = queued
        else:  # who has come since the last step finds a place in the next one, while there are any
            would_wait = unfinished - self._max_running
            waiting = max(would_wait, 0)
        # A request for more completions than may ever wait is served when nobody else is there.
        if would_wait + num_completions <= self._max_queued or not unfinished:
            return None
        message = f"{waiting} requests wait, and {self._max_queued} may: try again later"
        return Refused(number, message, retry_after=self._retry_after(waiting))

    def _retry_after(self, waiting: int) -> float:
        """Seconds in which about as many as wait now will have been served."""
        now = time.perf_counter()
        recent = [moment for moment in self._finish_times if now - moment < RATE_WINDOW_S]
        if not recent:
            return 1.0
        per_second = len(recent) / max(now - recent[0], 0.001)
        return float(min(max(1, math.ceil(waiting / per_second)), LONGEST_RETRY_S))
