"""Which GPUs each model's engines see, and each of its replicas."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

from mini_infer.core.config import Device, EngineConfig, LoadFormat, replace
from mini_infer.core.errors import ConfigError
from mini_infer.runtime.preflight import sees_gpu
from mini_infer.serving.settings import ModelSettings

VISIBLE = "CUDA_VISIBLE_DEVICES"
Count: TypeAlias = Callable[[Mapping[str, str]], int]  # how many GPUs a process with an environment sees
_COUNTED = dict[str | None, int]()  # by what CUDA_VISIBLE_DEVICES says


def placed(
    models: Sequence[ModelSettings], environment: Mapping[str, str], count: Count
) -> list[tuple[EngineConfig, Mapping[str, str]]]:
    """Each model's engines' config and environment. A model sees the GPUs that its `gpus` name; of several models the
    others get the next ones that nobody has named.

    Args:
        environment: this process's.

    Raises:
        ConfigError: there are too few GPUs, or models that share one want more than all of its memory.
    """
    on_gpus = {model.model_name: model for model in models if not needs_no_gpu(model.engine)}
    found: list[tuple[EngineConfig, Mapping[str, str]]] = [(model.engine, environment) for model in models]
    if not any(model.gpus for model in models) and (len(models) == 1 or not on_gpus):
        return found
    visible = _visible(environment, count(environment))
    if not visible and all(model.engine.model.device is Device.auto for model in on_gpus.values()):
        return found
    own = {name: _named(model, visible) for name, model in on_gpus.items()}
    free = [gpu for gpu in visible if not any(gpu in gpus for gpus in own.values())]
    for name, model in on_gpus.items():
        if not own[name]:
            needed = sum(each.ranks for each in model.engine.parallel.of_engines)
            if len(free) < needed:
                raise ConfigError(
                    f"model {name!r} needs {needed} GPUs of its own, and of the {len(visible)} that are visible here "
                    f"{len(free)} are left: say in `gpus` which each model uses, such as gpus: 0, and the parts of one "
                    "that several use in their cache.gpu_memory_utilization"
                )
            own[name], free = free[:needed], free[needed:]
    shared = _shared(on_gpus, own)
    for index, model in enumerate(models):
        if gpus := own.get(model.model_name):
            engine = replace(model.engine, cache={"gpu_shared": True}) if shared & {*gpus} else model.engine
            found[index] = (engine, {**environment, VISIBLE: ",".join(gpus)})
    return found


def _named(model: ModelSettings, visible: Sequence[str]) -> list[str]:
    """The GPUs that it asks for by their numbers."""
    numbers = [int(number) for number in model.gpus.split(",")] if model.gpus else []
    if len({*numbers}) < len(numbers):
        raise ConfigError(f"model {model.model_name!r}: gpus={model.gpus} names a GPU twice")
    missing = [number for number in numbers if number >= len(visible)]
    if missing:
        raise ConfigError(
            f"model {model.model_name!r}: gpus={model.gpus}, and {len(visible)} GPUs are visible here, from 0 on"
        )
    return [visible[number] for number in numbers]


def _shared(models: Mapping[str, ModelSettings], own: Mapping[str, Sequence[str]]) -> set[str]:
    """The GPUs that several models use. Raises ConfigError where they want more than all of one's memory."""
    users: dict[str, list[str]] = {}
    for name, gpus in own.items():
        for gpu in gpus:
            users.setdefault(gpu, []).append(name)
    shared = {gpu: names for gpu, names in users.items() if len(names) > 1}
    for gpu, names in shared.items():
        caches = {name: models[name].engine.cache for name in names}
        shares = {name: each.gpu_memory_utilization for name, each in caches.items() if each.memory_gib is None}
        if sum(shares.values()) > 1 + 1e-9:
            wanted = ", ".join(f"{name!r} {share:g}" for name, share in shares.items())
            raise ConfigError(
                f"models that share GPU {gpu} want more than all of its memory ({wanted}): lower each one's "
                "cache.gpu_memory_utilization until they are 1 together, or say its GiB for KV in cache.memory_gib"
            )
    return {*shared}


def _visible(environment: Mapping[str, str], number: int) -> list[str]:
    """The names of the GPUs that a process with this environment sees, so many. From one on that is not there (-1, say)
    it sees none of those that the environment names."""
    named = environment.get(VISIBLE)
    return [name.strip() for name in named.split(",")][:number] if named else [str(index) for index in range(number)]


def environments(config: EngineConfig, environment: Mapping[str, str], count: Count) -> list[dict[str, str]]:
    """Each replica's environment: with several, it sees its own GPUs alone.

    Args:
        environment: this process's.

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
    names = _visible(environment, visible)
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
    """Asked of torch in a process of its own, which takes seconds, and so once: here it would keep some 300 MB."""
    visible = environment.get(VISIBLE)
    if visible in _COUNTED or not sees_gpu():
        return _COUNTED.get(visible, 0)
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    done = subprocess.run(command, env=dict(environment), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return 0
    _COUNTED[visible] = int(done.stdout)
    return _COUNTED[visible]
