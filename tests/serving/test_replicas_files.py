"""Replicas beside each other share prefixes in files, also with one that takes the place of a killed one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from http_server import running
from test_replicas import by_replica, pids, wait_until_whole


def test_what_one_replica_has_computed_another_one_finds(tmp_path: Path) -> None:
    said = "".join(f"{number} " for number in range(200))
    flags = ("--parallel.replicas", "2", "--parallel.routing", "round_robin", "--model.dry.step_ms", "2")
    tiers = ("--cache.host_prefix_gib", "0.001", "--cache.disk_prefix_path", str(tmp_path))
    with running(*flags, *tiers) as server:
        answers = [server.complete(said, max_tokens=16, ignore_eos=True, temperature=0) for _ in range(2)]
        # The blocks that the last steps have filled are written beside those of the next request.
        assert sorted(by_replica(server, "prefix_cache_disk_hits_total").values())[1] >= 512
        killed = pids(server)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        wait_until_whole(server, unlike=killed)
        answers += [server.complete(said, max_tokens=16, ignore_eos=True, temperature=0) for _ in range(2)]
        assert min(by_replica(server, "prefix_cache_disk_hits_total").values()) >= 512
        assert by_replica(server, "prefix_cache_lost_blocks_total") == {"0": 0, "1": 0}
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
