"""As whoever asks says: smaller numbers first. A request gives way to one that is more urgent."""

from mini_infer.core.config import SchedulerConfig
from mini_infer.core.request import Request


def place(request: Request, config: SchedulerConfig) -> float:
    return request.priority
