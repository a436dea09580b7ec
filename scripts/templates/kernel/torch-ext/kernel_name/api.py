"""Public functions: what is computed, which arguments are taken, which path serves a call."""

import math

import torch
from torch import Tensor

from . import ops
from ._shared.checks import check_finite, check_float_tensor


def kernel_name(x: Tensor, factor: float = 2.0) -> Tensor:
    """Multiply by a number.

    `y = x * factor`, in float32 and rounded to the dtype of x at the end.

    Args:
        x: `[...]`, float16, bfloat16 or float32. Never changed.
        factor: Finite.

    Returns:
        `[...]` of the shape and dtype of x, contiguous. Differentiable in x.

    Raises:
        TypeError: x is no tensor of these dtypes, or factor no number.
        ValueError: factor is not finite.

    Example:
        >>> y = kernel_name(torch.randn(16, 4096), 0.5)
    """
    check_float_tensor("kernel_name", "x", x)
    check_finite("kernel_name", "factor", factor, minimum=-math.inf)
    if _needs_operator(x):
        return ops.kernel_name(x, factor)
    return ops.forward(x, factor)


def _needs_operator(x: Tensor) -> bool:
    """Return whether a call has to go through the dispatcher, which costs more than a launch."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter):
        return True
    return torch.is_grad_enabled() and x.requires_grad
