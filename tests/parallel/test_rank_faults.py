"""A rank that is killed, hangs, fails or disagrees ends the engine with an error that names it, and leaves nothing."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mini_infer import ConfigError, EngineConfig, LLMEngine, SamplingParams
from mini_infer.core.errors import ModelError, RankError
from mini_infer.runtime.executor import fingerprints, rank_process
from mini_infer.runtime.graphs.capture import GraphMemory, _try
from mini_infer.runtime.worker.model_runner import Runner
from mini_infer.runtime.worker.worker import Worker

MakeEngine = Callable[..., LLMEngine]

LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def others(engine: LLMEngine) -> list[Any]:
    return engine.executor._ranks.processes


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def wait_until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def shared_descriptors() -> int:
    gc.collect()
    links = (f"/proc/self/fd/{descriptor}" for descriptor in os.listdir("/proc/self/fd"))
    return sum("memfd:mini-infer" in os.readlink(link) for link in links if os.path.lexists(link))


def test_a_closed_engine_leaves_no_descriptor_open() -> None:
    before = shared_descriptors()
    model = {"path": "tiny-draft", "device": "cpu"}
    engine = LLMEngine(EngineConfig.from_dict({"model": model, "parallel": {"tensor": 2}, "cache": {"num_blocks": 64}}))
    engine.generate("def f(", SHORT)
    assert shared_descriptors() > before
    engine.close()
    del engine
    assert shared_descriptors() == before


STAGES = {"tensor": 1, "pipeline": 2}


@pytest.mark.parametrize(
    ("parallel", "rank", "busy"),
    [
        ({"tensor": 4}, 2, False),
        ({"tensor": 2, "pipeline": 2}, 1, True),
        ({"tensor": 2, "pipeline": 2}, 3, False),
        ({"tensor": 1, "pipeline": 3}, 2, True),
    ],
)
def test_a_killed_rank_is_named(make_engine: MakeEngine, parallel: dict[str, int], rank: int, busy: bool) -> None:
    before = shared_memory()
    engine = make_engine(parallel=parallel)
    pids = [process.pid for process in others(engine)]
    delay = 0.1 if busy else 0.0
    threading.Timer(delay, os.kill, (pids[rank - 1], signal.SIGKILL)).start()
    time.sleep(0.1 - delay)
    with pytest.raises(RankError, match=rf"^rank {rank} \(process {pids[rank - 1]}\) was killed by SIGKILL"):
        engine.generate(["def f("] * 2, LONG)
    wait_until(lambda: all(map(is_gone, pids)))
    assert shared_memory() == before
    with pytest.raises(RankError, match=f"rank {rank}"):  # the engine is at its end
        engine.generate("def f(", SHORT)


@pytest.mark.parametrize("phase", ["__init__", "load", "capture"])
def test_a_rank_that_is_killed_while_it_starts_is_named(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    serve = rank_process._serve

    def planted(about: dict[str, Any]) -> None:
        setattr(Worker, phase, lambda *given: os.kill(os.getpid(), signal.SIGKILL))
        serve(about)

    monkeypatch.setattr(rank_process, "_serve", planted)
    before = shared_memory()
    with pytest.raises(RankError, match=r"^rank 1 \(process \d+\) was killed by SIGKILL"):
        make_engine().generate("def f(", SHORT)  # who dies last is missed then
    assert shared_memory() == before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_has_no_memory_for_a_graph_is_named(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """The other one is in a sum by then."""

    def capture(worker: Worker) -> None:
        memory = object.__new__(GraphMemory)
        memory.device, memory.parallel = worker.device, worker._parallel

        def run() -> None:
            if worker._parallel.number == rank:
                raise torch.OutOfMemoryError("CUDA out of memory")
            worker._parallel.all_reduce(torch.ones(4))

        assert _try(lambda size: memory.warm_up(run), 1, memory) is None

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(Worker, "capture", capture)
    said = rf"(?s)^rank {rank} .*(Traceback.*rank 1 has|has) no GPU memory left for the first run of a CUDA graph"
    started = time.monotonic()
    with pytest.raises((RankError, ConfigError), match=said):
        make_engine()
    assert time.monotonic() - started < 60, "it has not waited for a group's timeout"


@pytest.mark.parametrize("parallel", [{"tensor": 2}, STAGES])
def test_a_rank_that_stops_is_named_after_the_stated_time(make_engine: MakeEngine, parallel: dict[str, Any]) -> None:
    engine = make_engine(parallel={**parallel, "timeout_s": 1.0})
    engine.generate("def f(", SHORT)
    (process,) = others(engine)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(RankError, match=r"longer than parallel.timeout_s=1: rank 1 .* hangs, and does not say where"):
        engine.generate("def f(", SHORT)
    wait_until(lambda: is_gone(process.pid))


def planted(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Runner], None]) -> None:
    """In the fourth step of every rank but 0."""
    follow = rank_process.follow

    def with_fault(runner: Runner, *given: Any) -> None:
        launch, left = runner.launch, iter(range(3, -1, -1))

        def launched(plan: Any) -> Any:
            if next(left, None) == 0:
                fault(runner)
            return launch(plan)

        runner.launch = launched  # type: ignore[method-assign]
        follow(runner, *given)

    monkeypatch.setattr(rank_process, "follow", with_fault)


@pytest.mark.parametrize("parallel", [{"tensor": 2}, STAGES])
def test_a_rank_that_hangs_says_where(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, parallel: dict[str, Any]
) -> None:
    def nap_that_has_no_end(runner: Runner) -> None:
        time.sleep(1000)

    planted(monkeypatch, nap_that_has_no_end)
    engine = make_engine(parallel={**parallel, "timeout_s": 1.0})
    with pytest.raises(RankError, match=r"(?s)rank 1 \(process \d+\) hangs:.*nap_that_has_no_end"):
        engine.generate("def f(", LONG)


@pytest.mark.parametrize("parallel", [{"tensor": 2}, STAGES])
def test_the_traceback_of_a_rank_that_fails_is_in_the_error(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, parallel: dict[str, Any]
) -> None:
    def fail(runner: Runner) -> None:
        raise IndexError("a made up one")

    planted(monkeypatch, fail)
    engine = make_engine(parallel=parallel)
    with pytest.raises(RankError, match=r"(?s)^rank 1 .* ended with code 1:\nTraceback.*IndexError: a made up one"):
        engine.generate("def f(", LONG)


def test_a_killed_rank_is_named_where_a_token_was_forced(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    runner: Any = engine.executor.runner

    def lost(*given: int) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(runner._runner, "force_token", lost)
    (process,) = others(engine)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(RankError, match=r"^rank 1 .* was killed by SIGKILL"):
        runner.force_token(0, 0, 1)


@pytest.mark.parametrize("sections", [{}, {"model": {"path": "tiny-moe"}, "parallel": {"tensor": 1, "expert": 2}}])
def test_a_rank_that_disagrees_is_named(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any]
) -> None:
    monkeypatch.setattr(rank_process, "tokens_sum", lambda tokens: -1)  # rank 0 has a name of its own for it
    engine = make_engine(**sections)
    with pytest.raises(RankError, match=r"rank 1 .* disagrees: it sampled other tokens than rank 0 in step \d+"):
        engine.generate("def f(", LONG)


def test_a_failure_of_rank_0_ends_the_others(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    (process,) = others(engine)
    runner = engine.executor.runner._runner
    monkeypatch.setattr(runner, "launch", lambda plan: [][1])
    with pytest.raises(IndexError):
        engine.generate("def f(", SHORT)
    wait_until(lambda: is_gone(process.pid))
    with pytest.raises(RankError, match="rank 0 failed: IndexError"):
        engine.generate("def f(", SHORT)


@pytest.mark.parametrize("working", [False, True])
def test_ranks_end_with_the_process_of_rank_0(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, working: bool
) -> None:
    """Killed while the engine starts, and while it works."""
    before = shared_memory()
    told, tell = os.pipe()
    parent = os.fork()
    if not parent:
        try:
            gc.freeze()  # what is finalised here may wait for a thread that only the test's process has
            start = rank_process.RankProcess.__init__

            def tell_pid(process: Any, *given: Any) -> None:
                start(process, *given)
                os.write(tell, process.pid.to_bytes(8, "big"))

            monkeypatch.setattr(rank_process.RankProcess, "__init__", tell_pid)
            engine = make_engine()
            os.write(tell, b"works")
            engine.generate("def f(", LONG)
        finally:
            os._exit(0)
    os.close(tell)
    pid = int.from_bytes(os.read(told, 8), "big")
    if working:
        assert os.read(told, 5) == b"works"
    assert not is_gone(pid)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_until(lambda: is_gone(pid))
    assert shared_memory() == before
    os.close(told)


@pytest.mark.parametrize("what", ["code", "settings", "model"])
def test_what_is_not_the_same_on_all_ranks_is_named(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    serve = rank_process._serve

    def planted(about: dict[str, Any]) -> None:
        if what == "settings":
            about["config"]["scheduler"]["max_num_seqs"] = 7
        else:
            setattr(fingerprints, f"_{what}", lambda *given: "other")
        serve(about)

    monkeypatch.setattr(rank_process, "_serve", planted)
    with pytest.raises(ConfigError, match=f"^rank 1 has other {what} than rank 0"):
        make_engine()


def test_what_is_wrong_with_the_settings_is_said_once(make_engine: MakeEngine) -> None:
    with pytest.raises(ModelError, match="there is no such folder"):
        make_engine(model={"path": "./nowhere"})
    with pytest.raises(
        ConfigError, match=r"parallel.tensor=3 does not divide .* These numbers of ranks work: 1, 2, 4$"
    ):
        make_engine(tensor=3)
    with pytest.raises(ConfigError, match=r"pipeline=7: each stage needs a layer, and .* has 6"):
        make_engine(tensor=1, parallel={"pipeline": 7})
    with pytest.raises(ConfigError, match="a dry model has nothing that ranks could share"):
        EngineConfig.from_dict({"model": {"load_format": "dry"}, "parallel": {"tensor": 2}})
    with pytest.raises(ConfigError, match=r"parallel\.tensor must be at least 1, got 0"):
        EngineConfig.from_dict({"parallel": {"tensor": 0}})


def test_fewer_gpus_than_ranks_are_refused(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"2 ranks \(parallel\.tensor, .*\) need a GPU each, and torch sees 1"):
        make_engine()
