"""The engines that models ask for, and how each is made."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from mini_infer.core.config import EngineConfig, Launcher
from mini_infer.serving.processes.gpus import count_gpus, environments, placed
from mini_infer.serving.processes.launch import EngineProcess
from mini_infer.serving.settings import ModelSettings

Make: TypeAlias = Callable[[str], Any]  # an engine process that listens at a path


def engines_of(models: Sequence[ModelSettings]) -> list[list[Make]]:
    """How each model's engines are made. Raises ConfigError where there are too few GPUs, or too little memory of one
    that models share."""
    return [
        ways_to_make(engine, model.max_queued, environment)
        for model, (engine, environment) in zip(models, placed(models, os.environ, count_gpus), strict=True)
    ]


def ways_to_make(engine: EngineConfig, max_queued: int, environment: Mapping[str, str] | None = None) -> list[Make]:
    """Of each engine of a model, those for prompts first.

    Args:
        max_queued: completions that may wait, of all of them together.
        environment: by default this process's.

    Raises:
        ConfigError: there cannot be as many.
    """
    parallel = engine.parallel
    max_queued = -(-max_queued // (parallel.decode or parallel.replicas))
    if parallel.launcher is Launcher.ray:
        from mini_infer.serving.processes.ray_engine import RayEngine, place

        return [partial(RayEngine, actor) for actor in place(engine, max_queued)]
    configs = [dataclasses.replace(engine, parallel=own) for own in parallel.of_engines]
    surroundings = environments(engine, os.environ if environment is None else environment, count_gpus)
    return [
        partial(EngineProcess, own, max_queued, environment=environment)
        for own, environment in zip(configs, surroundings, strict=True)
    ]
