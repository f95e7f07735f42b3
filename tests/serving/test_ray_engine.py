"""Replicas on the machines of a Ray cluster: three of them made up on this one, by `make ray-tests`."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from http_server import Server, http_client, refusal, running, wait_for

from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.cli.server_process import start_server
from mini_infer.core.errors import ConfigError

try:  # it is no part of the extra `dev`
    import ray
    from ray.cluster_utils import Cluster
    from ray.util import placement_group_table
    from ray.util.placement_group import placement_group, remove_placement_group

    from mini_infer.serving.processes import ray_engine
except ImportError:
    ray = None

ON_RAY = ("--parallel.launcher", "ray")
MACHINES = 3
RESTARTED_S = 90  # Ray misses a machine within seconds; the engine starts in a new interpreter, as its ranks do
# By default it takes Ray 15 s.
SOON_MISSED = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}


@pytest.fixture(scope="module")
def only_cluster() -> Iterator[Any]:
    assert ray is not None, "Ray is not installed: `make ray-tests` does it"
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": SOON_MISSED})
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def cluster(only_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A head, where nobody computes, and three machines of two cores each, which nobody uses."""
    monkeypatch.setenv("RAY_ADDRESS", only_cluster.address)
    ray.init(address=only_cluster.address, log_to_driver=False, ignore_reinit_error=True)
    for _ in range(MACHINES - len(only_cluster.worker_nodes)):
        only_cluster.add_node(num_cpus=2)
    only_cluster.wait_for_nodes()
    wait_for(lambda: ray.available_resources().get("CPU") == 2 * MACHINES, timeout=30)
    return only_cluster


def bundles() -> list[tuple[str, dict[str, float]]]:
    """Of the one placement group that there is: the machine of each, and what it has of it."""
    (group,) = (group for group in placement_group_table().values() if group["state"] != "REMOVED")
    return [(group["bundles_to_node_id"][number], each) for number, each in group["bundles"].items()]


def actors() -> dict[int, str]:
    """The machine of each that lives, by its process."""
    found = ray._private.state.actors().values()
    return {actor["Pid"]: actor["Address"]["NodeID"] for actor in found if actor["State"] == "ALIVE"}


def processes_of(actor: int, module: str) -> set[int]:
    """Those below an actor's that run this module."""
    found = set()
    for process in psutil.Process(actor).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(word.endswith(module) for word in process.cmdline()):
                found.add(process.pid)
    return found


def machine_of(cluster: Any, pid: int) -> str:
    """Whose raylet a process comes from."""
    above = {process.pid for process in psutil.Process(pid).parents()}
    raylets = {node.node_id: node.all_processes["raylet"][0].process.pid for node in cluster.worker_nodes}
    (machine,) = (machine for machine, raylet in raylets.items() if raylet in above)
    return machine


def lose(cluster: Any, machine: str) -> None:
    (lost,) = (node for node in cluster.worker_nodes if node.node_id == machine)
    cluster.remove_node(lost, allow_graceful=False)


def are_all_up(server: Server) -> bool:
    with http_client(server.url) as client:
        return all(replica["status"] == "ok" for replica in client.get("/healthz").json()["replicas"])


@pytest.mark.ray
def test_replicas_are_on_different_machines_and_come_back_elsewhere(cluster: Any) -> None:
    with running(*ON_RAY, "--parallel.replicas", str(MACHINES), forked=False) as server:
        server.complete(max_tokens=3)
        assert [has for _, has in bundles()] == [{"CPU": 1}] * MACHINES
        before = actors()
        assert len({*before.values()}) == MACHINES
        assert {*before.values()} == {machine for machine, _ in bundles()}
        lost = bundles()[0][0]
        lose(cluster, lost)
        wait_for(lambda: len(actors()) == MACHINES and lost not in actors().values(), timeout=RESTARTED_S)
        wait_for(lambda: are_all_up(server), timeout=RESTARTED_S)
        server.check_unharmed()
        assert {*before} & {*actors()} == {pid for pid, machine in before.items() if machine != lost}
        assert lost not in {machine for machine, _ in bundles()}
        assert server.stop() == 0
    wait_for(lambda: not actors(), timeout=30)


@pytest.mark.ray
def test_ray_starts_actors_again_and_the_supervisor_engines(cluster: Any) -> None:
    def engine() -> set[int]:
        return {pid for actor in actors() for pid in processes_of(actor, "processes.launch")}

    with running(*ON_RAY, forked=False) as server:
        (actor,), (first,) = actors(), engine()
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: len(engine() - {first}) == 1 and are_all_up(server), timeout=RESTARTED_S)
        assert [*actors()] == [actor]
        os.kill(actor, signal.SIGKILL)
        wait_for(lambda: len(actors()) == 1 and actor not in actors() and are_all_up(server), timeout=RESTARTED_S)
        server.check_unharmed()
        assert server.stop() == 0


@pytest.mark.ray
def test_engines_with_roles_live_on_any_machine(cluster: Any) -> None:
    roles = ("--parallel.prefill", "1", "--parallel.decode", "1", "--parallel.connector", "stream")
    with running(*ON_RAY, "--parallel.hand_over", "always", *roles, forked=False) as server:
        server.complete(max_tokens=3)
        wait_for(lambda: server.metrics()["kv_transfers_total"] == 1)
        assert server.metrics()["kv_transfers_failed_total"] == 0
        assert len({*actors().values()}) == 2
        assert server.stop() == 0


@pytest.mark.ray
def test_ranks_of_an_engine_are_on_one_machine_and_come_back_on_another(cluster: Any) -> None:
    small = {"path": "tiny-target", "device": "cpu", "threads": 1}
    greedy = {"max_tokens": 5, "temperature": 0}
    engine = LLMEngine(EngineConfig.from_dict({"model": small}))
    expected = engine.generate(["def f("], SamplingParams(**greedy))[0].outputs[0].text
    flags = ("--model", "tiny-target", "--model.device", "cpu", "--model.threads", "1", "--cache.num_blocks", "64")
    with running(*ON_RAY, "--parallel.tensor", "2", *flags, dry=False, forked=False) as server:

        def check_ranks() -> str:
            """Both are on the machine that it returns, and compute what one alone does."""
            ((machine, has),), (actor,) = bundles(), actors()
            assert has == {"CPU": 2}
            (first,), (second,) = processes_of(actor, "processes.launch"), processes_of(actor, "rank_process")
            assert {machine_of(cluster, pid) for pid in (actor, first, second)} == {machine}
            assert server.complete(prompt="def f(", **greedy)["choices"][0]["text"] == expected
            return machine

        lost = check_ranks()
        lose(cluster, lost)
        wait_for(lambda: len(actors()) == 1 and lost not in actors().values(), timeout=RESTARTED_S)
        wait_for(lambda: are_all_up(server), timeout=RESTARTED_S)
        assert check_ranks() != lost
        assert server.stop() == 0


@pytest.mark.ray
def test_a_rank_that_takes_a_gpu_has_one_of_the_bundle(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # which need not be there
    machine = cluster.add_node(num_cpus=2, num_gpus=2)
    try:
        wait_for(lambda: ray.cluster_resources().get("GPU") == 2)
        made = ray_engine.place(EngineConfig.from_dict({"parallel": {"tensor": 2, "launcher": "ray"}}), max_queued=1)
        assert bundles() == [(machine.node_id, {"CPU": 2, "GPU": 2})]
        wait_for(lambda: [*actors().values()] == [machine.node_id], timeout=30)
        del made
        wait_for(lambda: not actors() and ray.available_resources().get("GPU") == 2, timeout=30)
    finally:
        cluster.remove_node(machine)
        wait_for(lambda: not ray.cluster_resources().get("GPU"), timeout=30)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model": {"device": "cpu"}, "parallel": {"tensor": 3, "replicas": 2}},
            r"replicas=2 engines, of which one takes 3 CPUs of one machine, and the cluster has room for 0 of 2",
        ),
        (
            {"model": {"device": "cpu"}, "parallel": {"tensor": 2, "replicas": 4}},
            r"replicas=4 engines, of which one takes 2 CPUs of one machine, and the cluster has room for 3 of 4",
        ),
    ],
)
def test_what_the_cluster_has_no_room_for_is_refused(cluster: Any, settings: dict[str, Any], message: str) -> None:
    settings["parallel"]["launcher"] = "ray"
    with pytest.raises(ConfigError, match=message):
        ray_engine.place(EngineConfig.from_dict(settings), max_queued=1)


@pytest.mark.ray
def test_machines_that_others_use_are_not_waited_for(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "_ROOM_S", 0.5)
    others = placement_group([{"CPU": 2}] * MACHINES)
    assert others.wait(10)
    with pytest.raises(ConfigError, match=r"takes 2 CPUs of one machine: the cluster has that, but others use it"):
        ray_engine.place(
            EngineConfig.from_dict({"model": {"device": "cpu"}, "parallel": {"tensor": 2, "launcher": "ray"}}), 1
        )
    remove_placement_group(others)


@pytest.mark.ray
def test_a_cluster_without_the_gpus_asked_for_ends_the_server(cluster: Any) -> None:
    code, said = refusal(*ON_RAY, "--port", "0", "--model", "tiny-target", "--model.device", "cuda")
    assert (code, said.count("\n")) == (2, 1), said
    assert "takes 1 CPUs and 1 GPUs of one machine, and the cluster, which has no GPU, has room for 0 of 1" in said


@pytest.mark.ray
def test_a_cluster_that_does_not_answer_ends_the_server_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as once:
        port = once.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    started = time.monotonic()
    code, said = refusal(*ON_RAY, "--port", "0", "--dry-run")
    assert (code, said.count("\n")) == (2, 1), said
    assert f"no Ray cluster can be joined at RAY_ADDRESS=127.0.0.1:{port}" in said
    assert time.monotonic() - started < 20


@pytest.mark.ray
def test_a_machine_without_a_cluster_is_told_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ray.shutdown()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray._private.services, "find_gcs_addresses", functools.cache(set))  # whatever else runs here
    monkeypatch.setattr(ray._private.utils, "read_ray_address", lambda *of: None)
    with pytest.raises(ConfigError, match=r"can be joined here \(Could not find .*`ray start --head` starts one"):
        ray_engine.place(EngineConfig.from_dict({"parallel": {"launcher": "ray"}}), max_queued=1)


def test_ray_that_is_not_installed_ends_the_server(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('hidden by a test')\n")
    flags = (*ON_RAY, "--port", "0", "--dry-run")
    server = start_server(flags, {**os.environ, "PYTHONPATH": str(tmp_path)}, stderr=subprocess.STDOUT)
    said, _ = server.communicate(timeout=60)
    assert (server.returncode, said.count("\n")) == (2, 1), said
    assert "parallel.launcher=ray needs Ray: pip install -e '.[ray]'" in said


def test_one_engine_is_not_placed_on_a_cluster() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.launcher=ray places engines behind mini-infer-serve"):
        LLMEngine(EngineConfig.from_dict({"parallel": {"launcher": "ray"}}))
