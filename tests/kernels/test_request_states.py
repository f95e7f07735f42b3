"""The slots' state gives the same step input built eagerly and built as a CUDA graph captures it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mini_infer.core.plan import Admission, Growth, StepPlan
from mini_infer.core.request import SamplingParams
from mini_infer.runtime.worker.request_states import RequestStates, Samples

PARAMS = SamplingParams()


def make_slots(device: torch.device) -> RequestStates:
    req_indices = RequestStates(
        max_num_seqs=6, max_model_len=40, block_size=4, num_params=3, device=device, padding_block=99
    )
    admissions = [
        Admission(
            req_index,
            str(req_index),
            list(range(100 * req_index, 100 * req_index + length)),
            length,
            blocks,
            PARAMS,
            0,
            frozenset(),
        )
        for req_index, length, blocks in ((4, 9, [11, 12, 13]), (0, 4, [21, 22]), (2, 8, [31, 32]))
    ]
    prompts = StepPlan(1, [4, 0, 2], [0, 0, 0], [9, 4, 8], [True] * 3, 0, admissions)
    req_indices.apply(prompts, [np.arange(3) + 10 * a.req_index for a in admissions])
    step = req_indices.build(prompts, Samples.of(prompts))
    assert step.token_ids.tolist() == [*range(400, 409), *range(4), *range(200, 208)]
    assert step.batch.slot_mapping.tolist() == [
        *range(44, 52), 52, *range(84, 88), *range(124, 132)
    ]  # fmt: skip
    assert step.sampled_tokens is not None
    assert step.sampled_tokens.tolist() == [8, 12, 20]
    assert step.param_rows.tolist() == [[40, 41, 42], [0, 1, 2], [20, 21, 22]]
    req_indices.append(step, torch.tensor([7, 8, 9], device=device))
    return req_indices


DECODE = StepPlan(2, [0, 4, 2], [4, 9, 8], [1, 1, 1], [True] * 3, 3, growths=[Growth(2, 2, [33])])


@pytest.mark.parametrize("num_rows", [3, 8])
def test_captured_input_is_the_eager_one_and_padding(device: torch.device, num_rows: int) -> None:
    eager_slots, req_indices = make_slots(device), make_slots(device)
    eager_slots.apply(DECODE, [])
    eager = eager_slots.build(DECODE, Samples.of(DECODE))
    packed = req_indices.pack_decode(DECODE, num_rows)
    assert packed is not None
    starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    built = req_indices.build_decode(torch.from_numpy(packed).to(device), starts)
    assert eager.token_ids.tolist() == [8, 7, 9], "the tokens that the step before sampled"
    for name in ("token_ids", "param_rows", "sampled_positions", "places"):
        assert torch.equal(getattr(built, name)[:3], getattr(eager, name)), name
    for name in ("positions", "slot_mapping", "seq_lens"):
        assert torch.equal(getattr(built.batch, name)[:3], getattr(eager.batch, name)), name
    width = eager.batch.block_tables.shape[1]
    assert torch.equal(built.batch.block_tables[:3, :width], eager.batch.block_tables)
    assert torch.equal(req_indices.rows[:6], eager_slots.rows[:6])
    assert (built.batch.slot_mapping[3:] == 99 * 4).all(), "padding rows write to the spare block"
    req_indices.append(built, torch.arange(num_rows, device=device))
    assert req_indices.history[0, 5].item() == 0
    assert req_indices.history[4, 10].item() == 1


def test_plans_that_bring_more_than_a_graph_takes_are_left_to_the_eager_path(device: torch.device) -> None:
    req_indices = make_slots(device)
    two_blocks = StepPlan(2, [0], [4], [1], [True], 1, growths=[Growth(0, 2, [23, 24])])
    assert req_indices.pack_decode(two_blocks, 1) is None
    newcomer = Admission(1, "new", [5], 1, [41], PARAMS, 0, frozenset())
    assert req_indices.pack_decode(StepPlan(2, [1], [0], [1], [True], 1, [newcomer]), 1) is None
