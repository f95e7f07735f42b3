"""Peers in a run: `engine=<peer>` measures it alone, and one that is not there is absent and no error."""

from dataclasses import replace

import pytest

from experiments.ablation import Ablation
from experiments.lab.config import schema
from experiments.lab.config.ablation_spec import AblationSpec
from experiments.lab.execute import execute
from experiments.lab.measure import cells
from experiments.lab.measure.kinds import Kind, PeerError
from experiments.lab.show import report
from experiments.lab.store import result as store
from mini_infer.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("quick_figures")

DRY = [
    *("experiment=probe", "model=dry", "measure.repeats=2", "engine.cache.num_blocks=64", "workload=fixed"),
    *("workload.count=3", "workload.prompt_tokens=12", "workload.output_tokens=5"),
]


@pytest.fixture
def with_vllm(compose_config, tmp_path):
    config = compose_config(*DRY, f"paths.results={tmp_path / 'results'}", f"paths.reports={tmp_path / 'reports'}")
    config.experiment.variants.transformers = {"kind": "vllm", "label": "vLLM"}
    return config


@pytest.mark.parametrize("baseline", ["transformers", "engine"])
def test_an_absent_peer_is_told_and_is_no_error(with_vllm, tmp_path, baseline, capsys):
    with_vllm.experiment.baseline = baseline
    if baseline == "engine":
        for claim in with_vllm.experiment.claims:
            claim.variant = "transformers"
    page = execute(with_vllm, "probe", [], tmp_path).read_text()
    result = store.read(tmp_path / "results/probe/own.in_process/cpu/default.json")
    absent = [row for row in result.rows if row.variant == "transformers"]
    assert len(absent) == 2 * 2 * 5  # points, repeats, metrics
    assert {row.reason for row in absent} == {"absent: vLLM is measured on a CUDA device, and this run is on the CPU"}
    assert not any(row.valid for row in absent)
    assert all(row.valid for row in result.rows if row.variant == "engine")
    assert {j.reason for j in result.judgements} == {"not measured, because transformers is absent"}
    assert result.info.gates == ()
    assert "- vLLM is absent: vLLM is measured on a CUDA device, and this run is on the CPU." in page
    assert "| absent" in page
    assert "INVALID:" not in page
    assert " Absent: vLLM.\n" in report.summary(result)
    assert "absent" in capsys.readouterr().out


def test_where_nothing_else_is_measured_its_absence_ends_the_run(compose_config, tmp_path):
    config = compose_config(*DRY, "system=vllm", f"paths.results={tmp_path}", f"paths.reports={tmp_path}")
    with pytest.raises(Exception, match="vLLM is measured on a CUDA device"):
        execute(config, "probe", [], tmp_path)


def served_by(compose_config, *overrides):
    return Ablation.from_config(compose_config(*overrides))


def test_engine_chooses_who_serves_the_workload(compose_config):
    experiment = served_by(compose_config, "experiment=chunked_prefill", "system=vllm")
    assert experiment.variants == {"vllm": "vLLM"}
    assert experiment.baseline == "vllm"
    assert experiment.claims == []
    assert {cell.kind for cell in experiment._cells.values()} == {Kind.vllm}
    assert set(served_by(compose_config, "experiment=chunked_prefill").variants) == {"whole", "chunk_256", "chunk_64"}


def test_an_experiments_own_variant_of_that_kind_is_taken(compose_config):
    experiment = served_by(compose_config, "experiment=quickstart", "system=hf")
    assert experiment.variants == {"transformers": "transformers.generate"}
    assert experiment.baseline == "transformers"
    hosted = served_by(compose_config, "experiment=quickstart", "system=hf_continuous")
    assert hosted.variants == {"hf_continuous": "transformers continuous batching"}


def test_claims_stay_where_all_that_they_name_does():
    claims = (
        {"metric": "ttft_ms", "variant": "peer", "at_most": 1.0},
        {"metric": "ttft_ms", "variant": "peer", "ratio_at_most": 1.0},
        {"metric": "ttft_ms", "variant": "peer", "ratio_at_most": 2.0, "against": {"workload.count": 1}},
        {"metric": "ttft_ms", "variant": "ours", "at_most": 3.0},
    )
    values = {
        "title": "t",
        "question": "q",
        "variants": {"ours": {}, "peer": {"kind": "hf", "label": "theirs"}},
        "baseline": "ours",
        "metrics": ["ttft_ms"],
        "claims": claims,
    }
    spec = schema.build(AblationSpec, values, "experiment")
    kept = spec.served_by(Kind.hf)
    assert [claim.at_most or claim.ratio_at_most for claim in kept.claims] == [1.0, 2.0]
    assert (kept.variants, kept.baseline) == ({"peer": {"kind": "hf", "label": "theirs"}}, "peer")
    assert spec.served_by(Kind.engine).variants == {"ours": {}}


def test_settings_of_peers_are_typed(compose_config):
    config = compose_config("peers.vllm.pythonpath=/site", "+peers.vllm.args.async_scheduling=false")
    found = schema.build(schema.PeerSettings, config.peers, "peers")
    assert (found.vllm.pythonpath, found.vllm.args) == ("/site", {"async_scheduling": False})
    with pytest.raises(Exception, match=r"pythonpth"):
        compose_config("peers.vllm.pythonpth=/site")
    with pytest.raises(ConfigError, match=r"timeout_s must be above 0"):
        schema.build(schema.PeerSettings, compose_config("peers.hf.timeout_s=0").peers, "peers")


def test_a_peer_that_fails_costs_no_other_variants_rows(with_vllm, tmp_path, monkeypatch, capsys):
    """In the second repeat: what it gave before stays, and the engine is measured to the end."""
    serve, passes = cells.serve, []

    def served(cell, *arguments):
        if cell.kind is Kind.vllm:
            passes.append(cell)
            if len(passes) > 2:
                raise PeerError("vLLM could not serve: out of memory.\nIts log:\n| the last words")
        return serve(replace(cell, kind=Kind.engine), *arguments)

    monkeypatch.setattr(cells, "serve", served)
    page = execute(with_vllm, "probe", [], tmp_path).read_text()
    result = store.read(tmp_path / "results/probe/own.in_process/cpu/default.json")
    assert all(row.valid for row in result.rows if row.variant == "engine" or row.repeat == 0)
    lost = [row for row in result.rows if not row.valid]
    assert {(row.variant, row.repeat) for row in lost} == {("transformers", 1)}
    assert {row.reason for row in lost} == {
        "absent: it has failed, and is not asked again: vLLM could not serve: out of memory."
    }
    assert len(passes) == 3
    assert "vLLM is absent: it has failed" in page
    assert "the last words" in capsys.readouterr().err
