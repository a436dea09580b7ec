"""Public functions: what is computed, which arguments are taken, which path serves a call."""

import math

import torch
from torch import Tensor

from . import ops
from ._shared.checks import check_finite, check_float_dtype, check_float_tensor, check_like
from ._shared.dispatch import needs_operator

_ROUNDINGS = ("once", "before_weight")
#: Kernels count rows with 32 bits, a tile beyond the last one included; offsets have 64.
MOST_ROWS = 2**30


def rmsnorm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    rounding: str = "once",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Normalise the last dimension by its root mean square (Zhang and Sennrich, 2019).

    `y = x / sqrt(mean(x ** 2) + eps) * (weight + offset) + bias`, in float32 and rounded to the
    output dtype at the end. With `rounding="before_weight"`, `x / rms` is first rounded to the
    dtype of x, as Llama in transformers does.

    Args:
        x: `[..., n]`, float16, bfloat16 or float32, 1 or more dimensions, n >= 1. Strided rows
            are read in place. Never changed.
        weight: `[n]`, any of these dtypes, or None for 1.
        eps: Added to the mean square; finite and not negative. The default does not depend on
            the dtype.
        bias: `[n]`, any of these dtypes, or None for 0.
        offset: Added to the weight in float32: 1.0 for Gemma, which stores weight - 1.
        rounding: "once" (PyTorch, Gemma) or "before_weight" (Llama).
        out_dtype: dtype of the result; None means that of x.

    Returns:
        `[..., n]`, contiguous. Differentiable in x, weight and bias.

    Raises:
        TypeError: An argument is no tensor or number, or of another dtype.
        ValueError: A shape, device or value does not fit.
        NotImplementedError: An argument carries a forward-mode tangent.

    Example:
        >>> y = rmsnorm(torch.randn(2, 16, 4096), torch.ones(4096), eps=1e-5)
    """
    dtype = _check("rmsnorm", x, None, weight, bias, eps, offset, rounding, out_dtype, None)
    before_weight = rounding == "before_weight"
    if needs_operator("rmsnorm", x, weight, bias):
        y: Tensor = ops.rmsnorm(x, weight, bias, eps, offset, before_weight, dtype)[0]
        return y
    return ops.forward(
        x, None, weight, bias, eps, offset, before_weight, dtype, None, False, False
    )[0]


def rmsnorm_residual_fused(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    rounding: str = "once",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `rmsnorm(x + residual)` without the sum; see `add_rmsnorm` for both.

    Args:
        x: `[..., n]`, float16, bfloat16 or float32. Never changed.
        residual: Like x, of any of these dtypes. Never changed.
        weight: As in `rmsnorm`.
        eps: As in `rmsnorm`.
        bias: As in `rmsnorm`.
        offset: As in `rmsnorm`.
        rounding: As in `rmsnorm`.
        out_dtype: As in `rmsnorm`.

    Returns:
        `[..., n]` of x's dtype or `out_dtype`, contiguous: the first result of `add_rmsnorm`.

    Raises:
        TypeError: As in `rmsnorm`.
        ValueError: As in `rmsnorm`.
    """
    dtype = _check(
        "rmsnorm_residual_fused", x, residual, weight, bias, eps, offset, rounding, out_dtype, None
    )
    before_weight = rounding == "before_weight"
    if needs_operator("rmsnorm_residual_fused", x, residual, weight, bias):
        y: Tensor = ops.add_rmsnorm(
            x, residual, weight, bias, eps, offset, before_weight, dtype, residual.dtype
        )[0]
        return y
    return ops.forward(
        x, residual, weight, bias, eps, offset, before_weight, dtype, residual.dtype, False, False
    )[0]


def add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    offset: float = 0.0,
    rounding: str = "once",
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Add a residual and normalise the sum, in one pass over memory.

    `total = x + residual`, added in float32 and rounded to the residual's dtype;
    `y = rmsnorm(total)`, computed from the rounded sum: the same bits as the two steps one
    after the other.

    Args:
        x: `[..., n]`, float16, bfloat16 or float32. Never changed.
        residual: Like x, of any of these dtypes. Never changed.
        weight: As in `rmsnorm`.
        eps: As in `rmsnorm`.
        residual_dtype: dtype of the sum; None means that of residual.
        bias: As in `rmsnorm`.
        offset: As in `rmsnorm`.
        rounding: As in `rmsnorm`; "before_weight" rounds to the dtype of the sum.
        out_dtype: dtype of the norm; None means that of x.

    Returns:
        The norm and the new residual, `[..., n]` each, contiguous. Differentiable in x,
        residual, weight and bias, through both results.

    Raises:
        TypeError: As in `rmsnorm`.
        ValueError: As in `rmsnorm`.

    Example:
        >>> y, residual = add_rmsnorm(attention_output, residual, weight)
    """
    dtype = _check(
        "add_rmsnorm", x, residual, weight, bias, eps, offset, rounding, out_dtype, residual_dtype
    )
    before_weight = rounding == "before_weight"
    total_dtype = residual.dtype if residual_dtype is None else residual_dtype
    if needs_operator("add_rmsnorm", x, residual, weight, bias):
        y, total, _ = ops.add_rmsnorm(
            x, residual, weight, bias, eps, offset, before_weight, dtype, total_dtype
        )
        return y, total
    y, total, _ = ops.forward(
        x, residual, weight, bias, eps, offset, before_weight, dtype, total_dtype, True, False
    )
    assert total is not None
    return y, total


def _check(
    function: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    rounding: str,
    out_dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None,
) -> torch.dtype:
    """Raise unless the arguments fit, and return the dtype of the norm."""
    check_float_tensor(function, "x", x)
    shape = x.shape
    if not shape or shape[-1] == 0:
        raise ValueError(
            f"{function}: x must have at least one dimension and a last one of at least 1, "
            f"got shape {tuple(shape)}"
        )
    if x.numel() // shape[-1] > MOST_ROWS:
        raise ValueError(
            f"{function}: x must have at most {MOST_ROWS} rows, got shape {tuple(shape)}"
        )
    if residual is not None or function != "rmsnorm":
        check_like(function, "residual", residual, shape, x)
    if weight is not None:
        check_like(function, "weight", weight, shape[-1:], x)
    if bias is not None:
        check_like(function, "bias", bias, shape[-1:], x)
    check_finite(function, "eps", eps, 0.0)
    check_finite(function, "offset", offset, -math.inf)
    if rounding not in _ROUNDINGS:
        raise ValueError(f"{function}: rounding must be one of {_ROUNDINGS}, got {rounding!r}")
    if residual_dtype is not None:
        check_float_dtype(function, "residual_dtype", residual_dtype)
    if out_dtype is None:
        return x.dtype
    check_float_dtype(function, "out_dtype", out_dtype)
    return out_dtype


# What `kernels.FuncRepository` reads before it binds a function.
for _function in (rmsnorm, rmsnorm_residual_fused, add_rmsnorm):
    vars(_function).update(has_backward=True, can_torch_compile=True)
