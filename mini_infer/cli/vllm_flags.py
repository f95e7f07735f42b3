"""Flags as vLLM's server has them, so that a command line for it serves here too. Each becomes a flag of ours, or an
error that says what to do; none is ignored that would change anything."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mini_infer.core.errors import ConfigError
from mini_infer.core.vllm_names import ON, SETTINGS, Ours

NAMES = {name: Ours(f"--{ours.name}", ours.values) for name, ours in SETTINGS.items()} | {
    "q": Ours("--model.quantization"),
    "tp": Ours("--parallel.tensor"),
    "pp": Ours("--parallel.pipeline"),
    "data-parallel-size": Ours("--parallel.replicas"),
    "dp": Ours("--parallel.replicas"),
    "enable-lora": Ours(""),  # so anyway, as all that have no name
    "lora-modules": Ours("--lora"),
    "api-server-count": Ours("--api-processes"),
    "uvicorn-log-level": Ours("--log-level"),
    "tool-call-parser": Ours("--tool-format", {"llama3_json": "llama3", "llama": "llama3"}),
    "reasoning-parser": Ours("--reasoning-format", dict.fromkeys(("qwen3", "deepseek_r1", "glm45"), "think")),
    "enable-auto-tool-choice": Ours(""),
    "enable-reasoning": Ours(""),
    "disable-log-requests": Ours(""),
    "disable-log-stats": Ours("--stats-interval", {"": "0"}),
    "no-enable-log-requests": Ours(""),
    "disable-uvicorn-access-log": Ours(""),
}
INSTEAD = {
    "trust-remote-code": "no code of a checkpoint is run: leave it out",
    "speculative-config": "use --speculation.method and what stands beside it in --help",
    "generation-config": "send what it holds with each request",
    "guided-decoding-backend": "llguidance is the one there is: leave it out",
    "limit-mm-per-prompt": "text alone is understood: leave it out",
    "cpu-offload-gb": "weights stay on the device: use --model.quantization",
    "hf-overrides": "write them into the folder's config.json",
    "revision": "give --model a folder",
    "download-dir": "give --model a folder",
    "disable-custom-all-reduce": "leave it out",
    "distributed-executor-backend": "ranks are processes of one machine, which --parallel.launcher ray chooses",
    "compilation-config": "leave it out; --graphs.capture and --graphs.max_batch are what there is",
    "attention-backend": "use --attention.prefill and --attention.decode",
    "max-logprobs": "leave it out: a request may ask for 20, and /v1/completions for 64",
    "enable-log-requests": "use --access-log",
}


def translated(argv: Sequence[str], known: Collection[str]) -> list[str]:
    """The arguments with vLLM's flags as ours; those that are none of vLLM's stay as they are.

    Args:
        known: our own flags, which go before vLLM's.

    Raises:
        ConfigError: one that has no counterpart here.
    """
    words = list(argv)
    result = []
    if words[:1] == ["serve"]:
        words.pop(0)
    if words and not words[0].startswith("-"):
        result += ["--model", words.pop(0)]
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        name = flag.lstrip("-").replace("_", "-")
        if f"--{name}" in known and flag.startswith("--") and flag not in known:
            flag = f"--{name}"  # vLLM takes either spelling
        is_theirs = flag.startswith("-") and flag not in known and (name in NAMES or name in INSTEAD)
        if not is_theirs:
            result.append(flag + equals + value)
            continue
        if name in INSTEAD:
            raise ConfigError(f"{flag} is vLLM's and has no counterpart here: {INSTEAD[name]}")
        # Behind a switch for what is so anyway stands none of its values, perhaps a model: nothing may get lost.
        takes = NAMES[name].name or (words and words[0] in ON)
        if not equals and words and not words[0].startswith("-") and takes:
            value = words.pop(0)
        result += _ours(flag, value, NAMES[name], known)
        while name == "lora-modules" and words and not words[0].startswith("-"):
            result += _ours(flag, words.pop(0), NAMES[name], known)
    return result


def _ours(flag: str, value: str, ours: Ours, known: Collection[str]) -> list[str]:
    if not ours.name:
        return []
    meant = ours.value(value)
    if ours.name in known:
        return [ours.name, str(meant).lower() if isinstance(meant, bool) else meant]
    if meant == "1":  # so many of what there can be only one of
        return []
    raise ConfigError(f"{flag} {value}: this version has no counterpart ({ours.name}); leave it out")
