"""mini-infer-demo: what it claims is so, at any size of terminal and without one."""

from __future__ import annotations

import io
import re
import signal
from pathlib import Path

import pytest
from rich.console import Console

from mini_infer.cli import demo
from mini_infer.cli.demo import main, play
from mini_infer.cli.demo_lane import Arrival, Lane, LaneClock
from mini_infer.cli.demo_scenes import DRY, SCENES
from mini_infer.cli.demo_view import view
from mini_infer.core.config import DryConfig, EngineConfig, ModelConfig

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE = DryConfig(max_model_len=2048)  # no time model: nothing sleeps
QUICK = DryConfig(max_model_len=2048, step_ms=0.4, prefill_token_us=6.0, decode_token_us=10.0)


def terminal(width: int, height: int, encoding: str = "utf-8") -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(file=file, width=width, height=height, force_terminal=True, color_system=None, legacy_windows=False)


def plain() -> Console:
    return Console(file=io.StringIO(), width=80)


@pytest.mark.parametrize("name", SCENES)
def test_a_scene_ends_with_the_same_answers_and_shows_what_is_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes: list[Lane] = []
    monkeypatch.setattr(demo, "Lane", lambda *given: lanes.append(Lane(*given)) or lanes[-1])
    console, scene = plain(), SCENES[name]
    first, second = play(scene, DRY, console, plain=True, dry=QUICK)
    assert first.startswith(f"{name}: ")
    assert second.endswith("the answers are the same.")
    assert scene.question in console.file.getvalue()  # type: ignore[attr-defined]
    off, on = lanes
    if name == "prefix_cache":
        assert off.hit_share == 0
        assert on.hit_share > 0.8
        assert on.ttft_s < off.ttft_s
    elif name == "continuous_batching":
        assert on.mean_running > 1.5 * off.mean_running
    elif name == "preemption":
        assert (off.preemptions, on.preemptions > 0) == (0, True)
        assert on.mean_running > off.mean_running
    else:
        (_, whole), (_, chunked) = scene.configs(DRY)
        assert (whole.scheduler.chunked_prefill, chunked.scheduler.chunked_prefill) == (False, True)
        assert chunked.scheduler.max_num_batched_tokens < max(len(a.prompt) for a in scene.arrivals(DRY))


def test_it_fits_into_any_terminal() -> None:
    scene = SCENES["prefix_cache"]
    lanes = [Lane(name, config, scene.arrivals(DRY)) for name, config in scene.configs(DRY, AT_ONCE)]
    for steps in (0, 20, 1000):
        for lane in lanes:
            while steps and not lane.done:
                lane.advance()
                steps -= 1
        for width, height in ((80, 24), (120, 40), (72, 24), (71, 24), (40, 16), (24, 10), (5, 3)):
            console = terminal(width, height)
            lines = console.render_lines(view(scene, lanes, console), pad=False)
            assert all(sum(segment.cell_length for segment in line) <= width for line in lines)
            assert len(lines) <= height or width < 40
            text = "\n".join("".join(segment.text for segment in line) for line in lines)
            assert width < 40 or all(lane.name in text for lane in lanes)
            assert ("│" * 2 in text) == (width >= 72), "side by side where there is room"


def test_a_terminal_that_knows_only_ascii() -> None:
    console = terminal(80, 24, "ascii")
    play(SCENES["preemption"], DRY, console, plain=False, dry=AT_ONCE)
    console.file.flush()
    assert b"#" in console.file.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_lanes_clock_stands_still_while_others_work() -> None:
    clock = LaneClock()
    with clock.running():
        inside = clock()
    assert clock() == clock() >= inside
    clock.set(5.0)
    with clock.running():
        assert clock() >= 5.0


def test_a_lane_without_work_goes_on_to_the_next_arrival() -> None:
    config = EngineConfig(model=ModelConfig(DRY, "dry", dry=AT_ONCE))  # type: ignore[arg-type]
    lane = Lane("lane", config, [Arrival(3.0, [50] * 8, 2), Arrival(1.0, [60] * 8, 2)])
    lane.advance()
    assert 1.0 <= lane.seconds < 3.0
    while not lane.done:
        lane.advance()
    assert 3.0 <= lane.seconds < 4.0
    assert lane.num_finished == 2
    assert lane.ttft_s < 1.0


def test_the_readme_names_the_scenes() -> None:
    text = (ROOT / "README.md").read_text()
    (named,) = re.findall(r"\(`--show (.+?)\)", text, re.DOTALL)
    assert set(re.findall(r"\w+", named)) == set(SCENES)
    assert all((ROOT / "conf" / "experiment" / f"{name}.yaml").exists() for name in SCENES)


def test_mistakes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--show", "everything"])
    assert "prefix_cache" in capsys.readouterr().err
    assert main(["--show", "preemption", "--model", "/nowhere"]) == 2
    assert "/nowhere" in capsys.readouterr().err


@pytest.mark.slow
def test_the_shipped_model() -> None:
    scene = SCENES["prefix_cache"]
    arrivals = scene.arrivals("tiny-target")[:3]
    lanes = [Lane(name, config, arrivals) for name, config in scene.configs("tiny-target")]
    for lane in lanes:
        while not lane.done:
            lane.advance()
    off, on = lanes
    assert off.answers == on.answers
    assert on.hit_share > 0.5 > off.hit_share


def test_ctrl_c_ends_it_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def line(lane: Lane) -> str:
        if lane.num_finished:
            signal.raise_signal(signal.SIGINT)
        return lane.name

    monkeypatch.setattr(demo, "_line", line)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores Ctrl-C
    try:
        assert main(["--show", "continuous_batching"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    said = capsys.readouterr()
    assert said.out.endswith("stopped\n")
    assert said.err == ""
