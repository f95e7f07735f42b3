"""Reports say what the rows show and no more, fit a screen, and follow from results/ alone, byte for byte."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from made_up import METRICS, VARIANTS, different, engine_steps, equal, requests, result

from experiments.kernels import METRICS as OF_KERNELS
from experiments.lab.config.spec import BOUND, STEPS, PanelKind, PanelSpec, PlotSpec
from experiments.lab.judge import formulas, stats
from experiments.lab.judge.claims import Bound, Claim
from experiments.lab.judge.gate import ALONE, ErrorGate
from experiments.lab.judge.metrics import Better, Metric
from experiments.lab.show import answer, details, effects, grids, pages, report, sweeps, wording
from experiments.lab.show.answer import _two_digits, flags, sentence
from experiments.lab.show.figures import frame, gallery
from experiments.lab.show.grids import SCREEN, Sheet
from experiments.lab.show.older import LABELS, in_todays_words
from experiments.lab.show.pages import screen
from experiments.lab.store import result as store
from experiments.lab.store.provenance import ProcessInfo
from experiments.lab.store.result import Sample, StoreError
from experiments.lab.store.rows import Row
from experiments.quantization import METRICS as OF_QUANTIZATION

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_figures")]  # together they take some seconds

ROOT = Path(__file__).resolve().parents[2]
PLAIN = {"plots": ()}  # figures take time, and most tests are about words
NEW = frame.new  # a figure as it is


def contents(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def built(tmp_path, *results):
    for each in results:
        store.write(tmp_path / "results", each)
    report.rebuild(tmp_path / "results", tmp_path / "reports")
    return tmp_path / "reports"


def text_of(tmp_path, *results):
    return (built(tmp_path, *results) / f"{results[0].info.experiment}.md").read_text()


def without(given, *, variant, point=None, reason):
    """Some rows of a result made invalid."""
    hit = lambda row: row.variant == variant and point in (None, row.point)  # noqa: E731
    rows = [replace(row, valid=False, reason=reason) if hit(row) else row for row in given.rows]
    return replace(given, rows=tuple(rows))


# The answer


def test_the_answer_is_what_the_claims_name_in_plain_words():
    text = sentence(result(noise=0.001))
    assert text.startswith(
        "Chunked prefill, 512 tokens a step against whole prompts: concurrency 8: 1.50x tokens/s (6,"
    )
    assert text.endswith("against 4,298); time to first token 214 ms against 305.")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"repeats": 1}, "tokens/s 6,"),
        ({"repeats": 1}, "(1.50x; one valid repeat; at least 1.20x: not shown)"),
        ({"noise": 0.6, "seed": 1}, "no difference shown in tokens/s ("),
        ({"gates": [different("new", "concurrency=8")]}, "There is no answer: its tokens differ from the baseline's"),
        ({"claims": ()}, "Best in tokens/s, concurrency 8: chunked prefill, 512 tokens a step, 1.52x ["),
    ],
)
def test_the_answer_claims_no_more_than_the_rows(changes, says):
    assert says in sentence(result(**changes))


def test_a_simulated_process_has_values_and_no_intervals():
    given = result(hardware="simulated-h200", claims=())
    says = "Best in tokens/s, concurrency 8: chunked prefill, 512 tokens a step,"
    alike = f"{says} {6500 / 4291:.2f}x of whole prompts (whole prompts 4,291; chunked prefill, 512 tokens a step 6,5"
    assert sentence(given).startswith(alike)
    (grid, *_) = Sheet(given).grids(["output_tokens_per_s"])
    assert "[" not in "".join(map("".join, grid.rows))
    ran = [replace(row, process=row.repeat) for row in given.rows]
    assert f"{says} 1.52x [" in sentence(replace(given, rows=ran)), "several processes have seeds of their own"


def test_a_worse_result_is_called_worse():
    given = result()
    metrics = {**METRICS, "output_tokens_per_s": Metric("time", "s", Better.lower)}
    text = sentence(replace(given, info=replace(given.info, metrics=metrics)))
    assert "tokens/s 6,500 s against 4,291: 52 % worse;" in text
    assert [_two_digits(percent) for percent in (0.84, 1.94, 51.5, 99.6)] == ["0.84", "1.9", "52", "100"]


def test_what_guards_against_a_loss_says_how_much_may_be_lost():
    claims = (
        Claim("output_tokens_per_s", "new", "concurrency=8", Bound.ratio_at_least, 1.2, "base", "concurrency=8"),
        Claim("itl_p99_ms", "new", "concurrency=1", Bound.ratio_at_most, 1.02, "base", "concurrency=1"),
    )
    variants = {"base": "without", "new": "with"}
    text = sentence(result(claims=claims, variants=variants, seed=3))
    assert text.startswith("Concurrency 8: 1.50x tokens/s (4,277 -> 6,446)")
    assert re.search(r"; concurrency 1: no loss above [\d.]+ % in P99 ITL\.", text)


def test_an_answer_of_more_than_a_line_keeps_the_first_part_and_what_was_missed(monkeypatch):
    claims = (
        Claim("output_tokens_per_s", "new", "concurrency=8", Bound.ratio_at_least, 1.2, "base", "concurrency=8"),
        Claim("ttft_p50_ms", "new", "concurrency=8", Bound.ratio_at_most, 0.9, "base", "concurrency=8"),
        Claim("output_tokens_per_s", "new", "concurrency=1", Bound.ratio_at_least, 9.0, "base", "concurrency=1"),
    )
    short = sentence(result(claims=claims, noise=0.001))
    assert "time to first token" not in short
    assert short.endswith("at least 9x: missed).")
    monkeypatch.setattr(answer, "LONG", len(short) + 100)
    whole = sentence(result(claims=claims, noise=0.001))
    assert whole.startswith(short.removesuffix("."))
    assert whole.endswith("time to first token 214 ms against 305.")


def test_where_nothing_is_compared_every_variant_of_the_first_claim_is_named():
    claims = [Claim("itl_p99_ms", name, "concurrency=8", Bound.at_most, 20.0) for name in ("base", "new")]
    given = result(claims=tuple(claims))
    text = sentence(replace(given, info=replace(given.info, baseline=None)))
    assert text.startswith("P99 ITL, concurrency 8: ")
    assert all(re.search(rf"{label} [\d.]+ ms", text) for label in VARIANTS.values())


def test_where_claims_name_several_variants_each_is_told_once():
    variants = {"base": "bf16", "new": "fp8", "third": "int4"}
    claims = [Claim(metric, name, "concurrency=8", Bound.at_most, 1e5, source="target")
              for metric in ("ttft_p50_ms", "output_tokens_per_s") for name in ("new", "third")]  # fmt: skip
    text = sentence(result(variants=variants, claims=tuple(claims), noise=0.001))
    listed = r"int4 [\d,.]+( ms)?; fp8 [\d,.]+( ms)?; bf16 [\d,.]+( ms)?\."
    assert re.match(rf"Time to first token, concurrency 8: {listed} Tokens/s, concurrency 8: {listed}$", text)
    guards = [replace(claim, bound=Bound.ratio_at_least, value=0.98, reference_variant="base",
                      reference_point="concurrency=8", metric="itl_p99_ms") for claim in claims[:2]]  # fmt: skip
    text = sentence(result(variants=variants, claims=tuple(guards)))
    assert re.match(r"Fp8 against bf16: concurrency 8: no \w+ .*; int4: concurrency 8: no \w+", text)


def test_a_loss_that_cannot_be_is_none():
    same = Claim("itl_p99_ms", "new", "concurrency=1", Bound.ratio_at_most, 1.02, "base", "concurrency=1")
    given = result(claims=(same,), noise=0.0)
    assert "P99 ITL 45 ms against 45 (one process, all repeats alike)." in sentence(given)
    given = replace(given, info=replace(given.info, hardware="simulated-cpu"))  # whose repeats are alike by nature
    assert sentence(given).endswith("no loss in P99 ITL.")


def test_where_values_do_not_count_stands_on_the_first_screen():
    given = without(result(), variant="new", point="concurrency=8", reason="faster than its floor")
    line = "- **INVALID**: 15 values of chunked prefill, 512 tokens a step at concurrency 8 (faster than its floor)."
    assert line in screen(given, lambda info: 0)
    said = replace(given, remarks="- The floor of INVALID values was wrong.")
    assert f"{line} The remarks say more." in screen(said, lambda info: 0)
    assert "INVALID**" not in screen(result(), lambda info: 0)


def test_a_metric_with_too_few_samples_everywhere_has_no_table():
    given = result(sizes=(1, 8))
    few = [replace(row, valid=False, reason="not shown: 8 samples do not show a P99") for row in given.rows
           if (row.metric, row.point) == ("itl_p99_ms", "concurrency=1")]  # fmt: skip
    kept = [row for row in given.rows if (row.metric, row.point) != ("itl_p99_ms", "concurrency=1")]
    (grid,) = Sheet(replace(given, rows=(*kept, *few))).grids(["itl_p99_ms"])
    assert grid.title.endswith("at concurrency=8")


def test_a_part_that_says_the_measurement_is_sound_is_no_answer():
    check = Claim("client_busy", "new", "concurrency=8", Bound.at_most, 0.8)
    metrics = {**METRICS, "client_busy": Metric("load of the client", "", Better.lower)}
    given = result()
    rows = (*given.rows, *(replace(row, metric="client_busy", value=0.1) for row in given.rows if row.repeat == 0))
    given = replace(given, rows=rows, info=replace(given.info, metrics=metrics, claims=(check, *given.info.claims)))
    assert "1.52x tokens/s" in sentence(given)
    assert "client" not in sentence(given)


def test_an_answer_without_valid_rows_says_so():
    given = without(result(), variant="new", reason="lengths differ")
    assert sentence(given) == "There is no answer: no valid measurement."
    assert "  There is no answer: no valid measurement. INVALID: 30 of 60 values.\n" in report.summary(given)


def test_a_claim_on_an_absolute_figure_or_on_another_point():
    absolute = Claim("ttft_p50_ms", "base", "concurrency=1", Bound.at_most, 90)
    growth = Claim("ttft_p50_ms", "base", "concurrency=8", Bound.ratio_at_most, 4, "base", "concurrency=1")
    text = sentence(result(claims=(absolute,)))
    assert re.match(r"Whole prompts: concurrency 1: time to first token 8\d\.\d ms, target 90\.$", text)
    text = sentence(result(claims=(growth,)))
    assert re.match(
        r"Whole prompts: concurrency 8: time to first token 3\.\d+x that at concurrency 1 \([^;]*\)\.$", text
    )
    once = sentence(result(claims=(growth,), repeats=1))
    assert once.endswith("; one valid repeat; at most 4x: not shown).")
    missed = sentence(result(claims=(replace(growth, value=2.0),)))
    assert missed.endswith("; at most 2x: missed).")
    wide = sentence(result(claims=(replace(growth, value=3.5),), noise=0.1))
    assert re.search(r"3\.\d+x \[\d\.\d+, \d\.\d+\] that at concurrency 1 \(.*; at most 3\.50x: not shown\)\.$", wide)


def test_what_shows_no_difference_may_miss_its_bound_all_the_same():
    absolute = Claim("itl_p99_ms", "new", "concurrency=8", Bound.at_most, 90)
    text = sentence(result(claims=(absolute,)))
    assert re.search(r": no difference shown in P99 ITL \(\S+ \[.*\]; at most 90 ms: missed\)\.$", text)
    two = result(repeats=2, noise=0.2, claims=(replace(absolute, value=900),))
    text = sentence(two)
    assert re.search(r": no difference shown by two values in P99 ITL \([\d.]+x and [\d.]+x", text)


def test_a_peer_is_known_by_its_name_where_no_config_has_variants():
    info = replace(result(variants={"base": "ours", "vllm": "vLLM"}).info, config={"experiment": {"mixes": []}})
    assert effects.peers(info) == ["vllm"]
    for label, named in (
        ("vLLM, chunks", "vLLM 0.23, chunks"),
        ("2 of vLLM", "2 of vLLM 0.23"),
        ("vllm.LLM", "vllm.LLM 0.23"),
        ("other", "other 0.23"),
    ):
        told = replace(info, variants={"base": "ours", "vllm": label}, peers={"vllm": ({"vllm": "0.23"},)})
        assert pages._named(told, "vllm") == named


def test_the_target_of_a_ratio_is_none_of_a_value():
    gain = Claim("ttft_p50_ms", "new", "concurrency=8", Bound.ratio_at_most, 0.9, "base", "concurrency=8", "target")
    assert "target" not in sentence(without(result(claims=(gain,)), variant="base", reason="late")).partition(". ")[0]


def test_the_baseline_beside_itself_stands_on_top_where_it_differs():
    variants = {"base": "off", "base again": "off again", "new": "on"}
    rows = result(variants={"base": "off", "new": "on"}).rows
    again = [replace(row, variant="base again") for row in rows if row.variant == "base"]
    given = result(variants=variants, rows=[*rows, *again], aa="base again")
    assert flags(given) == []
    assert "| 1x |" in screen(given, lambda info: 3)
    slow = [replace(row, value=1.2 * row.value) for row in again]
    (flag,) = flags(replace(given, rows=(*rows, *slow)))
    assert flag.startswith("the baseline differs from itself: A/A ratio 1.20")
    assert all("again" not in effect.cell[0] for effect in effects.shown(given, 5))


# How much better


def test_an_effect_has_its_bounds_on_the_axis_of_its_gain():
    claims = (
        Claim("ttft_p50_ms", "new", "concurrency=8", Bound.at_most, 300.0, source="target", aim=200.0),
        Claim("ttft_p50_ms", "new", "concurrency=8", Bound.ratio_at_most, 0.9, "base", "concurrency=8", "original"),
    )
    (effect,) = effects.of_claims(result(claims=claims, noise=1e-9))  # one quantity, whatever is claimed of it
    assert effect.gain.median == pytest.approx(1 / 0.7)
    assert effect.ticks == pytest.approx((effect.base.median / 300, effect.base.median / 200))
    assert effect.told == 1
    (alike,) = effects.of_claims(result(claims=claims, noise=0.0))
    assert (alike.told, alike.gain.low) == (0, None), "repeats of one process that are alike have no interval"


def test_without_a_baseline_the_target_is_what_a_figure_is_compared_with():
    claim = Claim("output_tokens_per_s", "base", "concurrency=8", Bound.at_least, 2000.0, source="target")
    (effect,) = effects.of_claims(result(claims=(claim,), baseline=None, gates=[], noise=0.0))
    assert effect.reference is None
    assert effect.gain.median == pytest.approx(effect.own.median / 2000)
    assert effect.ticks == (1.0, None)


def test_a_bound_that_is_neither_kept_nor_missed_stands_in_the_answer():
    claim = Claim("ttft_p50_ms", "new", "concurrency=8", Bound.at_most, 219.0)
    given = result(claims=(claim,), noise=0.05, gates=[])
    assert re.search(r"first token 219 ms against \d+ \(\[209, 226\]; at most 219 ms: not shown\)", sentence(given))


def test_what_is_missed_or_lost_elsewhere_stands_in_the_answer():
    def at(count, bound):
        return Claim("output_tokens_per_s", "new", f"concurrency={count}", Bound.ratio_at_least, bound, "base",
                     f"concurrency={count}")  # fmt: skip

    given = result(sizes=(1, 2, 4, 8), claims=tuple(at(n, 1.2) for n in (1, 2)), gates=[], noise=0.001)
    assert "worse" not in sentence(given)
    slow = lambda r: (r.variant, r.metric, r.point) == ("new", "output_tokens_per_s", "concurrency=8")  # noqa: E731
    lost = replace(given, rows=tuple(replace(r, value=0.4 * r.value) if slow(r) else r for r in given.rows))
    assert re.search(r"concurrency 8: 0\.6\d\dx tokens/s \(.*\): 40 % worse", sentence(lost))
    claims = (*(at(n, 1.2) for n in (1, 2)), at(4, 1.3), at(8, 1.6))
    missed = replace(given, info=replace(given.info, claims=claims))
    assert re.search(r"concurrency 8: 1\.50x tokens/s \(.*; at least 1\.60x: missed\)", sentence(missed))


def test_a_profile_that_is_missing_is_no_timed_pass():
    def flag(why, planned):
        given = result()
        ran = (ProcessInfo(0, 0, "2026-01-01T00:00:00+00:00", 60.0),)
        asked = {"measure": {"processes": planned}}
        return flags(
            replace(given, info=replace(given.info, status=f"incomplete: {why}", processes=ran, config=asked))
        )[0]

    cut = "interrupted in profile 1 at batch 256; 12 of 13 rounds are kept"
    assert flag(cut, 1).startswith("a profile is missing (")
    assert flag(f"process 1 of 2: {cut}; 0 of 2 processes are complete", 2).startswith("INCOMPLETE ("), (
        "one never began"
    )
    assert flag(f"{cut}; interrupted in repeat 1 of 2", 1).startswith("INCOMPLETE (")


def test_rows_that_no_claim_names_fill_the_picture_of_effects():
    given = result(sizes=(1, 2, 8), noise=0.001)
    shown = effects.shown(given, 5)
    assert [(e.metric, e.cell[1]) for e in shown] == [
        *(("output_tokens_per_s", f"concurrency={n}") for n in (1, 2, 8)),
        ("ttft_p50_ms", "concurrency=8"),
    ]
    arrivals = {name: {"workload.rate_per_s": n} for n, name in enumerate(given.info.points)}
    offered = replace(given, info=replace(given.info, claims=(), points=arrivals))
    assert effects.shown(offered, 5) == [], "the schedule sets this rate"
    assert len(effects.shown(result(sizes=tuple(range(1, 12))), 5)) == 5
    peer = {"experiment": {"variants": {"base": {}, "new": {"kind": "vllm"}}}}
    assert [e.cell[0] for e in effects.shown(result(claims=(), config=peer), 5)] == []  # a peer is no effect of ours
    failed = [different("new", "concurrency=1"), equal("new", "concurrency=2")]
    assert "concurrency=1" not in [e.cell[1] for e in effects.shown(result(sizes=(1, 2, 8), gates=failed), 5)]


def test_a_peer_stands_beside_the_variant_that_is_set_like_it():
    variants = {"vllm": "vLLM", "vllm_base": "vLLM, too", **VARIANTS}  # each 1.5 times as fast as the one before it
    kinds = {name: {"kind": "vllm"} if name.startswith("vllm") else {} for name in variants}
    given = result(variants=variants, config={"experiment": {"variants": kinds}}, gates=[], noise=1e-9)
    (line, *_) = pages._beside_others(given)
    beside = r"{} [\d,]+, {}x{} as good as {} \([\d,]+\)"
    interval = r" \[[\d.]+, [\d.]+\]"
    new = beside.format("chunked prefill, 512 tokens a step", r"3\.3\d", interval, "vLLM")
    base = beside.format("whole prompts", r"1\.50", interval, "vLLM, too")
    assert re.search(f"concurrency 8: {new}; {base}\\.$", line)
    two = result(variants=variants, config={"experiment": {"variants": kinds}}, gates=[], noise=0.2, repeats=2)
    for claims in (two.info.claims, [claim for claim in two.info.claims if claim.metric == "ttft_p50_ms"]):
        line = pages._beside_others(replace(two, info=replace(two.info, claims=tuple(claims))))[0]
        assert re.search(r"[ (][\d.]+x and [\d.]+x as good", line), "as two passes tell"


# Tables


@pytest.mark.parametrize(
    ("values", "processes", "told"),
    [
        ([46.0, 374.0], 1, "46x and 374x"),  # t with one degree of freedom: from 0.0002 to 87 million
        ([374.0, 46.0], 2, "46x and 374x"),
        ([1.0, 1.05], 1, "1.02x [0.752, 1.40]"),  # not twice its lower end
        ([0.0, 1.0], 1, "0x and 1x"),
        ([46.0, 374.0, 110.0], 1, "46x, 110x and 374x"),
        ([46.0, 374.0, 110.0, 120.0], 3, "115x [31.3, 481]"),  # of more the interval says what they do
        ([5.0, 5.0], 2, "5x [5, 5]"),
        ([5.0], 1, "5x"),
    ],
)
def test_two_or_three_values_stand_for_an_interval_that_says_less(values, processes, told):
    turns = [(0, n) if processes == 1 else (n, 0) for n in range(len(values))]
    assert wording.interval(stats.absolute(dict(zip(turns, values, strict=True))), "x") == told


def test_two_variants_stand_side_by_side():
    (grid, *_) = Sheet(result(variants={"base": "off", "new": "on"}, sizes=(1, 2, 4))).grids(["output_tokens_per_s"])
    assert grid.header == ("point", "off", "on", "ratio", "same tokens")
    assert len(grid.rows) == 3
    assert grid.rows[0][-1] == "all 900"


def test_more_variants_stand_below_each_other():
    variants = {"base": "off", "a": "one", "b": "two"}
    (grid,) = Sheet(result(variants=variants)).grids(["ttft_p50_ms"])
    assert grid.header == ("point", "variant", "median [95 %]", "ratio to off", "same tokens")
    assert [row[:2] for row in grid.rows[:2]] == [("concurrency=1", "off"), ("concurrency=1", "one")]
    assert grid.rows[0][3:] == ("1", "baseline")


def test_predictions_stand_beside_what_was_measured_of_the_same_variant():
    """Whatever the baseline is."""
    variants = {"base": "off", "base predicted": "off, predicted", "new": "on", "new predicted": "on, predicted"}
    values = {"base": 100.0, "base predicted": 103.0, "new": 50.0, "new predicted": 40.0}
    given = result(variants=variants, gates=[], claims=(), sizes=(1,))
    rows = [replace(row, value=values[row.variant]) for row in given.rows]
    given = replace(given, rows=tuple(rows))
    (grid,) = Sheet(given).grids(["ttft_p50_ms"])
    assert grid.header == ("variant", "median [95 %]", "ratio to baseline", "off by"), "no gate, no column of gates"
    assert [row[3] for row in grid.rows] == ["-", "+3.0%", "-", "-20.0%"]
    assert [row[2][:5] for row in grid.rows] == ["1", "1", "0.500", "0.388"], "to the baseline's prediction"
    (gains,) = grids.gains_predicted(given)
    assert [(*row[:3], row[3][:5], row[4][:5]) for row in gains.rows if row[0] == "median TTFT"] == [
        ("median TTFT", "concurrency=1", "on", "2x", "2.58x")
    ]
    assert grids.errors_of_predictions(given) == [], "no claim is about a prediction"
    bound = {"new predicted": ({STEPS: f"{BOUND}: nobody has measured"},)}
    (grid,) = Sheet(replace(given, info=replace(given.info, peers=bound))).grids(["ttft_p50_ms"])
    assert [row[3] for row in grid.rows] == ["-", "+3.0%", "-", "-"], "that a bound is not met is no miss"


def test_a_page_about_predictions_begins_with_their_errors():
    """A row a load, with the worst of all variants; what was measured as 0 is missed by whatever was predicted."""
    variants = {"base": "off", "base predicted": "off, predicted", "new": "on", "new predicted": "on, predicted"}
    given = result(variants=variants, gates=[], repeats=1)
    values = {"base": 100.0, "base predicted": 103.0, "new": 50.0, "new predicted": 40.0}
    rows = [replace(row, value=values[row.variant]) for row in given.rows]
    rows += [
        Row(name, "concurrency=8", 0, "goodput_rps", value, "") for name, value in (("new", 0), ("new predicted", 2))
    ]
    about = [
        Claim("ttft_p50_ms", "base predicted", "concurrency=1", bound, value, "base", "concurrency=1", "reach")
        for bound, value in ((Bound.ratio_at_least, 0.95), (Bound.ratio_at_most, 1.05))
    ]
    given = replace(given, rows=tuple(rows), info=replace(given.info, claims=tuple(about)))
    (grid,) = grids.errors_of_predictions(given)
    assert grid.title == "Errors of the predictions: off / on"
    assert grid.header == ("load", "tokens/s", "median TTFT", "P99 ITL", "goodput", "worst")
    off = "+3.0% / -20.0%"
    assert grid.rows == (
        ("concurrency=1", off, off, off, "- / -", "tokens/s, on: -20.0%"),
        ("concurrency=8", off, off, off, "- / +2 from 0", "goodput, on: +2 from 0"),
    )
    page = pages.report_page([given], [], lambda info: 0)
    assert page.index(grid.title) < page.index("<details>")
    assert sentence(given).startswith(
        "Predictions are off by, in the median: tokens/s 11.5% (worst -20.0%); median TTFT 11.5%"
    )
    cell = pages._cell(given, lambda info: 0)
    assert cell.startswith("[Predictions are off by, in the median: tokens/s 11.5% (worst -20.0%)](")
    (effect,) = effects.of_claims(given)
    assert effect.target is None, "between two bounds neither is to be reached"


def test_a_single_variant_has_one_table_for_all_metrics():
    (grid,) = Sheet(result(variants={"base": "mini-infer"}, baseline=None, gates=[], claims=())).grids(list(METRICS))
    assert grid.header == ("metric", "unit", "point", "median [95 %]", "better")
    assert len(grid.rows) == 2 * len(METRICS)
    assert grid.rows[0][:3] == ("output tokens per second", "tokens/s", "concurrency=1")


def test_the_only_point_stands_in_the_title():
    (grid,) = Sheet(result(sizes=(8,))).grids(["ttft_p50_ms"])
    assert grid.title == "Time to first token, median request, ms (lower is better), at concurrency=8"
    assert grid.header[0] == "variant"


@pytest.mark.parametrize("points", [(1,), (1, 8, 64)])
@pytest.mark.parametrize("number", [1, 2, 3, 6])
def test_tables_fit_a_screen(number, points):
    names = ["transformers.generate, continuous", "static batching, contiguous KV", "all of it, and swap space"]
    variants = {f"v{i}": names[i % 3] + f" {i}" for i in range(number)}
    limits = {"floor_ms": Metric("floor", "ms", Better.lower), "mbu": Metric("MBU", "", Better.higher)}
    given = result(variants=variants, baseline="v0" if number > 1 else None, sizes=points, gates=[], claims=())
    rows = [replace(row, metric=name, unit="") for row in given.rows for name in limits if row.metric == "itl_p99_ms"]
    given = replace(given, rows=(*given.rows, *rows), info=replace(given.info, metrics={**METRICS, **limits}))
    grids = Sheet(given).grids(list(given.info.metrics))
    assert grids
    for grid in grids:
        assert max(map(len, grid.markdown().splitlines())) <= SCREEN
        assert max(map(len, grid.text().splitlines())) <= SCREEN
    assert max(map(len, report.summary(given).splitlines())) <= SCREEN


def test_how_near_the_hardwares_limits_stands_beside_the_speed():
    limits = {"mbu": Metric("memory bandwidth utilization", "", Better.higher)}
    given = result(variants={"base": "off", "new": "on"}, sizes=(8,))
    rows = [replace(row, metric="mbu", value=0.5, unit="") for row in given.rows if row.metric == "itl_p99_ms"]
    given = replace(given, rows=(*given.rows, *rows), info=replace(given.info, metrics={**METRICS, **limits}))
    first, *others = Sheet(given).grids(list(given.info.metrics))
    assert first.header == ("variant", "median [95 %]", "ratio to off", "same tokens", "MBU")
    assert first.rows[0][-1] == "0.500"
    assert len(others) == 2  # it has no table of its own


def test_missing_and_invalid_values_are_told_apart():
    given = without(result(), variant="new", point="concurrency=8", reason="lengths differ")
    given = replace(given, rows=tuple(r for r in given.rows if r.variant == "base" or r.metric != "itl_p99_ms"))
    sheet = Sheet(given)
    assert sheet.value("new", "concurrency=8", "ttft_p50_ms") == "INVALID"
    assert sheet.value("new", "concurrency=1", "itl_p99_ms") == "-"
    assert sheet.ratio("new", "concurrency=8", "ttft_p50_ms") == "-"
    given = replace(given, rows=tuple(r for r in given.rows if r.repeat != 1 or r.point != "concurrency=1"))
    assert Sheet(given).value("base", "concurrency=1", "ttft_p50_ms").endswith("(n=4)")


def test_a_failed_gate_stands_beside_every_speed():
    sheet = Sheet(result(gates=[different("new", "concurrency=8")]))
    assert sheet.same_tokens("new", "concurrency=8") == "FAILED: 33.3 % of 3"
    assert sheet.same_tokens("new", "concurrency=1") == "-"
    assert {grid.header[-1] for grid in sheet.grids(list(METRICS))} == {"same tokens"}
    passed = Sheet(result()).grids(list(METRICS))  # without the column both points fit one table
    assert [grid.header[-1] == "same tokens" for grid in passed] == [True, True, False, False]


def test_a_column_of_gates_says_what_was_compared():
    """A gate of a whole variant and that of a point are one figure; nothing is asked of a peer, or of the A/A arm."""
    variants = {"base": "vLLM", "new": "ours", "base again": "vLLM again"}
    alone = [replace(equal("new", point), against=f"{ALONE} (so)") for point in ("", "concurrency=8")]
    (grid,) = Sheet(result(variants=variants, gates=alone, aa="base again", sizes=(8,))).grids(["ttft_p50_ms"])
    assert grid.header[-1] == "gate: alone"
    assert [row[-1] for row in grid.rows] == ["-", "all 1,800", "-"]
    failed = [alone[0], replace(different("new", "concurrency=8"), against=alone[1].against)]
    assert Sheet(result(gates=failed)).same_tokens("new", "concurrency=8") == "FAILED: 33.3 % of 3"
    others = [replace(gate, against="one engine's") for gate in alone]
    assert Sheet(result(gates=others)).grids(["ttft_p50_ms"])[0].header[-1] == "gate: one engine's"
    # With timed tokens of another variant, `new` alone has been compared with nothing of the baseline's.
    timed = [*alone, replace(alone[0], variant="other"), equal("other", "concurrency=8")]
    (grid,) = Sheet(result(variants={**VARIANTS, "other": "c"}, gates=timed, sizes=(8,))).grids(["ttft_p50_ms"])
    assert grid.header[-1] == "same tokens"
    assert [row[-1] for row in grid.rows] == ["baseline", "as alone", "all 900"]
    elsewhere = Sheet(result(variants={**VARIANTS, "other": "c"}, gates=timed))
    assert elsewhere.same_tokens("base", "concurrency=1") == "-", "nothing was compared with it there"


def test_gates_that_ask_the_same_and_passed_are_one_line():
    variants = {"base": "off", "a": "one", "b": "two", "c": "three"}
    gates = [equal(variant, point) for variant in "ab" for point in ("concurrency=1", "concurrency=8")]
    gates += [equal("c", "concurrency=1"), different("c", "concurrency=8")]
    gates += [replace(equal(variant, ""), against=f"{ALONE} (so)") for variant in "abc"]
    bounds = {"a": 0.02, "b": 0.02, "c": 0.03}
    errors = [ErrorGate(name, None, 0.001 * n, bounds[name], "fp32", n, 9) for n, name in enumerate("abc", 1)]
    lines = wording.verdicts(result(variants=variants, gates=gates, error_gates=errors, claims=()))
    assert [line[:3] for line in lines] == [
        ("one and two: the same greedy tokens as off, at all 2 points", "supported", "3,600 of 3,600 tokens"),
        ("three: the same greedy tokens as off at concurrency=1", "supported", "900 of 900 tokens"),
        ("3 variants, all passed: every request gets the tokens that it gets alone (so)", "supported",
         "2,700 of 2,700 tokens"),
        ("three: the same greedy tokens as off at concurrency=8", "refuted",
         "1 of 3 tokens (first difference: request 0, token 1: 2 became 5)"),
        ("one and two: relative error at most 0.0200 against fp32", "supported",
         "0.00200; 2 of 9 greedy tokens agree"),
        ("three: relative error at most 0.0300 against fp32", "supported", "0.00300; 3 of 9 greedy tokens agree"),
    ]  # fmt: skip
    failed = [different(variant, "concurrency=8") for variant in "ab"]
    lines = wording.verdicts(result(variants=variants, gates=failed, claims=()))
    assert [line.claim[:5] for line in lines] == ["one: ", "two: "]


def test_a_bar_in_a_name_breaks_no_table():
    text = Sheet(result(variants={"base": "a|b", "new": "on"})).grids(["ttft_p50_ms"])[0].markdown()
    rule, first = text.splitlines()[3], text.splitlines()[4]
    assert rule.count("|") == first.replace("\\|", "").count("|")
    assert "a\\|b" in text


# The page


def test_a_report_says_what_was_found(tmp_path):
    text = text_of(
        tmp_path,
        result(
            gates=[equal("new", "concurrency=1"), different("new", "concurrency=8")],
            samples=(Sample(("base", "new"), "def f(", "x):\n    return `x` # ```"),),
            notes=(
                "The cache was warm.",
                "base: a; b; c; d; e: left out, because of this.",
                "a; b: left out, because so.",
            ),
            workload={"kind": "trace", "cut": {"requests": 100}, "file": None},
            ceilings={"read_gb_s": 14.2},
        ),
    )
    assert text.startswith(pages.MARK)
    for part in (
        "# On cpu: A demo: chunks",
        "Does `chunked` prefill help?",
        "**There is no answer: its tokens differ from the baseline's",
        "| 2026-01-01, cpu: A CPU | 1 x 5 | 0 | not measured | none | 2 inconclusive | **1 of 2 FAILED** | no git",
        "> On cpu: **tokens differ from the baseline's**\n",
        "- **Peers**: none ran beside it.\n- **The original project**: +20 %.\n- **To reach**: 1.2x.",
        "<details><summary>Claims and gates</summary>",
        "at concurrency=1 | **supported** | 900 of 900 tokens | the gate |",
        "at concurrency=8 | **refuted** | 1 of 3 tokens (first difference: request 0, token 1: 2 became 5) | the gate",
        "its tokens differ from the baseline's, so its speed does not count",
        "| original: 1.2x |",
        "](figures/demo-cpu-speed.png)",
        "whole prompts and chunked prefill, 512 tokens a step, alike:",
        "````python",  # a fence longer than the one in the sample
        "- The cache was warm.\n- base: a; b and 3 more: left out, because of this.\n- a; b: left out, because so.\n",
        "Workload: kind trace, cut.requests 100.",
        "commit 0123456789ab, clean tree; python 3.11, torch 2.13.",
        "A CPU, 2 cores, 2 torch threads, 24 GiB RAM; 5 repeats.",
        "python run.py experiment=demo",
        "[csv](../results/demo/own.in_process/cpu/default.csv)",
        "[run.py](../run.py)",
        "It is made up.",
    ):
        assert part in text
    assert "Step by step" not in text
    assert "Measured ceilings" not in text, "no floor is shown that they would explain"
    assert (tmp_path / "reports/figures/demo-cpu-speed.png").is_file()


def test_what_another_experiment_has_measured_stands_beside_it():
    wanted = {
        "name": "step_ms",
        "label": "a step",
        "experiment": "speed",
        "metric": "ttft_p50_ms",
        "at": {"workload.concurrency": 8},
        "variants": {"new": "base"},
    }
    of_speed = PlotSpec("speed", "Speed", (PanelSpec("ttft_p50_ms", PanelKind.curve, x="step_ms"),))
    own = result(config={"experiment": {"beside": [wanted]}}, plots=(of_speed,))
    (alone,) = sweeps.with_beside([own])
    assert alone == own
    assert "speed" not in [picture.name for picture in chain(*gallery.of(alone))]
    speed = result("speed", "h200", seed=1)
    found, other = sweeps.with_beside([own, speed])
    assert other is speed
    assert found.info.metrics["step_ms"] == Metric("a step, on h200", "ms", Better.lower)
    first = next(iter(own.info.points))
    expected = speed.table.values("base", "concurrency=8", "ttft_p50_ms")
    assert found.table.values("new", first, "step_ms") == expected
    assert not found.table.values("base", first, "step_ms")
    there = replace(speed.info.provenance, device={**speed.info.provenance.device, "cpu": "Another CPU"})
    elsewhere = replace(speed, info=replace(speed.info, hardware="cpu", provenance=there))
    labels = [sweeps.with_beside([own, r])[0].info.metrics["step_ms"].label for r in (result("speed"), elsewhere)]
    assert labels == ["a step, on cpu", "a step, on cpu: Another CPU"], "where the same key is another processor's"
    unfinished = replace(speed, info=replace(speed.info, status="incomplete: interrupted"))
    assert sweeps.with_beside([own, unfinished])[0] == alone


def test_gates_that_pass_at_all_points_are_one_line(tmp_path):
    text = text_of(tmp_path, result(**PLAIN))
    assert "same greedy tokens as whole prompts, at all 2 points | **supported** | 1,800 of 1,800 tokens |" in text


def test_peers_of_whom_no_claim_tells_are_named(tmp_path):
    given = result(claims=(), **{k: v for k, v in PLAIN.items() if k != "claims"})
    config = {**given.info.config, "experiment": {"variants": {"base": {}, "new": {"kind": "hf"}}}}
    text = text_of(tmp_path, replace(given, info=replace(given.info, config=config)))
    assert f"- **Peers**: {given.info.variants['new']} ran beside it, and the first claim is not about them." in text


def test_invalid_rows_are_listed_by_reason(tmp_path):
    text = text_of(tmp_path, without(result(repeats=2, **PLAIN), variant="new", reason="the client fell behind"))
    assert "<summary>INVALID: 12 values were kept but not counted</summary>" in text
    assert text.count("- the client fell behind:") == 1
    assert "  - chunked prefill, 512 tokens a step concurrency=1, repeats 1, 2: all metrics" in text


def test_a_page_shows_a_complete_run_or_an_incomplete_one_never_both(tmp_path):
    stopped = result(status="incomplete: interrupted", **PLAIN)
    store.write_run(tmp_path / "results", stopped)
    assert "INCOMPLETE" in report.rebuild(tmp_path / "results", tmp_path / "reports")[0].read_text()
    store.write_run(tmp_path / "results", result(**PLAIN))
    assert store.write_run(tmp_path / "results", stopped).name == "default-incomplete.json"
    whole, _ = found = store.read_all(tmp_path / "results")
    assert store.without_beside(found) == [whole]
    page, index = report.rebuild(tmp_path / "results", tmp_path / "reports")
    for text in (page.read_text(), index.read_text()):
        assert "incomplete" not in text.lower()


def test_an_incomplete_run_is_marked_at_the_top(tmp_path):
    status = "incomplete: interrupted in repeat 3 of 5"
    reports = built(tmp_path, result(status=status, **PLAIN))
    text = (reports / "demo.md").read_text()
    assert text.index("> On cpu: **INCOMPLETE** (interrupted in repeat 3 of 5)") < text.index("Does `chunked`")
    assert "**INCOMPLETE**" in (reports / "README.md").read_text()
    assert "INCOMPLETE" in report.summary(result(status=status))


def test_a_run_that_was_stopped_before_its_first_row_has_a_report(tmp_path):
    text = text_of(tmp_path, result(rows=[], gates=[], status="incomplete: interrupted"))
    assert "> On cpu: **INCOMPLETE** (interrupted)\n" in text
    assert "**There is no answer: no valid measurement.**" in text


def test_several_machines_and_runs_stand_in_one_report(tmp_path):
    failed = [different("new", "concurrency=1")]
    runs = [
        result(**PLAIN),
        result(run="workload.count=9", **PLAIN),
        result(hardware="h200", limits=("GPU.",), status="incomplete: interrupted", gates=failed, **PLAIN),
    ]
    text = text_of(tmp_path, *runs)
    flags = "**INCOMPLETE** (interrupted); **tokens differ from the baseline's**"
    assert f"\n> On h200: {flags}\n" in text, "one line a run"
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == ["## cpu", "## cpu, with `workload.count=9`", "## h200"]
    assert text.count("concurrency 8: 1.52x tokens/s") == 3
    assert text.count("<summary>What the numbers do not say</summary>") == 1
    assert "- It is made up.\n- GPU.\n" in text


def test_steps_are_drawn_and_who_was_preempted_is_named(tmp_path):
    steps = engine_steps("base", 400) + engine_steps("new", 20)
    given = result(steps=steps, requests=requests(), plots=(PlotSpec("speed", "Speed", (PanelSpec("ttft_p50_ms"),)),))
    text = text_of(tmp_path, given)
    assert "What each engine variant did in its first repeat" in text
    assert "](figures/demo-cpu-steps-concurrency=8.png)" in text
    assert "- Preempted by whole prompts: base-" in text
    assert "`python run.py trace demo/own.in_process/cpu`" in text
    assert "[steps](../results/demo/own.in_process/cpu/default.steps.csv)" in text
    paths = report.figure_paths(tmp_path / "reports", given)
    assert [path.name for path in paths] == [
        f"demo-cpu-{name}.png" for name in ("effects", "steps-concurrency=8", "speed", "waits")
    ]


# The index


def test_the_index_is_a_matrix_of_mechanisms_and_settings(tmp_path):
    refuted = Claim("ttft_p50_ms", "new", "concurrency=8", Bound.at_most, 1.0, source="needed")
    given = result(**PLAIN)
    large = {"scale": "7b", "default_scale": "7b"}
    mixed = result(hardware="h200", claims=(given.info.claims[0], refuted), **large, **PLAIN)
    several = [result(hardware="h200x2", **PLAIN), result(hardware="h200", scale="small", via="http", **PLAIN)]
    named = [result(run="a=1", hardware=where, **PLAIN) for where in ("cpu", "simulated-h200")]
    alone = [result("sole", hardware="h200x2", run=run, **PLAIN) for run in ("long", "short")]  # no default run beside
    for each in (given, mixed, *several, *named, *alone, result("other", claims=(), **PLAIN)):
        store.write(tmp_path / "results", each)
    report.rebuild(tmp_path / "results", tmp_path / "reports", since=lambda info: 3 if info.hardware == "h200" else 0)
    lines = (tmp_path / "reports/README.md").read_text().splitlines()
    header = next(index for index, line in enumerate(lines) if line.startswith("| mechanism"))
    assert lines[header] == "| mechanism | CPU | kernels | small | 7B | served | GPUs |"
    cells = [cell.strip() for cell in lines[header + 2].split("|")[1:-1]]
    against = "chunked prefill, 512 tokens a step against whole prompts: concurrency 8"
    one = f"[{against}: 1.52x tokens/s (6,500 against 4,291)](demo.md)<br>claims: 2 supported"
    refuting = one.replace("2 supported", "1 supported, **1 refuted**, 3 commits since")
    served = one.replace("demo.md", "demo.small.http.md") + ", 3 commits since"
    assert cells == ["demo", one, "", "", refuting, served, one]
    assert lines[header + 3].startswith(
        "| other | [Best in tokens/s, concurrency 8: chunked prefill, 512 tokens a step, 1.52x ["
    )
    sole = one.replace("demo", "sole")
    assert lines[header + 4] == f"| sole |  |  |  |  |  | With `long`: {sole}<br><br>With `short`: {sole} |"
    assert pages.column(replace(mixed.info, scale="none")) == "kernels", "of no model"
    simulated = one.replace("1.52x", "1.51x")  # of repeats that are alike: the ratio of their medians
    assert lines[-2:] == [f"| demo | cpu | `a=1` | {one} |", f"| demo | simulated-h200 | `a=1` | {simulated} |"]


def test_the_index_says_where_one_key_is_several_processors():
    ours, others = result(**PLAIN), result("other", **PLAIN)
    there = replace(others.info.provenance, device={**others.info.provenance.device, "cpu": "Another CPU"})
    others = replace(others, info=replace(others.info, provenance=there))
    told = "CPUs are A CPU and Another CPU: each page says which one it is about"
    assert told in pages.index_page([ours, others], [], lambda info: 0)
    assert "CPUs are" not in pages.index_page([ours], [], lambda info: 0)


def test_the_index_warns_of_failed_gates(tmp_path):
    gates = [different("new", "concurrency=8")]
    index = (built(tmp_path, result(gates=gates, **PLAIN)) / "README.md").read_text()
    assert "concurrency 8: no figure of tokens/s that counts (its tokens differ from the baseline's" in index
    assert "**tokens differ from the baseline's**" in index


# Rebuilding


def test_the_index_says_what_came_of_the_gpu_tests_and_leads_there(tmp_path):
    reports = built(tmp_path, result(**PLAIN))
    assert "gpu_tests" not in (reports / "README.md").read_text()
    (reports / "gpu_tests.md").write_text("# Tests on the GPU\n\n8 passed, **1 failed**; 2026-11-29.\n\nA GPU.\n")
    report.rebuild(tmp_path / "results", reports)
    said = "[Tests on GPUs](gpu_tests.md): 8 passed, **1 failed**; 2026-11-29."
    assert said in (reports / "README.md").read_text().splitlines()
    html = (reports / "index.html").read_text()
    assert '<a href="#gpu_tests">Tests on GPUs</a>: 8 passed, <strong>1 failed</strong>' in html
    assert '<section id="gpu_tests">' in html
    assert (reports / "gpu_tests.md").exists()


def test_rebuilding_changes_no_byte_nor_does_another_process(tmp_path, monkeypatch):
    monkeypatch.setattr(frame, "new", NEW)
    steps = engine_steps("base", 30) + engine_steps("new", 600)
    given = [result(steps=steps, requests=requests()), result(run="size=3", **PLAIN), result("other", **PLAIN)]
    reports = built(tmp_path, *given)
    first = contents(reports)
    assert set(first) == {
        "README.md",
        "index.html",
        "demo.md",
        "other.md",
        *(f"figures/demo-cpu-{name}.png" for name in ("effects", "speed", "steps-concurrency=8", "waits")),
        "figures/demo-cpu-size=3-effects.png",
        "figures/other-cpu-effects.png",
    }
    assert len(first["figures/demo-cpu-speed.png"]) > 10_000
    written = report.rebuild(tmp_path / "results", reports)
    assert [path.name for path in written] == ["demo.md", "other.md", "README.md"]
    assert contents(reports) == first
    without_torch = "sys.modules['torch'] = None; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", f"import runpy, sys; {without_torch}", str(ROOT / "run.py"), "report"]
    command += ["--results", str(tmp_path / "results"), "--reports", str(tmp_path / "again")]
    environment = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, timeout=120, check=True)
    assert contents(tmp_path / "again") == first


def test_reports_whose_results_are_gone_go_too_and_nothing_else_does(tmp_path):
    reports = built(tmp_path, result(), result("gone"), result("gone", steps=engine_steps("base", 20)))
    (reports / "notes.md").write_text("by hand")
    (reports / "figures/no-picture.png").write_text("by hand")
    (reports / "figures/photo.png").write_bytes((reports / "figures/demo-cpu-speed.png").read_bytes())
    foreign = reports / "figures/gone-by-hand.png"
    frame.Image.new("RGB", (2, 2)).save(foreign)
    stored = tmp_path / "results/gone/own.in_process/cpu"
    for path in stored.iterdir():
        path.unlink()
    stored.rmdir()
    report.rebuild(tmp_path / "results", reports)
    left = set(contents(reports))
    assert {"notes.md", "demo.md", "README.md", "figures/gone-by-hand.png", "figures/no-picture.png"} <= left
    assert not {"gone.md", "figures/gone-cpu-speed.png", "figures/gone-cpu-steps-concurrency=8.png"} & left
    assert "figures/photo.png" not in left  # a copy of a figure of demo's that its report does not show


def test_a_figure_that_its_report_no_longer_shows_goes(tmp_path):
    reports = built(tmp_path, result())
    built(tmp_path, result(**PLAIN))
    assert set(contents(reports)) == {"README.md", "index.html", "demo.md", "figures/demo-cpu-effects.png"}


def test_making_one_report_leaves_the_others_alone(tmp_path):
    reports = built(tmp_path, result(**PLAIN), result("other", **PLAIN))
    before = (reports / "other.md").read_bytes()
    store.write(tmp_path / "results", result("other", title="Changed", **PLAIN))
    written = report.rebuild(tmp_path / "results", reports, only="demo")
    assert [path.name for path in written] == ["demo.md", "README.md"]
    assert (reports / "other.md").read_bytes() == before


def test_a_damaged_result_is_named_and_costs_no_other_report(tmp_path):
    reports = built(tmp_path, result(**PLAIN), result("other", **PLAIN), result("other", hardware="h200", **PLAIN))
    before = (reports / "demo.md").read_bytes()
    for name in ("demo/own.in_process/cpu", "other/own.in_process/h200"):
        (tmp_path / f"results/{name}/default.csv").write_text("cut")
    both = r"(?s)without these results:.*demo/own\.in_process/cpu/default\.csv.*other/own\.in_process/h200/default\.csv"
    with pytest.raises(StoreError, match=both):
        report.rebuild(tmp_path / "results", reports)
    assert (reports / "demo.md").read_bytes() == before  # what it said is all that is left of it
    assert (
        "> **NOT IN THIS REPORT**: `results/other/own.in_process/h200/default.json`"
        in (reports / "other.md").read_text()
    )
    assert "> **CANNOT BE READ**: `results/demo/own.in_process/cpu/default.json`" in (reports / "README.md").read_text()


def test_a_damaged_result_of_another_experiment_stops_no_run(tmp_path):
    reports = built(tmp_path, result(**PLAIN), result("other", **PLAIN))
    (tmp_path / "results/other/own.in_process/cpu/default.csv").write_text("cut")
    assert report.rebuild(tmp_path / "results", reports, only="demo")[0].name == "demo.md"


def test_a_report_without_results_says_what_to_do(tmp_path):
    with pytest.raises(StoreError, match="run an experiment first"):
        report.rebuild(tmp_path / "nothing", tmp_path)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mix=long prompts rate_per_s=6.0", "long prompts, 6 requests/s"),
        ("heads=28/4 batch=1 length=512", "heads 28/4, batch 1, length 512"),
        ("routing=uniform tokens=1", "uniform routing, 1 token"),
        ("prefix_tokens=4096 suffix_tokens=32", "4096 prefix tokens, 32 suffix tokens"),
        ("layers=all count=64", "all layers, 64 requests"),
        ("tokens=1,024 heads=16 64 x 4096", "1,024 tokens, heads 16, 64 x 4096 tokens"),
        ("8 clients", "8 clients"),
    ],
)
def test_a_point_is_told_in_words(name, told):
    assert wording.point(name) == told


def test_an_old_result_is_told_in_todays_words():
    notes = (
        "Process 1: swap at count=2, repeat 1: 1 of 200 steps look too short, since an end before them was read late.",
        "Up to 1 other GPUs of this machine computed for somebody else meanwhile.",
        "Process 2, 3: swap, repeat 2: 4 of 100 steps look too short, since an end before them was read late.",
    )
    assert in_todays_words(result(notes=notes)).info.notes == (
        "Other GPUs of this machine, 1 at most, computed for somebody else when passes ended.",
        "In 2 passes the host read the end of some steps late, so that the steps after them look shorter than they "
        "were: up to 4 % of a pass's steps.",
    )
    old = {"mbu": Metric("memory bandwidth utilization", "", Better.higher)}
    notes = (
        "vLLM: memory bandwidth utilization; engine steps: left out, because so.",
        "A: memory bandwidth utilization.",
    )
    limits = ("A small model: short steps; at 7B the same gap is a tenth of that share.",)
    target = "GPU idle between decode steps at most 3 %"
    told = in_todays_words(result(metrics=old, rows=[], claims=(), notes=notes, limits=limits, target=target)).info
    assert told.metrics["mbu"].label == formulas.describe("mbu").label != old["mbu"].label
    assert told.notes == ("vLLM: useful share of the memory bandwidth; engine steps: left out, because so.", notes[1])
    assert told.limits == ("A small model: short steps.",)
    assert told.target == "GPU idle between decode steps, under the profiler, at most 3 %"
    today = [*OF_QUANTIZATION.values(), *OF_KERNELS.values(), *map(formulas.describe, formulas.SERVING)]
    assert set(LABELS.values()) <= {metric.label for metric in today}
    assert not set(LABELS) & {metric.label for metric in today}, "an older label that is written today"


def test_what_processes_rank_is_one_line():
    """By the sum of places, where the first process names another one first: b has 1, a 5 and c 6."""
    head = "int4, groups: layers that gain most by staying in bf16, best first"
    ranked = (("c", "b"), ("b", "a"), ("b", "a"), ("b", "a"))
    notes = ["First.", *(f"Process {n}: {head}: {', '.join(own)}." for n, own in enumerate(ranked)), "Last."]
    assert list(details._notes(notes)) == ["First.", f"{head}: b, a (by mean place in 4 processes).", "Last."]
    assert list(details._notes(notes[2:3])) == [f"{head}: b, a."]


def test_settings_that_a_page_tells_elsewhere_are_not_its_name():
    given = result(hardware="h200x2", run="device=cuda,processes=1,repeats=2,size=4", **PLAIN)
    assert pages.heading(given.info) == "h200x2, with `size=4`"
    assert pages.heading(replace(given.info, run="device=cuda,processes=1")) == "h200x2"
