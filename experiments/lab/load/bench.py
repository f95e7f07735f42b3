"""`vllm bench serve`, a load client that nobody here wrote, in a process of its own: what runs there.

It sends the prompts as token ids, so that neither it nor the server needs a tokenizer, and keeps a number of requests
in flight. It notes when a request was sent and when each event came, and of its tokens their number alone: where events
had several, they are spread evenly over them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from experiments.lab.load.client import ASKED, Target
from experiments.lab.measure.traces import RequestTrace, Served
from experiments.lab.peers.vllm import import_vllm
from mini_infer.core.config import EngineConfig


class Bench:
    def __init__(self, serve: Any, version: str) -> None:
        """`serve` is vLLM's module of that name, with add_cli_args, and main that calls benchmark once."""
        self._serve, self._benchmark = serve, serve.benchmark
        serve.benchmark = self._timed
        self._parser = argparse.ArgumentParser()
        serve.add_cli_args(self._parser)
        self.about: Mapping[str, Any] = {"client": f"vllm bench serve {version}"}

    def bench(
        self, target: Target, prompts: Sequence[Sequence[int]], output_tokens: int, concurrency: int, salt: str
    ) -> Served:
        body = {**ASKED, "max_tokens": output_tokens, "cache_salt": salt}
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "prompts.jsonl"
            file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
            arguments = [
                *("--backend=openai", f"--base-url=http://{target.host}:{target.port}", f"--endpoint={target.path}"),
                *(f"--model={target.model}", "--skip-tokenizer-init", f"--extra-body={json.dumps(body)}"),
                *("--dataset-name=custom", f"--dataset-path={file}", "--disable-shuffle"),
                *(f"--num-prompts={len(prompts)}", f"--max-concurrency={concurrency}"),
                *("--ready-check-timeout-sec=0", "--save-detailed", "--disable-tqdm"),
            ]
            found = self._serve.main(self._parser.parse_args(arguments))
        return replace(read(found, prompts, output_tokens), outside_s=self._took)

    async def _timed(self, *given: Any, **named: Any) -> Any:
        """The pass, without reading prompts and settings, by another clock than those that its result tells of."""
        start = time.perf_counter()
        found = await self._benchmark(*given, **named)
        self._took = time.perf_counter() - start
        return found


def read(found: Mapping[str, Any], prompts: Sequence[Sequence[int]], output_tokens: int) -> Served:
    """What its detailed result says of each request, but for the prompts' lengths: without a tokenizer it takes each
    for one token. Its clock is time.perf_counter."""
    names = ("start_times", "ttfts", "itls", "output_lens", "errors")
    traces = []
    for prompt, start, ttft, gaps, count, error in zip(prompts, *(found[name] for name in names), strict=True):
        read_at = list(accumulate(gaps, initial=start + ttft))
        times = () if error else tuple(read_at[index * len(read_at) // count] for index in range(count))
        traces.append(RequestTrace(len(prompt), output_tokens, start, times, (), error=error, tells_tokens=False))
    first = min(trace.arrival for trace in traces)
    end = max((trace.token_times[-1] for trace in traces if trace.token_times), default=first)
    return Served(tuple(traces), first, end)


def open_peer(config: EngineConfig, settings: Mapping[str, Any]) -> Bench:
    """`config` and `settings` are nothing for it. Raises PeerAbsent where vLLM cannot be imported."""
    vllm = import_vllm("benchmarks.serve")
    return Bench(vllm.benchmarks.serve, vllm.__version__)
