"""Threads of a step on a CPU: one for small steps, all for large ones, as many as asked for, and put back behind."""

import os
import subprocess
import sys

import pytest
import torch

from mini_infer import ConfigError, EngineConfig, LLMEngine, SamplingParams
from mini_infer.core.openmp import waiting_asleep
from mini_infer.runtime.worker.threads import StepThreads

GREEDY = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def in_step(threads: StepThreads, num_tokens: int) -> int:
    with threads(num_tokens):
        return torch.get_num_threads()


def test_a_step_that_is_too_small_to_share_takes_one_thread(two_threads):
    threads = StepThreads(None, num_parameters=4 * 10**6)
    assert [in_step(threads, tokens) for tokens in (1, 99, 100, 1000)] == [1, 1, 2, 2]
    assert str(threads) == "2, and 1 for steps of less than 100 tokens"
    assert torch.get_num_threads() == 2


def test_of_a_large_model_every_step_is_shared(two_threads):
    threads = StepThreads(None, num_parameters=7 * 10**9)
    assert in_step(threads, 1) == 2
    assert str(threads) == "2"


def test_threads_that_are_asked_for_are_every_steps(two_threads):
    threads = StepThreads(3, num_parameters=10)
    assert [in_step(threads, tokens) for tokens in (1, 1000)] == [3, 3]
    assert torch.get_num_threads() == 2


def test_the_number_is_put_back_after_an_error(two_threads):
    with pytest.raises(ZeroDivisionError), StepThreads(1, 1)(1):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("asked", "decode", "prompt"), [(None, 1, 2), (1, 1, 1), (2, 2, 2)])
def test_an_engines_steps_have_these_threads(two_threads, monkeypatch, asked, decode, prompt):
    engine = LLMEngine(EngineConfig.from_dict({"model": {"threads": asked}}))
    seen = []
    compute = torch.nn.functional.embedding

    def embedding(ids, *args, **kwargs):
        seen.append((len(ids), torch.get_num_threads()))
        return compute(ids, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "embedding", embedding)
    engine.generate([list(range(5, 205))], GREEDY)
    assert seen == [(200, prompt), (1, decode)]
    assert engine.startup.threads.startswith("2" if asked is None else str(asked))
    assert torch.get_num_threads() == 2


def test_no_threads_are_refused():
    with pytest.raises(ConfigError, match=r"model\.threads must be at least 1, got 0"):
        EngineConfig.from_dict({"model": {"threads": 0}})


def test_who_says_how_threads_wait_is_obeyed():
    assert waiting_asleep({"HOME": "/root"}) == {"OMP_WAIT_POLICY": "passive"}
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        assert waiting_asleep({name: "1"}) == {}


@pytest.mark.parametrize(("before", "policy"), [("pass", "passive"), ("sys.modules['torch'] = os", "None")])
def test_threads_sleep_where_the_package_is_imported_before_torch(before, policy):
    """In the place of torch, which takes seconds to import, stands another module."""
    environment = {name: value for name, value in os.environ.items() if waiting_asleep({name: value})}
    code = f"import os, sys; {before}; import mini_infer; print(os.environ.get('OMP_WAIT_POLICY'))"
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == policy


def test_importing_the_package_loads_no_torch():
    code = "import sys, mini_infer; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
