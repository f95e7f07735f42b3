"""Random prompts, of which no two begin alike: all of one length, lengths spread over a range, a shared start in a part
of them, long ones that arrive among running decodes, and conversations, whose turns repeat what was said before."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from experiments.lab.config.spec import Count, FromZero, Natural, Positive, Share
from experiments.lab.workloads.base import START, Arriving, Counted, Inputs, Item, Vocabulary, Workload, generator
from mini_infer.core.errors import ConfigError

TRIES = 100  # at a beginning that nobody has


class RandomTokens:
    """Every sequence that `draw` gives differs from all others within its first START tokens."""

    def __init__(self, vocabulary_size: int, rng: np.random.Generator) -> None:
        self._size = vocabulary_size
        self._rng = rng
        self._starts: set[tuple[int, ...]] = set()

    def any(self, length: int) -> tuple[int, ...]:
        """Tokens that stand in the middle of a prompt, where nothing depends on what else begins like them."""
        return tuple(self._rng.integers(0, self._size, length).tolist())

    def draw(self, length: int) -> tuple[int, ...]:
        """Raises ConfigError where there are no more different beginnings of this length."""
        for _ in range(TRIES):
            tokens = self.any(length)
            if self.claim(tokens):
                return tokens
        taken = f"({len(self._starts)} beginnings are taken): make the workload's prompts longer, or fewer"
        alike = f"sequences of {length} tokens from {self._size} token ids cannot all begin differently"
        raise ConfigError(f"{alike} {taken}")

    def claim(self, tokens: tuple[int, ...]) -> bool:
        """Whether nothing began like this yet; from now on, something does."""
        start = tokens[:START]
        new = start not in self._starts
        self._starts.add(start)
        return new


@dataclass(frozen=True)
class Fixed(Counted, kind="fixed"):
    """All prompts and all outputs of one length."""

    prompt_tokens: Count = 128
    output_tokens: Count = 128

    def _make(self, vocabulary: Vocabulary, seed: int) -> Inputs:
        self._require_room(vocabulary, self.prompt_tokens, self.output_tokens, "prompt_tokens", "output_tokens")
        tokens = RandomTokens(vocabulary.size, generator(seed, "tokens"))
        items = [Item(tokens.draw(self.prompt_tokens), self.output_tokens) for _ in range(self.count + self.num_warmup)]
        return self._parted(items)


@dataclass(frozen=True)
class Uniform(Counted, kind="uniform"):
    """Lengths drawn evenly from a range, ends included. The defaults are the benchmark of nano-vllm."""

    count: Count = 256
    min_prompt_tokens: Count = 100
    max_prompt_tokens: Count = 1024
    min_output_tokens: Count = 100
    max_output_tokens: Count = 1024
    # How much of the range of output lengths is used, about its middle: at 0 all outputs have the middle length, at 1
    # the range is whole. The mean stays where it is.
    output_spread: Share = 1.0
    # Share of requests with priority 0 and the name "urgent"; the others have priority 1 and the name "normal". At 0
    # there is one class, without a name.
    urgent_share: Share = 0.0

    def _make(self, vocabulary: Vocabulary, seed: int) -> Inputs:
        self._require_room(
            vocabulary, self.max_prompt_tokens, self.max_output_tokens, "max_prompt_tokens", "max_output_tokens"
        )
        total = self.count + self.num_warmup
        prompts = self._lengths(seed, "prompt", total, self.min_prompt_tokens, self.max_prompt_tokens)
        middle = (self.min_output_tokens + self.max_output_tokens) / 2
        reach = (self.max_output_tokens - self.min_output_tokens) / 2 * self.output_spread
        outputs = self._lengths(seed, "output", total, round(middle - reach), round(middle + reach))
        classes = [(0, "")] * total
        if self.urgent_share:  # exactly the share of the measured ones
            order = generator(seed, "urgent").permutation(self.count)
            urgent = set(order[: round(self.urgent_share * self.count)].tolist())
            classes = [(0, "urgent") if n % self.count in urgent else (1, "normal") for n in range(total)]
        tokens = RandomTokens(vocabulary.size, generator(seed, "tokens"))
        items = [
            Item(tokens.draw(prompt), output, priority=priority, name=name)
            for prompt, output, (priority, name) in zip(prompts, outputs, classes, strict=True)
        ]
        return self._parted(items)

    def _lengths(self, seed: int, of: str, total: int, low: int, high: int) -> list[int]:
        """The same draws for every range, so that two ranges differ by their width alone."""
        drawn = generator(seed, f"{of} lengths").random(total)
        return (low + np.floor(drawn * (high - low + 1))).astype(int).tolist()


WARMUP_PROMPTS, WARMUP_TOKENS = 2, 64  # long prompts, and tokens of a stream


@dataclass(frozen=True)
class Mixed(Workload, kind="mixed"):
    """`streams` requests named "stream" arrive at 0; requests named "prompt" arrive every `prompt_every_s`, the first
    one that long after the streams. An open loop without ramps: the streams are there from the start, and are what is
    looked at. Their outputs should outlast the last prompt.

    In a pass of several rounds streams are a closed loop: in each of `streams` places one begins as the last one ends,
    so that the load stays what it is however long the pass is. They end one by one, since the first stream of a place
    is the shorter, and its last one the longer, the earlier the place is."""

    streams: Count = 8
    stream_prompt_tokens: Count = 64
    stream_output_tokens: Count = 256
    stream_rounds: Count = 1  # so many times stream_output_tokens are generated in each place
    prompts: Count = 4
    prompt_tokens: Count = 1024
    prompt_output_tokens: Count = 8
    prompt_every_s: Positive = 0.5

    @property
    def num_requests(self) -> int:
        return len(self._stream_outputs) + self.prompts

    @property
    def in_flight(self) -> int:
        return self.num_requests if self.stream_rounds == 1 else self.streams

    @property
    def _stream_outputs(self) -> list[int]:
        """Tokens of each stream, in the order in which they begin."""
        whole, rounds = self.stream_output_tokens, self.stream_rounds
        if rounds == 1:
            return [whole] * self.streams
        first = [max(1, whole * (2 * place + 1) // (2 * self.streams)) for place in range(self.streams)]
        return [*first, *[whole] * (self.streams * (rounds - 1)), *(max(1, whole - tokens) for tokens in first)]

    def make(self, vocabulary: Vocabulary, seed: int) -> Inputs:
        classes = ("stream_prompt_tokens", "stream_output_tokens"), ("prompt_tokens", "prompt_output_tokens")
        for prompt, output in classes:
            self._require_room(vocabulary, getattr(self, prompt), getattr(self, output), prompt, output)
        tokens = RandomTokens(vocabulary.size, generator(seed, "tokens"))

        def stream(arrival_s: float | None, output_tokens: int) -> Item:
            return Item(tokens.draw(self.stream_prompt_tokens), output_tokens, arrival_s, name="stream")

        def prompt_at(arrival_s: float | None) -> Item:
            return Item(tokens.draw(self.prompt_tokens), self.prompt_output_tokens, arrival_s, name="prompt")

        at_once = 0.0 if self.stream_rounds == 1 else None
        measured = [stream(at_once, tokens) for tokens in self._stream_outputs]
        measured += [prompt_at((index + 1) * self.prompt_every_s) for index in range(self.prompts)]
        warmup = [stream(None, min(self.stream_output_tokens, WARMUP_TOKENS)) for _ in range(self.streams)]
        warmup += [prompt_at(None) for _ in range(min(self.prompts, WARMUP_PROMPTS))]
        return Inputs(tuple(measured), tuple(warmup), notes={"streams": self.streams, "prompts": self.prompts})


@dataclass(frozen=True)
class MultiTurn(Arriving, kind="multi_turn"):
    """A turn's whole prompt is the whole prompt before it, the answer that was really given, and `user_tokens` new
    ones; it is due `think_s` after that answer. Arrivals, rate, concurrency and warmup count conversations.

    Items stand conversation by conversation, so that whoever takes the first one that is due finishes a conversation
    before it begins another. Turns are named "turn1", "turn2" and so on."""

    conversations: Count = 8
    turns: Count = 4
    prompt_tokens: Count = 128  # of a conversation's first turn
    user_tokens: Count = 32  # that each later turn adds
    answer_tokens: Count = 64  # output of every turn
    think_s: FromZero = 0.0

    counted_by: ClassVar[str] = "conversations"

    @property
    def num_requests(self) -> int:
        return self.conversations * self.turns

    @property
    def num_arrivals(self) -> int:
        return self.conversations

    @property
    def shares(self) -> bool:
        return self.turns > 1

    def _make(self, vocabulary: Vocabulary, seed: int) -> Inputs:
        longest = self.prompt_tokens + (self.turns - 1) * (self.answer_tokens + self.user_tokens)
        lower = "turns", "prompt_tokens", "user_tokens", "answer_tokens"
        self._require_room(vocabulary, longest, self.answer_tokens, *lower)
        tokens = RandomTokens(vocabulary.size, generator(seed, "tokens"))

        def talk(conversations: int) -> tuple[Item, ...]:
            items: list[Item] = []
            for _ in range(conversations):
                said = self.prompt_tokens + self.answer_tokens
                items.append(Item(tokens.draw(self.prompt_tokens), self.answer_tokens, name="turn1"))
                for turn in range(2, self.turns + 1):
                    following = partial(Item, follows=len(items) - 1, think_s=self.think_s)
                    shared = said - 1  # the last token of an answer was sampled, never computed
                    more = tokens.any(self.user_tokens)
                    items.append(following(more, self.answer_tokens, shared_tokens=shared, name=f"turn{turn}"))
                    said += self.user_tokens + self.answer_tokens
            return tuple(items)

        measured = talk(self.conversations)
        notes = {"conversations": self.conversations, "turns": self.turns}
        return Inputs(measured, talk(self.num_warmup), notes=notes)


@dataclass(frozen=True)
class SharedPrefix(Counted, kind="shared_prefix"):
    """`hit_rate` of the requests begin with the prefix of their group; the others have a prompt of the same length of
    their own. Suffixes all differ. The first request of a group computes its prefix, unless the group is primed.

    In a closed loop of one request every later one finds the prefix. Requests that start together do not: none of
    them has left anything yet. `prime: true` computes every prefix before the clock starts."""

    count: Count = 32
    prefix_tokens: Natural = 512
    suffix_tokens: Count = 64
    output_tokens: Count = 32
    hit_rate: Share = 1.0  # share of requests that begin with a shared prefix. Which ones is drawn by the seed.
    groups: Count = 1  # different prefixes
    # At 0 requests take them in turns; else each draws its own, the i-th with a weight of 1 / i**skew, as prefixes are
    # asked for in recorded traces: some all the time, many once in a while.
    skew: FromZero = 0.0
    prime: bool = False

    @property
    def shares(self) -> bool:
        return self.hit_rate > 0 and self.prefix_tokens > 0

    def _make(self, vocabulary: Vocabulary, seed: int) -> Inputs:
        length = self.prefix_tokens + self.suffix_tokens
        self._require_room(vocabulary, length, self.output_tokens, "prefix_tokens", "suffix_tokens", "output_tokens")
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
        computed: set[int | None] = set(range(len(prefixes))) if self.prime else set()
        measured = []
        for group in map(group_of.get, range(self.count)):
            prompt = tokens.draw(length) if group is None else prefixes[group] + tokens.draw(self.suffix_tokens)
            shared, name = (self.prefix_tokens, "hit") if group in computed else (0, "miss")
            measured.append(Item(prompt, self.output_tokens, shared_tokens=shared, name=name))
            computed |= {group} - {None}
        warmup = tuple(Item(tokens.draw(length), self.output_tokens) for _ in range(self.num_warmup))
        primed = prefixes if self.prime else ()
        prime = tuple(Item(prefix + tokens.draw(min(self.suffix_tokens, START)), 1) for prefix in primed)
        notes = {"sharing_requests": shares, "groups": len(prefixes)}
        return Inputs(tuple(measured), warmup, prime, notes)
