"""What the server says of itself in its log: what it chose when it started, and every few seconds what it does."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mini_infer.serving.link.wire import Ready
from mini_infer.serving.stats import Stats

if TYPE_CHECKING:
    from mini_infer.serving.api.gateway import Model

GIB = 2**30
COUNTED = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")


def chosen(name: str, info: Ready) -> str:
    """In a line: where the model computes, by what, and how much it has room for."""
    startup, settings = info.startup, info.settings
    block_size = settings["cache"]["block_size"]
    memory = f"KV memory for {startup['num_kv_blocks'] * block_size:,} tokens"
    if settings["model"]["load_format"] == "dry":
        return f"{name} is dry: it has no weights, and answers made-up text; {memory}"
    graphs = len(startup["graphs"]["batch_sizes"])
    return (
        f"{name} on {startup['device']} in {startup['dtype']}, weights {startup['weight_bytes'] / GIB:.2f} GiB "
        f"(quantization: {startup['quantization']}); {memory} ({startup['kv_bytes'] / GIB:.2f} GiB), up to "
        f"{info.max_model_len:,} a request; attention: {startup['attention_prefill']} for prompts, "
        f"{startup['attention_decode']} for decode; kernels: {startup['kernels']}; CUDA graphs: {graphs or 'none'}; "
        f"overlap: {'on' if startup['overlap'] else 'off'}; speculation: {startup['speculation']}; "
        f"started in {startup['seconds']:.1f} s"
    )


class Throughput:
    """Lines about what was done since the line before."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since, self._before = clock(), dict.fromkeys(COUNTED, 0)

    def line(self, replicas: Sequence[Stats]) -> str | None:
        """None where nothing was done."""
        now, before = self._clock(), self._before

        def total(name: str) -> int:
            return sum(getattr(stats, name) for stats in replicas)

        self._before = {name: total(name) for name in COUNTED}
        # One that was started again counts from 0.
        prompts, answers, asked, hits = (max(0, self._before[name] - before[name]) for name in COUNTED)
        seconds, self._since = now - self._since, now
        if not prompts and not answers:
            return None
        running = total("num_requests_running")
        used = total("kv_used_blocks") / max(1, total("kv_total_blocks"))
        found = f", {hits / asked:.0%} of prompts cached" if asked else ""
        return (
            f"{answers / seconds:,.0f} tokens/s of answers, {prompts / seconds:,.0f} of prompts{found}; "
            f"{running} running, {total('unfinished') - running} waiting, {used:.0%} of KV memory in use"
        )


class Narrator:
    """Tells of models in the log: what each chose, once it serves, and from then on what it does."""

    def __init__(self, models: Sequence[Model], logger: logging.Logger) -> None:
        self._models = models
        self._logger = logger
        self._throughputs: dict[str, Throughput] = {}  # of those that serve

    def tell(self) -> None:
        for model in self._models:
            if model.name in self._throughputs:
                line = self._throughputs[model.name].line([replica.stats for replica in model.replicas])
                name = f"{model.name}: " if len(self._models) > 1 else ""
                if line is not None:
                    self._logger.info("%s%s", name, line)
            elif model.service is not None:
                self._throughputs[model.name] = Throughput()
                self._logger.info("%s", chosen(model.name, model.service.engine.info))

    async def tell_every(self, seconds: float) -> None:
        """For as long as it is not cancelled."""
        while True:
            await asyncio.sleep(seconds)
            self.tell()
