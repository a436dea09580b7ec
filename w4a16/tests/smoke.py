"""The call that publish.py makes on what it has just published, on a CPU or a GPU."""

from types import ModuleType

import torch


def smoke(kernel: ModuleType) -> None:
    """Multiply one weight by the identity and by ones, and check values known by hand."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Steps of 2 / 15 * 7.5 = 1 from -8 to 7 in a row: codes 0 to 15 stand for themselves.
    row = torch.arange(-8.0, 8.0, device=device).clamp(min=-7.5).repeat(4)
    weight = kernel.quantize(row.expand(16, 64).half(), group_size=64)
    exact = torch.arange(-8.0, 8.0, device=device).repeat(4)
    assert torch.equal(kernel.dequantize(weight, torch.float32), exact.expand(16, 64))

    identity = torch.eye(64, device=device, dtype=torch.float16)
    assert torch.equal(kernel.w4a16_gemm(identity, weight), exact.half()[:, None].expand(64, 16))
    bias = torch.arange(16.0, device=device)
    y = kernel.w4a16_gemm(torch.ones(64, device=device).bfloat16(), weight, bias)
    assert y.dtype is torch.bfloat16 and torch.equal(y, (bias - 32).bfloat16())
