"""expert_quantization on windows of a few tokens of the mixture that ships."""

from __future__ import annotations

import pytest
from test_lab_exact_gate import _drawn_by_company

from experiments.expert_quantization import GATE_ANSWER, WHOLE, ExpertQuantization
from mini_infer.core.errors import ConfigError

SMALL = (
    "experiment=expert_quantization",
    "experiment.windows=2",
    "experiment.window_tokens=12",
    "experiment.claims=[]",
)


def test_what_changes_nothing_changes_no_answer_and_no_route_and_drawn_routes_are_others(compose_config) -> None:
    both = "experiment.variants={same: {}, drawn: {model: {routing: uniform}}}"
    study = ExpertQuantization.from_config(compose_config(*SMALL, "~experiment.variants", f"+{both}"))
    same = study.values("same", WHOLE)
    assert (same["agreement"], same["same_experts"]) == (1.0, 1.0)
    assert abs(same["divergence_mnats"]) < 1e-3
    layers = [point for point in study.points if point is not WHOLE]
    assert [study.values("same", point)["same_experts"] for point in layers] == [1.0] * 4
    drawn = study.values("drawn", WHOLE)
    assert drawn["agreement"] < 0.9
    assert 0.1 < drawn["same_experts"] < 0.4, "four of sixteen, by chance"


def test_its_gate_goes_through_the_scheduler_and_finds_a_fault(compose_config, monkeypatch) -> None:
    same = "+experiment.variants={same: {}}"
    study = ExpertQuantization.from_config(compose_config(*SMALL, "~experiment.variants", same))
    (gate,) = study._gates()
    assert (gate.passed, gate.variant, gate.total_tokens) == (True, "same", 2 * 2 * GATE_ANSWER)
    _drawn_by_company(monkeypatch)
    (gate,) = study._gates()
    assert not gate.passed


def test_a_model_without_experts_is_refused(compose_config) -> None:
    with pytest.raises(ConfigError, match=r"takes a mixture of experts: model=tiny_moe"):
        ExpertQuantization.from_config(compose_config(*SMALL, "model=tiny"))
