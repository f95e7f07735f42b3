"""Prompts that begin with a shared prefix, in a stated share of the requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from experiments.lab import check
from experiments.lab.workloads.base import START, Arriving, Inputs, Item, Vocabulary, generator
from experiments.lab.workloads.tokens import RandomTokens


@dataclass(frozen=True)
class SharedPrefix(Arriving):
    """`hit_rate` of the requests begin with the prefix of their group; the others have a prompt of the same length of
    their own. Suffixes all differ. The first request of a group computes its prefix, unless the group is primed.

    In a closed loop of one request every later one finds the prefix. Requests that start together do not: none of
    them has left anything yet. `prime: true` computes every prefix before the clock starts."""

    kind: ClassVar[str] = "shared_prefix"

    count: int = 32
    prefix_tokens: int = 512
    suffix_tokens: int = 64
    output_tokens: int = 32
    hit_rate: float = 1.0  # share of requests that begin with a shared prefix. Which ones is drawn by the seed.
    groups: int = 1  # different prefixes
    # At 0 requests take them in turns; else each draws its own, the i-th with a weight of 1 / i**skew, as prefixes are
    # asked for in recorded traces: some all the time, many once in a while.
    skew: float = 0.0
    prime: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least("workload", self, 1, "count", "suffix_tokens", "output_tokens", "groups")
        check.at_least("workload", self, 0, "prefix_tokens", "skew")
        check.share("workload", self, "hit_rate")

    @property
    def num_requests(self) -> int:
        return self.count

    def _make(self, vocabulary: Vocabulary, seed: int) -> Inputs:
        length = self.prefix_tokens + self.suffix_tokens
        way_out = (
            f"lower workload.prefix_tokens={self.prefix_tokens}, workload.suffix_tokens={self.suffix_tokens} or "
            f"workload.output_tokens={self.output_tokens}"
        )
        self._require_room(vocabulary, length, self.output_tokens, way_out)
        tokens = RandomTokens(vocabulary.size, generator(seed, "tokens"))
        shares = round(self.hit_rate * self.count) if self.prefix_tokens else 0
        order = generator(seed, "hits").permutation(self.count).tolist()  # a higher rate adds requests, moves none
        sharing = sorted(order[:shares])
        turns = [turn % self.groups for turn in range(shares)]
        if self.skew:
            weights = 1 / np.arange(1, self.groups + 1) ** self.skew
            drawn = generator(seed, "groups").choice(self.groups, size=shares, p=weights / weights.sum())
            turns = [sorted(set(drawn.tolist())).index(group) for group in drawn.tolist()]  # without those of nobody
        group_of = dict(zip(sharing, turns, strict=True))
        prefixes = [tokens.draw(self.prefix_tokens) for _ in range(max(turns, default=-1) + 1)]
        computed = set(range(len(prefixes))) if self.prime else set()
        measured = []
        for index in range(self.count):
            group = group_of.get(index)
            if group is None:
                measured.append(Item(tokens.draw(length), self.output_tokens, name="miss"))
                continue
            prompt = prefixes[group] + tokens.draw(self.suffix_tokens)
            hits = group in computed
            computed.add(group)
            shared = self.prefix_tokens if hits else 0
            measured.append(Item(prompt, self.output_tokens, shared_tokens=shared, name="hit" if hits else "miss"))
        warmup = tuple(Item(tokens.draw(length), self.output_tokens) for _ in range(self.num_warmup))
        prime: tuple[Item, ...] = ()
        if self.prime:
            prime = tuple(Item(prefix + tokens.draw(min(self.suffix_tokens, START)), 1) for prefix in prefixes)
        notes = {"sharing_requests": shares, "groups": len(prefixes)}
        return Inputs(tuple(measured), warmup, prime, notes)
