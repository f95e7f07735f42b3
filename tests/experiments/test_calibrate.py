"""A calibration of the mixture of experts with latents that ships: what it measures, writes, and is found by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from small_runs import run as measured

from experiments.calibrate import KINDS, Calibrate
from experiments.lab.measure import costs
from experiments.lab.measure.simulated import Simulator, drive
from experiments.lab.workloads import Item

SMALL = [
    *("experiment=calibrate", "model=tiny_moe", "measure.gates=false", "engine.scheduler.max_num_batched_tokens=32"),
    *("experiment.rows=[1,2]", "experiment.contexts=[16]", "experiment.prompts=[2,4,8,40,72]"),
    *("experiment.decodes=[2]", "experiment.beside_prompts=[8]", "+experiment.output_tokens=12"),
]


def test_a_mixture_with_latents_is_calibrated_and_simulated(compose_config, tmp_path: Path) -> None:
    config = compose_config(*SMALL, f"paths.results={tmp_path}")
    experiment, found = measured(config, Calibrate)
    assert {row.point for row in found.rows} == {kind.name for kind in KINDS.values()}, "residuals of both kinds"
    chunks = [row for row in found.steps if row.point == "72 alone" and row.prefill_tokens]
    assert [(row.prefill_tokens, row.prompt_context) for row in chunks[:3]] == [(32, 32), (32, 64), (8, 72)]
    experiment.finish(found)
    (path,) = (tmp_path / "costs").iterdir()
    known = costs.read(path)
    assert known.layout.model.endswith(", 4 of 16 experts a token"), "another mixture is another model"
    assert known.costs.decode.tokens == (1, 2, 3), "the third has come beside two"
    assert set(known.residuals) == {*KINDS}
    pushed = replace(known, costs=replace(known.costs, held_block_s=1e-5), held="elsewhere")
    costs.save(path, pushed)
    experiment.finish(found)
    assert costs.read(path) == pushed, "what an engine alone cannot tell is kept"
    costs.save(path, replace(known, machine="another"))
    experiment.finish(found)
    (own,) = {*path.parent.iterdir()} - {path}
    costs.save(own, pushed)
    experiment.finish(found)
    assert costs.read(own) == pushed, "beside those of another machine, too"
    own.replace(path)
    setup = Simulator(experiment.chosen, experiment.threads, path.parent).setup(experiment.engine)
    assert setup.found.source.startswith(f"fitted: {path.name}")
    items = [Item(tuple(range(count, 2 * count)), 5) for count in (8, 20)]
    served = drive(setup.cluster(), items, 2)
    assert [len(trace.token_times) for trace in served.requests] == [5, 5]
