"""What steps cost, on a dry model whose times are set."""

from __future__ import annotations

import pytest

from mini_infer import EngineConfig, LLMEngine
from mini_infer.speculative.adapt import DraftLengths


def costs_of(**dry: float) -> DraftLengths:
    model = {"load_format": "dry", "dry": {"max_model_len": 64, **dry}}
    speculation = {"method": "ngram", "num_tokens": 3}
    engine = LLMEngine(
        EngineConfig.from_dict({"model": model, "speculation": speculation, "scheduler": {"max_num_seqs": 4}})
    )
    assert engine.startup.speculation == "ngram, up to 3 tokens, as many as pay"
    lengths = engine.scheduler._proposer._lengths
    assert isinstance(lengths, DraftLengths)
    return lengths


def test_costs_are_those_of_the_machine() -> None:
    costs = costs_of(step_ms=4.0, decode_token_us=1000.0).costs
    assert costs.verify_seconds(1, 1) == pytest.approx(0.005, rel=0.3)
    assert costs.verify_seconds(4, 1) == pytest.approx(0.008, rel=0.3)
    assert costs.verify_seconds(1, 4) < 1.8 * costs.verify_seconds(1, 1), "drafts cost this model next to nothing"
    assert costs.draft_seconds(4) == 0


def test_drafts_that_cost_nothing_are_made() -> None:
    assert costs_of(step_ms=4.0).choose(["a", "b"], [3, 2]) == [3, 2]
