"""A server and engine processes that tests share, and the certainty that none is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from forking import engines_are_forked, forks
from http_server import Server, running
from served import HandDrivenServer, dry_config

from mini_infer import EngineConfig
from mini_infer.serving.processes.launch import EngineProcess

_shared: list[psutil.Process] = []


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    """With the dry model and no settings of its own. Each process of the test run has one."""
    with running() as server:
        process = psutil.Process(server.process.pid)
        _shared.extend([process, *process.children(recursive=True)])
        yield server


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
