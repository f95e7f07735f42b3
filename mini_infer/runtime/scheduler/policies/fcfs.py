"""First come, first served."""

from mini_infer.core.config import SchedulerConfig
from mini_infer.core.request import Request


def place(request: Request, config: SchedulerConfig) -> float:
    return 0.0
