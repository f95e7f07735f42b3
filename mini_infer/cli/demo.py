"""mini-infer-demo: the engine's mechanisms at work, each off and on side by side."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live

from mini_infer.cli.arguments import command_parser, refuse
from mini_infer.cli.demo_lane import Lane
from mini_infer.cli.demo_scenes import DRY, SCENES, TIME_MODEL, Scene
from mini_infer.cli.demo_view import view
from mini_infer.core.config import DryConfig
from mini_infer.core.errors import MiniInferError
from mini_infer.core.model_config import ModelConfig
from mini_infer.runtime import preflight

NAME = "mini-infer-demo"
ALL = "all"
STOPPED = 130  # as shells report a program that Ctrl-C has ended
DRAWN_EVERY_S = 1 / 15
PRINTED_EVERY_S = 0.5  # on a lane's clock
DESCRIPTION = """\
Shows what a mechanism of the engine does, live: the same requests go to two engines that differ in it alone.

  mini-infer-demo                             all of them, on the dry model: no weights, a time model; a minute
  mini-infer-demo --show prefix_cache         one of them
  mini-infer-demo --model tiny-target         on the small model that ships with the package
  mini-infer-demo --plain                     lines of text, as also where the output is no terminal

Both engines work in turns in one thread, each with a clock of its own, so that neither disturbs the other's figures.
The experiments measure the same with repeats and intervals: python run.py experiment=prefix_cache
"""

Show = Callable[[Sequence[Lane]], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    args = _parser().parse_args(argv)
    scenes = list(SCENES.values()) if args.show == ALL else [SCENES[args.show]]
    console = Console(highlight=False)
    plain = args.plain or not sys.stdout.isatty()
    try:
        if args.model != DRY:
            preflight.check_model(ModelConfig(path=args.model))
        for scene in scenes:
            for line in play(scene, args.model, console, plain):
                _say(console, line)
    except KeyboardInterrupt:
        _say(console, "stopped")
        return STOPPED
    except MiniInferError as error:
        return refuse(NAME, error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(NAME, DESCRIPTION)
    parser.add_argument("--show", choices=[*SCENES, ALL], default=ALL, help="the mechanism. Default: all of them")
    parser.add_argument(
        "--model", default=DRY, metavar="NAME", help="a shipped model, a folder or a hub name. Default: dry"
    )
    parser.add_argument("--plain", action="store_true", help="lines of text, and no drawing")
    return parser


def play(scene: Scene, model: str, console: Console, plain: bool, dry: DryConfig = TIME_MODEL) -> tuple[str, str]:
    """Runs a scene to its end and shows it meanwhile. Returns the two lines of its summary.

    Raises:
        ConfigError, ModelError: the model cannot be loaded.
        KeyboardInterrupt: Ctrl-C; both engines are closed.
    """
    lanes: list[Lane] = []
    try:
        lanes += [Lane(name, config, scene.arrivals(model)) for name, config in scene.configs(model, dry)]
        with _printing(scene, console) if plain else _drawing(scene, console) as show:
            show(lanes)
            while left := [lane for lane in lanes if not lane.done]:
                min(left, key=lambda lane: lane.seconds).advance()
                show(lanes)
    finally:
        for lane in lanes:
            lane.close()
    return summary(scene, *lanes)


@contextmanager
def _drawing(scene: Scene, console: Console) -> Any:
    drawn_at = 0.0
    with Live(console=console, auto_refresh=False) as live:

        def draw(lanes: Sequence[Lane]) -> None:
            nonlocal drawn_at
            now = time.monotonic()
            if now - drawn_at >= DRAWN_EVERY_S or all(lane.done for lane in lanes):
                drawn_at = now
                live.update(view(scene, lanes, console), refresh=True)

        yield draw


@contextmanager
def _printing(scene: Scene, console: Console) -> Any:
    next_at: dict[str, float] = {}
    _say(console, f"\n{scene.name}: {scene.question}")

    def print_lines(lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            at = next_at.setdefault(lane.name, 0.0)
            if lane.seconds >= at or (lane.done and at < float("inf")):
                next_at[lane.name] = float("inf") if lane.done else lane.seconds + PRINTED_EVERY_S
                _say(console, _line(lane))

    yield print_lines


def _line(lane: Lane) -> str:
    kv = lane.kv
    free = kv.total_blocks - kv.used_blocks - kv.cached_blocks
    return (
        f"{lane.seconds:6.2f} s  {lane.name:<18}  done {lane.num_finished:2}  running {lane.num_running:2}  "
        f"waiting {lane.num_waiting:2}  KV {kv.used_blocks} used {kv.cached_blocks} cached {free} free  "
        f"{lane.tokens_per_s:5.0f} tokens/s  TTFT {lane.ttft_s * 1e3:.0f} ms"
    )


def _say(console: Console, text: str) -> None:
    """As it is, at whatever width: a line that is cut in two is of no use to a program."""
    console.print(text, markup=False, soft_wrap=True)


def summary(scene: Scene, off: Lane, on: Lane) -> tuple[str, str]:
    """What the mechanism was worth, in two lines."""
    speed = (
        f"{scene.name}: {on.num_requests} requests in {on.seconds:.2f} s instead of {off.seconds:.2f} s "
        f"({off.seconds / on.seconds:.2f} times as fast), {on.tokens_per_s:.0f} tokens/s instead of "
        f"{off.tokens_per_s:.0f}"
    )
    differ = sum(on.answers[request] != answer for request, answer in off.answers.items())
    same = "the answers are the same" if not differ else f"{differ} answers differ by rounding"
    found = scene.found(off, on)
    return speed, f"{found[0].upper()}{found[1:]}; {same}."


if __name__ == "__main__":
    sys.exit(main())
