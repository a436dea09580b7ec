"""The call that publish.py makes on what it has just published, on a CPU or a GPU."""

from types import ModuleType

import torch


def smoke(kernel: ModuleType) -> None:
    """Call forward, the fused addition and backward once, and check values known by hand."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # The mean square of a row of 3, -3, 3, ... is 9, so the norm is 1, -1, 1, ...
    signs = torch.tensor([1.0, -1.0] * 32, device=device).expand(4, 64)
    x = (3 * signs).half().requires_grad_()
    weight = torch.full((64,), 2.0, device=device, requires_grad=True)
    y = kernel.rmsnorm(x, weight, eps=0.0)
    assert y.dtype is torch.float16 and torch.equal(y, 2 * signs.half())

    y, total = kernel.add_rmsnorm(x.detach(), x.detach(), weight.detach(), eps=0.0)
    assert torch.equal(total, 6 * signs.half()) and torch.equal(y, 2 * signs.half())

    # A gradient along x changes the length only, which the norm takes out again.
    (kernel.rmsnorm(x, weight, eps=0.0) * signs).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.zeros_like(x))
    assert weight.grad is not None and torch.equal(weight.grad, torch.full_like(weight, 4.0))
