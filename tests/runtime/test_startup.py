"""What a start does for its speed's sake, and what it says of where its seconds went."""

import subprocess
import sys

import pytest

from mini_infer import EngineConfig, LLMEngine
from mini_infer.runtime.worker.memory import decode_steps, largest_steps
from mini_infer.runtime.worker.startup import Phases


def test_seconds_are_told_by_phase_and_waited_for() -> None:
    now = [0.0]

    def finish() -> None:
        now[0] += 2.0  # of a device

    phase = Phases(finish, lambda: now[0])
    for name, seconds in (("load", 1.0), ("capture", 5.0), ("load", 3.0)):
        with phase(name):
            now[0] += seconds
    assert phase.seconds == {"load": 8.0, "capture": 7.0}
    now[0] += 1.0
    assert phase.total == 16.0


def test_an_engine_tells_where_its_seconds_went() -> None:
    startup = LLMEngine(EngineConfig()).startup
    assert {"load", "tokenizer", "allocate", "reserve memory"} <= startup.phases.keys()
    assert 0 < sum(startup.phases.values()) <= startup.seconds


def test_what_takes_long_to_import_is_imported_when_it_is_needed() -> None:
    code = (
        "import sys; from mini_infer import EngineConfig, LLMEngine; "
        "LLMEngine(EngineConfig.from_dict({'model': {'path': 'tiny-draft', 'device': 'cpu'}})).generate('x'); "
        "assert not {'llguidance', 'torch._dynamo', 'transformers.models.auto.modeling_auto'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("budget", [16, 64])
def test_the_end_of_the_longest_prompt_is_tried_where_it_is_expanded(budget: int) -> None:
    scheduler = {"max_num_seqs": 4, "max_num_batched_tokens": budget}
    config = EngineConfig.from_dict({"scheduler": scheduler, "cache": {"block_size": 16}})
    *_, step = largest_steps(config, max_model_len=33, block=0, expands=True)
    new = min(budget, 32)
    assert (step.starts, step.counts, step.num_decode_rows) == ([32 - new], [new], 0)
    (admission,) = step.admissions
    assert (len(admission.token_ids), admission.block_table) == (32, [0, 0, 0])


@pytest.mark.parametrize("most", [1, 5, 8])
def test_small_decode_steps_are_of_rows_that_the_largest_step_admits(most: int) -> None:
    config = EngineConfig.from_dict({"scheduler": {"max_num_seqs": most, "max_num_batched_tokens": 64}})
    (step,) = largest_steps(config, max_model_len=32, block=0)
    plans = decode_steps(step, [1, 2, 4, 8])
    assert [plan.num_decode_rows for plan in plans] == [size for size in (1, 2, 4, 8) if size <= most]
    admitted = {admission.req_index for admission in step.admissions}
    assert all(set(plan.req_indices) <= admitted and plan.num_tokens == plan.num_rows for plan in plans)
