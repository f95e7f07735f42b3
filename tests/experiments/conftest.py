"""Composing configs as run.py does, and a small random checkpoint."""

from __future__ import annotations

import copy
import gc
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra.core.override_parser.overrides_parser import OverridesParser
from matplotlib.figure import Figure
from omegaconf import DictConfig, ListConfig, OmegaConf, ValueNode
from omegaconf.base import Metadata
from yaml.constructor import SafeConstructor
from yaml.cyaml import CParser
from yaml.resolver import Resolver

from experiments.lab.config import axes, schema
from experiments.lab.measure import clocks, engine_processes, schedule, subjects
from experiments.lab.peers import process
from experiments.lab.show.figures import frame
from mini_infer import LLMEngine
from mini_infer.core.config import EngineConfig
from mini_infer.core.config import replace as changed
from mini_infer.runtime.executor import dry
from mini_infer.serving.processes.engine_process import EngineServer

ROOT = Path(__file__).resolve().parents[2]
TEST_CONF = Path(__file__).resolve().parent / "conf"  # experiment=probe


class _InC(CParser):
    """What a loader's classes take from text in Python, in C."""

    def __init__(self, stream: Any) -> None:
        CParser.__init__(self, stream)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)


def pytest_configure(config: pytest.Config) -> None:
    """Each file of conf/ is parsed once: cases of tests are made of them, too."""
    parse, known = yaml.load, dict[str, Any]()

    def parse_once(stream: Any, Loader: Any) -> Any:
        if Loader.__name__ != "OmegaConfLoader":  # which copies what it is given
            return parse(stream, Loader)
        text = stream.read()
        if text not in known:
            known[text] = parse(text, type("InC", (_InC, Loader), {}))
        return copy.deepcopy(known[text])

    patch = pytest.MonkeyPatch()
    patch.setattr(yaml, "load", parse_once)
    config.add_cleanup(patch.undo)


@pytest.fixture(scope="session", autouse=True)
def configs_are_made_once() -> Iterator[None]:
    """Hydra reads and merges some forty files for a composition, of which the next one takes most again: a file is
    loaded once, and of the defaults those up to the last mechanism's are merged once. And for each file it makes a
    config of all choices, which only a defaults list with an interpolation reads."""
    load, merge = CachingConfigRepository.load_config, ConfigLoaderImpl._compose_config_from_defaults_list
    load_one, make_map = ConfigLoaderImpl._load_single_config, defaults_list._create_interpolation_map
    files, merged = dict[Any, Any](), dict[Any, DictConfig]()
    register, registered = schema.register, set[tuple[Path, str]]()

    def load_once(repository: Any, config_path: str) -> Any:
        key = (config_path, *(source.path for source in repository.get_sources()))
        if key not in files:
            files[key] = load(repository, config_path)
        return files[key]

    def copy_metadata(metadata: Any, memo: dict[int, Any]) -> Any:
        """Of each value: half of the time that copies of configs take."""
        mine = object.__new__(type(metadata))
        cached = copy.deepcopy(metadata.resolver_cache) if metadata.resolver_cache else defaultdict(dict)
        mine.__dict__ |= metadata.__dict__ | {"flags": dict(metadata.flags), "resolver_cache": cached}
        return mine

    def copy_node(node: Any, memo: dict[int, Any]) -> Any:
        """Without making an empty one first, which is checked like what a user writes."""
        mine = object.__new__(type(node))
        mine.__dict__.update(node.__dict__, _metadata=copy_metadata(node._metadata, memo), _flags_cache=None)
        content = node.__dict__.get("_content")  # of a dict, of a list, or an interpolation
        if isinstance(content, (dict, list)):
            items = content.items() if isinstance(content, dict) else enumerate(content)
            copies = {key: item.__deepcopy__(memo) for key, item in items}
            for each in copies.values():
                each.__dict__["_parent"] = mine
            mine.__dict__["_content"] = copies if isinstance(content, dict) else [*copies.values()]
        return mine

    def own(loaded: Any) -> Any:
        """Merged with others it becomes another."""
        mine = copy.copy(loaded)
        mine.config = copy.deepcopy(loaded.config)
        return mine

    def load_own(loader: Any, default: Any, repo: Any) -> Any:
        if isinstance(default, DictConfig):
            return SimpleNamespace(config=copy.deepcopy(default))
        return load_one(
            loader,
            default,
            SimpleNamespace(
                load_config=lambda config_path: own(repo.load_config(config_path)),
                get_schema_source=repo.get_schema_source,
            ),
        )

    def merge_once(loader: Any, defaults: list[Any], repo: Any) -> DictConfig:
        mechanisms = [index for index, each in enumerate(defaults) if (each.config_path or "").startswith("engine/")]
        first = mechanisms[-1] + 1 if mechanisms else 0
        key = (*map(repr, defaults[:first]), *(source.path for source in repo.get_sources()))
        if key not in merged:
            merged[key] = merge(loader, defaults[:first], repo)
        return merge(loader, [merged[key], *defaults[first:]], repo)

    def register_once(conf: Path = axes.CONF, experiment: str = "*") -> None:
        if not registered & {(conf, experiment), (conf, "*")}:
            registered.add((conf, experiment))
            register(conf, experiment)

    def map_if_read(overrides: Any, defaults: Any, self_added: bool) -> DictConfig:
        read = any(not default.is_self() and default.is_interpolation() for default in defaults)
        return make_map(overrides, defaults, self_added) if read else OmegaConf.create()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachingConfigRepository, "load_config", load_once)
        patch.setattr(ConfigLoaderImpl, "_load_single_config", load_own)
        patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", merge_once)
        patch.setattr(defaults_list, "_create_interpolation_map", map_if_read)
        patch.setattr(schema, "register", register_once)
        patch.setattr(Metadata, "__deepcopy__", copy_metadata, raising=False)
        for kind in (DictConfig, ListConfig, *ValueNode.__subclasses__()):
            patch.setattr(kind, "__deepcopy__", copy_node)
        yield


@pytest.fixture(autouse=True)
def _quick(quick_step_costs: None) -> None:
    """Engines with drafts."""


@pytest.fixture(scope="session")
def compose_config(configs_are_made_once: None) -> Callable[..., DictConfig]:
    schema.register(ROOT / "conf")
    OmegaConf.register_new_resolver("lab.help", lambda: "", replace=True)

    @cache
    def composed(*files: str) -> DictConfig:
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            here = [f"hydra.searchpath=[file://{TEST_CONF}]", "measure.processes=1"]  # tests plant faults in this one
            return compose("config", overrides=[*here, *files])

    def made(*overrides: str) -> DictConfig:
        """Of each choice of files once. Values of single keys come after them all, as where Hydra composes anew."""
        parsed = dict(zip(overrides, OverridesParser.create().parse_overrides(list(overrides)), strict=True))
        values = [one for one in parsed.values() if "." in one.key_or_group and not one.is_hydra_override()]
        config = copy.deepcopy(composed(*(text for text, one in parsed.items() if one not in values)))
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
        return config

    return made


class Undrawn(Figure):
    def draw(self, renderer: Any) -> None:
        """An empty picture."""


@pytest.fixture(scope="module")
def quick_figures() -> Iterator[None]:
    """Composed without looking for room, and not drawn, for tests of all but what they look like."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame, "new", lambda width, height: Undrawn(figsize=(width, height), dpi=20))
        yield


@pytest.fixture
def peers_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children of this process, which has imported what they need; test_lab_peer_process.py is about how they are
    started."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "serving"))
    import forking

    def popen(
        command: list[str], *, stdin: int, stdout: Any, stderr: Any, env: dict[str, str], start_new_session: bool,
        pass_fds: list[int],
    ) -> forking.Child:  # fmt: skip
        (theirs,) = pass_fds
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "path", [*env["PYTHONPATH"].split(os.pathsep), *sys.path])
            child = forking.fork(command[2:], env, {1: stdout.fileno(), 2: stderr.fileno(), theirs: theirs})
        os.setpgid(child.pid, child.pid)
        return child

    monkeypatch.setattr(process, "subprocess", SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL))


class _InThread:
    """An engine process that is none."""

    def __init__(self, config: EngineConfig, path: str) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        server = EngineServer(LLMEngine(config), listener)
        threading.Thread(target=server.serve, daemon=True).start()

    def ending(self) -> None:
        """It does not end by itself."""

    def stop(self) -> None:
        """It waits for ever."""


@pytest.fixture
def engines_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of any config: with roles, or both alike."""

    def ways_to_make(config: EngineConfig, max_queued: int) -> list[Callable[[str], _InThread]]:
        roles = [{"prefill": 1, "decode": 0}, {"prefill": 0, "decode": 1}] if config.parallel.prefill else [{}, {}]
        return [partial(_InThread, changed(config, parallel={"replicas": 1, **role})) for role in roles]

    monkeypatch.setattr(engine_processes, "ways_to_make", ways_to_make)


@pytest.fixture
def run_py(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs run.py as if its arguments had been typed, in this process, which has imported all that it needs. Returns
    the exit code; what it prints is capsys's."""

    def run(*arguments: str) -> int:
        handlers, on_sigterm = list(logging.root.handlers), signal.getsignal(signal.SIGTERM)
        with monkeypatch.context() as patch:
            patch.setenv("HYDRA_FULL_ERROR", "1")  # run.py sets it; here it is taken back afterwards
            patch.setattr(sys, "argv", [str(ROOT / "run.py"), *arguments])
            try:
                runpy.run_path(str(ROOT / "run.py"), run_name="__main__")
            except SystemExit as ended:
                return ended.code if isinstance(ended.code, int) else 1
            finally:
                logging.root.handlers[:] = handlers  # Hydra has put its own there
                signal.signal(signal.SIGTERM, on_sigterm)
        return 0

    return run


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 of two layers. Its generation_config.json would bend any generation that heeds it."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=list(range(0, 128, 2)), do_sample=True, temperature=3.0, repetition_penalty=1.5
    )
    folder = tmp_path_factory.mktemp("models") / "random-qwen2"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def frozen_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was frozen after the collection of the tests stays so, and a measurement's own collections are short."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.fixture(autouse=True)
def steady_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that runs the tests is busy, and its clocks are nothing that they are about."""
    monkeypatch.setattr(clocks, "take", lambda device, wanted=None: clocks.Speed(1.0))


class VirtualTime:
    """A clock that moves as the dry model sleeps, with noise: a machine of its own, whatever else this one does."""

    def __init__(self, seed):
        self.now = 0.0
        self._rng = np.random.default_rng(seed)
        self.new_pass()

    def new_pass(self):
        """Each pass meets the machine in another mood."""
        self._mood = float(np.exp(self._rng.normal(0, 0.02)))

    def __call__(self):
        self.now += 1e-6
        return self.now

    def sleep(self, seconds):
        self.now += seconds * self._mood * float(np.exp(self._rng.normal(0, 0.05)))


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """What engines of the lab, and those who watch them, read instead of the machine's clock."""
    clock = VirtualTime(seed=0)

    def engine(config):
        clock.new_pass()
        return LLMEngine(config, clock=clock)

    monkeypatch.setattr(subjects, "LLMEngine", engine)
    monkeypatch.setattr(schedule, "time", SimpleNamespace(perf_counter=clock))
    # The dry model's sleep alone: a thread that another test left behind must not move this clock.
    monkeypatch.setattr(dry, "time", SimpleNamespace(sleep=clock.sleep, perf_counter=clock))
    return clock
