"""Short prompts before long ones: a prompt stands in line as if it had come later, by its tokens. So a long one lets
short ones pass for a while, and not for ever."""

from mini_infer.core.config import SchedulerConfig
from mini_infer.core.request import Request


def place(request: Request, config: SchedulerConfig) -> float:
    return request.arrival_time + request.prompt_len / config.ageing_tokens_per_s
