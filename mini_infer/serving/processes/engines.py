"""The engines that a config asks for: how each is made, and which GPUs it sees."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mini_infer.core.config import Device, EngineConfig, Launcher, LoadFormat, replace
from mini_infer.core.errors import ConfigError
from mini_infer.serving.processes.launch import EngineProcess

VISIBLE = "CUDA_VISIBLE_DEVICES"


def ways_to_make(engine: EngineConfig, max_queued: int) -> list[Callable[[str], Any]]:
    """Of each engine, those for prompts first, an engine process that listens at a path. Of them all no more than
    `max_queued` completions may wait. Raises ConfigError where there cannot be as many."""
    parallel = engine.parallel
    number = parallel.decode or parallel.replicas
    config = replace(engine, parallel={"replicas": 1, "launcher": Launcher.processes})
    max_queued = -(-max_queued // number)
    if parallel.launcher is Launcher.ray:
        from mini_infer.serving.processes.ray_engine import RayEngine, require_cluster

        require_cluster(engine)
        return [partial(RayEngine, config, max_queued)] * number
    surroundings = environments(engine, os.environ, count_gpus)
    configs = [config] * number
    if parallel.prefill:  # those for prompts come first
        computes, decodes = ({"prefill": 1, "decode": 0}, parallel.prefill), ({"prefill": 0, "decode": 1}, number)
        configs = [replace(config, parallel=role) for role, count in (computes, decodes) for _ in range(count)]
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
    replicas, each = config.parallel.engines, config.parallel.ranks
    on_cpu = needs_no_gpu(config)
    visible = 0 if replicas == 1 or on_cpu else count(environment)
    if replicas == 1 or on_cpu or (visible == 0 and config.model.device is Device.auto):
        return [dict(environment) for _ in range(replicas)]
    if visible < replicas * each:
        raise ConfigError(
            f"{_asked(config)} with {config.parallel.asked} needs {replicas * each} GPUs, and {visible} "
            "are visible here: lower one of them, or choose model.device=cpu"
        )
    named = environment.get(VISIBLE)
    names = [name.strip() for name in named.split(",")] if named else [str(index) for index in range(visible)]
    if config.parallel.prefill:  # each sees them all, its own one first: they write to each other's memory
        own = [names[index:] + names[:index] for index in range(replicas)]
    else:
        own = [names[first : first + each] for first in range(0, replicas * each, each)]
    return [{**environment, VISIBLE: ",".join(gpus)} for gpus in own]


def _asked(config: EngineConfig) -> str:
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
