"""What a step costs, and what drafts are worth by it.

Interface only, so far.
"""

from __future__ import annotations

from collections.abc import Mapping


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

    Args:
        target: (rows, tokens a row) -> seconds of a decode step of the target. A full grid: every number of rows with
            every number of tokens a row, 1 among them.
        draft: rows -> seconds of one draft token for each of them. Empty: proposing costs nothing.
        padded: every row is computed with as many tokens as the longest one, as a CUDA graph does.
    """

    def __init__(
        self, target: Mapping[tuple[int, int], float], draft: Mapping[int, float] | None = None, padded: bool = False
    ) -> None:
        raise NotImplementedError
