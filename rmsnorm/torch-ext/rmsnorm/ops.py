"""The operators: registered for autograd and torch.compile, called directly where neither is on.

`forward` and `backward` are the implementations, for any device. The registered operators add
what they need: shapes under fake tensors and gradients. Optional results are empty tensors
there, because an operator's schema cannot say "maybe a tensor".
"""

import torch
from torch import Tensor

from . import config, reference
from ._ops import add_op_namespace_prefix
from ._shared import table
from ._shared.device import device_guard, has_triton, multiprocessor_count, uses_triton
from ._shared.rows import as_rows

if has_triton():
    from . import launch


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    before_weight: bool,
    out_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
    need_total: bool,
    need_rstd: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return y, x + residual and 1 / rms, the last two None unless needed."""
    n = x.shape[-1]
    rows = x.numel() // n
    if rows and not uses_triton(x):
        return reference.forward(
            x, residual, weight, bias, eps, offset, before_weight, out_dtype, residual_dtype
        )
    y = _contiguous_like(x, out_dtype)
    total = _contiguous_like(x, residual_dtype) if need_total else None
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32) if need_rstd else None
    if not rows:
        return y, total, rstd
    period, (x_rows, residual_rows) = as_rows(x, residual)
    tile = config.forward_config(table.row_bucket(rows), n, x.dtype, residual is not None, x.device)
    with device_guard(x):
        launch.forward(
            x_rows,
            residual_rows,
            period,
            _dense(weight),
            _dense(bias),
            eps,
            offset,
            before_weight,
            y,
            total,
            rstd,
            x.dtype if residual_dtype is None else residual_dtype,
            rows,
            tile,
        )
    return y, total, rstd


def backward(
    dy: Tensor,
    dtotal: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    before_weight: bool,
    dx_dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    need_dx: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dx, dweight and dbias, each None unless needed (a dtype says so for the last two)."""
    n = h.shape[-1]
    rows = h.numel() // n

    def empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype | None) -> Tensor | None:
        return None if dtype is None else torch.empty(shape, dtype=dtype, device=h.device)

    dweight, dbias = empty((n,), weight_dtype), empty((n,), bias_dtype)
    if not rows:
        for gradient in (dweight, dbias):
            if gradient is not None:
                gradient.zero_()
        return empty(h.shape, dx_dtype if need_dx else None), dweight, dbias
    if not uses_triton(h):
        dx, dweight32, dbias32 = reference.backward(
            dy, dtotal, h, weight, rstd, offset, before_weight, dx_dtype
        )
        return (
            dx if need_dx else None,
            None if weight_dtype is None else dweight32.to(weight_dtype),
            None if bias_dtype is None else dbias32.to(bias_dtype),
        )

    dx = empty(h.shape, dx_dtype if need_dx else None)
    period, (dy_rows, dtotal_rows, h_rows) = as_rows(dy, dtotal, h)
    weight = _dense(weight)
    tile = config.backward_config(table.row_bucket(rows), n, h.dtype, h.device)
    arguments = (
        dy_rows, dtotal_rows, h_rows, period, weight, rstd, offset, before_weight, dx
    )  # fmt: skip
    if tile.programs:
        kernel = launch.backward
        split = sums = config.backward_programs(tile, rows, multiprocessor_count(h.device))
        if weight_dtype is None and bias_dtype is None:
            split = -(-rows // tile.block_m)  # no sums to keep: a program a tile
    else:
        kernel = launch.backward_blocked
        split = config.backward_block(rows, n, h.dtype.itemsize)
        sums = -(-rows // split)
    with device_guard(h):
        if sums == 1:
            kernel(*arguments, dweight, dbias, rows, split, tile)
        else:
            dweight_sums = empty((sums, n), None if dweight is None else torch.float32)
            dbias_sums = empty((sums, n), None if dbias is None else torch.float32)
            kernel(*arguments, dweight_sums, dbias_sums, rows, split, tile)
            for partial, gradient in ((dweight_sums, dweight), (dbias_sums, dbias)):
                if gradient is not None:
                    launch.sum_partials(partial, gradient, config.SUM_TILE)
    return dx, dweight, dbias


def _contiguous_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    # The shortest call costs half of the others, at a microsecond each.
    if dtype is x.dtype and x.is_contiguous():
        return torch.empty_like(x)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _dense(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


def _empty_for_none(like: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0) if tensor is None else tensor for tensor in tensors)


@torch.library.custom_op(add_op_namespace_prefix("rmsnorm"), mutates_args=())
def rmsnorm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    before_weight: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return y and 1 / rms."""
    y, _, rstd = forward(
        x, None, weight, bias, eps, offset, before_weight, out_dtype, None, False, True
    )
    return y, rstd


@torch.library.register_fake(add_op_namespace_prefix("rmsnorm"))
def _(x, weight, bias, eps, offset, before_weight, out_dtype):
    return (
        torch.empty(x.shape, dtype=out_dtype, device=x.device),
        torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device),
    )


@torch.library.custom_op(add_op_namespace_prefix("add_rmsnorm"), mutates_args=())
def add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    before_weight: bool,
    out_dtype: torch.dtype,
    residual_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, x + residual and 1 / rms."""
    return forward(
        x, residual, weight, bias, eps, offset, before_weight, out_dtype, residual_dtype, True, True
    )


@torch.library.register_fake(add_op_namespace_prefix("add_rmsnorm"))
def _(x, residual, weight, bias, eps, offset, before_weight, out_dtype, residual_dtype):
    return (
        torch.empty(x.shape, dtype=out_dtype, device=x.device),
        torch.empty(x.shape, dtype=residual_dtype, device=x.device),
        torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device),
    )


@torch.library.custom_op(add_op_namespace_prefix("rmsnorm_backward"), mutates_args=())
def rmsnorm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    before_weight: bool,
    dx_dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    need_dx: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, dweight and dbias, empty where not needed."""
    gradients = backward(
        dy, dtotal, h, weight, rstd, offset, before_weight, dx_dtype, weight_dtype, bias_dtype,
        need_dx,
    )  # fmt: skip
    return _empty_for_none(h, *gradients)


@torch.library.register_fake(add_op_namespace_prefix("rmsnorm_backward"))
def _(
    dy, dtotal, h, weight, rstd, offset, before_weight, dx_dtype, weight_dtype, bias_dtype, need_dx
):
    n = h.shape[-1]
    return _empty_for_none(
        h,
        torch.empty(h.shape, dtype=dx_dtype, device=h.device) if need_dx else None,
        None if weight_dtype is None else torch.empty(n, dtype=weight_dtype, device=h.device),
        None if bias_dtype is None else torch.empty(n, dtype=bias_dtype, device=h.device),
    )


def _gradients(ctx, dy, dtotal, h, weight, rstd, dx_dtype, need_dx, need_weight, need_bias):
    """Call the backward operator and return dx, dweight, dbias, None where not needed."""
    if dy is None:  # only x + residual was used downstream
        dy = torch.zeros_like(h, dtype=ctx.out_dtype)
    dx, dweight, dbias = rmsnorm_backward(
        dy,
        dtotal,
        h,
        weight,
        rstd,
        ctx.offset,
        ctx.before_weight,
        dx_dtype,
        weight.dtype if need_weight else None,
        ctx.bias_dtype if need_bias else None,
        need_dx,
    )
    return (
        dx if need_dx else None,
        dweight if need_weight else None,
        dbias if need_bias else None,
    )


def _save_scalars(ctx, bias, offset, before_weight, out_dtype):
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.offset = offset
    ctx.before_weight = before_weight
    ctx.out_dtype = out_dtype
    ctx.set_materialize_grads(False)


def _rmsnorm_setup(ctx, inputs, output):
    x, weight, bias, _, offset, before_weight, out_dtype = inputs
    ctx.save_for_backward(x, weight, output[1])
    _save_scalars(ctx, bias, offset, before_weight, out_dtype)


def _rmsnorm_gradient(ctx, dy, _drstd):
    x, weight, rstd = ctx.saved_tensors
    need = ctx.needs_input_grad
    dx, dweight, dbias = _gradients(
        ctx, dy, None, x, weight, rstd, x.dtype, need[0], need[1], need[2]
    )
    return dx, dweight, dbias, None, None, None, None


rmsnorm.register_autograd(_rmsnorm_gradient, setup_context=_rmsnorm_setup)


def _add_rmsnorm_setup(ctx, inputs, output):
    x, residual, weight, bias, _, offset, before_weight, out_dtype, _ = inputs
    ctx.save_for_backward(weight, output[1], output[2])
    ctx.x_dtype = x.dtype
    ctx.residual_in_dtype = residual.dtype
    _save_scalars(ctx, bias, offset, before_weight, out_dtype)


def _add_rmsnorm_gradient(ctx, dy, dtotal, _drstd):
    weight, total, rstd = ctx.saved_tensors
    need = ctx.needs_input_grad
    # x and residual share one gradient; where their dtypes differ it is kept in float32 first.
    same = ctx.x_dtype == ctx.residual_in_dtype
    dx, dweight, dbias = _gradients(
        ctx,
        dy,
        dtotal,
        total,
        weight,
        rstd,
        ctx.x_dtype if same else torch.float32,
        need[0] or need[1],
        need[2],
        need[3],
    )
    dresidual = dx.to(ctx.residual_in_dtype) if need[1] else None
    dx = dx.to(ctx.x_dtype) if need[0] else None
    return dx, dresidual, dweight, dbias, None, None, None, None, None


add_rmsnorm.register_autograd(_add_rmsnorm_gradient, setup_context=_add_rmsnorm_setup)
