"""Products of each head with a weight of its own: where latent attention is absorbed (attention/mla.py).

    x [T, heads, K] --> W [heads, N, K] --> out [T, heads, N]       and, behind it, what else out's row is made of

For few tokens a batched product of a library takes as long to start as these weights take to read, does not let the
next kernel start early, and leaves the copy to another. Here a program owns some outputs of a head and all of K, for up
to 16 tokens, and has its weights on the way before it waits for x (kernels/pdl.py). A token's numbers are the same in
any company.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_infer.kernels.paged_prefill import DOT_DTYPES
from mini_infer.kernels.pdl import launch_options, let_next_start, wait_for_previous

_TOKENS = 16  # a program
_WEIGHTS = 8192  # a program


def head_products_reference(x: Tensor, weights: Tensor, out: Tensor, rest: Tensor | None = None) -> None:
    """The definition. Arguments as of head_products."""
    made = torch.einsum("thk,hnk->thn", x.float(), weights.float()).to(x.dtype)
    out.copy_(made if rest is None else torch.cat((made, rest), dim=-1))


@triton.jit(do_not_specialize=["tokens"])
def _head_products_kernel(
    x_ptr,
    weights_ptr,
    rest_ptr,
    out_ptr,
    tokens,
    x_stride,  # between tokens
    x_head,  # between heads
    rest_stride,
    rest_head,
    out_stride,
    out_head,
    w_head,
    w_out,
    w_in,
    OUTS: tl.constexpr,
    IN: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    outs, columns = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT), tl.arange(0, BLOCK_IN)
    real = (outs < OUTS)[:, None]
    w_ptrs = weights_ptr + head * w_head + outs[:, None] * w_out + columns[None, :] * w_in
    w = tl.load(w_ptrs, mask=real & (columns < IN)[None, :], other=0.0).to(DOT)
    wait_for_previous(PDL)
    token = (tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]).to(tl.int64)
    some = token < tokens
    x_ptrs = x_ptr + token * x_stride + head * x_head + columns[:, None]
    x = tl.load(x_ptrs, mask=some & (columns < IN)[:, None], other=0.0).to(DOT)
    rows = out_ptr + token * out_stride + head * out_head
    y = tl.dot(w, x, input_precision="ieee")
    tl.store(rows + outs[:, None], y.to(out_ptr.dtype.element_ty), mask=some & real)
    if REST > 0:  # noqa: SIM102 Triton looks at both sides of an `and`
        if block == 0:
            more = tl.arange(0, BLOCK_REST)[:, None]
            copied = tl.load(rest_ptr + token * rest_stride + head * rest_head + more, mask=some & (more < REST))
            tl.store(rows + OUTS + more, copied, mask=some & (more < REST))


def head_products(x: Tensor, weights: Tensor, out: Tensor, rest: Tensor | None = None) -> None:
    """Fills out [T, heads, N + R] with x [T, heads, K] times weights [heads, N, K], summed in float32, and with rest
    [T, heads, R], where there is one.

    All of one dtype, and of any strides but for the last dimension of x, out and rest, whose numbers are adjacent. The
    weights may not still be being written on the GPU (rule 3 of kernels/pdl.py).
    """
    (tokens, heads, size), outs = x.shape, weights.shape[1]
    if not tokens:
        return
    block_in = max(16, triton.next_power_of_2(size))
    block_out = max(16, min(triton.next_power_of_2(outs), _WEIGHTS // block_in))
    more = 0 if rest is None else rest.shape[2]
    _head_products_kernel[(triton.cdiv(outs, block_out), heads, triton.cdiv(tokens, _TOKENS))](
        x, weights, rest, out, tokens, *x.stride()[:2], *((0, 0) if rest is None else rest.stride()[:2]),
        *out.stride()[:2], *weights.stride(), OUTS=outs, IN=size, REST=more, BLOCK_OUT=block_out, BLOCK_IN=block_in,
        BLOCK_REST=triton.next_power_of_2(max(more, 1)), BLOCK_T=_TOKENS, DOT=DOT_DTYPES[x.dtype], num_warps=4,
        **launch_options(x.device),
    )  # fmt: skip
