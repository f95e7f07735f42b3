"""Serves a mixed load for a long time and fails where memory grows, blocks are lost or an answer is wrong.

python -m experiments.soak --minutes 10        # takes the extra `dev`; more arguments are flags of mini-infer-serve

The server runs the dry model. Clients stream, wait for whole answers, leave in the middle of both, and send what is
refused. The resident memory of the API processes and of the engine process is printed, and stored as CSV.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pandas
import psutil

from mini_infer.cli.chat import own_server
from mini_infer.runtime.llm_engine import RECORDS_KEPT
from mini_infer.serving.metrics import PREFIX

MIB = 2**20
CLIENTS = 24
SAMPLES = 40  # of memory, in the whole time
# Allocators keep what they once had: memory counts from the middle of the time on, and a little more of it is no leak.
GROWTH_ALLOWED = 0.05
GROWTH_ALLOWED_MIB = 12.0
RECORD_MIB = 560 / MIB  # of a StepRecord, of which the engine keeps the last RECORDS_KEPT
PATIENCE_S = 60.0  # for one answer
SHARED = "The same beginning of many prompts. " * 8
PROCESSES = ("api", "engine")


@dataclass
class Seen:
    """What came of the requests, and memory over time."""

    outcomes: Counter[str] = field(default_factory=Counter)
    rows: list[dict[str, float]] = field(default_factory=list)  # seconds, requests, steps, api_mib, engine_mib

    def failures(self) -> list[str]:
        """What must not be; empty where all is well."""
        found = [f"{count} answers: {name}" for name, count in self.outcomes.items() if name.startswith("wrong")]
        late = self.rows[len(self.rows) // 2 :]
        half = max(len(late) // 3, 1)
        for process in PROCESSES:
            before, after = (median(_counted(row, process) for row in rows) for rows in (late[:half], late[-half:]))
            if after - before > max(GROWTH_ALLOWED * before, GROWTH_ALLOWED_MIB):
                found.append(f"the {process} process grew from {before:.1f} to {after:.1f} MiB in the second half")
        return found


def _counted(row: dict[str, float], process: str) -> float:
    """MiB, without the StepRecords: their number grows to a limit, which takes minutes."""
    kept = RECORD_MIB * min(row["steps"], RECORDS_KEPT) if process == "engine" else 0.0
    return row[f"{process}_mib"] - kept


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=Path("outputs/soak.csv"), help="memory over time")
    args, serve_flags = parser.parse_known_args(arguments)
    if not args.minutes > 0:
        parser.error(f"--minutes must be above 0, got {args.minutes}")
    with own_server(["--dry-run", "--scheduler.max_num_seqs", "16", *serve_flags]) as url:
        seen = asyncio.run(_soak(url, args.minutes * 60))
        failures = [*seen.failures(), *_what_is_left(url)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(seen.rows).to_csv(args.out, index=False)
    print(f"{sum(seen.outcomes.values())} requests: " + ", ".join(f"{k} {v}" for k, v in sorted(seen.outcomes.items())))
    print(f"memory over time: {args.out}")
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


async def _soak(url: str, seconds: float) -> Seen:
    seen, until = Seen(), time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        clients = [_client(http, random.Random(number), until, seen) for number in range(CLIENTS)]
        await asyncio.gather(_watch(http, seconds, seen), *clients)
    return seen


async def _watch(http: httpx.AsyncClient, seconds: float, seen: Seen) -> None:
    engine = psutil.Process((await http.get("/healthz")).json()["engine_pid"])
    started = time.monotonic()
    while (passed := time.monotonic() - started) < seconds:
        steps = _metrics(await http.get("/metrics"))["engine_steps_total"]
        row = {"seconds": round(passed, 1), "requests": float(sum(seen.outcomes.values())), "steps": steps}
        row |= {f"{name}_mib": round(rss / MIB, 2) for name, rss in zip(PROCESSES, _resident(engine), strict=True)}
        seen.rows.append(row)
        print("  ".join(f"{name} {value:g}" for name, value in row.items()), flush=True)
        await asyncio.sleep(seconds / SAMPLES)


def _resident(engine: psutil.Process) -> tuple[int, int]:
    """Bytes of whatever does HTTP, several API processes too, and of the engine process."""
    server = psutil.Process(engine.ppid())
    http = [process for process in (server, *server.children()) if process != engine]
    return sum(process.memory_info().rss for process in http), engine.memory_info().rss


async def _client(http: httpx.AsyncClient, rng: random.Random, until: float, seen: Seen) -> None:
    while time.monotonic() < until:
        body, leaves_after_s, refused = _request(rng)
        try:
            asked = http.post("/v1/completions", json=body)
            outcome = _outcome(await asyncio.wait_for(asked, leaves_after_s or PATIENCE_S), body, refused)
        except asyncio.TimeoutError:
            outcome = "wrong: no answer" if leaves_after_s is None else "left"
        except httpx.HTTPError as error:
            outcome = f"wrong: {error!r}"
        seen.outcomes[outcome] += 1


def _request(rng: random.Random) -> tuple[dict[str, Any], float | None, bool]:
    """A body, after how long its client leaves (None: it stays), and whether it must be refused."""
    prompt = rng.choice((SHARED, "")) + "".join(rng.choices("abcdefgh \n", k=rng.randint(1, 300)))
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randint(1, 60), "stream": rng.random() < 0.5}
    body |= rng.choice(({}, {}, {"n": 2}, {"logprobs": 2}, {"stop": ["e", "qq"]}, {"temperature": 0}))
    if rng.random() < 0.05:
        return body | {"temperature": -1}, None, True
    if rng.random() < 0.2:
        return body | {"max_tokens": 2000, "ignore_eos": True}, rng.uniform(0, 0.3), False
    return body, None, False


def _outcome(answer: httpx.Response, body: dict[str, Any], refused: bool) -> str:
    if refused:
        return "refused" if answer.status_code == 400 else f"wrong: {answer.status_code} for what must be refused"
    if answer.status_code != 200:
        return f"wrong: {answer.status_code} {answer.text[:200]!r}"
    if body["stream"]:
        return "streamed" if "data: [DONE]\n\n" in answer.text else "wrong: a stream without an end"
    return "whole" if '"usage":' in answer.text else "wrong: an answer without an end"


def _what_is_left(url: str) -> list[str]:
    """Requests and blocks that nobody waits for any more."""
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    until = time.monotonic() + 10
    while True:
        values = _metrics(httpx.get(f"{url}/metrics", timeout=10))
        left = [name for name in gauges if values[name]]
        if not left or time.monotonic() > until:
            return [f"{name} is {values[name]:g} when all clients have gone" for name in left]
        time.sleep(0.1)


def _metrics(answer: httpx.Response) -> dict[str, float]:
    """By name, without the prefix; of those with several labels the last."""
    lines = [line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#")]
    return {name.partition("{")[0].removeprefix(PREFIX): float(value) for name, value in lines}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
