"""The simulated engine as a system of the lab: costs found or refused, predictions beside measurements, a planner."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_runs import DRY, FEW
from small_runs import run as measured

from experiments.ablation import Ablation
from experiments.lab.judge import prediction
from experiments.lab.measure import costs
from experiments.lab.measure.costs import CostFile, Layout
from experiments.lab.measure.fit import Residuals
from experiments.lab.measure.hardware import Ceilings, Hardware
from experiments.lab.measure.simulated import Simulator, drive
from experiments.lab.store.rows import Row
from experiments.lab.workloads import Item
from mini_infer.core import limits
from mini_infer.core.config import (
    CacheConfig,
    Connector,
    Device,
    EngineConfig,
    LoadFormat,
    ModelConfig,
    ParallelConfig,
    Preemption,
    SchedulerConfig,
    replace,
)
from mini_infer.core.errors import ConfigError
from mini_infer.core.model_config import DRY_TOKEN_BYTES
from mini_infer.modeling.loader import load_spec
from mini_infer.runtime import preflight
from mini_infer.simulation.costs import Curve, FittedCosts, Work

GPU = Hardware("NVIDIA H200", device=Device.cuda, memory_gib=139.8, ceilings=(Ceilings(4000, 4400, {"bfloat16": 800}),))
TINY = EngineConfig(model=ModelConfig("tiny-target", device="cuda", dtype="bfloat16"))  # type: ignore[arg-type]


def a_file(config: EngineConfig = TINY, machine: str = "NVIDIA H200") -> CostFile:
    fitted = FittedCosts(Curve((1, 8), (1e-3, 2e-3)), Curve((1,), (3e-3,)), 1e-8, 2e-8, 1e-10, 1e-4, 1e-6)
    layout = Layout.of(config, *costs.served(config, "cuda"), "cuda", 1)
    return CostFile(machine, layout, "2026-11-22", "a test", fitted, 3, {"decode": Residuals(99, 0.01, 0.03, -0.001)})


def test_a_file_of_costs_comes_back_as_it_was_written(tmp_path: Path) -> None:
    costs.save(tmp_path / "a.yaml", a_file())
    assert costs.read(tmp_path / "a.yaml") == a_file()
    (tmp_path / "a.yaml").write_text("costs: {decode: 1}")
    with pytest.raises(ConfigError, match=r"a\.yaml is no file of costs"):
        costs.read(tmp_path / "a.yaml")


def test_costs_are_found_by_layout_and_machine(tmp_path: Path) -> None:
    costs.save(tmp_path / "a.yaml", a_file())
    found = Simulator(GPU, 1, tmp_path).setup(TINY)
    assert found.found.source == "fitted: a.yaml, of 2026-11-22"
    assert found.overlap
    assert found.found.costs.device_s(Work.decode(8, 100)) == pytest.approx(2e-3 + 1e-6)


def test_what_ranks_take_is_estimated_from_what_one_takes(tmp_path: Path) -> None:
    costs.save(tmp_path / "a.yaml", a_file())
    two = replace(TINY, parallel={"tensor": 2})
    assert Simulator(GPU, 1, tmp_path).setup(two).found.source.startswith("the roofline"), "no rate of a link is known"
    linked = dataclasses.replace(GPU.ceilings[0], link_gb_s={"to_peer": 400.0})
    found = Simulator(dataclasses.replace(GPU, ceilings=(linked,)), 1, tmp_path).setup(two).found
    assert found.source.startswith("estimated from those of one rank (a.yaml): no costs are known")
    spec = load_spec(TINY.model)
    sums = [(2 * spec.num_layers + 2) * (costs.SUM_S + rows * spec.hidden_size * 2 / 400e9) for rows in (1, 8)]
    assert [found.costs.device_s(Work.decode(rows, 0)) for rows in (1, 8)] == pytest.approx(
        [0.5e-3 + sums[0], 1e-3 + sums[1]]
    ), "half of each step, and the sums"
    slots = found.costs.device_s(Work.decode(1, 1000)) - found.costs.device_s(Work.decode(1, 0))
    assert slots == pytest.approx(0.5e-5), "each rank reads half of the heads"
    assert found.costs.host_s(8) == pytest.approx(1e-4 + 8e-6)
    throttled = a_file()
    costs.save(
        tmp_path / "a.yaml",
        dataclasses.replace(throttled, costs=dataclasses.replace(throttled.costs, throttled_s=1e-3)),
    )
    found = Simulator(dataclasses.replace(GPU, ceilings=(linked,)), 1, tmp_path).setup(two).found
    warm, cold = (found.costs.device_s(Work(0, 10, 0, 0, 0, 0, heat=heat)) for heat in (1.0, 0.0))
    assert warm - cold == pytest.approx(5e-3), "half of ten tokens"


def test_a_simulated_engine_takes_heat_and_launches_from_its_file(tmp_path: Path) -> None:
    """The second of two prompts that come at once takes longer, and a row's token waits for the launch behind it."""
    plain = a_file()
    own = dataclasses.replace(plain.costs, throttled_s=1e-3, settles_s=0.1, pieces_s=0.5, captured_tokens=4000)
    times = []
    for fitted in (plain.costs, dataclasses.replace(own, pieces_s=0.0), dataclasses.replace(own, throttled_s=0.0)):
        costs.save(tmp_path / "a.yaml", dataclasses.replace(plain, costs=fitted))
        cluster = Simulator(GPU, 1, tmp_path).setup(replace(TINY, scheduler={"max_num_batched_tokens": 512})).cluster()
        served = drive(cluster, [Item(tuple(range(n, n + 500)), 4) for n in (0, 1000)], 2)
        times.append([trace.token_times for trace in served.requests])
    none, hot, late = times
    assert hot[0][0] == none[0][0]
    assert hot[1][0] > none[1][0] + 0.005
    assert late[0][0] >= 0.5 > none[0][0], "the second prompt was launched beside the first"


def test_every_rank_reads_and_hands_on_all_of_a_latent(tmp_path: Path) -> None:
    mixture = replace(TINY, model={"path": "tiny-moe"}, parallel={"prefill": 1, "decode": 1})
    costs.save(tmp_path / "a.yaml", a_file(mixture))
    links = dataclasses.replace(GPU.ceilings[0], link_gb_s={"to_peer": 400.0})
    simulator = Simulator(dataclasses.replace(GPU, ceilings=(links,)), 1, tmp_path)
    one, two = (simulator.setup(replace(mixture, parallel={"tensor": ranks})).found.costs for ranks in (1, 2))
    slots = [each.device_s(Work.decode(1, 1000)) - each.device_s(Work.decode(1, 0)) for each in (one, two)]
    assert slots[0] == pytest.approx(slots[1]) == pytest.approx(1e-5)
    assert one.push_s(3) == two.push_s(3) > 0


NOT_THE_SAME = {
    "model": {"kernels": "torch"},
    "graphs": {"max_prefill_tokens": 8192},
    "lora": {"max_adapters": 8, "dummy": 8},
    "cache": {"block_size": 128},
    "parallel": {"all_reduce": "library"},
}


@pytest.mark.parametrize("section", NOT_THE_SAME)
def test_costs_are_not_those_of_other_kernels(tmp_path: Path, section: str) -> None:
    """Whatever changes a step is a part of the key, and says so; a file without it is of the defaults."""
    costs.save(tmp_path / "a.yaml", a_file())
    text = (tmp_path / "a.yaml").read_text()
    (tmp_path / "a.yaml").write_text(text.replace("  settings: {}\n", ""))
    changed = replace(TINY, **{section: NOT_THE_SAME[section]})
    found = Simulator(GPU, 1, tmp_path).setup(changed).found
    assert not found.measured
    key, value = next(iter(NOT_THE_SAME[section].items()))
    default = costs.flat(EngineConfig().to_dict())[f"{section}.{key}"]
    assert f"the nearest is a.yaml, but for {section}.{key}={default}" in found.source
    costs.save(tmp_path / "b.yaml", a_file(changed))
    assert Simulator(GPU, 1, tmp_path).setup(changed).found.source == "fitted: b.yaml, of 2026-11-22"
    assert costs.read(tmp_path / "b.yaml").layout.settings[f"{section}.{key}"] == value
    assert Simulator(GPU, 1, tmp_path).setup(TINY).found.source == "fitted: a.yaml, of 2026-11-22"


def test_settings_that_no_step_depends_on_leave_the_costs(tmp_path: Path) -> None:
    costs.save(tmp_path / "a.yaml", a_file())
    changed = replace(TINY, cache={"num_blocks": 99}, scheduler={"max_num_seqs": 8}, parallel={"replicas": 2})
    assert Simulator(GPU, 1, tmp_path).setup(changed).found.measured
    of_latents = {"attention": {"mla_crossover": 99}}
    assert Simulator(GPU, 1, tmp_path).setup(replace(TINY, **of_latents)).found.measured, "it has none"
    mixture = replace(TINY, model={"path": "tiny-moe"})
    costs.save(tmp_path / "b.yaml", a_file(mixture))
    assert Simulator(GPU, 1, tmp_path).setup(mixture).found.measured
    assert not Simulator(GPU, 1, tmp_path).setup(replace(mixture, **of_latents)).found.measured
    known = [f"{key}." for key in costs.flat(EngineConfig().to_dict())]
    assert all(any(key.startswith(f"{name}.") for key in known) for name in costs._ELSEWHERE)


def test_steps_beyond_what_was_measured_are_counted(tmp_path: Path) -> None:
    """Costs are known of up to 8 rows alone, and of one token of a prompt."""
    costs.save(tmp_path / "a.yaml", a_file())
    simulator = Simulator(GPU, 1, tmp_path)
    found = simulator.setup(TINY).found.costs
    assert found.rows_s(8, range(80, 96, 8), found.heat(1), 0.0, 0.0) == [
        found.device_s(Work.decode(8, context)) for context in (80, 88)
    ]
    assert simulator.beyond() == []
    found.rows_s(9, range(90, 117, 9), found.heat(1), 0.0, 0.0)
    found.device_s(Work(0, 2, 0, 2, 2, 3))
    assert simulator.beyond() == [
        "50.0% of the simulated steps lie beyond what was measured, which is up to 8 rows alone and 1 tokens with "
        "prompts: their times go on as between the last two that were."
    ]


def test_without_costs_the_roofline_stands_in_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs.save(tmp_path / "a.yaml", a_file(machine="NVIDIA B200"))
    found = Simulator(GPU, 1, tmp_path).setup(TINY)
    assert "the roofline, a bound that no step can beat" in found.found.source
    assert "the nearest is a.yaml, but for machine=NVIDIA B200" in found.found.source
    spec = load_spec(TINY.model)
    weights = 2 * sum(spec.hidden_size * w for w in (spec.vocab_size,)) / 4400e9
    assert found.found.costs.device_s(Work.decode(1, 10)) > weights
    monkeypatch.setattr(preflight, "sees_gpu", lambda: False)
    with pytest.raises(ConfigError, match=r"which GPU is to be simulated is not said.* choose hardware=\.\.\."):
        Simulator(Hardware(), 1, tmp_path).setup(TINY)
    without = dataclasses.replace(GPU, ceilings=())
    with pytest.raises(ConfigError, match=r"no costs are known of Qwen2.*there are no ceilings for a roofline"):
        Simulator(without, 1, tmp_path).setup(TINY)


@pytest.mark.parametrize("machine", ["NVIDIA B200", "NVIDIA H200"])
def test_a_pipeline_takes_the_costs_of_whole_steps(tmp_path: Path, machine: str) -> None:
    """Whether they are the roofline's or fitted: the executor gives each stage its share."""
    costs.save(tmp_path / "a.yaml", a_file(machine=machine))
    staged = dataclasses.replace(TINY, parallel=ParallelConfig(pipeline=2))
    one, two = (Simulator(GPU, 1, tmp_path).setup(engine).found.costs for engine in (TINY, staged))
    assert two.device_s(Work.decode(8, 100)) == one.device_s(Work.decode(8, 100))


def test_blocks_between_engines_take_what_the_link_takes(tmp_path: Path) -> None:
    """Of a link that nobody has measured it is said that it is taken to take no time."""
    file = a_file()
    costs.save(tmp_path / "a.yaml", dataclasses.replace(file, costs=dataclasses.replace(file.costs, held_block_s=1e-5)))
    apart = dataclasses.replace(TINY, parallel=ParallelConfig(prefill=1, decode=1))
    linked = dataclasses.replace(GPU.ceilings[0], link_gb_s={"to_peer": 400.0, "to_host": 50.0})
    for machine in ("NVIDIA H200", "NVIDIA B200"):  # fitted costs, and the roofline's
        here = dataclasses.replace(GPU, machine=machine, ceilings=(linked,))
        found = Simulator(here, 1, tmp_path).setup(apart)
        block = load_spec(TINY.model).kv_layout(torch.bfloat16).bytes_per_block(16)
        assert found.prompts is not None
        assert found.prompts.found.costs.push_s(3) == pytest.approx(3 * block / 400e9)
        assert "nobody has measured" not in found.found.source
        stream = dataclasses.replace(apart.parallel, connector=Connector.stream)
        slower = Simulator(here, 1, tmp_path).setup(dataclasses.replace(apart, parallel=stream)).prompts
        assert slower is not None
        assert slower.found.costs.push_s(3) == pytest.approx(3 * block / 50e9)
        by_kernels, by_sockets = (
            each.found.costs.device_s(Work(0, 1, 0, 0, 0, 0, 9)) for each in (found.prompts, slower)
        )
        assert by_kernels - by_sockets == pytest.approx(9e-5 * (machine == "NVIDIA H200"))
    unknown = Simulator(GPU, 1, tmp_path).setup(apart)
    assert unknown.prompts is not None
    assert unknown.prompts.found.costs.push_s(3) == 0
    assert "how quick the link between engines is nobody has measured" in unknown.found.source


def test_a_layout_that_does_not_fit_is_refused(compose_config) -> None:
    from experiments.lab.config import schema

    engine = schema.engine_config(compose_config("model=qwen2_5_7b", "engine.model.dtype=bfloat16").engine)
    engine = dataclasses.replace(engine, model=dataclasses.replace(engine.model, device=Device.cuda))
    small = dataclasses.replace(GPU, memory_gib=12.0)
    with pytest.raises(
        ConfigError, match=r"leave no room for KV in 10\.8 GiB\. .* With engine.parallel.tensor=2 it fits$"
    ):
        Simulator(small, 1).setup(engine)
    shared = dataclasses.replace(engine, parallel=ParallelConfig(tensor=2))
    assert Simulator(dataclasses.replace(small, memory_gib=14.0), 1).setup(shared).limits.num_blocks > 1000
    staged = dataclasses.replace(engine, parallel=ParallelConfig(pipeline=2))
    assert Simulator(dataclasses.replace(small, memory_gib=14.0), 1).setup(staged).limits.num_blocks > 1000
    with pytest.raises(ConfigError, match=r"device=cuda, and the chosen hardware is .*, a cpu"):
        Simulator(Hardware("a CPU", device=Device.cpu), 1).setup(engine)


def gpu_engine(compose_config, *overrides: str) -> EngineConfig:
    from experiments.lab.config import schema

    return schema.engine_config(compose_config("scale=7b", "engine.cache.memory_gib=null", *overrides).engine)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (
            ["model=qwen3_32b", "engine.cache.memory_gib=90"],
            r"Qwen3-32B on 1 of NVIDIA H200: weights of 61\.0 GiB, steps of 2\.4 GiB and KV of 90\.0 GiB "
            r"\(engine\.cache\.memory_gib=90\) take more than the 139\.8 GiB there are\. Lower "
            r"engine\.cache\.memory_gib to 76\.\d, .* With engine\.parallel\.tensor=2 it fits$",
        ),
        (["engine.cache.memory_gib=138"], r"weights of 14\.2 GiB, .* KV of 138\.0 GiB .*memory_gib to 123\.\d, raise"),
        (
            ["engine.cache.num_blocks=5000000"],
            r"KV of 4272\.5 GiB \(engine\.cache\.num_blocks=5000000\) take .* Lower engine\.cache\.num_blocks to "
            r"14\d{4}, raise engine\.parallel\.tensor, or quantize the weights$",
        ),
        (["engine.model.quantization=w8a8", "engine.cache.memory_gib=135"], r"weights of 8\.1 GiB, .* to 129\.\d, "),
        (["model=qwen3_32b", "engine.parallel.tensor=2", "engine.cache.memory_gib=120"], r"on 2 .* of 30\.5 GiB"),
    ],
)
def test_kv_that_does_not_fit_beside_the_weights_is_refused(compose_config, overrides: list[str], why: str) -> None:
    """Whoever says how much it is: what the error advises fits."""
    with pytest.raises(ConfigError, match=why) as refused:
        Simulator(GPU, 1).setup(gpu_engine(compose_config, *overrides))
    key, most = re.findall(r"Lower (\S+) to ([\d.]+),", str(refused.value))[0]
    assert Simulator(GPU, 1).setup(gpu_engine(compose_config, *overrides, f"{key}={most}")).limits.num_blocks > 1000


def test_kv_fits_that_the_batch_takes_less_of(compose_config) -> None:
    """More memory than it can use is not taken, and of a GPU whose memory is not known nothing is refused."""
    few = ["engine.scheduler.max_num_seqs=4", "engine.cache.memory_gib=138", "engine.model.max_model_len=4096"]
    assert Simulator(GPU, 1).setup(gpu_engine(compose_config, *few)).limits.num_blocks == 4 * 256
    unknown = dataclasses.replace(GPU, memory_gib=None)
    asked = gpu_engine(compose_config, "engine.cache.num_blocks=5000000")
    assert Simulator(unknown, 1).setup(asked).limits.num_blocks == 5_000_000
    with pytest.raises(ConfigError, match=r"how much memory the simulated GPU has is not known: choose hardware="):
        Simulator(unknown, 1).setup(gpu_engine(compose_config))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cpus_memory_holds_the_weights_and_kv_of_all_its_ranks(compose_config, ranks: int) -> None:
    host = Hardware(
        "a CPU", device=Device.cpu, host_memory_gib=24.0, ceilings=(dataclasses.replace(GPU.ceilings[0], threads=1),)
    )
    engine = gpu_engine(compose_config, "engine.model.device=cpu", f"engine.parallel.tensor={ranks}")
    assert Simulator(host, 1).setup(engine).limits.num_blocks * 16 * 57344 // ranks <= 2**29
    with pytest.raises(ConfigError, match=rf"KV of 12\.0 GiB .* more than the {24 // ranks}\.0 GiB there are"):
        Simulator(host, 1).setup(replace(engine, cache={"memory_gib": 12.0}))
    with pytest.raises(ConfigError, match=r"weights of .* leave no room for KV in"):
        Simulator(dataclasses.replace(host, host_memory_gib=10.0), 1).setup(engine)


@pytest.mark.parametrize("own", [1, 2**40])
def test_swap_space_is_the_chosen_machines(monkeypatch: pytest.MonkeyPatch, own: int) -> None:
    """Half of its memory at most, whatever is free where it is simulated."""
    monkeypatch.setattr(limits.psutil, "virtual_memory", lambda: SimpleNamespace(available=own))
    swaps = dataclasses.replace(TINY, scheduler=SchedulerConfig(preemption=Preemption.swap))
    dry = dataclasses.replace(swaps, model=ModelConfig(load_format=LoadFormat.dry, device=Device.cpu))
    block = load_spec(TINY.model).kv_layout(torch.bfloat16).bytes_per_block(16)
    for engine, size in ((swaps, block), (dry, 16 * DRY_TOKEN_BYTES)):
        small = Simulator(dataclasses.replace(GPU, host_memory_gib=2**-9), 1)
        assert small.setup(engine).limits.num_host_blocks == 2**20 // size
        asked = dataclasses.replace(engine, cache=CacheConfig(host_memory_gib=2**-8))
        with pytest.raises(ConfigError, match=r"host_memory_gib=0.00390625 takes 0.0 GiB of page-locked host memory"):
            small.setup(asked)


@pytest.mark.parametrize("load", ["workload.concurrency=3", "workload.arrivals=burst"])
def test_what_is_predicted_is_what_a_dry_engine_takes(compose_config, virtual_time, load: str) -> None:
    """To the noise of the machine, and with every rule kept by which passes count."""
    config = compose_config(
        *("experiment=simulator", *DRY, *FEW, load, "measure.repeats=2", "measure.aa=never", "measure.gates=false")
    )
    config.experiment.points = {}
    experiment, found = measured(config)
    assert {row.reason for row in found.rows if not row.valid} <= set(_forgiven(found.rows))
    misses = list(prediction.misses(found.rows, experiment._predictions))
    assert {miss.variant for miss in misses} == {"chunked predicted", "whole predicted", "uncached predicted"}
    assert all(abs(miss.share) < 0.1 for miss in misses), misses
    assert any("predictions" in note and "the worst misses" in note for note in found.notes)
    assert {(c.variant, c.reference_variant) for c in experiment.claims} == {*experiment._predictions.items()}
    assert found.notes[0] == "What simulated steps take: the dry model's own."


def test_a_bound_that_is_not_met_is_no_miss(compose_config, virtual_time, monkeypatch) -> None:
    setup = Simulator.setup

    def bound(self, engine):
        found = setup(self, engine)
        return dataclasses.replace(found, found=dataclasses.replace(found.found, measured=False))

    monkeypatch.setattr(Simulator, "setup", bound)
    config = compose_config(*("experiment=simulator", *DRY, *FEW, "measure.repeats=1", "measure.gates=false"))
    config.experiment.points = {}
    experiment, found = measured(config)
    assert list(prediction.misses(found.rows, experiment._predictions))
    assert not any("the worst misses" in note for note in found.notes)


def _forgiven(rows):
    return [row.reason for row in rows if "not shown" in row.reason]


def test_any_experiment_can_be_simulated_alone(compose_config) -> None:
    config = compose_config(
        "experiment=prefix_cache", "system=simulated", *DRY, "workload.count=6", "measure.repeats=1"
    )
    config.experiment.points, config.experiment.claims, config.experiment.timeline = {}, [], None
    experiment, found = measured(config)
    assert set(experiment.variants) == {"off", "on"}
    assert experiment.hardware_key == "simulated-cpu"
    ttft = {row.variant: row.value for row in found.rows if row.metric == "ttft_ms"}
    assert ttft["on"] < ttft["off"] / 2
    again = measured(config)[1]
    assert [row.value for row in again.rows] == [row.value for row in found.rows], "the same seed, the same result"


@pytest.mark.parametrize("scale", ["tiny", "7b"])
def test_what_is_not_simulated_is_left_out_of_what_is_simulated_alone(compose_config, scale: str) -> None:
    """As long as it is not all that there is beside the baseline."""
    machine = ["hardware=h200"] if scale == "7b" else ["hardware=cpu"]
    tiers = Ablation.from_config(
        compose_config("experiment=kv_tiers", "system=simulated", f"scale={scale}", *machine, "measure.aa=always")
    )
    assert [*tiers.variants] == ["none", "third", "host", "none again"]
    assert tiers.notes == [
        "Nothing is predicted of a third, and files: cache.disk_prefix_path=trial/kv_tiers: files of prefixes are not "
        "simulated, host memory is. Leave it and cache.disk_prefix_gib unset."
    ]
    for experiment in ("expert_parallel", "spec_decode"):
        with pytest.raises(ConfigError, match=r"^(parallel\.expert=2|speculation\.method=draft): "):
            Ablation.from_config(compose_config(f"experiment={experiment}", "system=simulated", "hardware=cpu"))


def test_what_is_served_is_predicted_where_no_engine_alone_is(compose_config) -> None:
    replicas = Ablation.from_config(compose_config("experiment=replicas", "measure.predict=true"))
    assert replicas._predictions == {f"{name} predicted": name for name in replicas.spec.variants if "pred" not in name}
    two = [
        "+experiment.variants.tensor={parallel: {tensor: 2}}",
        "+experiment.variants.two={kind: served, parallel: {replicas: 2}}",
        "+experiment.variants.apart={kind: served, parallel: {prefill: 1, decode: 1}}",
    ]
    layouts = Ablation.from_config(compose_config("experiment=simulator", *two))
    assert {"tensor", "two", "apart"} <= set(layouts._predictions.values())
    assert {claim.variant for claim in layouts.claims} == {*layouts._predictions}, "whatever variants there are"
    with pytest.raises(
        ConfigError, match=r"experiment\.reach\.mbu=0\.1: each is a metric that is measured, with a sha"
    ):
        Ablation.from_config(compose_config("experiment=simulator", "+experiment.reach.mbu=0.1"))
    serving = Ablation.from_config(compose_config("experiment=serving", "measure.predict=true"))
    assert [name for name in serving.variants if name.endswith("predicted")] == ["offline predicted"]


def test_what_the_simulator_does_not_know_is_not_predicted_and_told(compose_config) -> None:
    known = Ablation.from_config(compose_config("experiment=expert_parallel", "measure.predict=true"))
    assert known._predictions == {"one predicted": "one"}
    assert {"padded", "grouped", "packed", "copies"} < {*known.variants}
    assert known.notes == [
        "Nothing is predicted of padded, grouped, packed, grouped, a hot expert of each rank twice: parallel.expert=2: "
        "ranks that share experts are not simulated. Set parallel.expert=1."
    ]
    drafts = Ablation.from_config(compose_config("experiment=spec_decode", "measure.predict=true"))
    assert drafts._predictions == {"off predicted": "off"}
    assert all(": speculation.method=" in note and "a simulated engine has no text" in note for note in drafts.notes)


def test_a_trace_is_simulated_too(compose_config, tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    lines = [f"2023-11-16 18:15:{i:02d}.0000000,{100 + i},{5 + i}" for i in range(30)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    config = compose_config(
        *("experiment=simulator_trace", "system=simulated", *DRY, f"workload.path={path}", "workload.limit=30"),
        *("workload.max_prompt_tokens=200", "workload.max_output_tokens=20", "measure.repeats=1"),
    )
    config.experiment.points = {}
    found = measured(config)[1]
    assert next(row.value for row in found.rows if row.metric == "output_tokens_per_s") > 0
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines[:3], lines[9], *lines[3:]]))
    with pytest.raises(ConfigError, match=r"line 6: it is 6\.000 s earlier than the line before it"):
        measured(config)


def test_remarks_name_the_worst_and_those_that_missed() -> None:
    rows = [
        Row(variant, "load", repeat, metric, value, "ms")
        for variant, values in {"a": (100.0, 10.0), "a predicted": (103.0, 8.0)}.items()
        for metric, value in zip(("ttft_ms", "itl_p50_ms"), values, strict=True)
        for repeat in range(2)
    ]
    labels = {"a": "A", "a predicted": "A, predicted"}
    (worst,) = prediction.remarks(rows, {"a predicted": "a"}, labels)
    assert worst == (
        "Of 2 predictions 1 lie within 10% of what was measured; the worst misses the inter-token latency, median gap "
        "of A, predicted at load by -20.0%."
    )
    assert prediction.remarks(rows[:4], {"a predicted": "a"}, labels) == []


def test_remarks_have_no_blind_spots() -> None:
    """What was measured as 0 is missed by whatever else was predicted; a share is a prediction, too; and a percentile
    that one side alone shows is said not to be compared."""
    values = {"goodput_rps": (0.0, 50.0), "preemptions": (0.0, 0.0), "slo_share": (0.5, 0.75), "itl_p99_ms": (9.0, 9.0)}
    rows = [
        Row(variant, "", 0, metric, value, "", valid=(variant, metric) != ("a predicted", "itl_p99_ms"))
        for metric, pair in values.items()
        for variant, value in zip(("a", "a predicted"), pair, strict=True)
    ]
    worst, others, alone = prediction.remarks(rows, {"a predicted": "a"}, {"a": "A", "a predicted": "A, predicted"})
    assert worst.startswith(
        "Of 3 predictions 1 lie within 10% of what was measured; the worst misses the requests per "
    )
    assert worst.endswith("by +50 from 0.")
    assert others.endswith("too: share of the requests that met every SLO of A, predicted by +50.0%.")
    assert alone == (
        "1 more could not be compared, since one side alone has a value that counts: inter-token latency, P99 of A, "
        "predicted (the prediction has none)."
    )
