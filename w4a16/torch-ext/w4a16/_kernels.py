"""Triton bodies of w4a16: the product, for any number of tokens, and the dequantised weight.

The weight is the left operand, y^T = W x^T: on NVIDIA only that one may come from registers, where
its codes are converted, so no weight goes back to shared memory. Sizes come in units of what they
are multiples of, so that Triton knows what they are multiples of without a version for each.

`GROUP` is 32, 64, or 128 for groups of whole blocks, of which `shift` is the binary logarithm.
`ZEROS` is "eight", "integer" or "float".
"""

import triton
import triton.language as tl

from ._shared.jit_planar import (
    PLANAR_BFLOAT16,
    PLANAR_FLOAT16,
    planar_eight,
    planar_unpack4,
    planar_zero,
)
from ._shared.jit_split import split_arrive, split_collect

_SCALARS = ["m", "n8", "k32", "x_stride16", "shift", "groups", "steps", "per", "items", "m_tiles"]


@triton.jit
def _w4a16_load_x(x_at, mask, feature, left, WHOLE: tl.constexpr, PLANE: tl.constexpr):
    if WHOLE:
        return tl.load(x_at + PLANE * 32, mask=mask, other=0.0)
    else:
        return tl.load(x_at + PLANE * 32, mask=mask & (feature + PLANE * 32 < left), other=0.0)


@triton.jit
def _w4a16_correction(zero, x, DTYPE: tl.constexpr):
    # What a zero point that is no integer adds to 8: too fine for the 16 bits of the weight.
    EXPONENT: tl.constexpr = PLANAR_FLOAT16 if DTYPE == tl.float16 else PLANAR_BFLOAT16
    part = (zero - 8.0) * (1.0 / EXPONENT)
    return part[:, None] * tl.sum(x.to(tl.float32), axis=0)[None, :]


@triton.jit
def _w4a16_row(values_ptr, row, n, rows):
    # One group's values for the rows of the tile; groups * n passes 2^31.
    return tl.load(values_ptr + row.to(tl.int64) * n + rows)


@triton.jit
def _w4a16_factor(scale, DTYPE: tl.constexpr, EXPONENT: tl.constexpr):
    # A scale for weights that are scaled before the product. In its own 16 bits this is exact.
    if scale.dtype == DTYPE:
        return (scale * EXPONENT).to(DTYPE)[:, None]
    else:
        return (scale.to(tl.float32) * EXPONENT).to(DTYPE)[:, None]


@triton.jit(do_not_specialize=_SCALARS)
def w4a16_gemm_kernel(
    x_ptr,  # [m, k], rows x_stride16 * 16 elements apart
    w_ptr,  # [steps, n, 32] int16
    s_ptr,  # [groups, n]
    z_ptr,  # [groups, n] int16 or float32, or None
    b_ptr,  # [n] or None
    y_ptr,  # [m, n]
    parts_ptr,  # [2 * programs, BLOCK_M, BLOCK_N] float32 as int32; unused if no tile is shared
    arrivals_ptr,  # [tiles] int32, zero
    m,
    n8,
    k32,
    x_stride16,
    shift,
    groups,
    steps,
    per,
    items,
    m_tiles,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    SCALE_BEFORE: tl.constexpr,
    WHOLE: tl.constexpr,  # k is a multiple of 128
    PREFETCH: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    EXPONENT: tl.constexpr = PLANAR_FLOAT16 if DTYPE == tl.float16 else PLANAR_BFLOAT16
    n = n8 * 8
    k = k32 * 32
    x_stride = x_stride16 * 16
    program = tl.program_id(0)
    rn = tl.arange(0, BLOCK_N)
    rm = tl.arange(0, BLOCK_M)
    word = tl.arange(0, 32)
    eight = planar_eight(DTYPE)
    item = program * per
    end = tl.minimum(item + per, items)
    while item < end:
        tile = item // steps
        begin = item - tile * steps
        stop = tl.minimum(steps, begin + end - item)
        n_tile = tile // m_tiles
        m_tile = tile - n_tile * m_tiles
        on = n_tile * BLOCK_N + rn
        om = m_tile * BLOCK_M + rm
        mask = (om < m)[None, :]
        # Rows past the end repeat the last eight: no mask in the loop, no padding in memory.
        rows = tl.minimum(on // 8, n8 - 1) * 8 + on % 8
        rows = tl.max_contiguous(tl.multiple_of(rows, 8), 8)
        w_offsets = (rows - n_tile * BLOCK_N)[:, None] * 32 + word[None, :]
        w_at = w_ptr + n_tile.to(tl.int64) * (BLOCK_N * 32) + w_offsets
        w_step = n.to(tl.int64) * 32
        x_at = x_ptr + (m_tile * BLOCK_M).to(tl.int64) * x_stride
        x_offsets = rm[None, :] * x_stride + word[:, None]
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        if PREFETCH:
            # Less than 4 bytes a thread cannot be copied ahead: carried one step in registers.
            scale = _w4a16_row(s_ptr, begin >> shift, n, rows)
            if ZEROS != "eight":
                zero = _w4a16_row(z_ptr, begin >> shift, n, rows)
        for step in tl.range(begin, stop, num_stages=STAGES):
            words = tl.load(w_at + step * w_step, eviction_policy="evict_first")
            at = x_at + step * 128 + x_offsets
            left = k - step * 128
            feature = word[:, None]
            x0 = _w4a16_load_x(at, mask, feature, left, WHOLE, 0)
            x1 = _w4a16_load_x(at, mask, feature, left, WHOLE, 1)
            x2 = _w4a16_load_x(at, mask, feature, left, WHOLE, 2)
            x3 = _w4a16_load_x(at, mask, feature, left, WHOLE, 3)
            if GROUP == 128:
                if PREFETCH:
                    ahead = tl.minimum(step + 1, steps - 1) >> shift
                    next_scale = _w4a16_row(s_ptr, ahead, n, rows)
                    if ZEROS != "eight":
                        next_zero = _w4a16_row(z_ptr, ahead, n, rows)
                else:
                    scale = _w4a16_row(s_ptr, step >> shift, n, rows)
                    if ZEROS != "eight":
                        zero = _w4a16_row(z_ptr, step >> shift, n, rows)
                if ZEROS == "integer":
                    addend = planar_zero(zero, DTYPE, ASM)[:, None]
                else:
                    addend = eight
                w0, w1, w2, w3 = planar_unpack4(words, addend, DTYPE, ASM)
                if SCALE_BEFORE:
                    factor = _w4a16_factor(scale, DTYPE, EXPONENT)
                    acc = tl.dot(w0 * factor, x0, acc)
                    acc = tl.dot(w1 * factor, x1, acc)
                    acc = tl.dot(w2 * factor, x2, acc)
                    acc = tl.dot(w3 * factor, x3, acc)
                else:
                    product = tl.dot(w0, x0)
                    product = tl.dot(w1, x1, product)
                    product = tl.dot(w2, x2, product)
                    product = tl.dot(w3, x3, product)
                    if ZEROS == "float":
                        product -= _w4a16_correction(zero, x0, DTYPE)
                        product -= _w4a16_correction(zero, x1, DTYPE)
                        product -= _w4a16_correction(zero, x2, DTYPE)
                        product -= _w4a16_correction(zero, x3, DTYPE)
                    acc += product * scale.to(tl.float32)[:, None]
                if PREFETCH:
                    scale = next_scale
                    if ZEROS != "eight":
                        zero = next_zero
            else:
                # 2 or 4 groups in a block; the absent ones of the last block repeat the last.
                PARTS: tl.constexpr = 128 // GROUP
                last = groups - 1
                row0 = tl.minimum(step * PARTS, last)
                row2 = tl.minimum(step * PARTS + PARTS // 2, last)
                row1 = row0
                row3 = row2
                if PARTS == 4:
                    row1 = tl.minimum(step * PARTS + 1, last)
                    row3 = tl.minimum(step * PARTS + 3, last)
                s0 = _w4a16_row(s_ptr, row0, n, rows)
                s2 = _w4a16_row(s_ptr, row2, n, rows)
                s1 = s0
                s3 = s2
                if PARTS == 4:
                    s1 = _w4a16_row(s_ptr, row1, n, rows)
                    s3 = _w4a16_row(s_ptr, row3, n, rows)
                if ZEROS != "eight":
                    z0 = _w4a16_row(z_ptr, row0, n, rows)
                    z2 = _w4a16_row(z_ptr, row2, n, rows)
                    z1 = z0
                    z3 = z2
                    if PARTS == 4:
                        z1 = _w4a16_row(z_ptr, row1, n, rows)
                        z3 = _w4a16_row(z_ptr, row3, n, rows)
                if ZEROS == "integer":
                    # The planes that are not kept fall away when the compiler looks.
                    a0 = planar_zero(z0, DTYPE, ASM)[:, None]
                    a2 = planar_zero(z2, DTYPE, ASM)[:, None]
                    w0, w1, unused, unused = planar_unpack4(words, a0, DTYPE, ASM)
                    unused, unused, w2, w3 = planar_unpack4(words, a2, DTYPE, ASM)
                    if PARTS == 4:
                        a1 = planar_zero(z1, DTYPE, ASM)[:, None]
                        a3 = planar_zero(z3, DTYPE, ASM)[:, None]
                        unused, w1, unused, unused = planar_unpack4(words, a1, DTYPE, ASM)
                        unused, unused, unused, w3 = planar_unpack4(words, a3, DTYPE, ASM)
                else:
                    w0, w1, w2, w3 = planar_unpack4(words, eight, DTYPE, ASM)
                if SCALE_BEFORE:
                    acc = tl.dot(w0 * _w4a16_factor(s0, DTYPE, EXPONENT), x0, acc)
                    acc = tl.dot(w1 * _w4a16_factor(s1, DTYPE, EXPONENT), x1, acc)
                    acc = tl.dot(w2 * _w4a16_factor(s2, DTYPE, EXPONENT), x2, acc)
                    acc = tl.dot(w3 * _w4a16_factor(s3, DTYPE, EXPONENT), x3, acc)
                else:
                    # One product at a time: each takes as many registers as the sum.
                    product = tl.dot(w0, x0)
                    if PARTS == 4:
                        if ZEROS == "float":
                            product -= _w4a16_correction(z0, x0, DTYPE)
                        acc += product * s0.to(tl.float32)[:, None]
                        product = tl.dot(w1, x1)
                        if ZEROS == "float":
                            product -= _w4a16_correction(z1, x1, DTYPE)
                        acc += product * s1.to(tl.float32)[:, None]
                    else:
                        product = tl.dot(w1, x1, product)
                        if ZEROS == "float":
                            product -= _w4a16_correction(z0, x0, DTYPE)
                            product -= _w4a16_correction(z0, x1, DTYPE)
                        acc += product * s0.to(tl.float32)[:, None]
                    product = tl.dot(w2, x2)
                    if PARTS == 4:
                        if ZEROS == "float":
                            product -= _w4a16_correction(z2, x2, DTYPE)
                        acc += product * s2.to(tl.float32)[:, None]
                        product = tl.dot(w3, x3)
                        if ZEROS == "float":
                            product -= _w4a16_correction(z3, x3, DTYPE)
                        acc += product * s3.to(tl.float32)[:, None]
                    else:
                        product = tl.dot(w3, x3, product)
                        if ZEROS == "float":
                            product -= _w4a16_correction(z2, x2, DTYPE)
                            product -= _w4a16_correction(z2, x3, DTYPE)
                        acc += product * s2.to(tl.float32)[:, None]
        if not SCALE_BEFORE:
            acc = acc * EXPONENT
        # From om, which differs by tile: what does not is kept in registers through the loop.
        y_at = y_ptr + om.to(tl.int64)[None, :] * n + on[:, None]
        y_mask = mask & (on < n)[:, None]
        if stop - begin == steps:
            if b_ptr is not None:
                acc += tl.load(b_ptr + rows).to(tl.float32)[:, None]
            tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=y_mask)
        else:
            SIZE: tl.constexpr = BLOCK_M * BLOCK_N
            UNROLL: tl.constexpr = 4 if BLOCK_M <= 32 else (2 if BLOCK_M <= 64 else 1)
            parts = parts_ptr.to(tl.pointer_type(tl.float32))
            if BLOCK_M <= 16:
                # Few tokens: only those that are there, a line of rows each.
                offsets = rm[None, :] * BLOCK_N + rn[:, None]
                part_mask = mask
            else:
                offsets = rn[:, None] * BLOCK_M + rm[None, :]
                part_mask = None
            if split_arrive(
                acc, tile, steps, per, program, parts, arrivals_ptr, offsets, part_mask, SIZE
            ):
                total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
                total = split_collect(
                    total,
                    tile,
                    steps,
                    per,
                    parts,
                    arrivals_ptr,
                    offsets,
                    part_mask,
                    SIZE,
                    UNROLL,
                )
                if b_ptr is not None:
                    total += tl.load(b_ptr + rows).to(tl.float32)[:, None]
                tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=y_mask)
        item += stop - begin


@triton.jit(do_not_specialize=["first", "rows", "n8", "k32", "shift", "groups", "steps"])
def w4a16_dequantize_kernel(
    w_ptr,  # [steps, n, 32] int16
    s_ptr,  # [groups, n]
    z_ptr,  # [groups, n] int16 or float32, or None
    out_ptr,  # [rows, k]: rows first, first + 1, ... of the weight
    first,
    rows,
    n8,
    k32,
    shift,
    groups,
    steps,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    # Codes are exact in float16; only the product with the scale is rounded.
    EXPONENT: tl.constexpr = PLANAR_FLOAT16
    n = n8 * 8
    k = k32 * 32
    step = tl.program_id(0) % steps
    row = (tl.program_id(0) // steps) * BLOCK_N + tl.arange(0, BLOCK_N)
    word = tl.arange(0, 32)
    mask = row < rows
    on = tl.minimum(first + row, n - 1)
    w_at = w_ptr + (step.to(tl.int64) * n + on)[:, None] * 32 + word[None, :]
    words = tl.load(w_at, eviction_policy="evict_first")
    planes = planar_unpack4(words, planar_eight(tl.float16), tl.float16, ASM)
    out_at = out_ptr + row.to(tl.int64)[:, None] * k + step * 128 + word[None, :]
    for plane in tl.static_range(4):
        if GROUP == 128:
            group = step >> shift
        else:
            group = tl.minimum(step * (128 // GROUP) + plane * 32 // GROUP, groups - 1)
        scale = _w4a16_row(s_ptr, group, n, on).to(tl.float32)
        value = planes[plane].to(tl.float32) * EXPONENT
        if ZEROS != "eight":
            zero = _w4a16_row(z_ptr, group, n, on).to(tl.float32)
            value -= (zero - 8.0)[:, None]
        value = value * scale[:, None]
        inside = mask[:, None] & (step * 128 + plane * 32 < k)
        tl.store(out_at + plane * 32, value.to(DTYPE), mask=inside)
