"""Priorities that are seconds: a request stands in line as if it had come so much later. So urgent ones pass others,
and nobody waits for ever behind a stream of them."""

from mini_infer.core.config import SchedulerConfig
from mini_infer.core.request import Request


def place(request: Request, config: SchedulerConfig) -> float:
    return request.arrival_time + request.priority
