"""Grids and arguments of the Triton kernels. Allocates nothing, decides nothing.

A `config` is any object with the fields of `config.ForwardConfig` or `config.BackwardConfig`.
Keys of launches hold all that Triton specialises on: see `_shared/launcher.py`.
"""

import torch
import triton.language as tl

from . import _kernels
from ._shared.launcher import launch
from ._shared.rows import Rows

TRITON_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}
_NO_ROWS = Rows(None, 0, 0)
#: Columns of a tile of the blocked backward kernel: one 256-byte line of 16-bit values.
COLUMNS = 128


def forward(
    x: Rows,
    residual: Rows | None,
    period: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    offset: float,
    before_weight: bool,
    y: torch.Tensor,
    total: torch.Tensor | None,
    rstd: torch.Tensor | None,
    total_dtype: torch.dtype,
    rows: int,
    config,
) -> None:
    """Launch the forward kernel on `rows` rows; outputs are contiguous."""
    x_data, x_outer, x_inner = x
    residual_data, residual_outer, residual_inner = residual or _NO_ROWS
    n = x_data.shape[-1]
    key = (
        _kernels.rmsnorm_forward_kernel, x_data.get_device(), n, period == 1,
        x_outer, x_inner, residual_outer, residual_inner,
        x_data.dtype, y.dtype, total_dtype, before_weight, rstd is None, total is None,
        residual_data is not None and residual_data.dtype,
        weight is not None and weight.dtype,
        bias is not None and bias.dtype,
        config.block_m, config.block_n, config.num_warps, config.passes, config.unroll,
    )  # fmt: skip
    launch(
        key,
        _kernels.rmsnorm_forward_kernel,
        -(-rows // config.block_m),
        (x_data, residual_data, weight, bias, y, total, rstd),
        (
            rows, n, period, x_outer, x_inner, residual_outer, residual_inner,
            # An integer would be compiled in: 1 as a constant, for all calls of the key.
            float(eps), float(offset),
        ),
        {
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "PASSES": config.passes,
            "UNROLL": config.unroll,
            "FLAT": period == 1,
            "BEFORE_WEIGHT": before_weight,
            "TOTAL": TRITON_DTYPES[total_dtype],
        },
        config.num_warps,
    )  # fmt: skip


def backward(
    dy: Rows,
    dtotal: Rows | None,
    h: Rows,
    period: int,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    before_weight: bool,
    dx: torch.Tensor | None,
    dweight: torch.Tensor | None,
    dbias: torch.Tensor | None,
    rows: int,
    programs: int,
    config,
) -> None:
    """Launch the backward kernel of rows that one tile covers; sums are `[programs, n]`."""
    dtotal_data, dtotal_outer, dtotal_inner = dtotal or _NO_ROWS
    _kernels.rmsnorm_backward_kernel[(programs,)](
        dy.tensor, dtotal_data, h.tensor, weight, rstd, dx, dweight, dbias,
        rows, h.tensor.shape[-1], period,
        dy.outer, dy.inner, dtotal_outer, dtotal_inner, h.outer, h.inner,
        offset,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        NUM_STAGES=config.num_stages,
        FLAT=period == 1,
        BEFORE_WEIGHT=before_weight,
        num_warps=config.num_warps,
    )  # fmt: skip


def backward_blocked(
    dy: Rows,
    dtotal: Rows | None,
    h: Rows,
    period: int,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    before_weight: bool,
    dx: torch.Tensor | None,
    dweight: torch.Tensor | None,
    dbias: torch.Tensor | None,
    rows: int,
    block_rows: int,
    config,
) -> None:
    """Launch the backward kernel of blocks of rows; sums are `[blocks, n]`, of any dtype."""
    dtotal_data, dtotal_outer, dtotal_inner = dtotal or _NO_ROWS
    n = h.tensor.shape[-1]
    columns = 0 if dweight is None and dbias is None else -(-n // COLUMNS)
    _kernels.rmsnorm_backward_blocked_kernel[(-(-rows // block_rows) * (block_rows + columns),)](
        dy.tensor, dtotal_data, h.tensor, weight, rstd, dx, dweight, dbias,
        rows, n, period, block_rows,
        dy.outer, dy.inner, dtotal_outer, dtotal_inner, h.outer, h.inner,
        offset,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        COLUMNS=COLUMNS,
        ONE_TILE=config.block_n >= n,
        FLAT=period == 1,
        BEFORE_WEIGHT=before_weight,
        num_warps=config.num_warps,
    )  # fmt: skip


def sum_partials(partial: torch.Tensor, out: torch.Tensor, config) -> None:
    """Launch the sum of `[partials, n]` float32 into `[n]` of any dtype."""
    partials, n = partial.shape
    _kernels.rmsnorm_sum_partials_kernel[(-(-n // config.block_n),)](
        partial,
        out,
        partials,
        n,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
    )
