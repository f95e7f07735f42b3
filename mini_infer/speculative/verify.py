"""Which drafts stand, and the token that follows them: exact, whatever proposed them.

The reference of kernels/sampling/verify.py, over the flat list of N positions after which a step samples:

    position n         0     1     2     3   |   4     5          row 0 has three drafts, row 1 has one
    its input          last  d0    d1    d2  |   last  e0
    drafts[n]          d0    d1    d2    -   |   e0    -          what is judged by the logits after the input
    verify_tokens      d0    d1    x     ?   |   y     ?          the token at n, if all drafts before it stand
    a row keeps        d0    d1    x                              2 accepted: up to the first that is not its draft
                                                 y                0 accepted

`verify_tokens` judges every position by itself. A token equals its draft exactly where the draft is accepted.

- Greedy rows: the argmax.
- Drafts that nothing random proposed (n-gram, suffix: no `sources`), and positions without one: the token that the
  sampler draws there anyway, which is modified rejection sampling for a proposal that is certain.
- Drafts drawn from q (a draft model): accepted with probability min(1, p(x) / q(x)), otherwise the token is drawn from
  max(0, p - q), normalised (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318). p and q are
  the truncated distributions, summed in integers as in kernels/sampling/draw.py.

Everything is a function of (logits, parameters, seed, position, draft), through the streams of core/uniforms.py
(docs/speculation.md: what reproduces). A caller must not discard a draft drawn from q because of what it is: that would
bias what is left.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from mini_infer.core.plan import NO_DRAFT
from mini_infer.core.uniforms import ACCEPT, Array, uniforms
from mini_infer.kernels.sampling.draw import PARAM_COLUMNS, Draw, invert, kept_weights, pick_rows

_UNIT = 2.0**61  # a probability of 1 in fixed point: the sum of a row's fits into int64


def verify_tokens(
    logits: Tensor,
    param_rows: Tensor,
    positions: Tensor,
    drafts: Tensor,
    draft_logits: Tensor | None = None,
    sources: Tensor | None = None,
) -> Tensor:
    """The token at each of N positions, given that the drafts before it in its row stand.

    Args:
        logits: [N, V], penalties and masks applied, with the drafts before each position counted in.
        param_rows: [N, NUM_PARAMS] int32, from draw.encode.
        positions: [N]: tokens before the one that is judged.
        drafts: [N] int64, NO_DRAFT where there is none.
        draft_logits: [D, V'] any float dtype: what drafts were drawn from, by `sample_rows` (or pick_rows) with the
            parameters of their request, at their position + core.uniforms.DRAFT. None where nothing random proposed
            them. With a V' other than V, tokens that only one model has have no probability in the other.
        sources: [N] int64: the row of `draft_logits` for each position's draft, NO_DRAFT for none. No row twice.

    Returns:
        token ids [N] int64.
    """
    tokens = pick_rows(logits, param_rows, positions)
    if draft_logits is None or sources is None:
        return tokens
    params = param_rows.cpu().contiguous().numpy().view(PARAM_COLUMNS)[:, 0]
    judged = np.flatnonzero((sources != NO_DRAFT).cpu().numpy() & (params["temperature"] > 0))
    if not judged.size:
        return tokens
    at = torch.from_numpy(judged).to(logits.device)
    own, places = params[judged], positions.cpu().numpy()[judged]
    p, draw = _probabilities(logits[at], own, places)
    q, _ = _probabilities(draft_logits[sources[at]], own, places)
    q = pad(q, (0, p.shape[1] - q.shape[1]))  # a negative width cuts
    accepting = torch.from_numpy(uniforms(own["key"], places + ACCEPT)[:, None]).to(logits.device)
    return tokens.index_copy(0, at, _judge(p, q, drafts[at], accepting, draw.uniforms))


def _probabilities(logits: Tensor, params: Array, positions: Array) -> tuple[Tensor, Draw]:
    """Of truncated distributions, [J, V] float64 in units of 1 / _UNIT, and the draw that they are for."""
    draw = Draw.of(params, positions, logits.shape[1], lambda array: torch.tensor(array, device=logits.device))
    assert draw is not None, "greedy rows have no distribution"
    weights = kept_weights(logits.float(), draw)
    return weights * (_UNIT / weights.sum(dim=1, keepdim=True)), draw


def _judge(p: Tensor, q: Tensor, drafts: Tensor, accepting: Tensor, residual_uniforms: Tensor) -> Tensor:
    """Modified rejection sampling of J drafts [J] ~ q [J, V]: each, or a token from what p has more of than q.

    Args:
        accepting, residual_uniforms: [J, 1] float64 in [0, 1), independent of each other and of the drafts.
    """
    draft = drafts[:, None]
    known = draft < p.shape[1]
    at_draft = draft.where(known, 0)
    accepted = known & (accepting * q.gather(1, at_draft) < p.gather(1, at_draft))
    residual = (p - q).clamp_(min=0).long()
    accepted |= known & (residual.sum(dim=1, keepdim=True) == 0)  # p equals q, but for rounding
    return torch.where(accepted.squeeze(1), drafts, invert(residual, residual_uniforms))
