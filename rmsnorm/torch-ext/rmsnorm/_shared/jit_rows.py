# Copied from shared/jit_rows.py by scripts/sync_shared.py: edit it there.
"""Triton helpers for rows that two strides describe (see rows.py)."""

import triton
import triton.language as tl


@triton.jit
def row_offsets(row, period, stride_outer, stride_inner, FLAT: tl.constexpr):
    # 64-bit before it meets a stride: rows * stride passes 2^31 in real workloads.
    row = row.to(tl.int64)
    if FLAT:
        return row * stride_outer
    else:
        outer = row // period
        return outer * stride_outer + (row - outer * period) * stride_inner
