"""Stateless layers that `kernelize` binds onto a model's own modules."""

import torch
from torch import nn

from .api import kernel_name


class KernelName(nn.Module):
    """Multiplication by the module's own `factor`."""

    has_backward = True
    can_torch_compile = True

    factor: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [...] times `factor`."""
        return kernel_name(x, self.factor)
