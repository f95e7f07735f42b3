"""Acceptance at a stated rate. tests/kernels/test_rows.py has what a step makes of it."""

from __future__ import annotations

import numpy as np
import pytest
from at_rate import stands_at_rate

from mini_infer.core.errors import ConfigError
from mini_infer.core.speculation_config import SpeculationConfig, SpeculationMethod
from mini_infer.core.uniforms import hash_seeds
from mini_infer.speculative.proposers.synthetic import synthetic_drafts

KEYS = hash_seeds(np.arange(100, dtype=np.uint64))


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5585, 1.0])
def test_each_draft_has_the_rate_whatever_becomes_of_the_one_before_it(rate: float) -> None:
    stands = stands_at_rate(KEYS[:, None], np.arange(1_000), rate)
    before, after = stands[:, :-1], stands[:, 1:]
    for some in (stands, after[before], after[~before]):
        if some.size:
            assert abs(some.mean() - rate) <= 4 * (rate * (1 - rate) / some.size) ** 0.5


def test_a_position_has_one_fate() -> None:
    """However a request's drafts are cut into steps, whatever the batch."""
    whole = stands_at_rate(KEYS[3], np.arange(100, 150), 0.9)
    assert 0 < whole.sum() < 50
    for start in range(0, 50, 7):
        batch = stands_at_rate(KEYS[[1, 3]][:, None], np.array([[5], [100 + start]]) + np.arange(50 - start), 0.9)
        assert batch[1].tolist() == whole[start:].tolist()


def test_drafts_are_a_function_of_seed_and_place() -> None:
    drafts = synthetic_drafts(3, 10, 6, 1_000)
    assert len(drafts) == 6
    assert all(0 <= token < 1_000 for token in drafts)
    assert synthetic_drafts(3, 12, 4, 1_000) == drafts[2:]
    assert synthetic_drafts(4, 10, 6, 1_000) != drafts
    assert synthetic_drafts(3, 10, 0, 1_000) == []


def test_a_rate_goes_with_drafts_at_a_rate() -> None:
    with pytest.raises(ConfigError, match=r"synthetic needs the rate .* set speculation\.acceptance, to 0\.6, say$"):
        SpeculationConfig(SpeculationMethod.synthetic)
    with pytest.raises(ConfigError, match=r"acceptance=0\.6 goes with speculation\.method=synthetic, not ngram"):
        SpeculationConfig(SpeculationMethod.ngram, acceptance=0.6)
    assert SpeculationConfig(acceptance=0.6).rate is None, "it waits until there is a method"
