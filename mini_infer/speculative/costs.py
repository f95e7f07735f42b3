"""What a step costs, and what drafts are worth by it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from mini_infer.core.uniforms import Array


def expected_tokens(acceptance: float, k: int) -> float:
    """Tokens a step brings on average with k drafts, each accepted with probability `acceptance` if those before it
    are: (1 - a^(k+1)) / (1 - a), the capped geometric of Leviathan et al. 2023 (arXiv:2211.17192, equation 1)."""
    return sum(acceptance**i for i in range(k + 1))


def leviathan_speedup(acceptance: float, k: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Tokens a second with k drafts, over those without: expected_tokens / (k * draft_cost + verify_cost).

    Theorem 3.8 of Leviathan et al. has verify_cost = 1: a step of 1 + k tokens a row takes no longer than one of 1.

    Args:
        draft_cost: of one draft token, in steps of the target without drafts.
        verify_cost: of a step with 1 + k tokens a row, in the same unit.
    """
    return expected_tokens(acceptance, k) / (k * draft_cost + verify_cost)


class StepCosts:
    """Seconds of a step, from a table that was measured at start-up.

    Between the measured numbers of rows and of tokens a row it is a bilinear surface. Beyond the largest of them the
    last piece goes on; with fewer rows than measured it is the cost of the fewest. A measurement by which more work
    takes less time is noise, and is levelled.

    Where steps with drafts are captured in CUDA graphs, a step costs what the graph costs that it runs in: the one of
    fewest tokens that takes it, what is missing being padding. It has as many rounds of drafting as it has places for
    drafts, for all of its rows. What no graph takes runs eagerly, and costs what is in it; or, with `padded`, as many
    tokens for every row as for the longest.

    Args:
        target: (rows, tokens a row) -> seconds of a decode step of the target. A full grid: every number of rows with
            every number of tokens a row, 1 among them, and at least one more.
        draft: rows -> seconds of one draft token for each of them. None: proposing costs nothing that counts.
        captured: (rows, tokens a row) of graphs for steps with drafts.
        padded: steps with drafts that no graph takes have tokens of padding, too.
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
        missing = [(r, w) for r in rows for w in widths if (r, w) not in target]
        if missing or len(widths) < 2 or widths[0] != 1:
            raise ValueError(
                "step costs must be measured for every number of rows with 1 token a row and with at least one larger "
                f"number; got {rows} rows and {widths} tokens a row, without {missing[:4]}"
            )
        if not all(seconds > 0 for seconds in target.values()):
            raise ValueError("step costs must be above 0 seconds")
        if draft is not None and not draft:
            raise ValueError("the draft's costs must be measured for at least one number of rows")
        self.padded = padded
        self.waiting = waiting
        self._rows, self._widths = rows, widths
        grid = np.array([[target[r, w] for r in rows] for w in widths])  # a curve over rows for each width
        self._target = np.maximum.accumulate(np.maximum.accumulate(grid, axis=0), axis=1).tolist()
        self._draft_rows = sorted(draft) if draft else [1]
        self._draft = list(accumulate((draft[r] for r in self._draft_rows), max)) if draft else [0.0]
        self._captured = sorted(set(captured), key=lambda graph: (graph[0] * graph[1], graph))
        self._shapes: dict[tuple[int, int], tuple[int, int] | None] = {}

    def shape(self, rows: int, tokens_per_row: int) -> tuple[int, int] | None:
        """(rows, tokens a row) that a step runs as whose longest row has so many, more than one; None where it is
        not padded."""
        step = rows, tokens_per_row
        if step not in self._shapes:
            eager = step if self.padded else None
            fitting = (g for g in self._captured if g[0] >= rows and g[1] >= tokens_per_row)
            self._shapes[step] = next(fitting, eager) if tokens_per_row > 1 else None
        return self._shapes[step]

    def verify_seconds(self, rows: int, tokens_per_row: float = 1) -> float:
        """A step of the target. `tokens_per_row` may be an average where steps are not padded."""
        padded_rows, width = self.shape(rows, math.ceil(tokens_per_row)) or (rows, tokens_per_row)
        over_widths = [_interpolate(self._rows, curve, padded_rows) for curve in self._target]
        return _interpolate(self._widths, over_widths, width)

    def draft_seconds(self, rows: int) -> float:
        """One draft token for each row."""
        padded_rows, _ = self.shape(rows, 2) or (rows, 2)
        return _interpolate(self._draft_rows, self._draft, padded_rows)

    def proposing_seconds(self, lengths: Array) -> float:
        """So many drafts for each row, [R] int: those that have any take part in every round."""
        longest = int(lengths.max(initial=0))
        shape = self.shape(len(lengths), 1 + longest)
        if shape is not None:
            return (shape[1] - 1) * self.draft_seconds(shape[0])
        return longest * self.draft_seconds(int(np.count_nonzero(lengths)))

    def step_seconds(self, lengths: Array) -> float:
        """A step whose R rows (not 0) have so many drafts, [R] int; proposing included."""
        rows, longest = len(lengths), int(lengths.max())
        padded = self.shape(rows, 1 + longest) is not None
        width = 1 + (longest if padded else lengths.sum() / rows)
        return self.verify_seconds(rows, width) + self.proposing_seconds(lengths)

    def table(self) -> dict[str, Any]:
        """Plain lists, for a record: target_s[i][j] is a step of rows[j] with tokens_per_row[i], draft_s[i] one draft
        token for each of draft_rows[i]."""
        return {
            "rows": list(self._rows),
            "tokens_per_row": list(self._widths),
            "target_s": [list(curve) for curve in self._target],
            "draft_rows": list(self._draft_rows) if any(self._draft) else [],
            "draft_s": list(self._draft) if any(self._draft) else [],
            "captured": [list(graph) for graph in self._captured],
            "padded": self.padded,
            "waiting": self.waiting,
        }

    def __str__(self) -> str:
        """A line: the target's milliseconds by rows, and those of a draft token."""
        widths = "/".join(map(str, self._widths))
        curves = zip(self._rows, *self._target, strict=True)
        steps = ", ".join(f"{rows}: {'/'.join(f'{1e3 * s:.2f}' for s in seconds)}" for rows, *seconds in curves)
        drafts = ", ".join(f"{r}: {1e3 * s:.2f}" for r, s in zip(self._draft_rows, self._draft, strict=True) if s)
        return f"ms of {widths} tokens a row by rows: {steps}" + (f"; ms of a draft token: {drafts}" if drafts else "")


def _interpolate(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    if len(xs) == 1 or x <= xs[0]:
        return ys[0]
    i = min(bisect_right(xs, x), len(xs) - 1)
    share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i - 1] + share * (ys[i] - ys[i - 1])
