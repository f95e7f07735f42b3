"""A server and its clients, by the standard library alone: what it is, eight streams at once, and what it counted.

python examples/server_and_clients.py                                # starts a server of its own, on the shipped model
python examples/server_and_clients.py http://localhost:8000          # asks one that runs
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mini_infer.cli.chat import own_server

CLIENTS = 8


def post(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))


def stream(url: str, prompt: str) -> tuple[str, list[float]]:
    """The text of one answer, and when each of its pieces came, in seconds."""
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "stream": True}
    text, times, start = "", [], time.perf_counter()
    with post(f"{url}/v1/completions", body) as response:
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if data and data != "[DONE]":
                text += json.loads(data)["choices"][0]["text"]
                times.append(time.perf_counter() - start)
    return text, times


@contextlib.contextmanager
def server(urls: list[str]) -> Iterator[str]:
    if urls:
        yield urls[0]
    else:
        with own_server(["tiny-target"]) as url:
            yield url


def main(*urls: str) -> None:
    with server(list(urls)) as url:
        about = json.load(urllib.request.urlopen(f"{url}/healthz"))
        print(f"{about['model']} at {url}, up to {about['max_model_len']} tokens a request\n")

        with post(
            f"{url}/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}
        ) as whole:
            print("one answer:", repr(json.load(whole)["choices"][0]["message"]["content"]), "\n")

        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = list(pool.map(lambda i: stream(url, f"def f{i}(x):\n"), range(CLIENTS)))
        for number, (text, times) in enumerate(answers):
            first, last = 1e3 * times[0], 1e3 * times[-1]
            print(f"client {number}: first piece after {first:4.0f} ms, last {last:4.0f} ms  {text[:40]!r}")

        print("\nwhat the server counted:")
        for line in urllib.request.urlopen(f"{url}/metrics").read().decode().splitlines():
            if line.startswith(("mini_infer:prompt_tokens_total", "mini_infer:generation_tokens_total")):
                print(" ", line)


if __name__ == "__main__":
    main(*sys.argv[1:])
