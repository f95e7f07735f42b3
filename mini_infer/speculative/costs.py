"""What a step costs, and what drafts are worth by it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

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
    """Seconds of a step, interpolated in a table that was measured at start-up.

    Between the measured numbers of rows and of tokens a row it is a bilinear surface. Beyond the largest of them the
    last piece goes on; with fewer rows than measured it is the cost of the fewest. A measurement by which more work
    takes less time is noise, and is levelled.

    Args:
        target: (rows, tokens a row) -> seconds of a decode step of the target. A full grid: every number of rows with
            every number of tokens a row, 1 among them, and at least one more.
        draft: rows -> seconds of one draft token for each of them. None: proposing costs nothing that counts.
        padded: a step computes as many tokens for every row as for the longest, as a CUDA graph does.
    """

    def __init__(
        self, target: Mapping[tuple[int, int], float], draft: Mapping[int, float] | None = None, padded: bool = False
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
        self._rows, self._widths = rows, widths
        grid = np.array([[target[r, w] for r in rows] for w in widths])  # a curve over rows for each width
        self._target = np.maximum.accumulate(np.maximum.accumulate(grid, axis=0), axis=1).tolist()
        self._draft_rows = sorted(draft) if draft else [1]
        self._draft = list(accumulate((draft[r] for r in self._draft_rows), max)) if draft else [0.0]

    def verify_seconds(self, rows: int, tokens_per_row: float = 1) -> float:
        """A step of the target. `tokens_per_row` may be an average."""
        over_widths = [_interpolate(self._rows, curve, rows) for curve in self._target]
        return _interpolate(self._widths, over_widths, tokens_per_row)

    def draft_seconds(self, rows: int) -> float:
        """One draft token for each row."""
        return _interpolate(self._draft_rows, self._draft, rows)

    def step_seconds(self, lengths: Array) -> float:
        """A step whose rows have so many drafts, [R] int; proposing included, for fewer rows as they have enough."""
        rows, longest = len(lengths), int(lengths.max())
        width = 1 + (longest if self.padded else lengths.sum() / rows)
        drafting = [int(np.count_nonzero(lengths > place)) for place in range(longest)]
        return self.verify_seconds(rows, width) + sum(map(self.draft_seconds, drafting))


def _interpolate(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    if len(xs) == 1 or x <= xs[0]:
        return ys[0]
    i = min(bisect_right(xs, x), len(xs) - 1)
    share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i - 1] + share * (ys[i] - ys[i - 1])
