"""Replicas on the machines of a Ray cluster: three of them made up on this one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from http_server import Server, http_client, running, wait_for

from mini_infer import EngineConfig, LLMEngine, SamplingParams
from mini_infer.core.errors import ConfigError

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")
ray_engine = pytest.importorskip("mini_infer.serving.processes.ray_engine")
pytestmark = pytest.mark.slow  # a cluster takes seconds to start


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head, where nobody computes, and three machines of two cores each."""
    made = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    made.machines = [made.add_node(num_cpus=2) for _ in range(3)]  # type: ignore[attr-defined]
    made.wait_for_nodes()
    yield made
    ray.shutdown()
    made.shutdown()


def replicas(server: Server) -> list[dict[str, Any]]:
    with http_client(server.url) as client:
        return client.get("/healthz").json()["replicas"]


def places() -> list[str]:
    """Of the actors that live: the machine of each."""
    actors = ray._private.state.actors().values()
    return [actor["Address"]["NodeID"] for actor in actors if actor["State"] == "ALIVE"]


def test_replicas_live_on_any_machine_and_come_back_elsewhere(cluster: Any) -> None:
    flags = ("--parallel.launcher", "ray", "--parallel.replicas", "2", "--parallel.tensor", "1")
    with running(*flags, environ={"RAY_ADDRESS": cluster.address}, forked=False) as server:
        ray.init(address=cluster.address, ignore_reinit_error=True, log_to_driver=False)
        server.complete(max_tokens=3)
        assert len(places()) == 2
        lost = next(node for node in cluster.machines if node.node_id in places())
        cluster.remove_node(lost, allow_graceful=False)

        def is_whole() -> bool:
            return len(places()) == 2 and lost.node_id not in places()

        wait_for(is_whole, timeout=60)
        wait_for(lambda: all(replica["status"] == "ok" for replica in replicas(server)), timeout=60)
        server.check_unharmed()
        assert server.stop() == 0
    wait_for(lambda: not places(), timeout=30)


def test_engines_with_roles_live_on_any_machine(cluster: Any) -> None:
    roles = ("--parallel.prefill", "1", "--parallel.decode", "1", "--parallel.connector", "stream")
    flags = ("--parallel.launcher", "ray", "--parallel.hand_over", "always", *roles)
    with running(*flags, environ={"RAY_ADDRESS": cluster.address}, forked=False) as server:
        server.complete(max_tokens=3)
        wait_for(lambda: server.metrics()["kv_transfers_total"] == 1)
        assert server.metrics()["kv_transfers_failed_total"] == 0
        assert server.stop() == 0


def test_ranks_of_an_engine_are_on_one_machine(cluster: Any) -> None:
    model = ("--model", "tiny-target", "--model.device", "cpu", "--model.threads", "1", "--cache.num_blocks", "64")
    flags = ("--port", "0", "--parallel.launcher", "ray", "--parallel.tensor", "2", *model)
    server = Server(flags, environ={"RAY_ADDRESS": cluster.address}, forked=False)
    try:
        ray.init(address=cluster.address, ignore_reinit_error=True, log_to_driver=False)
        engine = LLMEngine(EngineConfig.from_dict({"model": {"path": "tiny-target", "device": "cpu", "threads": 1}}))
        found = server.complete(prompt="def f(", max_tokens=5, temperature=0)["choices"][0]["text"]
        assert found == engine.generate(["def f("], SamplingParams(max_tokens=5, temperature=0))[0].outputs[0].text
        assert len(places()) == 1
    finally:
        assert server.stop() == 0


def test_what_the_cluster_has_no_room_for_is_refused(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    wide = {"model": {"device": "cpu"}, "parallel": {"tensor": 3, "replicas": 2, "launcher": "ray"}}
    with pytest.raises(
        ConfigError, match=r"replicas=2 engines, of which one takes 3 CPUs of one machine, .* room for 0 of 2"
    ):
        ray_engine.require_cluster(EngineConfig.from_dict(wide))
    with pytest.raises(ConfigError, match=r"parallel\.launcher=ray places engines behind mini-infer-serve"):
        LLMEngine(EngineConfig.from_dict({"parallel": {"launcher": "ray"}}))
