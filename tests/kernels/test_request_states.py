"""The requests' state gives the same step input built eagerly and built as a CUDA graph captures it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mini_infer.core.errors import ConfigError
from mini_infer.core.plan import Admission, Growth, StepPlan
from mini_infer.core.request import SamplingParams
from mini_infer.kernels.sampling.draw import NUM_PARAMS
from mini_infer.runtime.worker.request_states import RequestStates
from mini_infer.runtime.worker.step_input import Samples, small_growths

PARAMS = SamplingParams()


def make_states(device: torch.device) -> RequestStates:
    states = RequestStates(
        max_num_seqs=6, max_model_len=40, block_size=4, num_params=NUM_PARAMS, device=device, padding_block=99
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
    states.apply(prompts, [np.arange(NUM_PARAMS) + 10 * a.req_index for a in admissions])
    step = states.build(prompts, Samples.of(prompts))
    assert step.token_ids.tolist() == [*range(400, 409), *range(4), *range(200, 208)]
    assert step.batch.slot_mapping.tolist() == [
        *range(44, 52), 52, *range(84, 88), *range(124, 132)
    ]  # fmt: skip
    assert step.sampled_tokens is not None
    assert step.sampled_tokens.tolist() == [8, 12, 20]
    assert step.param_rows.tolist() == [list(range(first, first + NUM_PARAMS)) for first in (40, 0, 20)]
    states.append(step, torch.tensor([7, 8, 9], device=device))
    return states


DECODE = StepPlan(2, [0, 4, 2], [4, 9, 8], [1, 1, 1], [True] * 3, 3, growths=[Growth(2, 2, [33])])


@pytest.mark.parametrize("num_rows", [3, 6])
def test_captured_input_is_the_eager_one_and_padding(device: torch.device, num_rows: int) -> None:
    eager_states, states = make_states(device), make_states(device)
    eager_states.apply(DECODE)
    eager = eager_states.build(DECODE, Samples.of(DECODE))
    states.pack_rows(DECODE, num_rows, growths=small_growths(DECODE))
    built = states.build_rows(num_rows, query_len=1)
    assert eager.token_ids.tolist() == [8, 7, 9], "the tokens that the step before sampled"
    for name in ("token_ids", "param_rows", "sampled_positions", "places"):
        assert torch.equal(getattr(built, name)[:3], getattr(eager, name)), name
    for name in ("positions", "slot_mapping", "seq_lens"):
        assert torch.equal(getattr(built.batch, name)[:3], getattr(eager.batch, name)), name
    width = eager.batch.block_tables.shape[1]
    assert torch.equal(built.batch.block_tables[:3, :width], eager.batch.block_tables)
    assert torch.equal(states.rows[:6], eager_states.rows[:6])
    assert (built.batch.slot_mapping[3:] == 99 * 4).all(), "padding rows write to the padding block"
    states.settle(built, torch.arange(num_rows, device=device), None, 1000)
    eager_states.append(eager, torch.arange(3, device=device))
    assert states.history[0, 5].item() == 0
    assert states.history[4, 10].item() == 1
    assert torch.equal(states.rows[:6], eager_states.rows[:6])
    assert states._next_starts[[0, 4, 2]].tolist() == [5, 10, 9], "where the rows go on"


def test_more_requests_and_tokens_than_places_can_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_num_seqs=2048 requests of up to 1048576 tokens .* lower it"):
        RequestStates(2048, 2**20, 16, 8, torch.device("cpu"))
