"""Profiles of decode steps: made-up traces worked out by hand, what becomes of a profile in a run, and its report."""

import re
from dataclasses import replace
from functools import partial

import pytest
from made_up import result
from made_up_trace import KERNELS, event, trace
from small_runs import measured, probe

from experiments import ablation
from experiments.lab.measure import subjects
from experiments.lab.measure.profile import ROLES, KernelRow, NoProfile, StepProfile, analyse, by_role, role, short_name
from experiments.lab.show import report
from experiments.lab.show.figures import stacks as profile_figure
from experiments.lab.store import result as store
from experiments.lab.workloads import Item
from mini_infer import EngineConfig, LLMEngine
from mini_infer.core.errors import ConfigError

# --- traces ---


def found(made):
    return analyse(made, "new", "concurrency=8", rows=8, plain_us=95.0)


@pytest.mark.parametrize("graph", [True, False])
def test_kernels_and_idle_time_of_steps(graph):
    profile, rows = found(trace(graph=graph))
    assert (profile.steps, profile.rows, profile.plain_us) == (3, 8, 95.0)  # of five, the first and a half are left out
    assert profile.profiled_us == pytest.approx(100)
    assert profile.busy_us == pytest.approx(87)
    assert profile.idle_us == pytest.approx(12)  # from 90 to 102; 1 us lies between the kernels of a step
    assert profile.idle_share == pytest.approx(0.12)
    assert rows == [
        KernelRow("new", "concurrency=8", "linear", "nvjet_tst_64x8_splitK_TNT", 1.0, 60.0),
        KernelRow("new", "concurrency=8", "attention", "_flash_decode_kernel", 1.0, 20.0),
        KernelRow("new", "concurrency=8", "sample", "_sample_kernel", 1.0, 7.0),
    ]


def test_a_kernel_before_the_graph_is_no_idle_time_and_a_copy_is():
    profile, rows = found(trace(prologue=1.0, copy_at=95.0))
    assert profile.idle_us == pytest.approx(11)  # 12 less the microsecond in which inputs are filled
    assert {row.kernel: row.us for row in rows}["Memcpy DtoH (Device -> Pinned)"] == 2.0
    assert by_role(rows)["copy"] == 2.0


def test_steps_that_overlap_on_the_host_leave_nothing_idle():
    tight = [(name, after * 100 / 88, duration * 100 / 88) for name, after, duration in KERNELS]
    first = tight[0][1]
    profile, _ = found(trace(kernels=[(name, after - first, duration) for name, after, duration in tight]))
    assert profile.idle_us == pytest.approx(0, abs=1e-6)


def test_a_step_belongs_to_whom_launched_it():
    late = [(name, after + 130.0, duration) for name, after, duration in KERNELS]  # runs during the step after it
    profile, rows = found(trace(kernels=late))
    assert profile.idle_us == pytest.approx(12)
    assert [row.calls for row in rows] == [1.0, 1.0, 1.0]


def test_who_waits_in_place_for_another_is_not_counted_meanwhile():
    """A programmatic dependent starts early: of its 40 us it waits 20, and a third of its 39 us 32."""
    early = [(KERNELS[0][0], 2.0, 60.0), (KERNELS[1][0], 42.0, 40.0), (KERNELS[2][0], 50.0, 39.0)]
    _, rows = found(trace(kernels=early))
    assert [(row.role, row.us) for row in rows] == [("linear", 60.0), ("attention", 20.0), ("sample", 7.0)]


@pytest.mark.parametrize("made", [{}, {"traceEvents": [event("cpu_op", "aten::mm", 0, 1)]}, trace(steps=2)])
def test_a_trace_without_steps_is_said_so(made):
    with pytest.raises(NoProfile, match="no kernels of two steps"):
        found(made)


@pytest.mark.parametrize(
    ("name", "short", "what"),
    [
        ("nvjet_tst_64x8_64x16_1x2_h_bz_splitK_TNT", "nvjet_tst_64x8_64x16_1x2_h_bz_splitK_TNT", "linear"),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>, int>>(x)",
            "reduce_kernel<ArgMaxOps>",
            "sample",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, array<char*, 1>>(x)",
            "vectorized_elementwise_kernel<FillFunctor>",
            "elementwise",
        ),
        ("kernel_cutlass_FlashAttentionForwardSm90_object_at__tensor", None, "attention"),
        ("_add_rms_norm_kernel", "_add_rms_norm_kernel", "norm"),
        ("_rope_and_store_kernel", "_rope_and_store_kernel", "rope"),
        ("_silu_mul_kernel", "_silu_mul_kernel", "silu"),
        ("_gated_linear_kernel", "_gated_linear_kernel", "linear"),
        ("_fma_kernel", "_fma_kernel", "linear"),
        ("_dot_kernel", "_dot_kernel", "linear"),
        ("_add_parts_kernel", "_add_parts_kernel", "linear"),
        ("_split_rows_kernel", "_split_rows_kernel", "attention"),
        *((name, name, "adapter") for name in ("_group_kernel", "_shrink_kernel", "_expand_kernel")),
        *(
            (name, None, "experts")
            for name in (
                "few_gate_up_kernel",
                "few_down_kernel",
                "place_kernel",
                "grouped_kernel",
                "tall_kernel",
                "combine_kernel",
                "fused_moe_kernel",
                "void vllm::moe::moe_align_block_size_kernel<int>(int const*)",
            )
        ),
        *(
            (name, None, "router")
            for name in (
                "_route_kernel",
                "_norm_and_route_kernel",
                "void vllm::moe::topkGatingSoftmax<4, 128, 4, 16, int>(float const*)",
            )
        ),
        *(
            (name, None, "ranks")
            for name in (
                "_sum_kernel",
                "_gather_kernel",
                "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(int*)",
            )
        ),
        ("_head_products_kernel", None, "latent"),
        ("_mla_decode_kernel", None, "attention"),
        ("_merge_parts_kernel", None, "attention"),
        ("_rope_and_store_latent_kernel", None, "rope"),
        ("_quant_linear_kernel", None, "linear"),
        *((name, name, "sample") for name in ("_maxima", "guess", "gather", "find_cut", "_weigh", "_pick")),
        ("_gather", "_gather", "rows"),  # of a step's input
        ("void at::native::vectorized_gather_kernel<16, long>(x)", "vectorized_gather_kernel", "rows"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)", "copy"),
    ],
)
def test_names_and_roles(name, short, what):
    assert role(name) == what
    assert short is None or short_name(name) == short
    assert len(short_name(name)) <= 56


# --- a live engine ---


def test_without_a_gpu_there_is_no_profile():
    engine = LLMEngine(EngineConfig.from_dict({"model": {"path": "dry", "load_format": "dry"}}))
    with pytest.raises(NoProfile, match="takes a GPU"):
        subjects.profile_decode(engine, [], "new", "")


@pytest.fixture
def dry_gpu(monkeypatch):
    """The dry model as if it ran on a GPU, profiled by a made-up trace."""
    monkeypatch.setattr(subjects.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(subjects.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(subjects, "_trace", lambda engine: [engine.step() for _ in range(5)] and trace())


def dry_engine(max_model_len=None, **scheduler):
    model = {"path": "dry", "load_format": "dry", "max_model_len": max_model_len}
    values = {"model": model, "cache": {"num_blocks": 600}, "scheduler": scheduler}
    return LLMEngine(EngineConfig.from_dict(values))


def items(count, tokens=40):
    return [Item(tuple((index + position) % 250 for position in range(tokens)), 5) for index in range(count)]


def test_all_requests_decode_together_and_are_gone_afterwards(dry_gpu):
    engine = dry_engine(max_num_batched_tokens=64, max_num_seqs=8)
    for _ in range(2):
        profile, rows = subjects.profile_decode(engine, items(4), "new", "p")
        assert (profile.variant, profile.point, profile.rows) == ("new", "p", 4)
        assert profile.plain_us > 0
        assert rows
        assert not engine.has_unfinished_requests()
    assert all(record.decode_tokens in (0, 1, 2, 3, 4) for record in engine.records)
    assert sum(record.decode_tokens == 4 for record in engine.records) >= 2 * (subjects.STEPS + subjects.CALM)
    assert not any(record.prefix_hit_tokens for record in engine.records)  # the second profile finds nothing cached


def test_what_cannot_decode_together_is_said_so(dry_gpu):
    with pytest.raises(NoProfile, match="does not decode 4 requests together"):
        subjects.profile_decode(dry_engine(max_model_len=192, max_num_seqs=2), items(4), "new", "p")
    with pytest.raises(NoProfile, match="leaves 60 tokens after the longest prompt"):
        subjects.profile_decode(dry_engine(max_model_len=100), items(1), "new", "p")


def test_requests_that_end_while_steps_are_profiled_are_said_so(dry_gpu):
    """The first prompt is done long before the last, and its request has little left to decode then."""
    config = {
        "model": {"path": "dry", "load_format": "dry", "max_model_len": 192},
        "cache": {"num_blocks": 600},
        "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 4},
    }
    with pytest.raises(NoProfile, match="ended while its steps were profiled"):
        subjects.profile_decode(LLMEngine(EngineConfig.from_dict(config)), items(4, tokens=60), "new", "p")


# --- in a run ---


@pytest.fixture
def build(compose_config):
    settings = ("model=dry", "measure.repeats=2", "engine.cache.num_blocks=128", "workload=fixed", "workload.count=4")
    lengths = ("workload.prompt_tokens=40", "workload.output_tokens=12")
    variants = {"transformers": {"label": "base"}, "engine": {"seed": 7}}
    return partial(
        probe, compose_config, *settings, *lengths, variants=variants, points={"workload.concurrency": [1, 8]}
    )


PROFILED = {"metrics": ["ttft_ms", "gpu_idle_share"], "profile": [{"workload.concurrency": 8}]}


def test_on_a_cpu_a_profile_is_left_out_and_that_is_stated(build):
    found = measured(build(**PROFILED))
    assert "No decode step was profiled: that takes a GPU." in found.notes
    assert {row.metric for row in found.rows} == {"ttft_ms"}
    assert not found.profiles


def profiled(monkeypatch, fake):
    monkeypatch.setattr(ablation, "_can_profile", lambda device: True)
    monkeypatch.setattr(subjects, "profile_decode", fake)


def test_profiles_come_last_and_idle_shares_in_every_repeat(build, monkeypatch):
    order = []

    def fake(engine, items, variant, point):
        order.append(variant)
        assert len(items) == 4  # that are in flight
        profile, rows = analyse(trace(), variant, point, len(items), 95.0)
        return replace(profile, idle_us=profile.idle_us * len(order)), rows

    profiled(monkeypatch, fake)
    claims = [{"metric": "gpu_idle_share", "variant": "engine", "at": {"workload.concurrency": 8}, "at_most": 0.9}]
    found = measured(build(**PROFILED, claims=claims, keep_engines=True))
    assert order == ["transformers", "engine", "engine", "transformers"]
    shares = {(r.variant, r.point, r.repeat): r.value for r in found.rows if r.metric == "gpu_idle_share"}
    assert shares == pytest.approx(
        {
            ("transformers", "concurrency=8", 0): 0.12,
            ("engine", "concurrency=8", 0): 0.24,
            ("engine", "concurrency=8", 1): 0.36,
            ("transformers", "concurrency=8", 1): 0.48,
        }
    )
    assert [(p.variant, p.point) for p in found.profiles] == [
        ("transformers", "concurrency=8"),
        ("engine", "concurrency=8"),
    ]
    assert {(row.variant, row.role) for row in found.kernels} >= {("engine", "linear"), ("transformers", "linear")}


def test_a_profile_that_fails_is_a_note(build, monkeypatch):
    def fake(engine, items, variant, point):
        raise NoProfile("the trace shows no kernels")

    profiled(monkeypatch, fake)
    found = measured(build(metrics=["ttft_ms"], profile=[{"workload.concurrency": 8}]))
    assert "base: no decode step was profiled, because the trace shows no kernels." in found.notes
    assert found.status == "complete"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"metrics": ["gpu_idle_share"]}, "name their points in experiment.profile"),
        ({"profile": [{"workload.concurrency": 3}]}, r"experiment.profile\[0\]=.* names no measured point"),
        ({"metrics": ["gpu_idle_share@stream"], "profile": [{}]}, "gpu_idle_share is taken of the whole pass"),
    ],
)
def test_mistakes_are_named(build, settings, message):
    with pytest.raises(ConfigError, match=message):
        build(**settings)


# --- the report ---


def given():
    profiles = [
        StepProfile(v, "concurrency=8", 24, 8, 1900.0 * f, 1950.0 * f, 1500.0, 15.0 * f**12)
        for v, f in (("base", 1.2), ("new", 1.0))
    ]
    kernels = [
        KernelRow(v, "concurrency=8", r, f"{name}_{index}", 28.0, us / (index + 1))
        for v in ("base", "new")
        for r, name, us in (
            ("linear", "nvjet", 300.0),
            ("attention", "_flash_decode_kernel", 100.0),
            ("copy", "Memcpy", 9.0),
        )
        for index in range(6)
    ]
    return replace(result(profiles=tuple(profiles), plots=()), kernels=tuple(kernels))


def test_a_profile_is_stored_and_comes_back(tmp_path):
    path = store.write(tmp_path, given())
    assert path.with_name("default.profile.csv").read_text().startswith("variant,point,role,kernel,calls,us\nbase,")
    read = store.read(path)
    assert read.kernels[0] == given().kernels[0]
    assert read.info.profiles[1] == given().info.profiles[1]


@pytest.mark.slow
def test_the_report_shows_where_a_steps_time_goes(tmp_path):
    store.write(tmp_path / "results", given())
    report.rebuild(tmp_path / "results", tmp_path / "reports")
    text = (tmp_path / "reports/demo.md").read_text()
    assert "<details><summary>Where a decode step's time goes</summary>" in text
    assert re.search(r"\| whole prompts +\| 8 +\| 2,280 +\| 2,340 +\| 1,500 ", text)
    assert "0.77 %" in text
    assert "### Kernels of a step: chunked prefill, 512 tokens a step concurrency=8" in text
    assert "| 4 others" in text
    assert "[kernels](../results/demo/own.in_process/cpu/default.profile.csv)" in text
    name = "demo-cpu-profile.png"
    assert (tmp_path / "reports/figures" / name).read_bytes()[:4] == b"\x89PNG"
    before = (tmp_path / "reports/figures" / name).read_bytes()
    report.rebuild(tmp_path / "results", tmp_path / "reports")
    assert (tmp_path / "reports/figures" / name).read_bytes() == before
    assert tmp_path / "reports/figures" / name in report.figure_paths(tmp_path / "reports", given())


def test_pieces_of_a_bar_add_up_to_the_step():
    first = given().info.profiles[0]
    busy = sum(row.us for row in given().kernels if (row.variant, row.point) == (first.variant, first.point))
    own = replace(given().info, profiles=(replace(first, busy_us=busy),))
    (ax,) = profile_figure.steps(replace(given(), info=own)).axes
    assert sum(bar.get_width() for bar in ax.patches) == pytest.approx(first.profiled_us)


def test_what_had_no_role_when_it_was_stored_has_its_own_when_shown_and_no_two_roles_look_alike():
    old = KernelRow("new", "concurrency=8", "other", "_expand_kernel", 112.0, 634.0)
    assert by_role([old]) == {"adapter": 634.0}
    looks = profile_figure.LOOKS
    assert set(ROLES) < set(looks)
    assert len({(look["color"], look.get("hatch")) for look in looks.values()}) == len(looks)
    assert len({looks[role]["color"] for role in ROLES}) == len(ROLES)


def test_kernels_that_overlap_are_said_to():
    assert "overlap" not in profile_figure.describe(given())
    kernels = tuple(replace(row, us=3 * row.us) for row in given().kernels)
    assert "the kernels' times are too long" in profile_figure.describe(replace(given(), kernels=kernels))
