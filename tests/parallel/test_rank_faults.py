"""A rank that is killed, hangs, fails or disagrees ends the engine with an error that names it, and leaves nothing."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import cells
from leftovers import nothing_left

from mini_infer import ConfigError, EngineConfig, LLMEngine, SamplingParams
from mini_infer.core.errors import ModelError, RankError
from mini_infer.parallel.context import ParallelContext
from mini_infer.runtime.executor import fingerprints, rank_process, ranks
from mini_infer.runtime.graphs.capture import GraphMemory, _try
from mini_infer.runtime.worker.model_runner import Runner
from mini_infer.runtime.worker.worker import Worker

MakeEngine = Callable[..., LLMEngine]

LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


PHASES: dict[str, tuple[type, str] | None] = {  # each with what a rank calls in it
    "connect": (ParallelContext, "connected"),
    "init": (Worker, "__init__"),
    "load": (Worker, "load"),
    "capture": (Worker, "capture"),
    "prefill": (Runner, "launch"),
    "decode": (Runner, "launch"),
    "idle": None,
}
OF_A_START = ("connect", "init", "load", "capture")
TENSOR, STAGES, BOTH = {"tensor": 2}, {"tensor": 1, "pipeline": 2}, {"tensor": 2, "pipeline": 2}


class Signals:
    """A rank sends itself a signal where a phase begins, and notes it before."""

    def __init__(self, patch: pytest.MonkeyPatch, note: Path) -> None:
        self._patch, self._note = patch, note
        self._rank = 0  # this process's
        serve = rank_process._serve

        def serve_as(about: dict[str, Any]) -> None:
            self._rank = about["rank"]
            serve(about)

        patch.setattr(rank_process, "_serve", serve_as)

    def plan(self, rank: int, phase: str, number: int = signal.SIGKILL) -> None:
        if (place := PHASES[phase]) is None:  # a rank that is idle calls nothing
            return
        method = getattr(*place)

        def planted(*given: Any) -> Any:
            of_this_phase = place[0] is not Runner or (phase == "decode") == (given[1].num_decode_rows > 0)
            if self._rank == rank and of_this_phase:
                self.send(phase, number)
            return method(*given)

        self._patch.setattr(*place, planted)

    def send(self, phase: str, number: int = signal.SIGKILL) -> None:
        self._note.write_text(phase)
        os.kill(os.getpid(), number)

    @property
    def sent_in(self) -> str | None:
        """The phase that it was sent in."""
        return self._note.read_text() if self._note.exists() else None


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Signals:
    return Signals(monkeypatch, tmp_path / "phase")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has nothing to say is not given long to say it."""
    monkeypatch.setattr(rank_process, "DUMP_S", 0.2)
    monkeypatch.setattr(ranks, "SAY_S", 0.2)


def others(engine: LLMEngine) -> list[Any]:
    return engine.executor._ranks.processes


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


LAYOUTS = {"tensor": TENSOR, "stages": STAGES, "both": BOTH}


def each_of(of: Mapping[str, Sequence[int]]) -> list[tuple[str, int, str]]:
    """These ranks of a layout, in each phase."""
    return [(layout, rank, phase) for layout, ranks_of in of.items() for rank in ranks_of for phase in PHASES]


@pytest.mark.parametrize(
    ("layout", "rank", "phase"),
    cells(
        each_of({"tensor": [1], "stages": [1], "both": [1, 2, 3]}),
        {
            ("tensor", 1, "connect"),
            ("tensor", 1, "init"),
            ("stages", 1, "load"),
            ("tensor", 1, "capture"),
            ("both", 2, "prefill"),
            ("stages", 1, "decode"),
            ("both", 3, "idle"),
        },
    ),
)
def test_a_killed_rank_is_named(make_engine: MakeEngine, signals: Signals, layout: str, rank: int, phase: str) -> None:
    killed = pytest.raises(RankError, match=rf"^rank {rank} \(process \d+\) was killed by SIGKILL")
    signals.plan(rank, phase)
    with nothing_left():
        if phase in OF_A_START:
            with killed:
                make_engine(parallel=LAYOUTS[layout]).generate("def f(", SHORT)  # who dies last is missed then
        else:
            engine = make_engine(parallel=LAYOUTS[layout])
            if phase == "idle":
                engine.generate("def f(", SHORT)
                os.kill(others(engine)[rank - 1].pid, signal.SIGKILL)
            with killed:
                engine.generate(["def f("] * 2, LONG)
            with killed:  # the engine is at its end
                engine.generate("def f(", SHORT)
    assert signals.sent_in == (None if phase == "idle" else phase)


@pytest.mark.parametrize(
    ("layout", "rank", "phase"),
    cells(
        each_of({"tensor": [0], "stages": [0], "both": [0]}),
        {("tensor", 0, "load"), ("stages", 0, "decode"), ("both", 0, "idle")},
    ),
)
def test_no_rank_outlives_the_process_of_rank_0(
    make_engine: MakeEngine, signals: Signals, layout: str, rank: int, phase: str
) -> None:
    signals.plan(rank, phase)
    with nothing_left():
        parent = os.fork()
        if not parent:
            try:
                gc.freeze()  # what is finalised here may wait for a thread that only the test's process has
                make_engine(parallel=LAYOUTS[layout]).generate("def f(", SHORT)
                signals.send("idle")
            finally:
                os._exit(0)
        _, status = os.waitpid(parent, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert signals.sent_in == phase


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


@pytest.mark.parametrize("parallel", [TENSOR, STAGES])
def test_a_rank_that_stops_is_named_after_the_stated_time(
    make_engine: MakeEngine, impatient: None, parallel: dict[str, Any]
) -> None:
    engine = make_engine(parallel={**parallel, "timeout_s": 0.5})
    engine.generate("def f(", SHORT)
    with nothing_left():
        os.kill(others(engine)[0].pid, signal.SIGSTOP)
        said = (
            r"^a step took longer than parallel.timeout_s=0.5, which may be raised: rank 1 .* hangs, and does not say"
        )
        with pytest.raises(RankError, match=said):
            engine.generate("def f(", SHORT)


@pytest.mark.parametrize(
    ("parallel", "rank", "phase"),
    [
        (TENSOR, 1, "connect"),
        pytest.param(STAGES, 1, "load", marks=pytest.mark.soak),
        pytest.param(BOTH, 2, "init", marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_stops_while_it_starts_is_named_after_the_stated_time(
    make_engine: MakeEngine, signals: Signals, impatient: None, parallel: dict[str, Any], rank: int, phase: str
) -> None:
    signals.plan(rank, phase, signal.SIGSTOP)
    said = rf"^the start took longer than parallel.start_timeout_s=2, which may be raised: rank {rank} .* hangs"
    with nothing_left(), pytest.raises(RankError, match=said):
        make_engine(parallel={**parallel, "start_timeout_s": 2.0})
    assert signals.sent_in == phase


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


@pytest.mark.parametrize("parallel", [TENSOR, STAGES])
def test_a_rank_that_hangs_says_where(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, parallel: dict[str, Any]
) -> None:
    def nap_that_has_no_end(runner: Runner) -> None:
        time.sleep(1000)

    planted(monkeypatch, nap_that_has_no_end)
    engine = make_engine(parallel={**parallel, "timeout_s": 1.0})
    with pytest.raises(RankError, match=r"(?s)rank 1 \(process \d+\) hangs:.*nap_that_has_no_end"):
        engine.generate("def f(", LONG)


@pytest.mark.parametrize("parallel", [TENSOR, STAGES])
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


def test_steps_that_only_reserve_memory_are_not_compared(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They attend to what nobody has written: where attention is not shared each rank has something else there."""
    monkeypatch.setattr(rank_process, "tokens_sum", lambda tokens: -1)
    engine = make_engine()
    taken = []

    def reserve(worker: Any) -> None:  # as on a GPU
        for plan in worker._largest_steps(worker.limits, 0):
            taken.append(worker.runner.collect(worker.runner.launch(plan)))

    monkeypatch.setattr(Worker, "reserve_memory", reserve)
    for _ in range(3):
        engine.executor.reserve_memory()
    assert any(result.tokens for result in taken)
    with pytest.raises(RankError, match="disagrees"):
        engine.generate("def f(", LONG)


def test_a_failure_of_rank_0_ends_the_others(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    with nothing_left():
        engine = make_engine()
        runner = engine.executor.runner._runner
        monkeypatch.setattr(runner, "launch", lambda plan: [][1])
        with pytest.raises(IndexError):
            engine.generate("def f(", SHORT)
    with pytest.raises(RankError, match="rank 0 failed: IndexError"):
        engine.generate("def f(", SHORT)


@pytest.mark.parametrize("what", ["code", "settings", "model"])
def test_what_is_not_the_same_on_all_ranks_is_named(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    """Each rank reads a copy of its own of the package, and of a model at a relative path."""
    root, serve = fingerprints._ROOT, rank_process._serve
    folders = [tmp_path / "of rank 0", tmp_path / "of rank 1"]
    for folder in folders:
        for file in root.rglob("*.py"):
            (copy := folder / file.relative_to(root)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        shutil.copytree(root / "assets" / "tiny-draft", folder / "model", copy_function=shutil.copy2)
    changed = {"code": "core/plan.py", "model": "model/model.safetensors", "settings": None}[what]
    if changed is not None:
        with open(folders[1] / changed, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            (last,) = file.read()
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))

    def read_from(folder: Path) -> None:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(fingerprints, "_ROOT", folder)
        fingerprints._code.cache_clear()

    def serve_another(about: dict[str, Any]) -> None:
        read_from(folders[1])
        if what == "settings":
            about["config"]["scheduler"]["max_num_seqs"] = 7
        serve(about)

    monkeypatch.setattr(rank_process, "_serve", serve_another)
    read_from(folders[0])
    try:
        with pytest.raises(ConfigError, match=f"^rank 1 has other {what} than rank 0"):
            make_engine(model={"path": "./model", "tokenizer": "tiny-draft"})
    finally:
        fingerprints._code.cache_clear()


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
    with pytest.raises(ConfigError, match=r"parallel\.start_timeout_s must be above 0, got 0"):
        EngineConfig.from_dict({"parallel": {"start_timeout_s": 0}})
    with pytest.raises(ConfigError, match=r"parallel\.tensor must be at least 1, got 0"):
        EngineConfig.from_dict({"parallel": {"tensor": 0}})


def test_fewer_gpus_than_ranks_are_refused(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"2 ranks \(parallel\.tensor, .*\) need a GPU each, and torch sees 1"):
        make_engine()
