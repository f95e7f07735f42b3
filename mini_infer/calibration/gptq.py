"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): columns are rounded one after the other, and each error is made up for.

With H = X^T X over calibration inputs X [tokens, K], the error of W' is tr((W - W') H (W - W')^T). When column j has
been rounded, the columns to come move by -error * U[j, j+1:] / U[j, j], where U is the upper Cholesky factor of H's
inverse (the paper's section 3.3, step 3). Updates go to a block of columns at once, to the rest after each block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mini_infer.calibration.scales import fitted
from mini_infer.quantization.formats import Quantized, WeightFormat, encode, spread_scales

DAMPING = 0.01  # of the mean of H's diagonal
BLOCK = 128  # columns


def gptq(
    weight: Tensor,
    gram: Tensor,
    form: WeightFormat,
    act_order: bool = True,
    dtype: torch.dtype = torch.float32,
    damping: float = DAMPING,
) -> Quantized:
    """weight [N, K] -> the codes that keep its products with the inputs, whose `gram` is X^T X [K, K].

    Args:
        act_order: columns with the largest inputs first, while there is most left to make up with. Groups stay those of
            neighbouring columns, with scales that were chosen before, so no reader needs to know of the order. Without
            it a group's scales are chosen when its turn comes, of weights that make up for the columns before it.
    """
    work, hessian = weight.float().clone(), gram.float().clone()
    rows, columns = work.shape
    unused = hessian.diagonal() == 0
    hessian.diagonal()[unused] = 1
    work[:, unused] = 0
    importance = hessian.diagonal().clone()
    quantized = fitted(work, form, importance, dtype)
    order = torch.argsort(importance, descending=True) if act_order else torch.arange(columns, device=work.device)
    back = torch.argsort(order)
    work, hessian = work[:, order], hessian[order][:, order]
    factor = _inverse_factor(hessian, damping)
    scales = spread_scales(quantized.scales, form, work.shape)[:, order]
    zeros = None if quantized.zeros is None else spread_scales(quantized.zeros, form, work.shape)[:, order]
    codes = torch.empty(rows, columns, dtype=form.number.code_dtype, device=work.device)
    one = WeightFormat(form.number, symmetric=form.symmetric)
    group = 0 if act_order else form.columns or 0
    block = -(-BLOCK // group) * group if group else BLOCK  # of whole groups
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        errors = torch.zeros(rows, stop - start, device=work.device)
        for j in range(start, stop):
            if group and j % group == 0:
                own, number = slice(j, j + group), j // group
                found = fitted(work[:, own], form, importance[own], dtype)
                quantized.scales[:, number] = found.scales[:, 0]
                scales[:, own] = spread_scales(found.scales, form, work[:, own].shape)
                if zeros is not None and quantized.zeros is not None and found.zeros is not None:
                    quantized.zeros[:, number] = found.zeros[:, 0]
                    zeros[:, own] = spread_scales(found.zeros, form, work[:, own].shape)
            column, scale = work[:, j, None], scales[:, j, None]
            zero = None if zeros is None else zeros[:, j, None]
            codes[:, j, None] = encode(column, scale, zero, one)
            kept = codes[:, j, None].float() if zero is None else codes[:, j, None].float() - zero
            error = (column - kept * scale) / factor[j, j]
            work[:, j + 1 : stop] -= error * factor[j, j + 1 : stop]
            errors[:, j - start] = error[:, 0]
        work[:, stop:] -= errors @ factor[start:stop, stop:]
    return Quantized(codes[:, back], quantized.scales, quantized.zeros)


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """Upper U with U^T U = (H + damping)^-1. Where H is too close to singular, more is added, tenfold a time."""
    mean = float(hessian.diagonal().mean())
    while True:
        hessian.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(hessian)
        if not int(failed):
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return factor
        damping *= 10
