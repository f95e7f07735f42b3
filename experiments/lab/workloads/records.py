"""What a line of a recorded trace says, whatever its format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    """
    Attributes:
        time_s: when the request arrived; only differences matter.
        prefix_ids: one id for each HASH_BLOCK tokens of the prompt, the last block partly filled. Prompts share
            their beginning as far as their ids are the same. Empty: nothing is known to be shared.
    """

    time_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()


class BrokenLine(Exception):
    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line
        self.reason = reason
