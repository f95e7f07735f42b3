"""`vllm bench serve`, made up: it asks for whole answers one after the other, and says that each token took 10 ms."""

import asyncio
import json
import time
import urllib.request


def add_cli_args(parser):
    for name in ("backend", "base-url", "endpoint", "model", "dataset-name", "dataset-path"):
        parser.add_argument(f"--{name}")
    for name in ("num-prompts", "max-concurrency", "ready-check-timeout-sec"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("skip-tokenizer-init", "disable-shuffle", "save-detailed", "disable-tqdm"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--extra-body", type=json.loads)


def main(args):
    return asyncio.run(benchmark(args))


async def benchmark(args):
    found = {name: [] for name in ("start_times", "ttfts", "itls", "output_lens", "errors")}
    with open(args.dataset_path) as file:
        prompts = [json.loads(line)["prompt"] for line in file]
    assert len(prompts) == args.num_prompts
    for prompt in prompts:
        body = {"model": args.model, "prompt": prompt, **args.extra_body}
        request = urllib.request.Request(
            args.base_url + args.endpoint, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        found["start_times"].append(time.perf_counter())
        with urllib.request.urlopen(request) as answer:
            usage = json.load(answer)["usage"]
        events = usage["completion_tokens"] // 2  # of two tokens each
        found["ttfts"].append(0.01)
        found["itls"].append([0.02] * (events - 1))
        found["output_lens"].append(usage["completion_tokens"])
        found["errors"].append("")
    return {**found, "duration": 1e6}
