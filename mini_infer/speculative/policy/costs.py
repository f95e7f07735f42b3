"""What a step costs by rows and tokens a row."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import numpy as np

from mini_infer.core.uniforms import Array


class StepCosts:
    """Seconds of a step, from a table measured at start-up.

    Between the measured numbers of rows and of tokens a row it is bilinear, beyond the largest the last piece goes on,
    and below the fewest rows it is their cost. Where more work was measured to take less time, it is levelled.

    A step with drafts costs what the smallest captured CUDA graph costs that takes it, padding included.

    Args:
        target: (rows, tokens a row) -> seconds of a decode step of the target: a full grid, with 1 token a row and at
            least one larger number.
        draft: rows -> seconds of one draft token for each of them. None: proposing costs nothing that counts.
        captured: (rows, tokens a row) of graphs for steps with drafts.
        padded: what no graph takes costs as many tokens for every row as for the longest; else what is in it.
        waiting: what it costs a step to wait for the one before it, as a share of a step without drafts.
    """

    def __init__(
        self,
        target: Mapping[tuple[int, int], float],
        draft: Mapping[int, float] | None = None,
        captured: Iterable[tuple[int, int]] = (),
        padded: bool = False,
        waiting: float = 0.0,
    ) -> None:
        rows, widths = sorted({r for r, _ in target}), sorted({w for _, w in target})
        grid = np.array([[target[r, w] for r in rows] for w in widths])
        self.rows, self.tokens_per_row = rows, widths
        self.target_s = np.maximum.accumulate(np.maximum.accumulate(grid, axis=0), axis=1).tolist()  # [widths][rows]
        by_rows = sorted((draft or {}).items())
        self.draft_rows, self.draft_s = [r for r, _ in by_rows], list(accumulate((s for _, s in by_rows), max))
        self.captured = sorted(set(captured), key=lambda graph: (graph[0] * graph[1], graph))
        self.padded, self.waiting = padded, waiting
        self._shapes: dict[tuple[int, int], tuple[int, int] | None] = {}

    def shape(self, rows: int, tokens_per_row: int) -> tuple[int, int] | None:
        """(rows, tokens a row) that a step with so many for its longest row is padded to; None where it is not."""
        step = rows, tokens_per_row
        if step not in self._shapes:
            eager = step if self.padded else None
            fitting = ((r, w) for r, w in self.captured if r >= rows and w >= tokens_per_row)
            self._shapes[step] = next(fitting, eager) if tokens_per_row > 1 else None
        return self._shapes[step]

    def verify_seconds(self, rows: int, tokens_per_row: float = 1) -> float:
        """A step of the target. `tokens_per_row` may be an average where steps are not padded."""
        padded_rows, width = self.shape(rows, math.ceil(tokens_per_row)) or (rows, tokens_per_row)
        if width == 1:
            return interpolate(self.rows, self.target_s[0], padded_rows)
        over_widths = [interpolate(self.rows, curve, padded_rows) for curve in self.target_s]
        return interpolate(self.tokens_per_row, over_widths, width)

    def draft_seconds(self, rows: int) -> float:
        """One draft token for each row."""
        padded_rows, _ = self.shape(rows, 2) or (rows, 2)
        return interpolate(self.draft_rows, self.draft_s, padded_rows) if self.draft_s else 0.0

    def proposing_seconds(self, lengths: Array) -> float:
        """So many drafts for each row, [R] int: a round of drafting for each place, for all rows that have any."""
        return self._proposing_seconds(len(lengths), int(lengths.max(initial=0)), int(np.count_nonzero(lengths)))

    def _proposing_seconds(self, rows: int, longest: int, drafting: int) -> float:
        if not self.draft_s:
            return 0.0
        shape = self.shape(rows, 1 + longest)
        if shape is not None:
            return (shape[1] - 1) * self.draft_seconds(shape[0])
        return longest * self.draft_seconds(drafting)

    def step_seconds(self, lengths: Array) -> float:
        """A step whose R rows (not 0) have so many drafts, [R] int; proposing included."""
        return self.steps_seconds(lengths[None])[0]

    def steps_seconds(self, lengths: Array) -> list[float]:
        """The same of several steps, [S, R] int."""
        rows = lengths.shape[1]
        of_steps = (lengths.max(axis=1), lengths.sum(axis=1), np.count_nonzero(lengths, axis=1))
        found = []
        for longest, drafts, drafting in zip(*(numbers.tolist() for numbers in of_steps), strict=True):
            padded = self.shape(rows, 1 + longest) is not None
            width = 1 + (longest if padded else drafts / rows)
            found.append(self.verify_seconds(rows, width) + self._proposing_seconds(rows, longest, drafting))
        return found

    def __str__(self) -> str:
        widths = "/".join(map(str, self.tokens_per_row))
        curves = zip(self.rows, *self.target_s, strict=True)
        steps = ", ".join(f"{rows}: {'/'.join(f'{1e3 * s:.2f}' for s in seconds)}" for rows, *seconds in curves)
        drafts = ", ".join(f"{r}: {1e3 * s:.2f}" for r, s in zip(self.draft_rows, self.draft_s, strict=True))
        return f"ms of {widths} tokens a row by rows: {steps}" + (f"; ms of a draft token: {drafts}" if drafts else "")


def interpolate(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    """At least ys[0]; beyond the last point, the last piece goes on."""
    if len(xs) == 1 or x <= xs[0]:
        return ys[0]
    i = min(bisect_right(xs, x), len(xs) - 1)
    share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i - 1] + share * (ys[i] - ys[i - 1])
