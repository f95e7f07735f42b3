"""Fixtures that tests of several packages share.

What takes seconds to import is imported where it is used: the process that hands the tests to others uses none of it.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from mini_infer.attention.context import AttentionBatch

# Before torch is imported, here and in every child: a process of the test run has one core.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"  # where a test is about two threads, none of them spins

# Workers begin with different ones of several GPUs, which experiments/gpu_tests.py counts; ranks take the next ones.
if (count := int(os.environ.get("TEST_GPUS", "1"))) > 1:
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % count
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])

# Where a line has run so often, slipcover goes through all functions to take out what counts the lines that have run,
# for a tenth of a second. After 50 times, as by default, the servers and ranks that tests fork do little else.
if coverage := getattr(sys.modules.get("slipcover.pytest_plugin"), "_slipcover_instance", None):
    coverage.d_miss_threshold = 10_000


@functools.cache
def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@functools.cache
def prepare() -> None:
    """Before the first test file is imported."""
    from hypothesis import HealthCheck, settings

    gc.set_threshold(100_000, 20, 20)  # imports leave next to nothing behind, and tests little
    if not has_gpu():
        # Read when triton is imported, by whichever test comes first: kernels then run on the CPU, slowly.
        os.environ["TRITON_INTERPRET"] = "1"
    # On how many examples a property is tried, the same ones in every run: by default on those of "usual", on more
    # where @settings.get_profile("light") says that an example is a call of one function, on fewer where one is a whole
    # history.
    same_each_time = settings(
        derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck), stateful_step_count=30
    )
    for profile, examples in {"light": 200, "usual": 60, "heavy": 12}.items():
        settings.register_profile(profile, same_each_time, max_examples=examples)
    settings.load_profile("usual")


def pytest_collectstart() -> None:
    prepare()


ON_DEMAND = ("attack", "soak", "ray")  # marks of tests that run where `-m` names them


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for mark in ON_DEMAND:
        if mark not in config.getoption("-m"):
            for item in items:
                if item.get_closest_marker(mark):  # keywords have the names of folders, too
                    item.add_marker(pytest.mark.skip(reason=f"runs with -m {mark}"))
    for item in items:
        if has_gpu():
            if _runs_on_the_gpu(item):
                item.add_marker("gpu")
        elif "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _runs_on_the_gpu(item: Any) -> bool:
    """Where there is one: tests on whatever device there is take the fixture `device`, or have it as a parameter."""
    import torch

    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    device = parameters.get("device", torch.device("cuda"))
    return "device" in getattr(item, "fixturenames", ()) and isinstance(device, torch.device) and device.type == "cuda"


def pytest_collection_finish() -> None:
    """What imports have made is left out of garbage collections, each of which would take some tenths of a second."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Each case of a parametrised property has examples of its own."""
    from hypothesis import is_hypothesis_test, seed

    function = getattr(item.obj, "__func__", item.obj) if isinstance(item, pytest.Function) else None
    if is_hypothesis_test(function):
        seed(zlib.crc32(item.nodeid.encode()))(function)


@pytest.fixture(scope="session", autouse=True)
def interpreter_is_prepared_once() -> Iterator[None]:
    if has_gpu():  # kernels are compiled
        yield
        return
    import interpreter

    with pytest.MonkeyPatch.context() as patch:
        scope = interpreter.prepare(patch)
        yield
        scope.restore()


@pytest.fixture(scope="module")
def plain_sampler() -> Iterator[None]:
    """Most of the interpreter's time would be the sampler's kernels, which test_sample.py is about."""
    from mini_infer.runtime.sampling.sampler import Sampler
    from mini_infer.runtime.worker import worker

    with pytest.MonkeyPatch.context() as patch:
        if not has_gpu():
            patch.setattr(worker, "make_sampler", lambda rows, vocab, device, kernels: Sampler(rows, vocab, device))
        yield


@pytest.fixture
def quick_step_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine with drafts times steps of all sizes, for seconds; tests/runtime/test_step_costs.py is about that."""
    from mini_infer.speculative import step_costs

    for name, value in {"CONTEXT_TOKENS": 16, "REPEATS": 2, "PLAN_S": 0.001, "BUDGET_S": 0.01}.items():
        monkeypatch.setattr(step_costs, name, value)


@pytest.fixture(scope="session")
def step_rows() -> Callable[..., AttentionBatch]:
    """Makes an AttentionBatch from each row's (start, count, block table)."""
    import numpy as np
    import torch

    from mini_infer.attention.context import AttentionBatch

    def make(
        rows: list[tuple[int, int, list[int]]],
        num_decode_rows: int,
        block_size: int,
        unused_block: int = 0,
        device: torch.device | str = "cpu",
    ) -> AttentionBatch:
        width = max(-(-(start + count) // block_size) for start, count, _ in rows)
        tables = torch.full((len(rows), width), unused_block, dtype=torch.int32)
        positions, slots = [], []
        for row, (start, count, table) in enumerate(rows):
            used = table[: -(-(start + count) // block_size)]
            tables[row, : len(used)] = torch.tensor(used)
            for position in range(start, start + count):
                positions.append(position)
                slots.append(table[position // block_size] * block_size + position % block_size)
        query_starts = np.cumsum([0] + [count for _, count, _ in rows])
        seq_lens = np.array([start + count for start, count, _ in rows])
        return AttentionBatch.of_rows(
            torch.tensor(positions, device=device),
            torch.tensor(slots, device=device),
            tables.to(device),
            torch.tensor(query_starts, dtype=torch.int32, device=device),
            torch.tensor(seq_lens, dtype=torch.int32, device=device),
            num_decode_rows=num_decode_rows,
            host_query_starts=query_starts,
            host_seq_lens=seq_lens,
        )

    return make
