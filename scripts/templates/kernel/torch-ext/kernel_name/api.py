"""Public functions: what is computed, which arguments are taken, which path serves a call."""

import math

from torch import Tensor

from . import ops
from ._shared.checks import check_finite, check_float_tensor
from ._shared.dispatch import needs_operator


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
    if needs_operator("kernel_name", x):
        return ops.kernel_name(x, factor)
    return ops.forward(x, factor)
