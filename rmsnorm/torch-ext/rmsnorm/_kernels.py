"""Triton bodies of RMSNorm: forward, backward of the rows, backward of the weight.

Rows come with two strides and a period (`_shared/rows.py`); columns are always dense. Outputs
are contiguous. Optional pointers are None, which Triton turns into a compile-time constant.
Scalars arrive as Python floats, which Triton takes as float32.
"""

import triton
import triton.language as tl

from ._shared.jit_rows import row_offsets


@triton.jit
def _columns(ptr, cols, mask):
    """Load a vector of columns; every program reads it, so it stays in cache."""
    return tl.load(ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last")


@triton.jit
def _inverse_rms(sum_of_squares, n_cols, eps):
    """Return 1 / sqrt(mean + eps) to about an ulp: rsqrt alone is off by two.

    The root of the quotient halves the quotient's error; a mean so small that its inverse would
    overflow is taken 2^64 times, which is exact.
    """
    n = tl.zeros_like(sum_of_squares) + n_cols
    mean = tl.div_rn(sum_of_squares, n) + eps
    small = mean < 2.0**-100
    inverse = tl.div_rn(tl.zeros_like(mean) + 1.0, tl.where(small, mean * 2.0**64, mean))
    return tl.sqrt_rn(inverse) * tl.where(small, 2.0**32, 1.0)


@triton.jit
def _add_residual(
    x, residual_row, at, mask, total_ptr, out_row, TOTAL: tl.constexpr, POLICY: tl.constexpr
):
    """Return x + residual in float32, rounded to the dtype of the sum and stored if asked."""
    h = x.to(tl.float32)
    if residual_row is not None:
        r = tl.load(residual_row[:, None] + at, mask=mask, other=0.0, eviction_policy=POLICY)
        total = (h + r.to(tl.float32)).to(TOTAL)
        if total_ptr is not None:
            tl.store(total_ptr + out_row[:, None] + at, total, mask=mask)
        h = total.to(tl.float32)
    return h


@triton.jit
def _scale(h, rstd, w, b, offset, BEFORE_WEIGHT: tl.constexpr, TOTAL: tl.constexpr):
    """Normalise rows h [M, N] and apply weight and bias [N], in float32."""
    y = h * rstd[:, None]
    if BEFORE_WEIGHT:
        y = y.to(TOTAL).to(tl.float32)
    if w is not None:
        # The offset is added in float32: 1 + w would lose small w in 16 bits.
        y *= (w.to(tl.float32) + offset)[None, :]
    if b is not None:
        y += b.to(tl.float32)[None, :]
    return y


@triton.jit(do_not_specialize=["n_rows", "period"])
def rmsnorm_forward_kernel(
    x_ptr,  # [n_rows, n_cols] by strides
    residual_ptr,  # [n_rows, n_cols] by strides, or None
    weight_ptr,  # [n_cols] or None
    bias_ptr,  # [n_cols] or None
    y_ptr,  # [n_rows, n_cols]
    total_ptr,  # [n_rows, n_cols] x + residual, or None
    rstd_ptr,  # [n_rows] float32, or None
    n_rows, n_cols, period,
    stride_xo, stride_xi, stride_ro, stride_ri,
    eps, offset,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PASSES: tl.constexpr,  # 1: BLOCK_N covers a row, which stays in registers; 2: read again
    UNROLL: tl.constexpr,  # pieces of a row whose loads are issued together
    FLAT: tl.constexpr,
    BEFORE_WEIGHT: tl.constexpr,
    TOTAL: tl.constexpr,  # dtype of what is normalised: of x, or of x + residual
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = row < n_rows
    cols = tl.arange(0, BLOCK_N)
    x_row = x_ptr + row_offsets(row, period, stride_xo, stride_xi, FLAT)
    out_row = row.to(tl.int64) * n_cols
    residual_row = None
    if residual_ptr is not None:
        residual_row = residual_ptr + row_offsets(row, period, stride_ro, stride_ri, FLAT)

    if PASSES == 1:
        mask_n = cols < n_cols
        mask = mask_m[:, None] & mask_n[None, :]
        at = cols[None, :]
        x = tl.load(x_row[:, None] + at, mask=mask, other=0.0, eviction_policy="evict_first")
        # Loaded before the reduction, so that they arrive with the rows and not after.
        w = None if weight_ptr is None else _columns(weight_ptr, cols, mask_n)
        b = None if bias_ptr is None else _columns(bias_ptr, cols, mask_n)
        h = _add_residual(x, residual_row, at, mask, total_ptr, out_row, TOTAL, "evict_first")
        rstd = _inverse_rms(tl.sum(h * h, axis=1), n_cols, eps)
        y = _scale(h, rstd, w, b, offset, BEFORE_WEIGHT, TOTAL)
        tl.store(y_ptr + out_row[:, None] + at, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        squares = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in tl.range(0, n_cols, BLOCK_N, loop_unroll_factor=UNROLL):
            mask = mask_m[:, None] & (start + cols < n_cols)[None, :]
            at = start + cols[None, :]
            # Kept in cache for the second pass, which is the last to read it.
            x = tl.load(x_row[:, None] + at, mask=mask, other=0.0, eviction_policy="evict_last")
            h = _add_residual(x, residual_row, at, mask, None, out_row, TOTAL, "evict_last")
            squares += h * h
        rstd = _inverse_rms(tl.sum(squares, axis=1), n_cols, eps)
        for start in tl.range(0, n_cols, BLOCK_N, loop_unroll_factor=UNROLL):
            mask_n = start + cols < n_cols
            mask = mask_m[:, None] & mask_n[None, :]
            at = start + cols[None, :]
            x = tl.load(x_row[:, None] + at, mask=mask, other=0.0, eviction_policy="evict_first")
            # Added again, not read back: a program's own stores need not be visible to it yet.
            h = _add_residual(x, residual_row, at, mask, total_ptr, out_row, TOTAL, "evict_first")
            w = None if weight_ptr is None else _columns(weight_ptr, start + cols, mask_n)
            b = None if bias_ptr is None else _columns(bias_ptr, start + cols, mask_n)
            y = _scale(h, rstd, w, b, offset, BEFORE_WEIGHT, TOTAL)
            tl.store(y_ptr + out_row[:, None] + at, y.to(y_ptr.dtype.element_ty), mask=mask)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd, mask=mask_m)


@triton.jit
def _weight_factor(x_hat, BEFORE_WEIGHT: tl.constexpr, H: tl.constexpr):
    """Return what the weight multiplied in y: x_hat, as it was rounded then."""
    if BEFORE_WEIGHT:
        return x_hat.to(H).to(tl.float32)
    else:
        return x_hat


@triton.jit(do_not_specialize=["n_rows", "period"])
def rmsnorm_backward_kernel(
    dy_ptr,  # [n_rows, n_cols] by strides
    dtotal_ptr,  # [n_rows, n_cols] by strides, or None: gradient that reaches x + residual itself
    h_ptr,  # [n_rows, n_cols] by strides: what was normalised
    weight_ptr,  # [n_cols] or None
    rstd_ptr,  # [n_rows] float32
    dx_ptr,  # [n_rows, n_cols] or None
    dweight_ptr,  # [programs, n_cols] sums over a program's rows, or None
    dbias_ptr,  # [programs, n_cols], or None
    n_rows, n_cols, period,
    stride_yo, stride_yi, stride_to, stride_ti, stride_ho, stride_hi,
    offset,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # covers a row
    NUM_STAGES: tl.constexpr,
    FLAT: tl.constexpr,
    BEFORE_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Rows pid, pid + programs, ...: dx, and the program's share of dweight and dbias."""
    H: tl.constexpr = h_ptr.dtype.element_ty
    cols = tl.arange(0, BLOCK_N)
    mask_n = cols < n_cols
    at = cols[None, :]
    if dweight_ptr is not None:
        dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if dbias_ptr is not None:
        dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if weight_ptr is not None:
        w = (_columns(weight_ptr, cols, mask_n).to(tl.float32) + offset)[None, :]
    first = tl.program_id(0) * BLOCK_M
    step = tl.num_programs(0) * BLOCK_M
    for start in tl.range(first, n_rows, step, num_stages=NUM_STAGES):
        row = start + tl.arange(0, BLOCK_M)
        mask_m = row < n_rows
        mask = mask_m[:, None] & mask_n[None, :]
        h_row = h_ptr + row_offsets(row, period, stride_ho, stride_hi, FLAT)
        dy_row = dy_ptr + row_offsets(row, period, stride_yo, stride_yi, FLAT)
        h = tl.load(h_row[:, None] + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_row[:, None] + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=mask_m, other=0.0)
        x_hat = h * rstd[:, None]
        if dx_ptr is not None:
            w_dy = dy
            if weight_ptr is not None:
                w_dy = dy * w
            mean = tl.sum(x_hat * w_dy, axis=1) / n_cols
            dx = (w_dy - x_hat * mean[:, None]) * rstd[:, None]
            if dtotal_ptr is not None:
                dtotal_row = dtotal_ptr + row_offsets(row, period, stride_to, stride_ti, FLAT)
                dx += tl.load(dtotal_row[:, None] + at, mask=mask, other=0.0).to(tl.float32)
            dx_row = dx_ptr + row.to(tl.int64) * n_cols
            tl.store(dx_row[:, None] + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if dweight_ptr is not None:
            dweight += dy * _weight_factor(x_hat, BEFORE_WEIGHT, H)
        if dbias_ptr is not None:
            dbias += dy
    partial = tl.program_id(0).to(tl.int64) * n_cols + cols
    if dweight_ptr is not None:
        total = tl.sum(dweight, axis=0).to(dweight_ptr.dtype.element_ty)
        tl.store(dweight_ptr + partial, total, mask=mask_n)
    if dbias_ptr is not None:
        total = tl.sum(dbias, axis=0).to(dbias_ptr.dtype.element_ty)
        tl.store(dbias_ptr + partial, total, mask=mask_n)


@triton.jit
def _load_gradient(h_row, dy_row, weight_ptr, at, n_cols, offset):
    """Return part of one row of h, and of dy * (weight + offset), in float32."""
    mask = at < n_cols
    h = tl.load(h_row + at, mask=mask, other=0.0)
    dy = tl.load(dy_row + at, mask=mask, other=0.0)
    if weight_ptr is not None:
        w = _columns(weight_ptr, at, mask)
        return h.to(tl.float32), dy.to(tl.float32) * (w.to(tl.float32) + offset)
    else:
        return h.to(tl.float32), dy.to(tl.float32)


@triton.jit
def _store_dx(dx_row, dtotal_row, h, w_dy, rstd, mean, at, n_cols):
    """Store part of one row of dx, given the mean of x_hat * w_dy over the row."""
    dx = (w_dy - h * rstd * mean) * rstd
    if dtotal_row is not None:
        dx += tl.load(dtotal_row + at, mask=at < n_cols, other=0.0).to(tl.float32)
    tl.store(dx_row + at, dx.to(dx_row.dtype.element_ty), mask=at < n_cols)


@triton.jit(do_not_specialize=["n_rows", "period", "block_rows"])
def rmsnorm_backward_blocked_kernel(
    dy_ptr,  # [n_rows, n_cols] by strides
    dtotal_ptr,  # [n_rows, n_cols] by strides, or None
    h_ptr,  # [n_rows, n_cols] by strides
    weight_ptr,  # [n_cols] or None
    rstd_ptr,  # [n_rows] float32
    dx_ptr,  # [n_rows, n_cols] or None
    dweight_ptr,  # [blocks, n_cols] sums over the rows of a block, or None
    dbias_ptr,  # [blocks, n_cols], or None
    n_rows, n_cols, period, block_rows,
    stride_yo, stride_yi, stride_to, stride_ti, stride_ho, stride_hi,
    offset,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    ONE_TILE: tl.constexpr,  # BLOCK_N covers a row
    FLAT: tl.constexpr,
    BEFORE_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Rows too wide for the registers of one program, or too few to fill the device.

    Rows come in blocks. A block has one program a row, for dx, then one a tile of COLUMNS
    columns, for the sums over its rows: those find the block in L2, where dx has read it.
    """
    H: tl.constexpr = h_ptr.dtype.element_ty
    programs = block_rows
    if dweight_ptr is not None or dbias_ptr is not None:
        programs += tl.cdiv(n_cols, COLUMNS)
    block = tl.program_id(0) // programs
    member = tl.program_id(0) - block * programs
    first = block * block_rows
    last = tl.minimum(first + block_rows, n_rows)
    if member < block_rows:
        row = first + member
        if dx_ptr is not None and row < last:
            cols = tl.arange(0, BLOCK_N)
            h_row = h_ptr + row_offsets(row, period, stride_ho, stride_hi, FLAT)
            dy_row = dy_ptr + row_offsets(row, period, stride_yo, stride_yi, FLAT)
            dx_row = dx_ptr + row.to(tl.int64) * n_cols
            dtotal_row = None
            if dtotal_ptr is not None:
                dtotal_row = dtotal_ptr + row_offsets(row, period, stride_to, stride_ti, FLAT)
            rstd = tl.load(rstd_ptr + row)
            if ONE_TILE:
                h, w_dy = _load_gradient(h_row, dy_row, weight_ptr, cols, n_cols, offset)
                mean = tl.sum(h * rstd * w_dy) / n_cols
                _store_dx(dx_row, dtotal_row, h, w_dy, rstd, mean, cols, n_cols)
            else:
                products = tl.zeros((BLOCK_N,), tl.float32)
                for start in range(0, n_cols, BLOCK_N):
                    at = start + cols
                    h, w_dy = _load_gradient(h_row, dy_row, weight_ptr, at, n_cols, offset)
                    products += h * rstd * w_dy
                mean = tl.sum(products) / n_cols
                for start in range(0, n_cols, BLOCK_N):
                    at = start + cols
                    h, w_dy = _load_gradient(h_row, dy_row, weight_ptr, at, n_cols, offset)
                    _store_dx(dx_row, dtotal_row, h, w_dy, rstd, mean, at, n_cols)
    else:
        cols = (member - block_rows) * COLUMNS + tl.arange(0, COLUMNS)
        mask_n = cols < n_cols
        at = cols[None, :]
        dweight = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
        dbias = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
        for start in range(first, last, BLOCK_M):
            row = start + tl.arange(0, BLOCK_M)
            mask_m = row < last
            mask = mask_m[:, None] & mask_n[None, :]
            dy_row = dy_ptr + row_offsets(row, period, stride_yo, stride_yi, FLAT)
            dy = tl.load(dy_row[:, None] + at, mask=mask, other=0.0).to(tl.float32)
            if dweight_ptr is not None:
                h_row = h_ptr + row_offsets(row, period, stride_ho, stride_hi, FLAT)
                h = tl.load(h_row[:, None] + at, mask=mask, other=0.0).to(tl.float32)
                rstd = tl.load(rstd_ptr + row, mask=mask_m, other=0.0)
                dweight += dy * _weight_factor(h * rstd[:, None], BEFORE_WEIGHT, H)
            if dbias_ptr is not None:
                dbias += dy
        out = block.to(tl.int64) * n_cols + cols
        if dweight_ptr is not None:
            total = tl.sum(dweight, axis=0).to(dweight_ptr.dtype.element_ty)
            tl.store(dweight_ptr + out, total, mask=mask_n)
        if dbias_ptr is not None:
            total = tl.sum(dbias, axis=0).to(dbias_ptr.dtype.element_ty)
            tl.store(dbias_ptr + out, total, mask=mask_n)


@triton.jit(do_not_specialize=["n_partials"])
def rmsnorm_sum_partials_kernel(
    partial_ptr,  # [n_partials, n_cols] float32
    out_ptr,  # [n_cols]
    n_partials, n_cols,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum over partials in a fixed order: the same bits at every call."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = cols < n_cols
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, n_partials, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        mask = (row < n_partials)[:, None] & mask_n[None, :]
        at = row.to(tl.int64)[:, None] * n_cols + cols[None, :]
        total += tl.load(partial_ptr + at, mask=mask, other=0.0)
    out = tl.sum(total, axis=0)
    tl.store(out_ptr + cols, out.to(out_ptr.dtype.element_ty), mask=mask_n)
