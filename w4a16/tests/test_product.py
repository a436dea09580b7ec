"""Values of the product: the reference on a CPU, the Triton kernel in the interpreter."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from monorepo.numerics import check_elements

from .oracle import ZEROS, check, exact_weight, weight

HALF, BFLOAT = torch.float16, torch.bfloat16
GROUPS = (32, 64, 128, 256, -1)
#: (tokens, out, in): tails of rows and of features, shared tiles, several tiles.
SIZES = ((1, 8, 32), (3, 72, 96), (9, 40, 160), (17, 136, 320), (5, 24, 352), (33, 192, 448))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", (HALF, BFLOAT))
@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("group_size", GROUPS)
def test_groups_and_zeros(
    kernel: ModuleType, device: str, group_size: int, zeros: str, dtype: torch.dtype
) -> None:
    """Cases B11, B131: every group size, the last group partial, every kind of zero point."""
    for tokens, n, k in SIZES:
        w = weight(kernel, n, k, group_size=group_size, zeros=zeros, device=device)
        x = torch.randn(tokens, k, device=device, dtype=dtype)
        bias = torch.randn(n, device=device)
        check(kernel, x, w, bias, kernel.w4a16_gemm(x, w, bias))


@pytest.mark.parametrize("dtype", (HALF, BFLOAT))
@pytest.mark.parametrize("tokens", (*range(1, 18), 31, 32, 33, 64, 65, 127, 128, 129, 329))
def test_tokens(kernel: ModuleType, device: str, tokens: int, dtype: torch.dtype) -> None:
    w = weight(kernel, 72, 160, zeros="integer", device=device)
    x = torch.randn(tokens, 160, device=device, dtype=dtype)
    check(kernel, x, w, None, kernel.w4a16_gemm(x, w))


@pytest.mark.parametrize("dtype", (HALF, BFLOAT))
@pytest.mark.parametrize("n", (8, 16, 24, 40, 64, 72, 192))
def test_identity_gives_the_weight(
    kernel: ModuleType, device: str, n: int, dtype: torch.dtype
) -> None:
    """Cases B10, B50: every element of every column, N that no tile divides."""
    k = 160
    w = weight(kernel, n, k, zeros="integer", group_size=32, device=device)
    y = kernel.w4a16_gemm(torch.eye(k, device=device, dtype=dtype), w)
    exact = exact_weight(kernel, w).T
    check_elements(y, exact, exact.to(dtype))


@pytest.mark.parametrize("dtype", (HALF, BFLOAT))
@pytest.mark.parametrize("scales", (HALF, BFLOAT, torch.float32))
def test_dtypes_of_scales(
    kernel: ModuleType, device: str, scales: torch.dtype, dtype: torch.dtype
) -> None:
    """Case B136."""
    for tokens in (3, 70):
        w = weight(kernel, 40, 160, scales=scales, zeros="integer", device=device)
        x = torch.randn(tokens, 160, device=device, dtype=dtype)
        for bias in (HALF, BFLOAT, torch.float32):
            b = torch.randn(40, device=device, dtype=bias)
            check(kernel, x, w, b, kernel.w4a16_gemm(x, w, b))


def test_act_order(kernel: ModuleType, device: str) -> None:
    """Case B128: features of a group that are not neighbours."""
    for tokens in (1, 20):
        w = weight(kernel, 40, 224, group_size=64, perm=True, device=device)
        x = torch.randn(tokens, 224, device=device, dtype=HALF)
        check(kernel, x, w, None, kernel.w4a16_gemm(x, w))
        dense = kernel.dequantize(w, torch.float32)
        assert torch.equal(dense.double(), exact_weight(kernel, w).float().double())


@pytest.mark.parametrize(
    "dtype, shape", [(HALF, s) for s in ((0, 64), (2, 0, 64), (64,), (2, 3, 64), (1, 1, 1, 64))]
)
def test_shapes(
    kernel: ModuleType, device: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Case B44 and leading dimensions; inputs stay as they were (B20), results are their own."""
    w = weight(kernel, 24, 64, device=device)
    x = torch.randn(shape, device=device, dtype=dtype)
    before = x.clone()
    y = kernel.w4a16_gemm(x, w)
    assert y.shape == (*shape[:-1], 24) and y.dtype is dtype and torch.equal(x, before)
    if x.numel():
        check(kernel, x, w, None, y)
