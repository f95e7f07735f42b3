"""How much a quantized model's answers differ from those of the model that it was made from.

Teacher-forced, both read the same held-out text, and their next-token distributions p (reference) and q are compared at
every token. In free generation each goes its own way after the first difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mini_infer.assets.evaluate import full_lines, is_python
from mini_infer.assets.prompts import Prompt

Logits = Callable[[Tensor], Tensor]  # token ids [B, L] int64 -> [B, L, V]
TOGETHER = 4  # windows of a call


@dataclass(frozen=True, eq=False)
class Reading:
    """What a model says of every next token of a text.

    Attributes:
        windows: [n, L + 1] int64; the last token of each is only predicted.
        log_p: [n, L, V] float32.
    """

    windows: Tensor
    log_p: Tensor

    @classmethod
    def of(cls, logits: Logits, windows: Tensor) -> Reading:
        return cls(windows, torch.cat([_log_probabilities(logits, part) for part in windows.split(TOGETHER)]))

    def first(self, count: int) -> Reading:
        """Of the first windows alone."""
        return Reading(self.windows[:count], self.log_p[:count])


@dataclass(frozen=True)
class TeacherForced:
    """
    Attributes:
        perplexity: a token, of the text.
        increase: of perplexity over the reference's, as a share of it.
        divergence: mean KL(p || q) a token, in nats.
        agreement: share of tokens at which both have the same argmax.
    """

    tokens: int
    perplexity: float
    increase: float
    divergence: float
    agreement: float


def teacher_forced(reference: Reading, logits: Logits) -> TeacherForced:
    """Of the model whose `logits` these are, on what the reference has read."""
    own = nats = divergence = equal = 0.0
    for windows, log_p in zip(reference.windows.split(TOGETHER), reference.log_p.split(TOGETHER), strict=True):
        labels, log_q = windows[:, 1:, None], _log_probabilities(logits, windows)
        own -= float(log_p.gather(2, labels).sum(dtype=torch.float64))
        nats -= float(log_q.gather(2, labels).sum(dtype=torch.float64))
        divergence += float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64))
        equal += float((log_p.argmax(-1) == log_q.argmax(-1)).sum())
    tokens = reference.windows[:, 1:].numel()
    return TeacherForced(
        tokens, math.exp(nats / tokens), math.expm1((nats - own) / tokens), divergence / tokens, equal / tokens
    )


@torch.no_grad()
def _log_probabilities(logits: Logits, windows: Tensor) -> Tensor:
    return torch.log_softmax(logits(windows[:, :-1]).float(), -1)


@dataclass(frozen=True)
class Generated:
    """
    Attributes:
        equal: share of the reference's tokens that come before the first difference.
        compiles: share of continuations whose function is Python: the module up to its end, or up to the last full
            line where it has none.
    """

    equal: float
    compiles: float


def generated(
    prompts: Sequence[Prompt],
    expected: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
    decode: Callable[[Sequence[int]], str],
) -> Generated:
    """`expected` and `found`: what the reference and another model make of each prompt."""
    same = compiling = 0
    for prompt, ours, theirs in zip(prompts, found, expected, strict=True):
        differ = (i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b)
        same += next(differ, min(len(theirs), len(ours)))
        compiling += is_python(prompt.source.text[: prompt.end] + function_body(decode(ours)))
    return Generated(same / sum(map(len, expected)), compiling / len(prompts))


def function_body(text: str) -> str:
    """The full lines that `text` begins with, up to one that is indented less than the first."""
    kept: list[str] = []
    least = 0
    for line in full_lines(text).splitlines(keepends=True):
        indent = len(line) - len(line.lstrip())
        if line.strip():
            least = least or indent
            if indent < least:
                break
        kept.append(line)
    return "".join(kept)


@torch.no_grad()
def greedy_together(model: Any, prompts: Tensor, new_tokens: int, stops: Collection[int]) -> list[list[int]]:
    """prompts [n, L] -> the greedy continuation of each, up to and with the first token of `stops`."""
    from transformers import DynamicCache

    cache, ids, written = DynamicCache(), prompts, []
    for _ in range(new_tokens):
        ids = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        written.append(ids)
    rows = torch.cat(written, 1).tolist()
    ends = ([place for place, token in enumerate(row, 1) if token in stops] for row in rows)
    return [row[: end[0]] if end else row for row, end in zip(rows, ends, strict=True)]


def spread_windows(stream: Tensor, count: int, length: int, start: float = 0.0) -> Tensor:
    """stream [tokens] -> [count, length + 1], at equal distances over all of it.

    Args:
        start: of the first window, as a share of the distance between two, where windows end before the stream does.
    """
    last = len(stream) - length - 1
    places = (torch.arange(count) + start) * (last / count) if start else torch.linspace(0, last, count)
    return torch.stack([stream[place : place + length + 1] for place in places.long().tolist()])
