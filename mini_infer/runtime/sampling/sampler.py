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
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mini_infer.core.request import SamplingParams, TokenLogprob
from mini_infer.kernels.draw import NUM_PARAMS, PARAM_COLUMNS, Array, Draw, encode, pick_rows, pick_tokens
from mini_infer.kernels.ops import Kernels
from mini_infer.runtime.sampling.adjust import Adjustment, Penalties, adjust, padded
from mini_infer.runtime.worker.request_states import StepInput
from mini_infer.speculative.verify import verify_tokens

MainPath = Callable[[Tensor, Tensor, Tensor], Tensor]
Verify = Callable[[Tensor, Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None"], Tensor]


class Drawn(NamedTuple):
    """Drafts that are to be verified, and what they were drawn from."""

    token_ids: Tensor  # [S] int64: the draft that stands at each sampled token's place, NO_DRAFT for none
    logits: Tensor  # [D, V'], what the drafts were drawn from
    sources: Tensor  # [S] int64: for each sampled token its draft's row of `logits`, NO_DRAFT for none


_COLUMNS = np.dtype(
    [
        ("penalised", np.bool_),
        ("biased", np.bool_),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("prompt_len", np.int64),
        ("min_len", np.int64),  # prompt and output tokens before which no stop token may come
        ("wants_logprobs", np.bool_),
        ("num_top", np.int64),
    ]
)
_ALWAYS = np.iinfo(np.int64).max
NO_BIASES: tuple[Array, Array] = (np.empty(0, np.int64), np.empty(0, np.float32))
NO_MASKS: Mapping[int, bytes] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Wanted:
    """L rows whose log-probabilities are asked for."""

    rows: Tensor | None  # [L] int64 on the device; None: all rows
    row_numbers: list[int]
    num_top: list[int]  # alternatives that each of them wants


@dataclass(frozen=True, eq=False)
class Rare:
    adjustment: Adjustment | None
    wanted: Wanted | None


@dataclass(frozen=True, eq=False)
class Logprobs:
    """Log-probabilities on their way to the host."""

    wanted: Wanted
    numbers: Tensor  # [L, 2 + K] int64: the token, its rank, the likeliest tokens
    values: Tensor  # [L, 1 + K] float32: the token's log-probability, the likeliest tokens'

    def finish(self) -> dict[int, TokenLogprob]:
        """Row -> the entry of its token. On a GPU: after an event that was recorded behind the sampling."""
        result = {}
        rows = zip(
            self.wanted.row_numbers, self.wanted.num_top, self.numbers.tolist(), self.values.tolist(), strict=True
        )
        for row, n, (token, rank, *ids), (own, *top) in rows:
            result[row] = TokenLogprob(token, own, rank, tuple(zip(ids[:n], top[:n], strict=True)))
        return result


class SampledTokens(NamedTuple):
    token_ids: Tensor  # [S] int64, on the device of the logits
    logprobs: Logprobs | None  # None: no row asks for them


class Sampler:
    """The sampling parameters of every slot, on the host, and what samples by them.

    Args:
        max_num_seqs: slots.
        main: the main path as one call that is safe to capture, (logits, param_rows, positions) -> token ids; None:
            torch operations, which `sample` chooses on the host by what the rows of a step use.
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
        self.graph_safe = main is not None
        self._main = main or pick_rows
        self._verify = verify
        self._params = np.zeros(max_num_seqs, PARAM_COLUMNS)
        self._columns = np.zeros(max_num_seqs, _COLUMNS)
        self._rare_until = np.zeros(max_num_seqs, np.int64)  # positions below are not for the main path alone
        self._stop_ids: list[Array] = [np.empty(0, np.int64)] * max_num_seqs
        self._biases: list[tuple[Array, Array]] = [NO_BIASES] * max_num_seqs  # token ids, what is added to each

    def admit(
        self, req_index: int, params: SamplingParams, seed: int, prompt_len: int, stop_ids: Collection[int]
    ) -> Array:
        """Gives `slot` to a request. `stop_ids` are the tokens that min_tokens forbids. Returns the slot's row of
        parameters for `main`, [num_params] int32."""
        encoded = encode(params, seed, self.vocab_size)
        self._params[req_index] = encoded.view(PARAM_COLUMNS)[0]
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        row = self._columns[req_index]
        row["penalised"] = penalties != (1, 0, 0)
        row["repetition"], row["presence"], row["frequency"] = penalties
        row["biased"] = bool(params.biases)
        row["prompt_len"] = prompt_len
        row["min_len"] = prompt_len + params.min_tokens if stop_ids else 0
        row["wants_logprobs"] = params.logprobs is not None
        row["num_top"] = min(params.logprobs or 0, self.vocab_size)
        self._stop_ids[req_index] = np.array([i for i in sorted(stop_ids) if 0 <= i < self.vocab_size], np.int64)
        self._biases[req_index] = NO_BIASES
        if params.biases:
            ids, values = zip(*params.biases, strict=True)
            self._biases[req_index] = (np.array(ids, np.int64), np.array(values, np.float32))
        always = row["penalised"] or row["biased"] or row["wants_logprobs"]
        self._rare_until[req_index] = _ALWAYS if always else row["min_len"]
        return encoded

    def main(self, logits: Tensor, param_rows: Tensor, positions: Tensor) -> Tensor:
        """One token a row, by what lies on the device alone; safe to capture where `graph_safe`.

        Args:
            logits: [S, V], left as they are.
            param_rows: [S, num_params] int32, the rows that `admit` returned.
            positions: [S]: tokens before the one that is sampled.

        Returns:
            token ids [S] int64.
        """
        return self._main(logits, param_rows, positions)

    def verify(
        self,
        logits: Tensor,
        param_rows: Tensor,
        positions: Tensor,
        drafts: Tensor,
        draft_logits: Tensor | None = None,
        sources: Tensor | None = None,
    ) -> Tensor:
        """Likewise, of rows some of which are drafts' places: the draft itself where it is accepted. Arguments as of
        speculative.verify.verify_tokens."""
        if draft_logits is None:  # a token that would be drawn anyway, and is the draft, is the draft accepted
            return self._main(logits, param_rows, positions)
        return self._verify(logits, param_rows, positions, drafts, draft_logits, sources)

    def warm_up(self, draft_logits: Tensor | None = None) -> None:
        """Compiles what `resample` runs, whose scores are float32 whatever the model's logits are.

        Args:
            draft_logits: [1, V'] like those of a draft model, where there is one.
        """
        if self.graph_safe:
            scores = torch.zeros((1, padded(self.vocab_size)), device=self.device)[:, : self.vocab_size]
            rows = torch.zeros((1, NUM_PARAMS), dtype=torch.int32, device=self.device)
            zero = torch.zeros(1, dtype=torch.int64, device=self.device)
            self.main(scores, rows, zero)
            if draft_logits is not None:
                self.verify(scores, rows, zero, zero, draft_logits, zero)

    def sample(
        self,
        logits: Tensor,
        step: StepInput,
        req_indices: Array,
        positions: Array,
        history: Tensor,
        masks: Mapping[int, bytes] = NO_MASKS,
        drawn: Drawn | None = None,
    ) -> SampledTokens:
        """One token a row, eagerly. Of a row that is a draft's place: the draft itself where it is accepted.

        Args:
            logits: [S, V], left as they are.
            step: what `main` reads on the device, `param_rows` and `sampled_positions`.
            slots, positions: [S] int64, the same on the host: each row's slot, and the tokens before the sampled one.
            history: [slots, longest] int32 on the device: each slot's prompt and output. Read only for penalties.
            masks: row -> bits, of the rows that may not pick any token (Constraint.mask).
            drawn: drafts that are to be verified. Others need nothing: a token that would have been drawn anyway, and
                is the draft, is the draft accepted.
        """
        rare = self.rare(req_indices, positions, masks)
        if self.graph_safe:
            token_ids = self._pick(logits, step.param_rows, step.sampled_positions, drawn)
            if rare is None:
                return SampledTokens(token_ids, None)
            return SampledTokens(token_ids, self.resample(logits, token_ids, rare, history, drawn))
        scores = logits.float()
        if rare is not None and rare.adjustment is not None:
            a = rare.adjustment
            adjusted = adjust(logits, a, history)
            scores = adjusted if len(a.rows) == len(logits) else scores.index_copy(0, a.rows, adjusted)
        if drawn is None:
            token_ids = pick_tokens(
                scores, Draw.of(self._params.take(req_indices), positions, self.vocab_size, self._send)
            )
        else:
            token_ids = self.verify(scores, step.param_rows, step.sampled_positions, *drawn)
        wanted = None if rare is None else rare.wanted
        return SampledTokens(token_ids, None if wanted is None else report(logits, token_ids, wanted))

    def draws_drafts(self, req_indices: Array) -> Array:
        """[slots] bool: whether drafts for the slot's request are drawn at random. Not for one that brings a seed: how
        many drafts it gets depends on its company, and which numbers decide its tokens must not."""
        params = self._params.take(req_indices)
        return (params["temperature"] > 0) & (params["seeded"] == 0)

    def keys(self, req_indices: Array) -> Array:
        """[slots] uint64: hashed seeds."""
        return self._params["key"].take(req_indices)

    def _pick(self, logits: Tensor, param_rows: Tensor, positions: Tensor, drawn: Drawn | None) -> Tensor:
        if drawn is None:
            return self.main(logits, param_rows, positions)
        return self.verify(logits, param_rows, positions, *drawn)

    # --- the rare things ------------------------------------------------------------------------------------------

    def rare(self, req_indices: Array, positions: Array, masks: Mapping[int, bytes] = NO_MASKS) -> Rare | None:
        """What the main path leaves to do for these rows; None, and quick, where it does it all."""
        if not masks and not (positions < self._rare_until.take(req_indices)).any():
            return None
        columns = self._columns.take(req_indices)
        return Rare(self._adjustment(req_indices, positions, columns, masks), self._wanted(columns))

    def resample(
        self, logits: Tensor, token_ids: Tensor, rare: Rare, history: Tensor, drawn: Drawn | None = None
    ) -> Logprobs | None:
        """Picks the tokens of adjusted rows once more and puts them into `token_ids` [S]. `history` and `drawn` as in
        `sample`; the caller sees to it that the new tokens reach the history."""
        a = rare.adjustment
        if a is not None:
            own = None if drawn is None else Drawn(drawn.token_ids[a.rows], drawn.logits, drawn.sources[a.rows])
            tokens = self._pick(adjust(logits, a, history), a.param_rows, a.positions, own)
            token_ids.index_copy_(0, a.rows, tokens.to(token_ids.dtype))
        return None if rare.wanted is None else report(logits, token_ids, rare.wanted)

    def _adjustment(
        self, req_indices: Array, positions: Array, columns: Array, masks: Mapping[int, bytes]
    ) -> Adjustment | None:
        early = positions < columns["min_len"]
        adjusted = early | columns["penalised"] | columns["biased"]
        adjusted[list(masks)] = True
        rows = np.flatnonzero(adjusted)
        if not rows.size:
            return None
        width = padded(self.vocab_size)
        banned = [
            i * width + self._stop_ids[req_indices[row]]
            for i, row in enumerate(rows)
            if early[row] and row not in masks
        ]
        biased = [(i, *self._biases[req_indices[row]]) for i, row in enumerate(rows) if columns["biased"][row]]
        params = self._params.take(req_indices[rows]).view(np.int32).reshape(-1, NUM_PARAMS)
        return Adjustment(
            rows=self._send(rows),
            positions=self._send(positions[rows]),
            bias_places=self._send(np.concatenate([i * width + ids for i, ids, _ in biased])) if biased else None,
            biases=self._send(np.concatenate([values for _, _, values in biased])) if biased else None,
            banned=self._send(np.concatenate(banned)) if banned else None,
            penalties=self._penalties(req_indices[rows], positions[rows], columns.take(rows)),
            mask=self._send(self._mask(rows, req_indices, early, masks)) if masks else None,
            param_rows=self._send(params),
        )

    def _mask(self, rows: Array, req_indices: Array, early: Array, masks: Mapping[int, bytes]) -> Array:
        """[rows, bytes] uint8. Stop tokens that come too early are left out, unless the grammar has nothing else."""
        mask = np.full((len(rows), -(-self.vocab_size // 8)), 0xFF, np.uint8)
        for i, row in enumerate(rows.tolist()):
            if row not in masks:
                continue
            own = mask[i]
            own[:] = np.frombuffer(masks[row], np.uint8)
            if early[row]:
                rest, stop_ids = own.copy(), self._stop_ids[req_indices[row]]
                np.bitwise_and.at(rest, stop_ids // 8, ~(1 << stop_ids % 8).astype(np.uint8))
                own[:] = rest if rest.any() else own
        return mask

    def _penalties(self, req_indices: Array, positions: Array, columns: Array) -> Penalties | None:
        if not columns["penalised"].any():
            return None
        factors = np.stack([columns["repetition"], columns["presence"], columns["frequency"]])[:, :, None]
        return Penalties(
            req_indices=self._send(req_indices),
            prompt_lens=self._send(columns["prompt_len"]),
            longest=int(positions.max()),
            factors=self._send(factors),
        )

    def _wanted(self, columns: Array) -> Wanted | None:
        rows = np.flatnonzero(columns["wants_logprobs"])
        if not rows.size:
            return None
        sent = None if len(rows) == len(columns) else self._send(rows)
        return Wanted(sent, rows.tolist(), columns["num_top"][rows].tolist())

    def _send(self, array: Array) -> Tensor:
        tensor = torch.from_numpy(array.copy())  # columns of a record array have strides that torch refuses
        if self.device.type == "cuda":  # a copy from pageable memory would wait for the stream
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor


def make_sampler(max_num_seqs: int, vocab_size: int, device: torch.device, kernels: Kernels) -> Sampler:
    """The sampler that goes with a model's kernels."""
    if kernels.name != "triton":
        return Sampler(max_num_seqs, vocab_size, device)
    from mini_infer.kernels.sample import sample_rows  # they need Triton
    from mini_infer.kernels.verify import verify_rows

    return Sampler(max_num_seqs, vocab_size, device, sample_rows, verify_rows)


def report(logits: Tensor, token_ids: Tensor, wanted: Wanted) -> Logprobs:
    """Log-probabilities (natural) under the model's own distribution, of the tokens and of the likeliest ones."""
    rows = slice(None) if wanted.rows is None else wanted.rows
    logprobs, tokens = logits[rows].float().log_softmax(dim=1), token_ids[rows, None]
    own = logprobs.gather(1, tokens)
    ranks = (logprobs > own).sum(dim=1, keepdim=True) + 1
    values, ids = logprobs.topk(max(wanted.num_top), dim=1)
    numbers, values = torch.cat([tokens, ranks, ids], dim=1), torch.cat([own, values], dim=1)
    # From a GPU, into page-locked memory, which needs no waiting.
    return Logprobs(wanted, numbers.to("cpu", non_blocking=True), values.to("cpu", non_blocking=True))
