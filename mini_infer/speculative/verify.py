"""Which drafts stand, and the token that follows them: exact, whatever proposed them.

The reference, in torch operations; kernels/verify.py follows it on a GPU. Two steps, both over the flat list of N
positions after which a step samples, those of row r being query_starts[r] ... query_starts[r + 1] - 1:

    position n         0     1     2     3   |   4     5          row 0 has three drafts, row 1 has one
    its input          last  d0    d1    d2  |   last  e0
    drafts[n]          d0    d1    d2    -   |   e0    -          what is judged by the logits after the input
    verify_tokens      d0    d1    x     ?   |   y     ?          the token at n, if all drafts before it stand
    accept_drafts      d0    d1    x                              2 accepted: up to the first that is not its draft
                                                 y                0 accepted

`verify_tokens` judges every position by itself. A token equals its draft exactly where the draft is accepted, so a row
needs no more bookkeeping than comparing the two.

- Greedy rows: the argmax.
- Drafts that nothing random proposed (n-gram, suffix; `distribution` says nothing of them), and positions without one:
  the token that the sampler would have drawn there anyway. A draft x is thus accepted with the target's probability
  p(x), and otherwise the token follows p without x: modified rejection sampling for a proposal that is certain.
- Drafts drawn from q (a draft model): accepted with probability min(1, p(x) / q(x)), otherwise the token is drawn from
  max(0, p - q), normalised (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318). p and q are
  the truncated distributions, summed in integers as in runtime/draw.py.

What reproduces. Everything is a function of (logits, parameters, seed, position, draft), through the streams of
core/uniforms.py: batch, slot, preemption do not matter. In the first two cases the token does not even depend on the
draft: given the same logits, a request's tokens are those without speculation, for any number of drafts. In the third
they are not (their distribution is): at temperature > 0 the tokens depend on which positions had a draft. A request
then reproduces for the same number of drafts at each position: always with a fixed k, and not where k follows the
batch. Where that matters, leave `distribution` out: fewer drafts are accepted, and tokens are those without speculation.

What a caller must not do: discard a draft drawn from q because of what it is. That would bias what is left. Whether
there is a next draft may depend on anything before it.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

NO_DRAFT = -1


class DraftDistribution(NamedTuple):
    """What drafts were drawn from: `sample_rows` (or pick_rows) of these logits, with the parameters of their request,
    at their position + core.uniforms.DRAFT."""

    logits: Tensor  # [D, V'] any float dtype. A V' other than the target's means tokens that only one model has
    rows: Tensor  # [N] int64: the row of `logits` that each position's draft was drawn from; NO_DRAFT: none


class Accepted(NamedTuple):
    num_accepted: Tensor  # [R] int64
    token_ids: Tensor  # [R, width] int64: accepted drafts, one token more, then NO_DRAFT


def verify_tokens(
    logits: Tensor,
    param_rows: Tensor,
    positions: Tensor,
    drafts: Tensor,
    distribution: DraftDistribution | None = None,
) -> Tensor:
    """The token at each of N positions, given that the drafts before it in its row stand.

    Args:
        logits: [N, V], penalties and masks applied, with the drafts before each position counted in.
        param_rows: [N, NUM_PARAMS] int32, from draw.encode.
        positions: [N]: tokens before the one that is judged.
        drafts: [N] int64, NO_DRAFT where there is none.
        distribution: None where nothing random proposed the drafts.

    Returns:
        token ids [N] int64.
    """
    raise NotImplementedError


def accept_drafts(
    token_ids: Tensor, drafts: Tensor, query_starts: Tensor, width: int, forced: Tensor | None = None
) -> Accepted:
    """What R rows go on with: each row's tokens up to the first that is not its draft.

    Args:
        token_ids: [N] int64, from `verify_tokens`.
        drafts: [N] int64. NO_DRAFT ends a row's drafts, so a captured graph's rows may have more positions than drafts.
        query_starts: [R + 1]: where each row's positions begin.
        width: positions of the longest row.
        forced: [R] int64: accept so many drafts, as far as there are, instead (synthetic.synthetic_accepts).
    """
    raise NotImplementedError
