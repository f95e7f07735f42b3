"""`vllm serve MODEL --flag=value ...`: mini-infer-serve with a dry model in its place. It fails without a tokenizer."""

import os
import sys
from pathlib import Path

subcommand, model, *flags = sys.argv[1:]
given = dict(flag.partition("=")[::2] for flag in flags)
assert subcommand == "serve"
assert (Path(model) / "config.json").exists()
assert (Path(given["--tokenizer"]) / "tokenizer.json").exists()
ours = ["--model=dry", "--model.load_format=dry", "--model.device=cpu", "--cache.num_blocks=64", "--host=127.0.0.1"]
taken = [f"--port={given['--port']}", f"--served-model-name={given['--served-model-name']}"]
if given.get("--seed") == "13":
    sys.exit("the made-up vLLM does not like 13")
os.execv(sys.executable, [sys.executable, "-m", "mini_infer.cli.serve", *ours, *taken])
