"""Conversations: every turn repeats all that was said before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from experiments.lab import check
from experiments.lab.workloads.base import Arriving, Inputs, Item, Vocabulary, generator
from experiments.lab.workloads.tokens import RandomTokens


@dataclass(frozen=True)
class MultiTurn(Arriving):
    """A turn's whole prompt is the whole prompt before it, the answer that was really given, and `user_tokens` new
    ones; it is due `think_s` after that answer. Arrivals, rate, concurrency and warmup count conversations.

    Items stand conversation by conversation, so that whoever takes the first one that is due finishes a conversation
    before it begins another. Turns are named "turn1", "turn2" and so on."""

    kind: ClassVar[str] = "multi_turn"

    conversations: int = 8
    turns: int = 4
    prompt_tokens: int = 128  # of a conversation's first turn
    user_tokens: int = 32  # that each later turn adds
    answer_tokens: int = 64  # output of every turn
    think_s: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least("workload", self, 1, "conversations", "turns", "prompt_tokens", "user_tokens", "answer_tokens")
        check.at_least("workload", self, 0, "think_s")

    @property
    def num_requests(self) -> int:
        return self.conversations * self.turns

    @property
    def num_arrivals(self) -> int:
        return self.conversations

    def _make(self, vocabulary: Vocabulary, seed: int) -> Inputs:
        longest = self.prompt_tokens + (self.turns - 1) * (self.answer_tokens + self.user_tokens)
        way_out = (
            f"lower workload.turns={self.turns}, workload.prompt_tokens={self.prompt_tokens}, "
            f"workload.user_tokens={self.user_tokens} or workload.answer_tokens={self.answer_tokens}"
        )
        self._require_room(vocabulary, longest, self.answer_tokens, way_out)
        tokens = RandomTokens(vocabulary.size, generator(seed, "tokens"))

        def talk(conversations: int) -> tuple[Item, ...]:
            items: list[Item] = []
            for _ in range(conversations):
                said = self.prompt_tokens
                items.append(Item(tokens.draw(said), self.answer_tokens, name="turn1"))
                for turn in range(2, self.turns + 1):
                    said += self.answer_tokens
                    items.append(
                        Item(
                            prompt=tokens.any(self.user_tokens),
                            output_tokens=self.answer_tokens,
                            follows=len(items) - 1,
                            think_s=self.think_s,
                            shared_tokens=said - 1,  # the last token of an answer was sampled, never computed
                            name=f"turn{turn}",
                        )
                    )
                    said += self.user_tokens
            return tuple(items)

        measured = talk(self.conversations)
        notes = {"conversations": self.conversations, "turns": self.turns}
        return Inputs(measured, talk(self.num_warmup), notes=notes)
