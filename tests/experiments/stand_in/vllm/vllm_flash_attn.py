"""FlashAttention-3 as vLLM has it, made up with torch."""

import torch


def get_scheduler_metadata(batch_size, num_splits, **plan):
    return torch.tensor([batch_size, num_splits])


def flash_attn_varlen_func(
    *, q, k, v, out, cu_seqlens_q, seqused_k, block_table, softmax_scale, causal, scheduler_metadata, num_splits,
    fa_version, max_seqlen_q, max_seqlen_k,
):  # fmt: skip
    assert (fa_version, causal, max_seqlen_k) == (3, True, int(seqused_k.max()))
    assert scheduler_metadata.tolist() == [len(seqused_k), num_splits]
    for row, (blocks, seen) in enumerate(zip(block_table, seqused_k.tolist(), strict=True)):
        first, last = cu_seqlens_q[row : row + 2].tolist()
        queries = q[first:last].transpose(0, 1)
        keys, values = (
            side[blocks].flatten(0, 1)[:seen].repeat_interleave(q.shape[1] // side.shape[2], 1).transpose(0, 1)
            for side in (k, v)
        )
        mask = torch.ones(last - first, seen, dtype=torch.bool).tril(seen - (last - first))
        out[first:last] = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=softmax_scale
        ).transpose(0, 1)
    return out
