"""Products of packed int4 weights by 8-bit integer products (dp4a), for the multiply-adds of gemv_kernels.py.

x becomes fixed-point numbers of 16 bits, whose high and low bytes are multiplied like int8. A unit is 1 / 32,767 of the
largest of 32 columns, which changes their sum some 20 times less than rounding the result to bfloat16 does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mini_infer.kernels.quantized.unpack import CHUNK, PLANE

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def group_values(ptr, w_rows, start, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_W: tl.constexpr):
    """Scales or zeros of the groups of BLOCK_W words from `start` on: for each group of a chunk one of a tuple,
    [rows, BLOCK_W / 4], as four words are of one chunk. Where GROUP is None, and the scale is not theirs, of all."""
    QUADS: tl.constexpr = BLOCK_W // 4
    chunks = (start // 4 + tl.arange(0, QUADS)) // (PLANE // 8) * CHUNK
    there = tl.broadcast_to((chunks < K)[None, :], [w_rows.shape[0], QUADS])
    GROUPS: tl.constexpr = 1 if GROUP is None else K // GROUP
    SHARED: tl.constexpr = CHUNK if GROUP is None or GROUP > CHUNK else GROUP
    found = ()
    for column in tl.static_range(0, CHUNK, SHARED):
        at = tl.broadcast_to((w_rows * GROUPS)[:, None], [w_rows.shape[0], QUADS])
        if GROUP is not None:
            at += ((chunks + column) // GROUP)[None, :]
        found += (tl.load(ptr + at, mask=there, other=0),)  # type: ignore[assignment]
    return found


@triton.jit
def _fixed_point(x_ptrs, left, DTYPE: tl.constexpr, BLOCK_W: tl.constexpr):
    """Of the columns of BLOCK_W words: four words of bytes, the low and the high ones of planes 0 and 2 and those of
    1 and 3, and the unit of each four words, [BLOCK_W / 4]: the largest of their 32 columns is 32,767 units. Where a
    column is not finite, the unit is not either, and so no result of theirs."""
    QUADS: tl.constexpr = BLOCK_W // 4
    numbers = ()
    largest = tl.zeros([BLOCK_W], tl.float32)
    for plane in tl.static_range(4):
        pairs = tl.load(x_ptrs + PLANE // 2 * plane, mask=left, other=0)
        first = pairs.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        second = (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        largest = _larger(largest, _larger(tl.abs(first), tl.abs(second)))
        numbers += (first, second)  # type: ignore[assignment]
    for _ in tl.static_range(2):
        one, other = tl.split(tl.reshape(largest, [largest.shape[0] // 2, 2]))
        largest = _larger(one, other)
    largest = _larger(largest, tl.full([QUADS], 2.0**-100, tl.float32))  # which no product feels, with an inverse
    inverse = tl.broadcast_to((32767.0 / largest)[:, None], [QUADS, 4])
    inverse = tl.reshape(inverse, [BLOCK_W])
    digits = ()
    for plane in tl.static_range(2):
        digits += _bytes(
            _whole(numbers[2 * plane], inverse), _whole(numbers[2 * plane + 1], inverse),
            _whole(numbers[2 * plane + 4], inverse), _whole(numbers[2 * plane + 5], inverse),
        )  # fmt: skip
    return digits, largest / 32767.0


@triton.jit
def _larger(a, b):
    """NaN where either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _whole(x, inverse):
    """x in units, rounded, in the low 16 bits."""
    return tl.fma(x, inverse, tl.full(x.shape, 12582912.0, tl.float32)).to(tl.int32, bitcast=True)  # 1.5 * 2^23


@triton.jit
def _bytes(a, b, c, d):
    """Of the low 16 bits of four words the low and the high bytes, each a word, in the order a, c, b, d."""
    if _INTERPRETED:
        low = (a & 255) | ((c & 255) << 8) | ((b & 255) << 16) | ((d & 255) << 24)
        high = ((a >> 8) & 255) | (c & 0xFF00) | ((b & 0xFF00) << 8) | ((d & 0xFF00) << 16)
    else:
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 p, q; prmt.b32 p, $2, $4, 0x5410; prmt.b32 q, $3, $5, 0x5410;
            prmt.b32 $0, p, q, 0x6420; prmt.b32 $1, p, q, 0x7531; }""",
            "=r,=r,r,r,r,r", [a, b, c, d], (tl.int32, tl.int32), True, 1,
        )  # fmt: skip
    return low, high


@triton.jit
def dot4(w, x, sums, UNSIGNED: tl.constexpr = False):
    """int32 words of four int8 each, or of uint8 those of x: sums plus their four products."""
    if _INTERPRETED:
        for i in tl.static_range(4):
            digit = (x >> 8 * i) & 255 if UNSIGNED else x << (24 - 8 * i) >> 24
            sums += (w << (24 - 8 * i) >> 24) * digit
    else:
        OF: tl.constexpr = "s32.u32" if UNSIGNED else "s32.s32"
        sums = tl.inline_asm_elementwise(f"dp4a.{OF} $0, $1, $2, $3;", "=r,r,r,r", [w, x, sums], tl.int32, True, 1)
    return sums


@triton.jit
def _byte_products(words, digits, low, high, less, ODD: tl.constexpr, SHARED: tl.constexpr, PLACE: tl.constexpr):
    """low and high plus products of x's bytes and the codes of planes ODD and ODD + 2, which are bytes of a word; less
    plus those of ones. Of these planes, such as are in the chunk's PLACE-th group, which SHARED make up."""
    FIRST: tl.constexpr = 0x00010001 if ODD // SHARED == PLACE else 0
    SECOND: tl.constexpr = 0x01000100 if (ODD + 2) // SHARED == PLACE else 0
    if FIRST + SECOND != 0:
        x_low, x_high = digits[2 * ODD], digits[2 * ODD + 1]
        codes = (words >> (4 * ODD)) & (15 * (FIRST + SECOND))
        low = dot4(codes, tl.broadcast_to(x_low[None, :], codes.shape), low, True)
        high = dot4(codes, tl.broadcast_to(x_high[None, :], codes.shape), high)
        ones = tl.full(less.shape, FIRST + SECOND, tl.int32)
        less = dot4(ones, x_low, less + dot4(ones, x_high, tl.zeros_like(less)) * 256, True)
    return low, high, less


@triton.jit
def add_int4_products(
    sums, words, scales, zeros, x_ptr, stride_x, start, T: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """sums [BLOCK_N, BLOCK_W / 4] of each row of x, plus products of words of eight codes: nibble `plane` of the halves
    of word w of a chunk is of the columns PLANE * plane + 2 * w and the next.

    scales, zeros: of `group_values`, () where there are none.
    """
    QUADS: tl.constexpr = BLOCK_W // 4  # of words, which have one group and one thread
    SHARED: tl.constexpr = CHUNK // PLANE if GROUP is None or GROUP > CHUNK else GROUP // PLANE  # planes a group
    here = start + tl.arange(0, BLOCK_W)
    x_ptrs = x_ptr + here // (PLANE // 2) * (CHUNK // 2) + here % (PLANE // 2)
    new = ()
    for t in tl.static_range(T):
        digits, unit = _fixed_point(x_ptrs + t * stride_x, here < K // 8, DTYPE, BLOCK_W)
        y = sums[t]
        for begin in tl.static_range(0, CHUNK // PLANE, SHARED):
            low = tl.zeros([BLOCK_N, BLOCK_W], tl.int32)
            high = low
            less = tl.zeros([BLOCK_W], tl.int32)
            for odd in tl.static_range(2):
                low, high, less = _byte_products(words, digits, low, high, less, odd, SHARED, begin // SHARED)
            low = tl.sum(tl.reshape(low, [BLOCK_N, QUADS, 4]), axis=2)
            high = tl.sum(tl.reshape(high, [BLOCK_N, QUADS, 4]), axis=2)
            less = tl.sum(tl.reshape(less, [QUADS, 4]), axis=1)[None, :]
            if len(zeros) == 0:
                part = high * 256 + (low - less * 8)
            else:
                part = high * 256 + (low - less * zeros[begin // SHARED].to(tl.int32))
            scale = tl.broadcast_to(unit[None, :], [BLOCK_N, QUADS])
            if GROUP is not None:
                scale *= scales[begin // SHARED].to(tl.float32)
            y += scale * part.to(tl.float32)
        new += (y,)  # type: ignore[assignment]
    return new
