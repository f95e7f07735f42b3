"""What mini-infer-demo shows: the same requests for two engines that differ in one mechanism."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mini_infer.cli.demo_lane import Arrival, Lane
from mini_infer.core.config import DryConfig, EngineConfig, LoadFormat, ModelConfig, replace

DRY = "dry"
MAX_MODEL_LEN = 2048
# A step costs something whatever is in it, and then by its tokens: what batching and short chunks trade.
TIME_MODEL = DryConfig(max_model_len=MAX_MODEL_LEN, step_ms=4.0, prefill_token_us=60.0, decode_token_us=100.0)
SMALLEST_VOCABULARY = 512  # token ids of made-up prompts are below, and exist in every model
FIRST_ID = 32
SEED = 1

SHORTER = 4  # by so much are the texts of a real model, which computes on whatever there is

Settings = dict[str, dict[str, Any]]  # of EngineConfig, by section


@dataclass(frozen=True)
class Scene:
    """One mechanism, off and on.

    Args:
        both: settings of both engines.
        off, on: what each is called, and what it has of its own.
        requests: makes what arrives, of random numbers and by how much texts are to be shorter.
        found: says from (off, on), when both are done, what the mechanism has changed beside the speed.
    """

    name: str
    question: str
    requests: Callable[[random.Random, int], list[Arrival]]
    both: Settings
    off: tuple[str, Settings]
    on: tuple[str, Settings]
    found: Callable[[Lane, Lane], str]

    def configs(self, model: str, dry: DryConfig = TIME_MODEL) -> list[tuple[str, EngineConfig]]:
        """Names and settings of the two engines.

        Args:
            model: "dry", a folder, a hub name or a shipped model.
        """
        load_format = LoadFormat.dry if model == DRY else LoadFormat.auto
        base = EngineConfig(model=ModelConfig(model, load_format, max_model_len=MAX_MODEL_LEN, dry=dry))
        return [(name, replace(replace(base, **self.both), **own)) for name, own in (self.off, self.on)]

    def arrivals(self, model: str) -> list[Arrival]:
        """The same at every call."""
        return self.requests(random.Random(SEED), 1 if model == DRY else SHORTER)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_ID, SMALLEST_VOCABULARY) for _ in range(count)]


def _shared_prefix(rng: random.Random, shorter: int) -> list[Arrival]:
    prefix = _tokens(rng, 896 // shorter)
    return [Arrival(0.03 * i, prefix + _tokens(rng, 128 // shorter), 24 // shorter) for i in range(24)]


def _long_prompts_into_streams(rng: random.Random, shorter: int) -> list[Arrival]:
    streams = [Arrival(0.0, _tokens(rng, 32), 240 // shorter) for _ in range(8)]
    return streams + [Arrival(0.2 + 0.3 * i, _tokens(rng, 1536 // shorter), 8) for i in range(5)]


def _outputs_of_all_lengths(rng: random.Random, shorter: int) -> list[Arrival]:
    return [Arrival(0.0, _tokens(rng, 32), rng.choice((8, 16, 32, 128)) // shorter) for _ in range(40)]


def _more_than_fits(rng: random.Random, shorter: int) -> list[Arrival]:
    return [Arrival(0.0, _tokens(rng, 64), rng.choice((32, 64, 160))) for _ in range(24 // shorter)]


def _prefix_found(off: Lane, on: Lane) -> str:
    return f"{on.hit_share:.0%} of the prompts' tokens were in the cache; {_first_tokens(off, on)}"


def _chunks_found(off: Lane, on: Lane) -> str:
    return f"the longest pause between two tokens of a stream was {_seconds(on.longest_gap_s, off.longest_gap_s)}"


def _batching_found(off: Lane, on: Lane) -> str:
    return (
        f"{on.mean_running:.1f} instead of {off.mean_running:.1f} requests in a step's batch; {_first_tokens(off, on)}"
    )


def _preemption_found(off: Lane, on: Lane) -> str:
    return (
        f"{on.mean_running:.1f} instead of {off.mean_running:.1f} requests ran at once in the same memory, "
        f"with {on.preemptions} preemptions"
    )


def _first_tokens(off: Lane, on: Lane) -> str:
    return f"median time to the first token {_seconds(on.ttft_s, off.ttft_s)}"


def _seconds(now: float, before: float) -> str:
    return f"{now * 1e3:.0f} ms instead of {before * 1e3:.0f} ms"


NO_CACHE: dict[str, Any] = {"prefix_caching": False}
SCENES = {
    scene.name: scene
    for scene in (
        Scene(
            "prefix_cache",
            "All prompts begin alike. What does it save to compute the beginning once?",
            _shared_prefix,
            both={"cache": {"num_blocks": 1024}, "scheduler": {"max_num_seqs": 16, "max_num_batched_tokens": 2048}},
            off=("no prefix cache", {"cache": NO_CACHE}),
            on=("prefix cache", {}),
            found=_prefix_found,
        ),
        Scene(
            "chunked_prefill",
            "Long prompts arrive while streams run. How long do the streams wait for them?",
            _long_prompts_into_streams,
            both={
                "cache": {"num_blocks": 1024, **NO_CACHE},
                "scheduler": {"max_num_seqs": 16, "max_num_batched_tokens": 2048},
            },
            off=("whole prompts", {"scheduler": {"chunked_prefill": False}}),
            on=("chunks of 64", {"scheduler": {"max_num_batched_tokens": 64}}),
            found=_chunks_found,
        ),
        Scene(
            "continuous_batching",
            "8 places, answers of all lengths. What is it worth to refill a place at once?",
            _outputs_of_all_lengths,
            both={
                "cache": {"num_blocks": 256, **NO_CACHE},
                "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 2048},
            },
            off=("static batches", {"scheduler": {"batching": "static"}}),
            on=("continuous", {}),
            found=_batching_found,
        ),
        Scene(
            "preemption",
            "Memory is short. Reserve the longest for each, or give by need and take back?",
            _more_than_fits,
            both={
                "model": {"max_model_len": 256},
                "cache": {"num_blocks": 64, "watermark": 0.0, **NO_CACHE},
                "scheduler": {"max_num_seqs": 16, "max_num_batched_tokens": 2048},
            },
            off=("all reserved", {"cache": {"layout": "contiguous"}}),
            on=("by need, preempted", {}),
            found=_preemption_found,
        ),
    )
}
