"""Long prompts that arrive among running decodes: what disturbs the streams of everybody else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from experiments.lab import check
from experiments.lab.workloads.base import Inputs, Item, Vocabulary, Workload, generator
from experiments.lab.workloads.tokens import RandomTokens

WARMUP_PROMPTS, WARMUP_TOKENS = 2, 64  # long prompts, and tokens of a stream


@dataclass(frozen=True)
class Mixed(Workload):
    """`streams` requests named "stream" arrive at 0; requests named "prompt" arrive every `prompt_every_s`, the first
    one that long after the streams. An open loop without ramps: the streams are there from the start, and are what is
    looked at. Their outputs should outlast the last prompt."""

    kind: ClassVar[str] = "mixed"

    streams: int = 8
    stream_prompt_tokens: int = 64
    stream_output_tokens: int = 256
    prompts: int = 4
    prompt_tokens: int = 1024
    prompt_output_tokens: int = 8
    prompt_every_s: float = 0.5

    def __post_init__(self) -> None:
        check.at_least("workload", self, 1, "streams", "stream_prompt_tokens", "stream_output_tokens")
        check.at_least("workload", self, 1, "prompts", "prompt_tokens", "prompt_output_tokens")
        check.above_zero("workload", self, "prompt_every_s")

    @property
    def num_requests(self) -> int:
        return self.streams + self.prompts

    def make(self, vocabulary: Vocabulary, seed: int) -> Inputs:
        for name in ("stream", "prompt"):
            prompt = "stream_prompt_tokens" if name == "stream" else "prompt_tokens"
            output = f"{name}_output_tokens"
            way_out = f"lower workload.{prompt}={getattr(self, prompt)} or workload.{output}={getattr(self, output)}"
            self._require_room(vocabulary, getattr(self, prompt), getattr(self, output), way_out)
        tokens = RandomTokens(vocabulary.size, generator(seed, "tokens"))

        def stream(arrival_s: float | None, output_tokens: int) -> Item:
            return Item(tokens.draw(self.stream_prompt_tokens), output_tokens, arrival_s, name="stream")

        def prompt_at(arrival_s: float | None) -> Item:
            return Item(tokens.draw(self.prompt_tokens), self.prompt_output_tokens, arrival_s, name="prompt")

        measured = [stream(0.0, self.stream_output_tokens) for _ in range(self.streams)]
        measured += [prompt_at((index + 1) * self.prompt_every_s) for index in range(self.prompts)]
        warmup = [stream(None, min(self.stream_output_tokens, WARMUP_TOKENS)) for _ in range(self.streams)]
        warmup += [prompt_at(None) for _ in range(min(self.prompts, WARMUP_PROMPTS))]
        return Inputs(tuple(measured), tuple(warmup), notes={"streams": self.streams, "prompts": self.prompts})
