"""The demonstration on a terminal: two lanes side by side, or one above the other where that is too narrow."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mini_infer.cli.demo_lane import Lane
from mini_infer.cli.demo_scenes import Scene

SIDE_BY_SIDE = 72  # columns that two lanes need
LABEL = 9  # columns of a row's name
NUMBER = 5
FRAME = 4  # columns of a panel's border and padding
AROUND = 4  # lines beside the lanes: the question and the legend
FULL_ROWS = 8
USED, CACHED, FREE = "red", "yellow", "bright_black"
BLOCK, SHADE, DOT = "█▒·"
ASCII_BLOCK, ASCII_SHADE, ASCII_DOT = "#=."


def view(scene: Scene, lanes: Sequence[Lane], console: Console) -> RenderableType:
    """The state of both lanes, in the width and height that there are."""
    marks = _marks(console)
    width, height = console.size
    if width >= SIDE_BY_SIDE:
        lane_width = width // 2
        table = Table.grid(expand=True)
        table.add_column(ratio=1)
        table.add_column(ratio=1)
        table.add_row(*(_panel(lane, lane_width, FULL_ROWS, marks) for lane in lanes))
        shown: list[RenderableType] = [table]
    else:
        rows = max(3, min(FULL_ROWS, (height - AROUND) // 2 - 2))
        shown = [_panel(lane, width, rows, marks) for lane in lanes]
    return Group(Text(scene.question, style="bold"), *shown, _legend(marks))


def _marks(console: Console) -> str:
    ascii_only = not console.encoding.lower().startswith("utf")
    return ASCII_BLOCK + ASCII_SHADE + ASCII_DOT if ascii_only else BLOCK + SHADE + DOT


def _panel(lane: Lane, width: int, num_rows: int, marks: str) -> Panel:
    room = max(width - FRAME - LABEL, 8)
    table = Table.grid(padding=0)
    table.add_column(width=LABEL, no_wrap=True)
    table.add_column(no_wrap=True, overflow="crop")
    for label, content in _rows(lane, room, marks)[:num_rows]:
        table.add_row(label, content)
    style = "green" if lane.done else "blue"
    return Panel(table, title=lane.name, border_style=style, subtitle="done" if lane.done else None)


def _rows(lane: Lane, room: int, marks: str) -> list[tuple[str, Text]]:
    """The most telling first: a low terminal shows only these."""
    kv = lane.kv
    return [
        ("time", Text(f"{lane.seconds:5.2f} s   {lane.num_finished} of {lane.num_requests} done")),
        ("KV", _kv_bar(kv.used_blocks, kv.cached_blocks, kv.total_blocks, room, marks)),
        ("running", _queue(lane.num_running, lane.num_requests, room, marks[0], "green")),
        ("waiting", _queue(lane.num_waiting, lane.num_requests, room, marks[0], "magenta")),
        ("tokens/s", Text(f"{lane.tokens_per_s:5.0f}")),
        ("TTFT", Text(f"{lane.ttft_s * 1e3:5.0f} ms (median)")),
        ("pause", Text(f"{lane.longest_gap_s * 1e3:5.0f} ms (longest)")),
        ("cache", Text(f"{lane.hit_share:5.0%} hits, {lane.preemptions} preempted")),
    ]


def _kv_bar(used: int, cached: int, total: int, room: int, marks: str) -> Text:
    """Blocks in use, free ones that still hold a prefix, and blank ones."""
    used_width = min(-(-used * room // total), room)
    cached_width = min(-(-cached * room // total), room - used_width)
    bar = Text(marks[0] * used_width, style=USED)
    bar.append(marks[1] * cached_width, style=CACHED)
    bar.append(marks[2] * (room - used_width - cached_width), style=FREE)
    return bar


def _queue(count: int, most: int, room: int, mark: str, style: str) -> Text:
    text = Text(f"{count:{NUMBER}} ")
    return text.append(mark * min(-(-count * (room - NUMBER - 1) // most), room), style=style)


def _legend(marks: str) -> Text:
    legend = Text("KV blocks: ")
    for mark, style, name in zip(marks, (USED, CACHED, FREE), ("used  ", "cached  ", "free"), strict=True):
        legend.append(mark, style=style).append(f" {name}")
    return legend
