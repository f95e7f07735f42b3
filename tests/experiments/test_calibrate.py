"""A calibration of the mixture of experts with latents that ships: what it measures, writes, and is found by."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from small_runs import run as measured

from experiments import calibrate
from experiments.calibrate import KINDS, Calibrate
from experiments.lab import predict
from experiments.lab.execute import execute
from experiments.lab.measure import costs
from experiments.lab.measure.hardware import torch_threads
from experiments.lab.measure.simulated import Simulator, drive
from experiments.lab.measure.traces import StepRow
from experiments.lab.store import result as store
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
    assert (known.costs.pieces_s, known.costs.captured_tokens) == (0.0, 0), (
        "on a CPU no step is launched beside another"
    )
    begins = [row.start_s for row in found.steps if row.variant == "fit"]
    assert begins == sorted(begins), "on one clock for all loads"
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


def test_an_end_that_was_told_late_tells_what_the_launch_behind_it_took() -> None:
    """Two steps of a row take 4 ms, a third is told after 6, since a prompt was being launched; that takes 8 from then,
    and a step behind it 4 again. Of the pass's clock all ends are as they were told."""
    nothing = dict.fromkeys((field.name for field in fields(StepRow)), 0)
    ends, prompts = [4e-3, 8e-3, 14e-3, 22e-3, 26e-3], [0, 0, 0, 16, 0]
    begins = [0.0, *ends[:-1]]
    rows = [
        StepRow(**{**nothing, "variant": "fit", "point": "a load", "start_s": begin, "duration_s": end - begin}
                | {"num_running": 1, "decode_tokens": 1, "verified_tokens": 1, "prefill_tokens": prompt})
        for begin, end, prompt in zip(begins, ends, prompts, strict=True)
    ]  # fmt: skip
    found = calibrate.measured(rows, overlap=True)
    assert [step.device_s for step in found] == pytest.approx([4e-3, 4e-3, 4e-3, 10e-3, 4e-3])
    assert [step.launch_s for step in found] == [None, None, None, pytest.approx(6e-3), None]
    assert [step.end_s for step in found] == pytest.approx(ends)


def test_a_stored_calibration_is_fitted_anew(compose_config, tmp_path: Path) -> None:
    """To the same steps, as they are rounded in their file: of the errors that were stored nothing stays, and the costs
    say when. A second time changes no more."""
    given = [*SMALL, "hardware=cpu", "measure.threads=1", f"paths.results={tmp_path}/results", "paths.run=tiny"]
    with torch_threads(1):
        execute(compose_config(*given), "calibrate", given, tmp_path)
    (path,) = tmp_path.glob(f"results/{store.EVERY_RUN}")
    (of_costs,) = (tmp_path / "results/costs").iterdir()
    measured_run, known = store.read(path), costs.read(of_costs)
    wrong = [replace(row, value=9.0) for row in measured_run.rows]
    store.write(tmp_path / "results", replace(measured_run, rows=tuple(wrong)))
    of_costs.unlink()
    told = predict.again(path, [], Path(__file__).resolve().parents[2])
    after, anew = store.read(path), costs.read(of_costs)
    assert after.steps == measured_run.steps
    assert [row.value for row in after.rows] == pytest.approx([row.value for row in measured_run.rows], abs=0.01)
    assert anew.costs.decode.seconds == pytest.approx(known.costs.decode.seconds, rel=0.01)
    assert replace(anew, how=known.how, costs=known.costs, residuals=known.residuals) == known
    assert "; fitted anew on " in anew.how
    assert f"costs    {of_costs}" in told
    predict.again(path, [], Path(__file__).resolve().parents[2])
    assert (store.read(path).rows, costs.read(of_costs).costs) == (after.rows, anew.costs)
    assert [note for note in store.read(path).info.notes if note.startswith("Fitted anew on ")] == [
        after.info.notes[-1]
    ]
