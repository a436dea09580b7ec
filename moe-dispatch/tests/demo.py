"""What `make demo` shows of moe-dispatch: values and gradients beside float64 and PyTorch.

A function `in_models(kernel, repository, device)` may follow, which yields the same of models.
"""

from collections.abc import Iterator
from types import ModuleType

import torch

from monorepo.comparison import Comparison


def comparisons(kernel: ModuleType, device: torch.device) -> Iterator[Comparison]:
    """Compare in every dtype."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.randn(4, 4096, device=device, dtype=dtype, requires_grad=True)
        shape, ones = tuple(x.shape), torch.ones_like(x)
        y = kernel.moe_dispatch(x, 0.3)
        yield Comparison("moe_dispatch", "random", shape, y, x.double() * 0.3, x * 0.3)
        (dx,) = torch.autograd.grad(y.sum(), x)
        exact, peer = ones.double() * 0.3, ones * 0.3
        yield Comparison("moe_dispatch backward", "random", shape, dx, exact, peer)
