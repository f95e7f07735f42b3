"""How much a quantized model's answers differ from those of the model that it was made from.

Teacher-forced, both read the same held-out text, and their next-token distributions p (reference) and q are compared at
every token. In free generation each goes its own way after the first difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mini_infer.assets.evaluate import full_lines, is_python
from mini_infer.assets.prompts import Prompt

Logits = Callable[[Tensor], Tensor]  # token ids [L] int64 -> [L, V]
Generate = Callable[[Sequence[int]], Sequence[int]]  # prompt -> its greedy continuation


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


@torch.no_grad()
def teacher_forced(reference: Logits, candidates: Mapping[str, Logits], windows: Tensor) -> dict[str, TeacherForced]:
    """windows [n, L + 1] int64: the last token of each is only predicted. The reference reads each window once."""
    sums = {name: [0.0, 0.0, 0.0] for name in candidates}
    own, labels_seen = 0.0, 0
    for window in windows:
        labels = window[1:, None]
        p = torch.log_softmax(reference(window[:-1]).double(), -1)
        own -= float(p.gather(1, labels).sum())
        labels_seen += len(labels)
        for name, candidate in candidates.items():
            q = torch.log_softmax(candidate(window[:-1]).double(), -1)
            sums[name][0] -= float(q.gather(1, labels).sum())
            sums[name][1] += float((p.exp() * (p - q)).sum())
            sums[name][2] += float((p.argmax(-1) == q.argmax(-1)).sum())
    return {
        name: TeacherForced(
            labels_seen,
            math.exp(nats / labels_seen),
            math.expm1((nats - own) / labels_seen),
            divergence / labels_seen,
            equal / labels_seen,
        )
        for name, (nats, divergence, equal) in sums.items()
    }


@dataclass(frozen=True)
class Generated:
    """
    Attributes:
        equal: share of the reference's tokens that come before the first difference.
        compiles: share of continuations with which the module, cut after the last full line, is Python or could become
            so if it went on.
    """

    equal: float
    compiles: float


def generated(
    prompts: Sequence[Prompt],
    ids: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    generate: Generate,
    decode: Callable[[Sequence[int]], str],
) -> Generated:
    """ids: the prompts' tokens; continuations: what the reference makes of them."""
    same = total = compiling = 0
    for prompt, start, expected in zip(prompts, ids, continuations, strict=True):
        found = generate(start)
        same += next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
                     min(len(expected), len(found)))  # fmt: skip
        total += len(expected)
        text = full_lines(prompt.source.text[: prompt.end] + decode(found))
        compiling += is_python(text, allow_unfinished=True)
    return Generated(same / total, compiling / len(prompts))


def spread_windows(stream: Tensor, count: int, length: int) -> Tensor:
    """stream [tokens] -> [count, length + 1], at equal distances over all of it."""
    starts = torch.linspace(0, len(stream) - length - 1, count).long()
    return torch.stack([stream[start : start + length + 1] for start in starts.tolist()])
