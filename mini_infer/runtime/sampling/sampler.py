"""From logits to tokens: every row of a batch with its own sampling parameters, on the CPU or a GPU.

    raw logits --> log-probabilities to report
        |  add biases -> ban stop tokens (min_tokens) -> repetition, presence, frequency penalties -> mask (grammar)
        |---> greedy rows: argmax
        '---> sampled rows: / temperature -> top-k -> top-p -> min-p -> inverse CDF at a hashed u

The lower half is the main path. On a GPU it is `main`, which reads parameters that lie on the device and can be
captured in a CUDA graph with the model. The upper half is rare: `rare` says on the host whether any row needs it, and
`resample` then does those rows once more, over the same logits. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from mini_infer.core.request import SamplingParams
from mini_infer.kernels.ops import Kernels
from mini_infer.kernels.pinned import to_device
from mini_infer.kernels.sampling.draw import NUM_PARAMS, PARAM_COLUMNS, Array, Draw, encode, pick_rows, pick_tokens
from mini_infer.runtime.sampling.adjust import ALWAYS, Adjustment, Adjustments, adjust, padded
from mini_infer.runtime.sampling.logprobs import Logprobs, Wanted, report
from mini_infer.runtime.worker.step_input import Drafts, StepInput
from mini_infer.speculative.verify import verify_tokens

MainPath = Callable[[Tensor, Tensor, Tensor], Tensor]
Verify = Callable[[Tensor, Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None"], Tensor]


NO_MASKS: Mapping[int, bytes] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Rare:
    adjustment: Adjustment | None
    wanted: Wanted | None


class Sampler:
    """The sampling parameters of every request, on the host, and what samples by them.

    Args:
        main: the main path as one call that is safe to capture: (logits [S, V], left as they are, param_rows [S,
            num_params] int32 as `admit` returned them, positions [S]: tokens before the one that is sampled) -> token
            ids [S] int64. None: torch operations, which `sample` chooses on the host by what rows use.
        verify: likewise, where drafts were drawn: (logits, param_rows, positions, drafts, their logits, sources).
    """

    num_params = NUM_PARAMS

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device | str,
        main: MainPath | None = None,
        verify: Verify = verify_tokens,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.name = "torch" if main is None else "triton"
        self._graph_safe = main is not None
        self.main: MainPath = main or pick_rows
        self._verify = verify
        self._params = np.zeros(max_num_seqs, PARAM_COLUMNS)
        self._num_top = np.full(max_num_seqs, -1, np.int64)  # -1 where no log-probabilities are asked for
        self._rare_until = np.zeros(max_num_seqs, np.int64)  # positions below are not for the main path alone
        self._adjustments = Adjustments(max_num_seqs, vocab_size)

    def admit(
        self, req_index: int, params: SamplingParams, seed: int, prompt_len: int, stop_ids: Collection[int]
    ) -> Array:
        """Gives `req_index` to a request. `stop_ids` are the tokens that min_tokens forbids. Returns its row of
        parameters for `main`, [num_params] int32."""
        encoded = encode(params, seed, self.vocab_size)
        self._params[req_index] = encoded.view(PARAM_COLUMNS)[0]
        self._num_top[req_index] = -1 if params.logprobs is None else min(params.logprobs, self.vocab_size)
        until = self._adjustments.admit(req_index, params, prompt_len, stop_ids)
        self._rare_until[req_index] = until if params.logprobs is None else ALWAYS
        return encoded

    def pick(
        self,
        logits: Tensor,
        param_rows: Tensor,
        positions: Tensor,
        drafts: Drafts | None = None,
        draft_logits: Tensor | None = None,
    ) -> Tensor:
        """`main`, of rows some of which may be drafts' places: there the draft itself where it is accepted.

        Args:
            draft_logits: [D, V'], what drafts were drawn from (speculative/verify.py). Where nothing random proposed
                them there is nothing to verify: a token that would be drawn anyway, and is the draft, is the draft
                accepted.
        """
        if drafts is None or draft_logits is None:
            return self.main(logits, param_rows, positions)
        return self._verify(logits, param_rows, positions, drafts.token_ids, draft_logits, drafts.sources)

    def warm_up(self, draft_logits: Tensor | None = None) -> None:
        """Compiles what `resample` runs, whose scores are float32 whatever the model's logits are. `draft_logits` [1,
        V'] are like a draft model's, where there is one."""
        if self._graph_safe:
            scores = torch.zeros((1, padded(self.vocab_size)), device=self.device)[:, : self.vocab_size]
            rows = torch.zeros((1, NUM_PARAMS), dtype=torch.int32, device=self.device)
            zero = torch.zeros(1, dtype=torch.int64, device=self.device)
            self.main(scores, rows, zero)
            if draft_logits is not None:
                self.pick(scores, rows, zero, Drafts(zero, zero), draft_logits)

    def sample(
        self,
        logits: Tensor,
        step: StepInput,
        req_indices: Array,
        positions: Array,
        history: Tensor,
        masks: Mapping[int, bytes] = NO_MASKS,
        draft_logits: Tensor | None = None,
    ) -> tuple[Tensor, Logprobs | None]:
        """One token a row [S] int64, eagerly, and the log-probabilities that are asked for.

        Args:
            logits: [S, V], left as they are.
            step: what `pick` reads on the device.
            req_indices, positions: [S] int64, the same on the host: whose row it is, and the tokens before the sampled
                one.
            history: [requests, longest] int32 on the device: each one's prompt and output. Read only for penalties.
            masks: row -> bits, of the rows that may not pick any token (Constraint.mask).
            draft_logits: as in `pick`.
        """
        drafts = None if draft_logits is None else step.drafts
        if self._graph_safe or drafts is not None:
            token_ids = self.pick(logits, step.param_rows, step.sampled_positions, drafts, draft_logits)
        else:
            draw = Draw.of(self._params.take(req_indices), positions, self.vocab_size, self._send)
            token_ids = pick_tokens(logits.float(), draw)
        rare = self.rare(req_indices, positions, masks)
        if rare is None:
            return token_ids, None
        return token_ids, self.resample(logits, token_ids, rare, history, drafts, draft_logits)

    def draws_drafts(self, req_indices: Array) -> Array:
        """[S] bool: whether drafts for the request are drawn at random. Not for one that brings a seed: how
        many drafts it gets depends on its company, and which numbers decide its tokens must not."""
        params = self._params.take(req_indices)
        return (params["temperature"] > 0) & (params["seeded"] == 0)

    # --- the rare things ------------------------------------------------------------------------------------------

    def rare(self, req_indices: Array, positions: Array, masks: Mapping[int, bytes] = NO_MASKS) -> Rare | None:
        """What the main path leaves to do for these rows; None, and quick, where it does it all."""
        if not masks and not (positions < self._rare_until.take(req_indices)).any():
            return None
        adjustment = self._adjustments.of(req_indices, positions, masks, self._params, self._send)
        return Rare(adjustment, self._wanted(self._num_top.take(req_indices)))

    def resample(
        self,
        logits: Tensor,
        token_ids: Tensor,
        rare: Rare,
        history: Tensor,
        drafts: Drafts | None = None,
        draft_logits: Tensor | None = None,
    ) -> Logprobs | None:
        """Picks the tokens of adjusted rows once more and puts them into `token_ids` [S]. `history` as in `sample`,
        drafts as in `pick`; the caller sees to it that the new tokens reach the history."""
        a = rare.adjustment
        if a is not None:
            own = None if drafts is None else drafts.at(a.rows)
            tokens = self.pick(adjust(logits, a, history), a.param_rows, a.positions, own, draft_logits)
            token_ids.index_copy_(0, a.rows, tokens.to(token_ids.dtype))
        return None if rare.wanted is None else report(logits, token_ids, rare.wanted)

    def _wanted(self, num_top: Array) -> Wanted | None:
        rows = np.flatnonzero(num_top >= 0)
        if not rows.size:
            return None
        return Wanted(None if len(rows) == len(num_top) else self._send(rows), rows.tolist(), num_top[rows].tolist())

    def _send(self, array: Array) -> Tensor:
        return to_device(array, self.device)


def make_sampler(max_num_seqs: int, vocab_size: int, device: torch.device, kernels: Kernels) -> Sampler:
    """The sampler that goes with a model's kernels."""
    if kernels.name != "triton":
        return Sampler(max_num_seqs, vocab_size, device)
    from mini_infer.kernels.sampling.sample import sample_rows  # they need Triton
    from mini_infer.kernels.sampling.verify import verify_rows

    return Sampler(max_num_seqs, vocab_size, device, sample_rows, verify_rows)
