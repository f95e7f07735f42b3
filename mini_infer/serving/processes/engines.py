"""The engines that a config asks for: how each is made, and which GPUs it sees."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

from mini_infer.core.config import Device, EngineConfig, Launcher, LoadFormat
from mini_infer.core.errors import ConfigError
from mini_infer.serving.processes.launch import EngineProcess

VISIBLE = "CUDA_VISIBLE_DEVICES"


def ways_to_make(engine: EngineConfig, max_queued: int) -> list[Callable[[str], Any]]:
    """Of each engine, those for prompts first, an engine process that listens at a path. Of them all no more than
    `max_queued` completions may wait. Raises ConfigError where there cannot be as many."""
    parallel = engine.parallel
    configs = [dataclasses.replace(engine, parallel=own) for own in parallel.of_engines]
    max_queued = -(-max_queued // (parallel.decode or parallel.replicas))
    if parallel.launcher is Launcher.ray:
        from mini_infer.serving.processes.ray_engine import RayEngine, require_cluster

        require_cluster(engine)
        return [partial(RayEngine, config, max_queued) for config in configs]
    surroundings = environments(engine, os.environ, count_gpus)
    return [
        partial(EngineProcess, own, max_queued, environment=environment)
        for own, environment in zip(configs, surroundings, strict=True)
    ]


def environments(
    config: EngineConfig, environment: Mapping[str, str], count: Callable[[Mapping[str, str]], int]
) -> list[dict[str, str]]:
    """Each replica's environment: with several, it sees its own GPUs alone.

    Args:
        environment: this process's.
        count: says how many GPUs a process with an environment sees.

    Raises:
        ConfigError: there are fewer GPUs than the replicas need.
    """
    sizes = [own.ranks for own in config.parallel.of_engines]
    replicas, needed = len(sizes), sum(sizes)
    on_cpu = needs_no_gpu(config)
    visible = 0 if replicas == 1 or on_cpu else count(environment)
    if replicas == 1 or on_cpu or (visible == 0 and config.model.device is Device.auto):
        return [dict(environment) for _ in range(replicas)]
    if visible < needed:
        raise ConfigError(
            f"{engines_asked(config)} with {config.parallel.asked} needs {needed} GPUs, and {visible} "
            "are visible here: lower one of them, or choose model.device=cpu"
        )
    named = environment.get(VISIBLE)
    names = [name.strip() for name in named.split(",")] if named else [str(index) for index in range(visible)]
    own = [names[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    if config.parallel.prefill:  # each sees them all, its own first: they write to each other's memory
        own = [mine + [name for name in names if name not in mine] for mine in own]
    return [{**environment, VISIBLE: ",".join(gpus)} for gpus in own]


def engines_asked(config: EngineConfig) -> str:
    parallel = config.parallel
    if parallel.prefill:
        return f"parallel.prefill={parallel.prefill} and parallel.decode={parallel.decode}"
    return f"parallel.replicas={parallel.replicas}"


def needs_no_gpu(config: EngineConfig) -> bool:
    """Whatever there is. With device=auto it may do without one, too."""
    return config.model.device is Device.cpu or config.model.load_format is LoadFormat.dry


def count_gpus(environment: Mapping[str, str]) -> int:
    """Asked of torch in a process of its own: here it would keep some 300 MB for good."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    done = subprocess.run(command, env=dict(environment), stdout=subprocess.PIPE, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else 0
