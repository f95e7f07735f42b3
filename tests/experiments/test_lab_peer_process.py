"""The process that a peer lives in: what goes in and comes back, every way in which it can fail, and that nothing of it
is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from reimported import reimported

from experiments.lab.load import subject as over_http
from experiments.lab.measure.kinds import Kind, PeerAbsent, PeerError, PeerSettings, ProcessSettings, VLLMSettings
from experiments.lab.measure.profile import NoProfile
from experiments.lab.peers import pool
from experiments.lab.peers.pool import Peers
from experiments.lab.peers.process import PeerProcess
from experiments.lab.workloads import Item
from mini_infer.core.config import EngineConfig
from mini_infer.core.errors import ConfigError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ITEMS = [Item((5, 6), 3, name="a"), Item((7,), 2)]


def start(timeout_s=60.0, **args):
    settings = VLLMSettings(pythonpath=str(HERE), timeout_s=timeout_s, args=args)
    return PeerProcess("Fake", "fake_peer", EngineConfig(), settings, threads=3)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for_the_end_of(*pids):
    end = time.monotonic() + 10
    while any(is_running(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(is_running(pid) for pid in pids)


def test_requests_go_in_and_traces_come_back_past_all_noise():
    before = time.perf_counter()
    peer = start(child=True)
    served = peer.serve(ITEMS, 2)
    first, second = served.requests
    assert (first.token_ids, second.token_ids) == ((5, 5, 5), (7, 7))
    assert (first.prompt_tokens, first.asked_tokens, first.name, served.peak_memory) == (2, 3, "a in 2", 7)
    assert before < served.start == first.arrival < first.token_times[0] < time.perf_counter() + 1  # one clock
    assert peer.about["fake"] == "1.0"
    peer.forget()
    assert peer.serve(ITEMS, 1).requests[0].cached_tokens == 1
    assert is_running(peer.about["child"])
    peer.close()
    assert not is_running(peer.about["child"])  # which would have kept the GPU's memory
    peer.close()


def test_a_peer_that_cannot_be_profiled_says_why_and_goes_on():
    with closing(start()) as peer:
        with pytest.raises(NoProfile, match=r"of vllm at batch 2 it has only \[\(5, 6\), \(7,\)\]"):
            peer.profile(ITEMS, "vllm", "batch 2")
        assert peer.alive


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("raise", PeerError, r"Fake could not serve: ValueError: planted\.(.|\n)*\| noise on stdout(.|\n)*Traceback"),
        ("die", PeerError, r"Fake could not serve: its process ended with code -9\.(.|\n)*\| the last words"),
        ("hang", PeerError, r"Fake could not serve: it took more than 2 s \(peers\.\*\.timeout_s\)"),
        ("absent", PeerAbsent, "^it is not installed here$"),
        ("setting", ConfigError, "^cache.layout=contiguous is nothing for it$"),
    ],
)
def test_every_failure_names_the_peer_and_shows_its_log(fault, kind, message):
    with pytest.raises(kind, match=message):
        start(timeout_s=2.0 if fault == "hang" else 60.0, fault=fault).serve(ITEMS, 1)


def test_a_process_that_cannot_start_is_explained():
    with pytest.raises(ConfigError, match=r"Fake cannot be started with peers.*python=/no/such/python"):
        PeerProcess("Fake", "fake_peer", EngineConfig(), ProcessSettings(python="/no/such/python"))
    with pytest.raises(PeerError, match=r"could not start: ModuleNotFoundError: No module named 'no_such_peer'"):
        PeerProcess("Fake", "no_such_peer", EngineConfig(), ProcessSettings())


def test_ctrl_c_kills_it():
    peer = start(fault="hang", child=True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores Ctrl-C
    try:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            peer.serve(ITEMS, 1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not is_running(peer.about["child"])


def test_it_does_not_outlive_a_parent_that_is_killed():
    script = (
        "import sys; sys.path[:0] = ['tests/experiments', 'tests']; import test_lab_peer_process as t\n"
        "peer = t.start(fault='hang', child=True); print(peer._process.pid, peer.about['child'], flush=True)\n"
        "peer.serve(t.ITEMS, 1)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.communicate()
    wait_for_the_end_of(*pids)


class Stub:
    """In place of a PeerProcess: what was started and stopped, in order."""

    log: list[str] = []  # noqa: RUF012
    serve = None  # which nobody asks for

    def __init__(self, name, module, config, settings, **more):
        if config.seed == 99:
            Stub.log.append("absent")
            raise PeerAbsent("it is not installed here")
        self.name, self.alive, self.about = name, True, {"seed": config.seed}
        Stub.log.append(f"start {config.seed}")

    def ready(self):
        Stub.log.append(f"{self.about['seed']} is ready")
        if self.about["seed"] == 98:
            raise PeerError("it has ended")

    def forget(self):
        Stub.log.append("forget")

    def close(self):
        self.alive = False
        Stub.log.append(f"stop {self.about['seed']}")


@pytest.fixture
def stubs(monkeypatch):
    monkeypatch.setattr(pool, "PeerProcess", Stub)
    monkeypatch.setattr(pool, "settled", lambda config: config)
    monkeypatch.setattr(Stub, "log", [])
    return Stub.log


def config(seed=0, share=0.9):
    return EngineConfig.from_dict(
        {"model": {"device": "cuda"}, "cache": {"gpu_memory_utilization": share}, "seed": seed}
    )


@pytest.fixture
def gpu(stubs, monkeypatch):
    """100 bytes, of which the living peers hold half each."""

    def free():
        living = sum(1 if line.startswith("start") else -1 for line in stubs if line.startswith(("start", "stop")))
        return 100 - 50 * living, 100

    monkeypatch.setattr(pool.torch.cuda, "mem_get_info", free)
    monkeypatch.setattr(pool.torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(pool, "RELEASE_S", 1.0)
    return stubs


def test_a_process_stays_for_its_next_turn_and_forgets(gpu):
    with closing(Peers(PeerSettings())) as peers:
        for _ in range(3):
            peers.open(Kind.vllm, config(1, 0.5))
            assert peers.open(Kind.engine, config(0, 0.5)) is None  # beside it, in this process
        peers.open(Kind.hf, config(2, 0.5)).close()  # as it does where it fails
        peers.open(Kind.hf, config(2, 0.5))
        assert gpu == ["start 1", "forget", "forget", "start 2", "stop 2", "start 2"]
    assert gpu[-2:] == ["stop 1", "stop 2"]


def test_peers_that_have_room_are_begun_together(gpu):
    with closing(Peers(PeerSettings())) as peers:
        for seed in (1, 98, 1):
            peers.begin(Kind.vllm, config(seed, 0.2))
        peers.begin(Kind.engine, config(0, 0.2))
        peers.await_begun()
        assert gpu == ["start 1", "start 98", "1 is ready", "98 is ready"]
        assert peers.open(Kind.vllm, config(1, 0.2)).about["seed"] == 1
        with pytest.raises(PeerError, match="it has ended"):
            peers.open(Kind.vllm, config(98, 0.2))
        peers.begin(Kind.hf, config(2, 0.2))
    assert gpu[4:] == ["start 2", "stop 2", "stop 1"]


def test_servers_that_have_room_are_begun_with_them(gpu, monkeypatch):
    monkeypatch.setattr(over_http, "open_subject", lambda kind, settings, server: server)
    with closing(Peers(PeerSettings())) as peers:
        for kind in (Kind.served, Kind.vllm_served, Kind.served_bench, Kind.http):
            peers.begin(kind, config(list(Kind).index(kind), 0.2))
        peers.await_begun()
        mine, theirs = (list(Kind).index(kind) for kind in (Kind.served, Kind.vllm_served))
        assert gpu == [f"start {mine}", f"start {theirs}", f"{mine} is ready", f"{theirs} is ready"]
        assert peers.open(Kind.served, config(mine, 0.2)).about["seed"] == mine
        assert gpu[4:] == []
    assert sorted(gpu[4:]) == [f"stop {mine}", f"stop {theirs}"]


def test_a_peer_loads_while_others_work():
    settings = VLLMSettings(pythonpath=str(HERE))
    peer = PeerProcess("Fake", "fake_peer", EngineConfig(), settings, wait=False, threads=3)
    try:
        peer.ready()
        assert peer.about["fake"] == "1.0"
        assert peer.serve(ITEMS, 2).requests[0].token_ids == (5, 5, 5)
    finally:
        peer.close()
    gone = PeerProcess("Fake", "no_such_peer", EngineConfig(), ProcessSettings(), wait=False)
    with pytest.raises(PeerError, match="could not start"):
        gone.ready()
    assert not gone.alive


def test_idle_peers_make_room(gpu, capsys):
    with closing(Peers(PeerSettings())) as peers:
        peers.open(Kind.vllm, config(1, 0.5))
        assert peers.open(Kind.engine, config(0, 0.6)) is None
        assert gpu == ["start 1", "stop 1"]
        assert "vLLM is stopped to make room on the GPU" in capsys.readouterr().err
    with closing(Peers(PeerSettings(), keep=True)) as peers:  # as keep_engines says
        peers.open(Kind.vllm, config(2, 0.5))
        assert peers.open(Kind.engine, config(0, 0.6)) is None
        assert gpu[2:] == ["start 2"]


def test_the_memory_of_a_killed_process_is_waited_for(gpu, monkeypatch):
    free, asked = pool.torch.cuda.mem_get_info, []

    def slow():
        asked.append(1)
        return (0, 100) if gpu[-1:] == ["stop 1"] and len(asked) < 12 else free()

    monkeypatch.setattr(pool.torch.cuda, "mem_get_info", slow)
    peers = Peers(PeerSettings())
    peers.open(Kind.vllm, config(1, 0.5))
    peers.close()
    assert len(asked) == 12


def test_one_that_is_not_there_is_asked_for_once(gpu):
    with closing(Peers(PeerSettings())) as peers:
        for _ in range(3):
            with pytest.raises(PeerAbsent, match="not installed"):
                peers.open(Kind.vllm, config(99))
    assert gpu == ["absent"]


def test_who_has_a_process_of_its_own(stubs, monkeypatch):
    cpu = EngineConfig.from_dict({"seed": 0, "model": {"device": "cpu"}})
    with closing(Peers(PeerSettings())) as peers:
        assert [peers.open(kind, cpu) for kind in (Kind.engine, Kind.hf, Kind.hf_continuous)] == [None] * 3
        with pytest.raises(PeerAbsent, match="vLLM is measured on a CUDA device"):
            peers.open(Kind.vllm, cpu)
    monkeypatch.setattr(pool, "_has_own_process", lambda kind, device: True)  # as on a GPU
    with closing(Peers(PeerSettings())) as peers:
        assert peers.open(Kind.hf, cpu) is not None
    assert stubs == ["start 0", "stop 0"]


def test_memory_given_in_gib_counts_with_the_weights(monkeypatch):
    monkeypatch.setattr(pool.torch.cuda, "mem_get_info", lambda: (0, 1000))
    assert pool.gpu_memory(EngineConfig.from_dict({"cache": {"gpu_memory_utilization": 0.4}})) == 400
    tiny = EngineConfig.from_dict({"model": {"device": "cpu"}, "cache": {"memory_gib": 2.0}})
    weights = pool.gpu_memory(tiny) - (2.0 + pool.BESIDE_GIB) * 2**30
    assert weights == pytest.approx(4 * 6.43e6, rel=0.01)


ROOMS = ("peers", "load", "kernels")  # of measure/ are processes of this one's own packages
PEERS = [
    path
    for room in ROOMS
    for path in sorted((ROOT / "experiments/lab" / room).rglob("*.py"))
    if "\ndef open_peer(" in path.read_text()
]


def test_a_peers_modules_need_no_hydra():
    """Their process may have only the packages that the peer brings."""
    assert len(PEERS) >= 4
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PEERS]
    names += ["experiments.lab.peers.process"]
    names += [f"experiments.lab.kernels.{name}" for name in ("attention", "fused", "latent", "moe")]
    assert reimported("import " + ", ".join(names), without=["hydra", "omegaconf"]) == 0
