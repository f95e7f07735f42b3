"""A server and engine processes that tests share, and the certainty that none is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from forking import engines_are_forked, forks
from http_server import Server, running
from served import HandDrivenServer, dry_config

from mini_infer import EngineConfig
from mini_infer.serving.processes.launch import EngineProcess


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "clients" not in config.option.markexpr:
        for item in items:
            if "clients" in item.keywords and item.get_closest_marker("clients"):
                item.add_marker(pytest.mark.skip(reason="runs with -m clients alone"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """The helper is forked when everything has been imported and nothing has run."""
    if session.items and not session.config.option.collectonly:
        forks()


_shared: list[psutil.Process] = []


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    """With the dry model and no settings of its own. Each process of the test run has one."""
    with running() as server:
        _shared.append(psutil.Process(server.process.pid))
        yield server


@pytest.fixture(scope="session")
def client(shared_server: Server) -> Iterator[Any]:
    """OpenAI's own, of the shared server."""
    import openai  # takes a second

    with openai.OpenAI(base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def helper() -> Iterator[psutil.Process]:
    """Forks servers and engines."""
    yield psutil.Process(forks().process.pid)
    forks().close()


@pytest.fixture(scope="module", autouse=True)
def engines_are_forked_here(helper: psutil.Process) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        engines_are_forked(patch, forks().start)
        yield


@pytest.fixture(scope="module", autouse=True)
def no_process_left(helper: psutil.Process) -> Iterator[None]:
    """But for the shared server."""
    before = set(psutil.Process().children(recursive=True))
    yield
    shared = {process for server in _shared for process in (server, *server.children(recursive=True))}
    new = set(psutil.Process().children(recursive=True)) - before - {helper, *shared}
    _, left = psutil.wait_procs(new, timeout=5)
    assert not left


@pytest.fixture(scope="module")
def engine_process() -> Iterator[EngineProcess]:
    process = EngineProcess(dry_config())
    yield process
    process.stop()
    assert process.ending() == "exited with code 0"


@pytest.fixture
def hand_driven(tmp_path: Path) -> Iterator[Callable[..., HandDrivenServer]]:
    servers: list[HandDrivenServer] = []

    def make(config: EngineConfig | None = None, **options: int) -> HandDrivenServer:
        servers.append(HandDrivenServer(tmp_path, config, **options))
        return servers[-1]

    yield make
    for server in servers:
        server.close()
