# %% [markdown]
# # A server and its clients
#
# By the standard library alone: what the server is, eight streams at once, and what it counted.
#
# As a script, with a server of its own on the shipped model: `python examples/server_and_clients.py`; of one that runs:
# `python examples/server_and_clients.py http://localhost:8000`

# %%
import contextlib
import json
import sys
import time
import urllib.request
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


# %% [markdown]
# ## The server
#
# One of our own, in a process of its own, unless an address was given.

# %%
given = [word for word in sys.argv[1:] if word.startswith("http")]
with contextlib.ExitStack() as open_until_here:
    url = given[0] if given else open_until_here.enter_context(own_server(["tiny-target"]))
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
