"""From logits to tokens: every row of a batch with its own sampling parameters, on the CPU or a GPU.

    raw logits --> log-probabilities to report
        |  ban stop tokens (min_tokens) -> repetition, presence, frequency penalties
        |---> greedy rows: argmax
        '---> sampled rows: / temperature -> top-k -> top-p -> min-p -> inverse CDF at a hashed u

A NaN counts as the largest logit, as it does in torch.argmax: its row gives a token that exists but means nothing,
and no other row is touched.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mini_infer.core.request import SamplingParams, TokenLogprob
from mini_infer.runtime.draw import Array, Column, Draw, draw_tokens, hash_seeds, uniforms

MIN_TEMPERATURE = 1e-5  # logits divided by less may overflow float32; by this, they are an argmax already


@dataclass(frozen=True, eq=False)
class Penalties:
    """P rows with penalties. `prompt` and `output` hold their tokens as flat indices into a [P, V] matrix."""

    rows: Tensor  # [P] int64
    prompt: Tensor  # [tokens] int64, empty for rows without a repetition penalty
    output: Tensor  # [tokens] int64, a repeated token as often as it occurs
    repetition: Tensor  # [P, 1] float32, as the next two
    presence: Tensor
    frequency: Tensor


@dataclass(frozen=True, eq=False)
class Logprobs:
    rows: Tensor | None  # [L] int64; None: all rows
    row_numbers: list[int]  # the same on the host
    num_top: list[int]  # alternatives that each of them wants


@dataclass(frozen=True, eq=False)
class SamplingBatch:
    """All that `sample` needs for S rows over a vocabulary of V. What no row uses is None and costs nothing."""

    banned: Tensor | None = None  # flat indices into [S, V]
    penalties: Penalties | None = None
    draw: Draw | None = None  # None: every row is greedy
    logprobs: Logprobs | None = None


@dataclass(frozen=True, eq=False)
class SampledTokens:
    token_ids: Tensor  # [S] int64, on the device of the logits
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # row -> of its token, where asked for


# ---------------------------------------------------------------------------------------------- the state

_COLUMNS = np.dtype(
    [
        ("key", np.uint64),  # hashed seed
        ("temperature", np.float32),  # 0 is greedy
        ("top_k", np.int64),  # vocab_size where it cuts nothing
        ("tail", np.float32),  # 1 - top_p
        ("min_p", np.float32),
        ("penalised", np.bool_),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("prompt_len", np.int64),
        ("min_len", np.int64),  # prompt and output tokens before which no stop token may come
        ("wants_logprobs", np.bool_),
        ("num_top", np.int64),
    ]
)


class SamplingState:
    """The sampling parameters of every slot, column by column, on the host."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._columns = np.zeros(max_num_seqs, _COLUMNS)
        self._stop_ids: list[Array] = [np.empty(0, np.int64)] * max_num_seqs

    def admit(self, slot: int, params: SamplingParams, seed: int, prompt_len: int, stop_ids: Collection[int]) -> None:
        """Gives `slot` to a request. `stop_ids` are the tokens that min_tokens forbids."""
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        row = self._columns[slot]
        row["key"] = hash_seeds(np.array([seed], np.uint64))[0]
        row["temperature"] = 0 if params.greedy else max(params.temperature, MIN_TEMPERATURE)
        row["top_k"] = min(params.top_k, self.vocab_size) or self.vocab_size
        row["tail"] = 1 - params.top_p
        row["min_p"] = params.min_p
        row["penalised"] = penalties != (1, 0, 0)
        row["repetition"], row["presence"], row["frequency"] = penalties
        row["prompt_len"] = prompt_len
        row["min_len"] = prompt_len + params.min_tokens
        row["wants_logprobs"] = params.logprobs is not None
        row["num_top"] = min(params.logprobs or 0, self.vocab_size)
        self._stop_ids[slot] = np.array([i for i in sorted(stop_ids) if 0 <= i < self.vocab_size], np.int64)

    def batch(self, slots: Sequence[int] | Array, positions: Sequence[int] | Array, token_ids: Array) -> SamplingBatch:
        """The batch whose row i samples token number positions[i] of the request in slots[i].

        token_ids [max_num_seqs, max_model_len + 1]: of each slot the prompt, then the output. Row i reads
        token_ids[slots[i], :positions[i]], and only where it has penalties.
        """
        slots, positions = np.asarray(slots, np.int64), np.asarray(positions, np.int64)
        rows = self._columns.take(slots)  # ten times as fast as [slots] on records
        return SamplingBatch(
            banned=self._banned(slots, positions, rows),
            penalties=self._penalties(slots, positions, rows, token_ids),
            draw=self._draw(positions, rows),
            logprobs=self._logprobs(rows),
        )

    def _banned(self, slots: Array, positions: Array, rows: Array) -> Tensor | None:
        early = np.flatnonzero(positions < rows["min_len"])
        flat = [row * self.vocab_size + self._stop_ids[slots[row]] for row in early]
        return self._tensor(np.concatenate(flat)) if sum(map(len, flat)) else None

    def _penalties(self, slots: Array, positions: Array, rows: Array, token_ids: Array) -> Penalties | None:
        chosen = np.flatnonzero(rows["penalised"])
        if not chosen.size:
            return None
        prompt, output = [], []
        for i, row in enumerate(chosen):
            tokens = token_ids[slots[row], : positions[row]].astype(np.int64) + i * self.vocab_size
            prompt_len = rows["prompt_len"][row]
            output.append(tokens[prompt_len:])
            if rows["repetition"][row] != 1:
                prompt.append(tokens[:prompt_len])
        return Penalties(
            rows=self._tensor(chosen),
            prompt=self._tensor(np.concatenate(prompt or [np.empty(0, np.int64)])),
            output=self._tensor(np.concatenate(output)),
            repetition=self._tensor(rows["repetition"][chosen, None]),
            presence=self._tensor(rows["presence"][chosen, None]),
            frequency=self._tensor(rows["frequency"][chosen, None]),
        )

    def _draw(self, positions: Array, rows: Array) -> Draw | None:
        chosen = np.flatnonzero(rows["temperature"])
        if not chosen.size:
            return None
        sampled = rows.take(chosen)
        return Draw(
            rows=None if len(chosen) == len(rows) else self._tensor(chosen),
            uniforms=self._tensor(uniforms(sampled["key"], positions[chosen])[:, None]),
            temperature=self._tensor(sampled["temperature"][:, None]),
            top_k=self._column(sampled["top_k"], sampled["top_k"] < self.vocab_size),
            max_top_k=int(sampled["top_k"].max(initial=0, where=sampled["top_k"] < self.vocab_size)),
            top_p=self._column(sampled["tail"].astype(np.float64), sampled["tail"] > 0),
            min_p=self._tensor(sampled["min_p"][:, None]) if sampled["min_p"].any() else None,
        )

    def _logprobs(self, rows: Array) -> Logprobs | None:
        chosen = np.flatnonzero(rows["wants_logprobs"])
        if not chosen.size:
            return None
        device_rows = None if len(chosen) == len(rows) else self._tensor(chosen)
        return Logprobs(device_rows, chosen.tolist(), rows["num_top"][chosen].tolist())

    def _column(self, values: Array, uses: Array) -> Column | None:
        chosen = np.flatnonzero(uses)
        if not chosen.size:
            return None
        rows = None if len(chosen) == len(values) else self._tensor(chosen)
        return Column(rows, self._tensor(values[chosen, None]))

    def _tensor(self, array: Array) -> Tensor:
        tensor = torch.from_numpy(array.copy())  # columns of a record array have strides that torch refuses
        if self.device.type == "cuda":  # a copy from pageable memory would wait for the stream
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor


def sample(logits: Tensor, batch: SamplingBatch) -> SampledTokens:
    """Picks one token a row. logits [S, V] float32 are left as they are."""
    scores = logits
    if batch.banned is not None:
        scores = scores.flatten().index_fill(0, batch.banned, -torch.inf).view_as(logits)
    if batch.penalties is not None:
        scores = _penalise(scores, batch.penalties)
    token_ids = _draw_over_argmax(scores, batch.draw)
    return SampledTokens(token_ids, _report(logits, token_ids, batch.logprobs) if batch.logprobs else {})


def _draw_over_argmax(scores: Tensor, draw: Draw | None) -> Tensor:
    if draw is None:
        return scores.argmax(dim=1)
    if draw.rows is None:
        return draw_tokens(scores, draw)
    return scores.argmax(dim=1).index_copy_(0, draw.rows, draw_tokens(scores[draw.rows], draw))


def _penalise(scores: Tensor, penalties: Penalties) -> Tensor:
    """Repetition as in Keskar et al. 2019 (arXiv:1909.05858), over prompt and output; presence and frequency as
    in the OpenAI API, over the output."""
    part = scores[penalties.rows]
    counts = torch.zeros(part.numel(), dtype=torch.int32, device=part.device)
    counts.scatter_add_(0, penalties.output, torch.ones_like(penalties.output, dtype=torch.int32))
    seen = (counts > 0).index_fill_(0, penalties.prompt, True).view_as(part)
    counts = counts.view_as(part)
    repeated = torch.where(part < 0, part * penalties.repetition, part / penalties.repetition)
    part = torch.where(seen, repeated, part)
    part = part - counts.sign() * penalties.presence - counts * penalties.frequency
    return scores.index_copy(0, penalties.rows, part)


def _report(logits: Tensor, token_ids: Tensor, wanted: Logprobs) -> dict[int, TokenLogprob]:
    """Log-probabilities (natural) under the model's own distribution, of the tokens and of the likeliest ones."""
    rows = slice(None) if wanted.rows is None else wanted.rows
    logprobs, tokens = logits[rows].log_softmax(dim=1), token_ids[rows, None]
    own = logprobs.gather(1, tokens)
    ranks = (logprobs > own).sum(dim=1) + 1
    values, ids = logprobs.topk(max(wanted.num_top), dim=1)
    host = [column.tolist() for column in (tokens.squeeze(1), own.squeeze(1), ranks, ids, values)]
    return {
        row: TokenLogprob(token, logprob, rank, tuple(zip(top_ids[:n], top[:n], strict=True)))
        for row, n, token, logprob, rank, top_ids, top in zip(wanted.row_numbers, wanted.num_top, *host, strict=True)
    }
