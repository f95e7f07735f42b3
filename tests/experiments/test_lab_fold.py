"""One screen answers: no picture above the fold is taller than it."""

from dataclasses import replace
from itertools import product

import pytest
from made_up import METRICS, result
from test_lab_configs import EVERY, build

from experiments.lab.config import typed
from experiments.lab.config.spec import PanelKind, PanelSpec, PlotSpec
from experiments.lab.measure.profile import StepProfile
from experiments.lab.show.figures import frame, gallery, stacks
from experiments.lab.store.rows import Row

pytestmark = pytest.mark.slow  # figures of all experiments


def height(given):
    """Inches of the picture below the forest of at most five rows; 0 without one."""
    return max((picture.draw().get_figheight() for picture in gallery.of(given).first[-1:]), default=0)


def measured(experiment):
    """A result of an experiment in which everything that its first figure is about was measured."""
    points = {point.name: dict(point.values) for point in experiment.points}
    panels = experiment.spec.plots[0].panels
    names = {name for panel in panels for name in (panel.metric, str(panel.x), *panel.parts)} & {*experiment.metrics}
    rows = [
        Row(variant, point, 0, name, 1.0 + (len(variant) + index) % 7, "")
        for variant, (index, point), name in product(experiment.variants, enumerate(points), sorted(names))
    ]
    whole = {"variants": dict(experiment.variants), "baseline": experiment.baseline, "aa": experiment.aa}
    whole |= {"metrics": dict(experiment.metrics), "points": points, "plots": experiment.spec.plots}
    return result(rows=rows, claims=(), gates=(), **whole)


@pytest.mark.parametrize(("name", "scale", "via"), [each for each in EVERY if each[-1] != "url"])
def test_the_first_figure_of_every_experiment_is_no_taller_than_a_screen(compose_config, name, scale, via):
    overrides = [f"experiment={name}", f"scale={scale}", f"via={via}"]
    experiment = build(typed.settle(compose_config(*overrides), name, overrides).config)
    spec = experiment.spec
    if not spec.plots or getattr(spec, "timeline", None) is not None:
        pytest.skip("steps come first, or nothing")
    if spec.plots[0].panels[0].kind is PanelKind.stack:
        pytest.skip("only some points have all parts of a stack")
    assert height(measured(experiment)) <= frame.FOLD


def test_what_has_no_room_above_the_fold_stands_below_it():
    """One row does, of panels with the same groups, which are named once."""
    sizes = tuple(2**n for n in range(12))
    few = PanelSpec("ttft_p50_ms", where={"workload.concurrency": 8})
    panels = (PanelSpec("output_tokens_per_s"), few, PanelSpec("ttft_p50_ms"), PanelSpec("itl_p99_ms"))
    given = result(
        sizes=sizes, variants={"base": "one"}, claims=(), plots=(PlotSpec("load", "Load", panels),), gates=()
    )
    ((first,), (other, *_)) = gallery.of(given)
    assert (first.name, other.name, other.title) == ("load", "load-more", "Load (more)")
    figure = first.draw()
    assert figure.get_figheight() <= frame.FOLD < gallery.panels(given.info.plots[0], given).get_figheight()
    assert [bool(ax.get_yticklabels()) for ax in figure.axes] == [True, False, False]
    assert [ax.get_title() for ax in other.draw().axes] == ["concurrency 8, lower is better"]
    fits = replace(given.info.plots[0], panels=panels[:2])
    assert gallery.above_the_fold(fits, given) == [fits]


def test_a_long_legend_makes_no_figure_taller_than_a_screen():
    variants = {
        f"v{n}": f"a long name of a variant that takes a row of the legend for itself, number {n}" for n in range(30)
    }
    panels = (PanelSpec("ttft_p50_ms", x="workload.concurrency", kind=PanelKind.lines),) * 2
    given = result(variants=variants, baseline="v0", claims=(), plots=(PlotSpec("load", "Load", panels),), repeats=2)
    assert height(given) == frame.FOLD


def test_profiles_of_more_steps_than_fit_stand_below():
    def first(many):
        variants = {f"v{n}": f"variant {n}" for n in range(many)}
        profiles = tuple(StepProfile(v, "concurrency=8", 4, 8, 900.0, 1000.0, 900.0, 50.0) for v in variants)
        given = result(variants=variants, baseline="v0", profiles=profiles, metrics=METRICS, claims=(), plots=())
        assert height(given) <= frame.FOLD
        return [picture.name for picture in gallery.of(given).first]

    assert first(stacks.FIT)[-1] == "profile"
    assert "profile" not in first(stacks.FIT + 1)
