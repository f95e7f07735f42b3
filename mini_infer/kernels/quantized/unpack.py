"""Packed int4 (quantization/packing.py) to numbers by their bits, without a conversion and in the thread that has them;
and pairs of e4m3.

16 bits hold four codes, one of each of the four planes of 32 columns that a chunk of 128 has. A code beside the bits of
128.0 in bfloat16, (word >> 4 * plane) & 15 | 0x4300, is the number 128 + code: two columns an instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK, PLANE = tl.constexpr(128), tl.constexpr(32)  # columns
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def unpacked(words, plane: tl.constexpr, zeros_ptr, rows, k, K: tl.constexpr, GROUP: tl.constexpr, DOT: tl.constexpr):
    """A plane of words [N, PLANE] int16 of the columns from k on, less its zeros or 8: whole numbers, exact in DOT.

    zeros_ptr: None, or [rows, groups] int8.
    """
    if tl.float32 == DOT or _INTERPRETED:
        codes = ((words >> (4 * plane)) & 15).to(DOT)
        if zeros_ptr is None:
            codes -= 8
    else:
        BRAIN: tl.constexpr = tl.bfloat16 == DOT
        ONE: tl.constexpr = "0x43004300" if BRAIN else "0x64006400"  # 128, of float16 1024
        LESS: tl.constexpr = "0xC308C308" if BRAIN else "0xE408E408"  # - 128 - 8, - 1024 - 8
        UNIT: tl.constexpr = "0x3F803F80" if BRAIN else "0x3C003C00"
        OF: tl.constexpr = "bf16x2" if BRAIN else "f16x2"
        SUBTRACT: tl.constexpr = (
            f"mov.b32 u, {UNIT}; mov.b32 v, {LESS}; fma.rn.{OF} t, t, u, v;" if zeros_ptr is None else ""
        )
        codes = tl.inline_asm_elementwise(
            f"""{{ .reg .b32 t, u, v; shr.b32 t, $1, {4 * plane}; lop3.b32 t, t, 0x000F000F, {ONE}, 0xEA;
            {SUBTRACT} mov.b32 $0, t; }}""",
            "=r,r", [words], tl.int16, True, 2,
        ).to(DOT, bitcast=True)  # fmt: skip
        if zeros_ptr is not None:
            codes -= 128 if BRAIN else 1024
    if zeros_ptr is not None:
        GROUPS: tl.constexpr = 1 if GROUP is None else K // GROUP
        group = 0 if GROUP is None else k // GROUP
        codes -= tl.load(zeros_ptr + rows * GROUPS + group).to(DOT)[:, None]
    return codes


@triton.jit
def unpacked_planes(
    words, first: tl.constexpr, COUNT: tl.constexpr, zeros_ptr, rows, k, K: tl.constexpr, GROUP: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """As `unpacked`, 1, 2 or 4 planes beside each other, [N, COUNT * PLANE]."""
    w = unpacked(words, first, zeros_ptr, rows, k, K, GROUP, DOT)
    if COUNT > 1:
        w = _beside(w, unpacked(words, first + 1, zeros_ptr, rows, k + PLANE, K, GROUP, DOT))
    if COUNT > 2:
        third = unpacked(words, first + 2, zeros_ptr, rows, k + 2 * PLANE, K, GROUP, DOT)
        w = _beside(w, _beside(third, unpacked(words, first + 3, zeros_ptr, rows, k + 3 * PLANE, K, GROUP, DOT)))
    return w


@triton.jit
def _beside(left, right):
    """Two [N, C] -> [N, 2 C]; on a GPU every number stays where it is."""
    both = tl.permute(tl.join(left, right), (0, 2, 1))
    return tl.reshape(both, [left.shape[0], 2 * left.shape[1]])


@triton.jit
def fp8_pairs(pairs):
    """int16 of two e4m3 -> the first and the second of each, float16, which holds them.

    32 bits, which are neighbours in a dot's K, become one operand of two such neighbours and another: no byte is
    exchanged between threads, and all of it takes three instructions.
    """
    if _INTERPRETED:
        first = pairs.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        second = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        first, second = tl.inline_asm_elementwise(
            """{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t;
            cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }""",
            "=r,=r,r", [pairs], (tl.float16, tl.float16), True, 2,
        )  # fmt: skip
    return first, second


@triton.jit
def scaled_sum(part, scales, column: tl.constexpr, sums, GROUP: tl.constexpr):
    """sums plus the part of K that begins `column` columns behind the first of `scales` (`group_scales`), times its
    scale; where GROUP is None times 1.

    Tensor cores do not add to `sums` themselves, and Triton would have them do a mere addition. Every step would then
    begin to overwrite the registers with the weights of the one before, for which Triton 3.6 does not wait on Hopper
    (wgmma reads them as it runs).
    """
    if GROUP is None:
        scale = tl.full([part.shape[0], 1], 1.0, tl.float32)
    else:
        scale = scales[column // GROUP].to(tl.float32)[:, None]
    return tl.fma(part, tl.broadcast_to(scale, part.shape), sums)


@triton.jit
def waited(sums):
    """sums, of a loop whose weights are made in registers: a use that tensor cores have to finish for, and no
    instruction. Without it the next step may overwrite weights while wgmma reads them (Triton 3.6 on Hopper)."""
    if not _INTERPRETED:
        sums = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [sums], tl.float32, True, 1)
    return sums


@triton.jit
def group_scales(ptr, w_rows, k, K: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """Scales of the groups of COLUMNS from k on, beyond the end those of the last, a tuple; where GROUP is None, an
    empty one."""
    found = ()
    if GROUP is not None:
        for start in tl.static_range(0, COLUMNS, GROUP):
            group = tl.minimum((k + start) // GROUP, K // GROUP - 1)
            found += (tl.load(ptr + w_rows * (K // GROUP) + group),)  # type: ignore[assignment]
    return found
