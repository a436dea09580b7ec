"""Drop-in modules with parameters of their own."""

from collections.abc import Sequence

import torch
from torch import nn

from ._shared.checks import check_finite
from .api import rmsnorm


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, in the place of `torch.nn.RMSNorm`.

    Args:
        normalized_shape: n, the size of the last dimension, also as a sequence of one number.
        eps: Added to the mean square; unlike in `torch.nn.RMSNorm`, it never depends on the dtype,
            so None is refused.
        elementwise_affine: Whether to learn a weight [n].
        bias: Whether to learn a bias [n].
        offset: Added to the weight; with 1.0 (Gemma) the weight starts at 0, else at 1 - offset.
        rounding: "once" or "before_weight", as in `rmsnorm`.
        device: Device of the parameters.
        dtype: dtype of the parameters; inputs may have another.

    Raises:
        TypeError: eps is no number.
        ValueError: normalized_shape is not one size, or eps is negative or not finite.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        bias: bool = False,
        offset: float = 0.0,
        rounding: str = "once",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
        if len(shape) != 1 or shape[0] < 1:
            raise ValueError(
                f"RMSNorm: normalized_shape must be one size of at least 1, got {normalized_shape}"
            )
        check_finite("RMSNorm", "eps", eps, 0.0)
        self.normalized_shape = tuple(shape)
        self.eps = eps
        self.offset = offset
        self.rounding = rounding
        self.weight = self.bias = None
        if elementwise_affine:
            self.weight = nn.Parameter(
                torch.empty(self.normalized_shape, device=device, dtype=dtype)
            )
        if bias:
            self.bias = nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make the norm start as the plain one: weight + offset = 1, bias = 0."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x [..., n] over its last dimension, in x's dtype."""
        return rmsnorm(
            x,
            self.weight,
            self.eps,
            bias=self.bias,
            offset=self.offset,
            rounding=self.rounding,
        )

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        return (
            f"{self.normalized_shape}, eps={self.eps}, offset={self.offset}, "
            f"rounding={self.rounding!r}"
        )
