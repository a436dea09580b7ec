"""The product in plain PyTorch: the oracle of the tests, and what runs where Triton does not."""

import torch

from .weight import W4Weight, group_count, unpack_codes


def dequantize(weight: W4Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return `(code - zero) * scale` `[n, k]`, in float32 (float64 if asked for), rounded once.

    Features are in packed order: `perm` is not looked at.
    """
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    k = weight.in_features
    codes = unpack_codes(weight.qweight, k).to(wide)
    size = k if weight.group_size == -1 else weight.group_size
    group = torch.arange(k, device=codes.device) // size
    assert weight.scales.shape[0] == group_count(k, weight.group_size)
    zeros = 8.0 if weight.zeros is None else weight.zeros.to(wide)[group].T
    return ((codes - zeros) * weight.scales.to(wide)[group].T).to(dtype)


def gemm(x: torch.Tensor, weight: W4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x `[m, k]`, in packed order, times the weight: products in float32, rounded once."""
    y = x.float() @ dequantize(weight, torch.float32).T
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)
