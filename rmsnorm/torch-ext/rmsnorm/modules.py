"""Drop-in modules with parameters of their own."""

import torch
from torch import nn

from .api import rmsnorm


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, in the place of `torch.nn.RMSNorm`.

    Args:
        hidden_size: n, the size of the last dimension.
        eps: Added to the mean square; unlike in `torch.nn.RMSNorm`, it never depends on the dtype.
        elementwise_affine: Whether to learn a weight [n].
        bias: Whether to learn a bias [n].
        offset: Added to the weight; with 1.0 (Gemma) the weight starts at 0, else at 1 - offset.
        rounding: "once" or "before_weight", as in `rmsnorm`.
        device: Device of the parameters.
        dtype: dtype of the parameters; inputs may have another.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        bias: bool = False,
        offset: float = 0.0,
        rounding: str = "once",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        self.offset = offset
        self.rounding = rounding
        self.weight = self.bias = None
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make the norm start as the plain one: weight + offset = 1, bias = 0."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x [..., hidden_size], in x's dtype."""
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
        return f"{self.hidden_size}, eps={self.eps}, offset={self.offset}, rounding={self.rounding}"
