"""Attention inside the CUDA graph of a step with prompts, which is then one launch without pauses.

A graph knows addresses and shapes. So a step's rows travel to tables that stay where they are, those of decode rows and
those of prompts. Each has room for more rows, and one that is not there has no tokens: its programs end at once.

    q of the step   | a | b | c | d d d d d | e e e | padding          [size, num_heads, head_dim]
    decode rows       a   b   c   -   -   -                            one token each, the first of the step's
    prompts                       d           e       -   -            query_starts count from the step's first token

Decode rows wait for memory, and prompts for the tensor cores. The graph therefore runs them side by side (Kamath et al.
2024, POD-Attention, arXiv:2410.18038, which has both in one kernel).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mini_infer.attention.backend import AttentionBackend
from mini_infer.attention.context import AttentionBatch, AttentionContext, ModelAttention, Rows
from mini_infer.cache.kv_store import KVStore

MOST_PROMPTS = 4  # of a step: kernels have programs for as many
MOST_ROWS = 512  # decode rows: of many more, Flash Decoding takes a kernel that writes those without tokens, too


class MixedAttention:
    """Attention of captured steps of at most `most_rows` decode rows (and MOST_ROWS) and MOST_PROMPTS prompts, each of
    at most `max_model_len` tokens. Backends are those that `captures` says yes to."""

    def __init__(
        self,
        attention: ModelAttention,
        prefill: AttentionBackend,
        decode: AttentionBackend,
        most_rows: int,
        max_model_len: int,
    ) -> None:
        assert isinstance(attention.store, KVStore), "other stores are views of one, for kernels"
        self.store, self.attention, self.prefill, self.decode = attention.store, attention, prefill, decode
        self.max_model_len = max_model_len
        device, width = self.store.device, -(-max_model_len // self.store.block_size)
        self.beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.decode_rows, self.prompts = (
            Rows(*(torch.zeros(size, dtype=torch.int32, device=device) for size in ((rows, width), rows + 1, rows)))
            for rows in (min(most_rows, MOST_ROWS), MOST_PROMPTS)
        )
        self.decode_rows.query_starts.add_(torch.arange(len(self.decode_rows.query_starts), device=device))

    @staticmethod
    def captures(prefill: AttentionBackend, decode: AttentionBackend) -> bool:
        return "prefill" in prefill.mixed_graphs and "decode" in decode.mixed_graphs

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.decode_rows, *self.prompts))

    def take(self, batch: AttentionBatch) -> bool:
        """Puts the rows of a step where graphs read them. False where they are too many, or decode rows have drafts."""
        decode, prompts = self.decode_rows, self.prompts
        n, width = batch.num_decode_rows, batch.block_tables.shape[1]
        count = batch.num_rows - n
        too_many = n > len(decode.seq_lens) or count > MOST_PROMPTS or width > decode.block_tables.shape[1]
        if too_many or batch.decode_query_len > 1:
            return False
        for rows, first, number in ((decode, 0, n), (prompts, n, count)):
            rows.block_tables[:number, :width].copy_(batch.block_tables[first : first + number])
            rows.seq_lens[:number].copy_(batch.seq_lens[first : first + number])
            rows.seq_lens[number:].zero_()
        prompts.query_starts[: count + 1].copy_(batch.query_starts[n:])
        prompts.query_starts[count + 1 :].fill_(batch.num_tokens)
        return True


class MixedContext(AttentionContext):
    """Of a captured step, whose tokens, padding among them, are at these positions and slots [size]. Attention leaves
    its result in `attended` [size, num_heads, value_dim], where that of padding stays as it is."""

    def __init__(self, mixed: MixedAttention, positions: Tensor, slot_mapping: Tensor, attended: Tensor) -> None:
        size, longest = len(positions), mixed.max_model_len
        tables, starts, lens = mixed.decode_rows
        self._num_rows = rows = min(size, len(lens))
        self._kv_store, self._beside, self._attended = mixed.store, mixed.beside, attended
        decode_rows = AttentionBatch(
            positions,
            slot_mapping,
            block_tables=tables[:rows],
            query_starts=starts[: rows + 1],
            seq_lens=lens[:rows],
            num_decode_rows=rows,
            max_decode_seq_len=longest,
        )
        self.batch = AttentionBatch(
            positions,
            slot_mapping,
            **mixed.prompts._asdict(),
            num_decode_rows=0,
            max_prefill_query_len=size,
            max_prefill_seq_len=longest,
        )
        self._prefill = mixed.prefill.prefill(self.batch, mixed.attention)
        self._decode = mixed.decode.decode(decode_rows, mixed.attention)

    def attend(self, layer: int, q: Tensor, out: Tensor | None = None) -> Tensor:
        assert self._prefill is not None, "there may be prompts"
        assert self._decode is not None, "there may be decode rows"
        out, rows, beside = self._attended, self._num_rows, self._beside
        if beside is None:
            self._prefill(layer, q, out)
            self._decode(layer, q[:rows], out[:rows])
            return out
        here = torch.cuda.current_stream(q.device)
        beside.wait_stream(here)
        try:
            self._prefill(layer, q, out)
            with torch.cuda.stream(beside):
                self._decode(layer, q[:rows], out[:rows])
        finally:  # a capture cannot end on one stream of two
            here.wait_stream(beside)
        return out
