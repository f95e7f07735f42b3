"""Where requests go, and what they look like."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.lab.workloads import Item


@dataclass(frozen=True)
class Target:
    host: str
    port: int
    path: str  # of the completions
    model: str

    def request(self, prompt: Sequence[int], item: Item, salt: str) -> bytes:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": item.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_token_ids": True,
            **({"priority": item.priority} if item.priority else {}),
            **({"cache_salt": salt} if salt else {}),
        }
        data = json.dumps(body, separators=(",", ":")).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data
