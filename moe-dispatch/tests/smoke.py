"""The call that publish.py makes on what it has just published, on a CPU or a GPU."""

from types import ModuleType

import torch


def smoke(kernel: ModuleType) -> None:
    """Call forward and backward once, and check values known by hand."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.arange(8.0, device=device, requires_grad=True)
    y = kernel.moe_dispatch(x, 0.5)
    assert y.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0.5] * 8
