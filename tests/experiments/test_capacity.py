"""The planner: the fewest replicas, what is beside them, what comes nearest, and commands that start and measure it."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import made_up
import pytest
from matplotlib.figure import Figure
from small_runs import DRY, FEW
from small_runs import run as measured

from experiments.ablation import Ablation
from experiments.capacity import GPUS, VARIANT, Capacity, front
from experiments.lab.config import catalog, typed
from experiments.lab.config.axes import CONF
from experiments.lab.config.points import Point, flat
from experiments.lab.config.spec import PanelKind, PanelSpec, PlotSpec
from experiments.lab.judge import formulas
from experiments.lab.judge.metrics import SLO
from experiments.lab.measure import plans
from experiments.lab.measure.plans import Plan
from experiments.lab.show import answer
from experiments.lab.show.figures import gallery, lines
from experiments.lab.store.rows import Row
from mini_infer.cli.serve import parse
from mini_infer.core.errors import ConfigError
from mini_infer.serving.settings import ModelSettings

PLAN = ["experiment=capacity", *DRY, *FEW, "workload.count=60", "workload.rate_per_s=200"]
SLOTS = {"engine.scheduler.max_num_seqs": [2, 8]}


def plan(compose_config, settings=SLOTS, slo=(60, 12), **changes):
    config = compose_config(*PLAN)
    config.experiment.settings = settings
    config.experiment.slo = dict(zip(("ttft_ms", "tpot_ms"), slo, strict=True))
    config.experiment.update(changes)
    return planned(config)


def planned(config, *but: str):
    """What the planner finds. Of every layout the command starts the engine that was simulated."""
    experiment, found = measured(config, Capacity)
    for plan in experiment._plans.values():
        assert_same_engine(experiment, plan, *but)
    return found


def command_of(experiment: Capacity, plan: Plan) -> str:
    return plans.server(experiment._engine(plan.settings, plan.replicas))


def assert_same_engine(experiment: Capacity, plan: Plan, *but: str) -> None:
    """With other seeds, and but for these settings, and that of drafts where there are none."""
    program, *flags = shlex.split(command_of(experiment, plan))
    assert program == "mini-infer-serve"
    (started,) = parse(flags, {}).models
    assert started == ModelSettings(engine=started.engine)
    engine = experiment._engine(plan.settings, plan.replicas)
    unread = () if engine.speculation.most else ("speculation.adaptive",)
    simulated, served = (flat(e.to_dict()) for e in (engine, started.engine))
    different = {key for key in simulated.keys() | served.keys() if simulated.get(key) != served.get(key)}
    assert different <= {"seed", *unread, *but}


def test_the_command_of_every_layout_of_a_gpu_starts_the_engine_that_was_simulated(compose_config) -> None:
    overrides = ["experiment=capacity", "scale=7b", "hardware=h200", "engine/graphs=never", "engine/attention=triton"]
    experiment = Capacity.from_config(compose_config(*overrides, "engine.model.path='a folder/of Mine'"))
    searched = dict(experiment.spec.settings)
    searched.pop("engine.speculation.method")  # of which one takes a rate
    layouts = [{**experiment._base, key: value} for key, values in searched.items() for value in values]
    layouts += [{key: values[turn % len(values)] for key, values in searched.items()} for turn in range(12)]
    for settings in layouts:
        for replicas in (2, 3):
            plan = Plan(Point("", {}), settings, replicas, 0, {}, {}, 1.0, False)
            shape = flat({"model.hf_config": experiment._engine(settings, 1).model.hf_config})
            assert_same_engine(experiment, plan, "model.load_format", "model.hf_config", *shape)
            assert "speculation" not in command_of(experiment, plan)
    assert "--model 'a folder/of Mine' --model.dtype=bfloat16 --model.device=cuda" in command_of(experiment, plan)
    assert "--model.max_model_len=16384" in command_of(experiment, plan)


@pytest.mark.slow
def test_the_command_of_a_plan_starts_a_server(compose_config, monkeypatch) -> None:
    """Of the model that ships, as it is typed."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "serving"))
    from http_server import Server

    config = compose_config("experiment=capacity", "hardware=cpu", *FEW, "workload.rate_per_s=1")
    config.experiment.settings = {}
    config.experiment.slo = {"ttft_ms": 10_000}
    program, *flags = shlex.split(planned(config).notes[0].removeprefix("Start it with: "))
    assert (program, *flags[:2]) == ("mini-infer-serve", "--model", "tiny-target")
    server = Server((*flags, "--port=0"))
    try:
        assert server.complete("def ", model="tiny-target", max_tokens=3)["usage"]["completion_tokens"] == 3
    finally:
        assert server.stop() == 0


def test_the_planner_finds_the_fewest_replicas(compose_config) -> None:
    found = plan(compose_config)
    best = found.points[-1]
    assert (found.workload["kind"], found.workload["arrivals"]) == ("shared_prefix", "poisson")
    (share,) = (row.value for row in found.rows if row.metric == "slo_share" and row.point == best.name)
    assert share >= 0.9
    assert {(row.variant, row.repeat, row.valid) for row in found.rows} == {(VARIANT, 0, True)}
    assert {row.point for row in found.rows} == {point.name for point in found.points}
    count = best.values["engine.parallel.replicas"]
    assert count > 1
    assert re.match(rf"The fewest: {count} GPUs, replicas={count}\. \S+% of the requests keep TTFT 60 ms", found.answer)
    assert re.search(r"12 ms, and 90% need at most \d+% of the time that this allows(, which leaves|\.$)", found.answer)
    assert "What a layout does not name is as given: max_num_seqs=8." in found.notes
    command = shlex.split(found.notes[0].removeprefix("Start it with: "))
    assert command[:4] == ["mini-infer-serve", "--model", "dry", "--model.load_format=dry"]
    started = parse(command[1:], {}).models[0].engine
    assert (started.parallel.replicas, started.scheduler.max_num_seqs) == (count, 8)
    assert any(note.startswith("scheduler.max_num_seqs, all else as in the winner") for note in found.notes)
    assert {p.values["engine.scheduler.max_num_seqs"] for p in found.points} == {2, 8}
    others = [note for note in found.notes if note.startswith("To be measured beside it")]
    commands = [note.partition("Start it with: ")[2] for note in others]
    assert len({*commands, shlex.join(command)}) == len(commands) + 1 == 2, "one setting, and each layout once"
    assert all(parse(shlex.split(command)[1:], {}).models for command in commands)


def test_nothing_with_as_few_gpus_beats_a_point_of_the_front(compose_config) -> None:
    """Of all numbers of replicas up to four times the fewest, simulated one by one."""
    config = compose_config(*PLAN)
    config.experiment.settings, config.experiment.slo = SLOTS, {"ttft_ms": 60, "tpot_ms": 12}
    experiment, found = measured(config, Capacity)
    best, name = found.points[-1].values["engine.parallel.replicas"], "ttft_p50_ms"
    shown = front([plan for plan in experiment._layouts.tried if plan.keeps], name)
    assert {plan.point.name for plan in shown} <= {point.name for point in found.points}
    assert (shown[0].gpus, len(shown) > 2) == (best, True)
    for count in range(best, 4 * best + 1):
        for slots in SLOTS["engine.scheduler.max_num_seqs"]:
            plan = experiment._layouts.simulate({"engine.scheduler.max_num_seqs": slots}, count)
            reached = min(one.values[name] for one in shown if one.gpus <= count)
            assert not plan.keeps or plan.values[name] >= reached, (count, slots)
    (told,) = (note for note in found.notes if note.startswith("Cost against TTFT P50"))
    assert f"{best} GPUs {shown[0].values[name]:.3g} ms (replicas={best})" in told


def test_beside_what_nobody_has_measured_the_fewest_of_what_was_are_searched_for(compose_config, monkeypatch) -> None:
    """With all settings, not with those alone that the search had come to before it met one that nobody has."""
    monkeypatch.setattr(plans, "_is_measured", lambda setup: setup.config.scheduler.max_num_seqs != 8)
    tokens = "engine.scheduler.max_num_batched_tokens"
    config = compose_config(*PLAN)
    config.experiment.settings = {**SLOTS, tokens: [128, 256]}
    config.experiment.slo = {"ttft_ms": 60, "tpot_ms": 12}
    found = measured(config, Capacity)[1]
    best = found.points[-1]
    assert best.values["engine.scheduler.max_num_seqs"] == 2, "though 8 takes fewer GPUs"
    assert "(not measured)" not in found.answer
    (bounds,) = (note for note in found.notes if note.startswith("Nobody has measured these"))
    assert re.search(r"max_num_seqs=8: \d+ GPUs?, TTFT P50 ", bounds)
    assert not any(
        "(not measured)" in note for note in found.notes if note.startswith(("Cost against", "To be measured"))
    )
    counts = [p.values["engine.parallel.replicas"] for p in found.points if p.name.startswith("max_num_seqs=2")]
    assert max(counts) == min(64, 4 * best.values["engine.parallel.replicas"])
    assert {p.values[tokens] for p in found.points if p.values["engine.scheduler.max_num_seqs"] == 2} >= {128, 256}
    monkeypatch.setattr(plans, "_is_measured", lambda setup: False)
    alone = plan(compose_config)
    assert re.match(r"The fewest: \d+ GPUs?, .*\(not measured\)\. ", alone.answer), "where there is nothing else"
    assert any(note.startswith("Nobody has measured what steps take") for note in alone.notes)


@pytest.mark.parametrize(("slo", "most", "number"), [((4, 3), 64, "any number of"), ((30, 12), 2, "up to 2")])
def test_the_nearest_that_is_named_can_be_kept(compose_config, slo, most: int, number: str) -> None:
    """Typed as it stands there it is kept, by as many GPUs as it says."""
    found = plan(compose_config, slo=slo, most_replicas=most)
    wanted = f"Nothing keeps TTFT {slo[0]} ms and TPOT {slo[1]} ms for 90% of the requests, with {number} replicas. "
    assert found.answer.startswith(wanted)
    told = re.search(r"with (\d+) GPUs?, (.*): slo\.ttft_ms=(\S+) slo\.tpot_ms=(\S+)\.$", found.answer)
    assert told is not None, found.answer
    assert not any("(chosen)" in note for note in found.notes)
    assert found.points[-1].name == told[2]
    nearest = tuple(map(float, told.groups()[2:]))
    assert all(near >= bound for near, bound in zip(nearest, slo, strict=True))
    again = plan(compose_config, slo=nearest, most_replicas=most).answer
    assert int(re.match(r"The fewest: (\d+) GPU", again)[1]) <= int(told[1]), again


def test_where_no_engine_alone_keeps_it_no_number_of_them_is_tried_of_what_is_far_off(compose_config) -> None:
    tokens = "engine.scheduler.max_num_batched_tokens"
    config = compose_config(*PLAN)
    config.experiment.settings, config.experiment.slo = {tokens: [16, 256]}, {"ttft_ms": 4, "tpot_ms": 5}
    experiment, _ = measured(config, Capacity)
    assert 16 not in {plan.settings[tokens] for plan in experiment._layouts.tried}


def test_prompts_that_are_computed_apart_are_planned_too(compose_config) -> None:
    """Long prompts hold up whoever decodes, unless another engine computes them."""
    config = compose_config(*PLAN, "workload.prefix_tokens=0", "workload.suffix_tokens=900", "workload.rate_per_s=20")
    config.experiment.settings = {"prefill_share": [0, 0.5]}
    config.experiment.slo = {"ttft_ms": 400, "tpot_ms": 6}
    found = planned(config)
    best = found.points[-1]
    assert best.values["prefill_share"] == 0.5, found.notes
    assert best.name == "prefill=1 decode=1"
    started = parse(shlex.split(found.notes[0].removeprefix("Start it with: "))[1:], {}).models[0].engine
    assert (started.parallel.prefill, started.parallel.decode, started.parallel.replicas) == (1, 1, 1)
    assert "2 GPUs, prefill=1 decode=1. " in found.answer


def test_drafts_are_planned_too(compose_config) -> None:
    settings = {"engine.speculation.method": ["none", "synthetic"]}
    config = compose_config(*PLAN, "engine.speculation.acceptance=0.8", "engine.speculation.adaptive=false")
    config.experiment.settings, config.experiment.slo = settings, {"ttft_ms": 300, "tpot_ms": 12}
    found = planned(config, "speculation.method", "speculation.acceptance")
    replicas = {p.values["engine.speculation.method"]: p.values["engine.parallel.replicas"] for p in found.points}
    assert found.answer.startswith("The fewest: 1 GPU, method=synthetic replicas=1. "), replicas
    assert "The fewest: 2 GPUs" in plan(compose_config, settings={}, slo=(300, 12)).answer, "without drafts"
    assert "--speculation.method=ngram --speculation.adaptive=false" in found.notes[0]
    assert not any("acceptance" in note or "synthetic" in note.partition("mini-infer-serve")[2] for note in found.notes)
    (assumed,) = (note for note in found.notes if note.startswith("Assumed, not known"))
    assert "that drafts are accepted at a rate of 0.8. The commands take them from ngram, which loads no" in assumed


def test_drafts_of_the_settings_that_are_tried_unasked_take_a_rate_alone(compose_config) -> None:
    """Without it what is missing is named, with it they are planned."""
    overrides = [
        "experiment=capacity",
        "scale=7b",
        "hardware=h200",
        *FEW,
        "workload.count=40",
        "workload.rate_per_s=20",
    ]
    notes = []
    for rate in ([], ["engine.speculation.acceptance=0.6"]):
        config = compose_config(*overrides, *rate)
        tried = config.experiment.settings["engine.speculation.method"]
        config.experiment.settings = {"engine.speculation.method": tried}
        config.experiment.slo = {"ttft_ms": 500, "tpot_ms": 25}
        notes.append(measured(config, Capacity)[1].notes)
    (why,) = (note for note in notes[0] if note.startswith("Not possible"))
    assert why == (
        "Not possible: method=synthetic: speculation.method=synthetic needs the rate at which its drafts are accepted, "
        "and none is given: set speculation.acceptance, to 0.6, say."
    )
    (worth,) = (note for note in notes[1] if note.startswith("speculation.method, all else as in the winner"))
    assert worth.startswith("speculation.method, all else as in the winner: synthetic: 1 GPU")
    assert not any(note.startswith("Not possible") for note in notes[1])


def made_up_plan(gpus: int, ttft: float, used: float = 0.5, **settings: object) -> Plan:
    keys = {f"engine.scheduler.{name}": value for name, value in settings.items()}
    values = {"gpus": gpus, "ttft_p90_ms": ttft, "slo_share": 1.0}
    return Plan(Point(f"{gpus} {ttft}", {}), keys, gpus, gpus, values, {}, used, False)


def test_the_front_has_what_nothing_beats_in_gpus_and_in_latency() -> None:
    cheap, quick, between = made_up_plan(1, 90), made_up_plan(8, 10), made_up_plan(4, 30)
    beaten = [made_up_plan(1, 95), made_up_plan(4, 31), made_up_plan(5, 30), made_up_plan(8, 90), made_up_plan(16, 10)]
    assert front([quick, *beaten, between, cheap], "ttft_p90_ms") == [cheap, between, quick]


def test_the_figure_has_the_front_as_a_line_and_guesses_as_hollow_marks_below_it() -> None:
    at = {
        "replicas=1": (1, 90),
        "replicas=2": (2, 95),
        "prefill=2 decode=1": (3, 40),
        "tensor=2 (not measured)": (2, 5),
    }
    metrics = {"gpus": GPUS, "ttft_p90_ms": formulas.describe("ttft_p90_ms")}
    rows = [Row(VARIANT, point, 0, name, float(value), metrics[name].unit)
            for point, values in at.items() for name, value in zip(metrics, values, strict=True)]  # fmt: skip
    simulated = made_up.result(rows=rows, variants={VARIANT: VARIANT}, baseline=None, metrics=metrics, gates=())
    shapes = {"prefill=2 decode=1": {"prefill_share": 0.5}, "tensor=2 (not measured)": {"engine.parallel.tensor": 2}}
    info = dataclasses.replace(
        simulated.info, points={p: shapes.get(p, {}) for p in at}, answer="3 GPUs do.", claims=()
    )
    simulated = dataclasses.replace(simulated, info=info)
    ax = Figure().subplots()
    assert lines.front(ax, PanelSpec("ttft_p90_ms", PanelKind.front, x="gpus"), simulated)
    line, *marks = ax.lines
    assert line.get_xydata().tolist() == [[1, 90], [3, 40], [3, 40]]
    hollow = {mark.get_label() for mark in marks if mark.get_markerfacecolor() == "white"}
    assert hollow == {"tensor 2, not measured"}
    assert {mark.get_label() for mark in marks} - hollow == {"replicas", "prefill share 0.5"}
    assert answer.sentence(simulated) == "3 GPUs do."


@pytest.mark.parametrize(("gpus", "names"), [((1, 2), ["front"]), ((1, 1), [])])
def test_a_front_is_drawn_where_costs_differ(gpus: tuple[int, int], names: list[str]) -> None:
    metrics = {"gpus": GPUS, "ttft_p90_ms": formulas.describe("ttft_p90_ms")}
    rows = [Row(VARIANT, point, 0, name, value, metrics[name].unit)
            for point, count in zip("ab", gpus, strict=True)
            for name, value in zip(metrics, (float(count), 90.0), strict=True)]  # fmt: skip
    plot = PlotSpec("front", "Cost against latency", (PanelSpec("ttft_p90_ms", PanelKind.front, x="gpus"),))
    found = made_up.result(
        rows=rows, variants={VARIANT: VARIANT}, baseline=None, metrics=metrics, gates=(), claims=(), plots=(plot,),
        points={"a": {}, "b": {}},
    )  # fmt: skip
    assert [picture.name for picture in gallery.of(found).first] == names


def test_what_the_simulator_cannot_tell_apart_is_no_gain() -> None:
    own = made_up_plan(4, 50, 0.50)
    assert not made_up_plan(4, 46, 0.46).beats(own)
    assert made_up_plan(4, 40, 0.40).beats(own)
    assert made_up_plan(3, 90, 0.99).beats(own)
    assert not made_up_plan(3, 90, 1.01).beats(own)
    assert made_up_plan(64, 1, 0.99).beats(made_up_plan(1, 9, 1.01))


def test_what_a_setting_was_worth_is_told_against_plans_that_are_alike_in_all_others(compose_config) -> None:
    config = compose_config(*PLAN)
    keys = ["engine.scheduler.max_num_seqs", "engine.scheduler.max_num_batched_tokens"]
    config.experiment.settings = {key: [1, 2, 3] for key in keys}
    experiment = Capacity.from_config(config)
    best = made_up_plan(2, 40, max_num_seqs=1, max_num_batched_tokens=1)
    plans = [
        best,
        made_up_plan(3, 20, max_num_seqs=2, max_num_batched_tokens=1),
        made_up_plan(64, 10, 1.25, max_num_seqs=3, max_num_batched_tokens=1),
        made_up_plan(1, 5, max_num_seqs=2, max_num_batched_tokens=2),  # in both
        made_up_plan(2, 41, 0.51, max_num_seqs=1, max_num_batched_tokens=3),  # as good, as far as anybody can tell
        made_up_plan(5, 33, max_num_seqs=1, max_num_batched_tokens=2),
    ]
    experiment._plans = {tuple(plan.settings.items()): plan for plan in plans}
    assert list(experiment._worth(best)) == [
        "scheduler.max_num_seqs, all else as in the winner: 1: 2 GPUs, TTFT P90 40 ms (chosen); 2: 3 GPUs, TTFT P90 "
        "20 ms; 3: 64 GPUs, TTFT P90 10 ms, not kept by 64 replicas.",
        "scheduler.max_num_batched_tokens, all else as in the winner: 1: 2 GPUs, TTFT P90 40 ms (chosen); 3: 2 GPUs, "
        "TTFT P90 41 ms; 2: 5 GPUs, TTFT P90 33 ms.",
    ]
    assert [(plan.gpus, plan.replicas) for plan in experiment._others(best)] == [(3, 3), (5, 5)], "of two settings"


def test_why_one_of_several_layouts_with_as_many_gpus_was_picked_is_told(compose_config) -> None:
    config = compose_config(*PLAN)
    config.experiment.slo = {"ttft_ms": 100, "tpot_ms": 20}
    experiment = Capacity.from_config(config)
    best = made_up_plan(2, 40, 0.5, max_num_seqs=1)._replace(needs={"ttft_ms": 40.0, "tpot_ms": 10.0})
    others = [
        made_up_plan(2, 48, 0.48, max_num_seqs=2),
        made_up_plan(2, 70, 0.7, max_num_seqs=3),
        made_up_plan(3, 20, 0.2, max_num_seqs=4),  # more GPUs
        made_up_plan(2, 99, 1.2, max_num_seqs=5),  # breaks it
    ]
    experiment._plans = {tuple(plan.settings.items()): plan for plan in [best, *others]}
    assert experiment._picked(best) == (
        "Why this one of 3 layouts that keep it with 2 GPUs: chosen is what leaves the most room below its tightest "
        "bound. Here 90% of the requests need at most 50% of TPOT 20 ms, and of the tightest bounds of the others 48% "
        "to 70%; less than 10% apart is equal, and then settings stay as they were."
    )
    experiment._plans = {tuple(best.settings.items()): best}
    assert experiment._picked(best) == ""


def test_beside_a_winner_with_all_gpus_stand_those_that_break_the_promise_with_as_many(compose_config) -> None:
    """Where no more may be had; of one setting both, where there is no other."""
    found = plan(compose_config, {"engine.scheduler.max_num_seqs": [1, 2, 8]}, slo=(600, 100), most_replicas=1)
    assert found.answer.startswith("The fewest: 1 GPU, replicas=1. ")
    others = [note.partition(". Start")[0] for note in found.notes if note.startswith("To be measured beside it")]
    assert [told.removeprefix("To be measured beside it: 1 GPU, ") for told in others] == [
        "max_num_seqs=2 replicas=1, which is to break the promise",
        "max_num_seqs=1 replicas=1, which is to break the promise",
    ]


TRACE = ["experiment=capacity", *DRY, "workload=trace", "workload.rate_scale=2", "workload.limit=60"]


def a_trace(folder: Path, hole_s: int = 1) -> Path:
    """30 requests, a second apart, and 30 more behind a hole."""
    times = [index + (index >= 30) * (hole_s - 1) for index in range(60)]
    lines = [f"2023-11-16 {18 + t // 3600}:{t // 60 % 60:02d}:{t % 60:02d},{100 + t % 7},8" for t in times]
    path = folder / "azure.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    return path


def test_the_line_that_measures_serves_the_engines_that_were_simulated(compose_config, tmp_path: Path) -> None:
    given = [
        f"workload.path={a_trace(tmp_path)}",
        "engine.scheduler.policy=priority",
        "engine.speculation.acceptance=0.6",  # of none of the plans below
        "slo.ttft_ms=60",
        "slo.tpot_ms=9",
    ]
    for overrides in ([*TRACE, *given], [*PLAN, *given[1:]]):
        overrides = catalog.shorthand(overrides, CONF)
        config = compose_config(*overrides)
        config.experiment.settings = {**SLOTS, "prefill_share": [0, 0.5]}
        experiment = Capacity.from_config(config)
        named = {
            name: Plan(Point(f"replicas={n}", {}), {**experiment._base, **settings}, n, n, {}, {}, 1.0, False)
            for name, settings, n in (
                ("winner", {}, 3),
                ("second", {"engine.scheduler.max_num_seqs": 2}, 2),
                ("third", {"prefill_share": 0.5}, 4),
            )
        }
        line = plans.measuring(experiment._config, overrides, experiment._base, named, experiment.spec.slo)
        program, script, *again = shlex.split(line)
        assert (program, script) == ("python", "run.py")
        composed = compose_config(*again)
        measuring = Ablation.from_config(typed.settle(composed, composed_name(again), again).config)
        assert measuring.baseline == "winner"
        assert set(measuring.variants) == {*named, *(f"{name} predicted" for name in named)}
        for cell in measuring._cells.values():
            own = named[cell.variant.removesuffix(" predicted")]
            assert not cell.engine.speculation.most
            wanted = experiment._engine(own.settings, own.replicas)
            assert cell.engine == dataclasses.replace(wanted, speculation=cell.engine.speculation), (
                "nothing reads the rate"
            )
            assert cell.workload == experiment._workload
        assert measuring.spec.slo == SLO(ttft_ms=60, tpot_ms=9)


def composed_name(overrides: list[str]) -> str:
    return next(text.partition("=")[2] for text in overrides if text.startswith("experiment="))


def test_too_few_requests_are_refused(compose_config, tmp_path: Path) -> None:
    config = compose_config(*TRACE, f"workload.path={a_trace(tmp_path)}", "workload.limit=5")
    with pytest.raises(ConfigError, match=r"too few requests to plan with: 5 of 5 .* takes 10: raise workload\.limit"):
        measured(config, Capacity)


def test_a_hole_in_a_trace_is_no_load(compose_config, tmp_path: Path) -> None:
    """It is refused; and whoever takes it as it is learns that nothing counts between the ramps."""
    path = a_trace(tmp_path, 3600)
    config = compose_config(*TRACE, f"workload.path={path}")
    with pytest.raises(ConfigError, match=r"azure\.csv has a hole: line 32 is 3,600 s later .*workload\.limit=30 or"):
        measured(config, Capacity)
    whole = compose_config(*TRACE, f"workload.path={path}", "workload.max_pause_s=3600")
    with pytest.raises(ConfigError, match=r"too few requests to plan with: 0 of 60 "):
        measured(whole, Capacity)
    shorter = compose_config(*TRACE, f"workload.path={path}", "workload.max_pause_s=5")
    shorter.experiment.settings, shorter.experiment.slo = {}, {"ttft_ms": 60}
    found = measured(shorter, Capacity)[1]
    assert found.answer.startswith("The fewest: 1 GPU, replicas=1. 100.0% of the requests keep TTFT 60 ms")
    assert (found.workload["last_arrival_s"], found.workload["max_pause_s"]) == (31.5, 5)


def test_layouts_that_cannot_be_had_are_named(compose_config) -> None:
    tokens = "engine.scheduler.max_num_batched_tokens"
    found = plan(compose_config, settings={tokens: [4, 256]})
    assert found.answer.startswith("The fewest: ")
    (why,) = (note for note in found.notes if note.startswith("Not possible"))
    assert why.startswith("Not possible: max_num_batched_tokens=4: scheduler.max_num_batched_tokens=4 is less than ")
    found = plan(compose_config, settings={"prefill_share": [0, 0.5]}, most_replicas=1, slo=(9000, 900))
    assert "Not possible: prefill_share=0.5: prefill_share=0.5 takes 2 engines: raise most_replicas." in found.notes


def test_where_no_layout_fits_the_nearest_that_would_is_named(compose_config) -> None:
    overrides = ["experiment=capacity", "scale=7b", "hardware=h200", "hardware.memory_gib=6", "workload.count=12"]
    config = compose_config(*overrides)
    config.experiment.settings = {"engine.parallel.tensor": [1, 2]}
    why = r"none of 2 layouts is possible\. The engine's own .* no room for KV in 5\.4 GiB\. .*tensor=4 it fits"
    with pytest.raises(ConfigError, match=why):
        measured(config, Capacity)


def test_bad_plans_are_refused(compose_config) -> None:
    with pytest.raises(ConfigError, match=r"experiment\.slo has no bound"):
        plan(compose_config, slo=(None, None))
    with pytest.raises(ConfigError, match=r"the engine has no setting engine\.scheduler\.wrong"):
        plan(compose_config, settings={"engine.scheduler.wrong": [1]})
    with pytest.raises(ConfigError, match=r"settings\[prefill_share\] must be from 0 to less than 1, got \[1\]"):
        plan(compose_config, settings={"prefill_share": [1]})
    with pytest.raises(ConfigError, match=r"experiment\.most_replicas must be at least 1, got 0"):
        plan(compose_config, most_replicas=0)
    for share in (0, 1.5):
        with pytest.raises(ConfigError, match=rf"experiment\.share must be .*got {share}"):
            plan(compose_config, share=share)
