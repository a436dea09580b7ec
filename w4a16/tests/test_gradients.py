"""Gradients of the activations and of the bias; what has none says so (case B56)."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from monorepo.numerics import FACTOR

from .oracle import ZEROS, exact_weight, memory, part, parts, relative_error, weight

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32


def check_dx(kernel: ModuleType, dx: Tensor, dy: Tensor, w) -> None:
    """Raise unless dx keeps the rule of `oracle.check` against float64."""
    dense = exact_weight(kernel, w)
    exact = dy.double() @ dense
    assert dx.shape == exact.shape and dx.dtype is dy.dtype
    peer = relative_error(dy @ dense.to(dy.dtype), exact)
    assert relative_error(dx, exact) <= FACTOR * max(peer, torch.finfo(dy.dtype).eps / 2)


@pytest.mark.parametrize("dtype", (HALF, BFLOAT), ids=str)
@pytest.mark.parametrize("perm", (False, True))
@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("group_size", (32, 128, -1))
def test_gradients(
    kernel: ModuleType, device: str, group_size: int, zeros: str, perm: bool, dtype: torch.dtype
) -> None:
    """Those of the dequantised product, for each kind of weight."""
    w = weight(kernel, 40, 160, group_size=group_size, zeros=zeros, perm=perm, device=device)
    x = torch.randn(5, 160, device=device, dtype=dtype, requires_grad=True)
    bias = torch.randn(40, device=device, requires_grad=True)
    y = kernel.w4a16_gemm(x, w, bias)
    dy = torch.randn_like(y)
    dx, dbias = torch.autograd.grad(y, (x, bias), dy)
    check_dx(kernel, dx, dy, w)
    exact = dy.double().sum(0)
    assert dbias.dtype is FLOAT
    assert relative_error(dbias, exact) <= 2 * torch.finfo(FLOAT).eps


@pytest.mark.parametrize("shape", ((160,), (1, 160), (2, 3, 160), (600, 160)), ids=str)
def test_shapes(kernel: ModuleType, device: str, shape: tuple[int, ...]) -> None:
    w = weight(kernel, 40, 160, zeros="integer", device=device)
    x = torch.randn(shape, device=device, dtype=HALF, requires_grad=True)
    y = kernel.w4a16_gemm(x, w)
    dy = torch.randn_like(y)
    y.backward(dy)
    assert x.grad is not None and x.grad.shape == shape
    check_dx(kernel, x.grad, dy, w)


@pytest.mark.parametrize("reduction", ("sum", "mean"))
def test_expanded_gradient(kernel: ModuleType, device: str, reduction: str) -> None:
    """Case B23: what `.sum().backward()` hands on has strides of 0."""
    w = weight(kernel, 40, 96, group_size=32, perm=True, device=device)
    x = torch.randn(2, 3, 96, device=device, dtype=HALF, requires_grad=True)
    bias = torch.randn(40, device=device, requires_grad=True)
    getattr(kernel.w4a16_gemm(x, w, bias), reduction)().backward()
    share = 1.0 if reduction == "sum" else 1 / 240
    check_dx(kernel, x.grad, torch.full((2, 3, 40), share, dtype=HALF, device=device), w)
    exact = torch.full((40,), 6 * share, device=device).double()
    assert relative_error(bias.grad, exact) <= torch.finfo(HALF).eps  # of the share


@pytest.mark.parametrize("layout", ("transposed", "stepped", "permuted", "odd offset"))
def test_strided_gradient(kernel: ModuleType, device: str, layout: str) -> None:
    """The strides of dy are not those of y."""
    w = weight(kernel, 40, 96, group_size=32, device=device)
    x = torch.randn(2, 3, 96, device=device, dtype=HALF, requires_grad=True)
    y = kernel.w4a16_gemm(x, w)
    dy = {
        "transposed": lambda: torch.randn(40, 2, 3, device=device).half().movedim(0, -1),
        "stepped": lambda: torch.randn(2, 3, 80, device=device).half()[..., ::2],
        "permuted": lambda: torch.randn(3, 2, 40, device=device).half().transpose(0, 1),
        "odd offset": lambda: torch.randn(241, device=device).half()[1:].view(2, 3, 40),
    }[layout]()
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    check_dx(kernel, dx, dy, w)
    (again,) = torch.autograd.grad(y, x, dy.contiguous())
    torch.testing.assert_close(dx, again)


@pytest.mark.parametrize("kept", (HALF, BFLOAT, FLOAT), ids=str)
def test_dtype_of_the_bias_gradient(kernel: ModuleType, device: str, kept: torch.dtype) -> None:
    """Summed in float32, whatever the dtypes; 1000 ones are more than bfloat16 counts by ones."""
    w = weight(kernel, 8, 32, device=device)
    x = torch.zeros(1000, 32, device=device, dtype=HALF)
    bias = torch.zeros(8, device=device, dtype=kept, requires_grad=True)
    y = kernel.w4a16_gemm(x, w, bias)
    y.backward(torch.ones_like(y))
    assert bias.grad is not None and bias.grad.dtype is kept
    assert torch.equal(bias.grad, torch.full_like(bias, 1000.0))


def test_only_what_is_wanted(
    kernel: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No gradient of x, no dequantised weight."""
    ops = part(kernel, "ops")
    w = weight(kernel, 40, 96, group_size=32, device=device)
    x = torch.randn(3, 96, device=device, dtype=HALF)
    bias = torch.randn(40, device=device, requires_grad=True)
    y = kernel.w4a16_gemm(x, w, bias)
    assert y.requires_grad
    monkeypatch.setattr(ops, "dequantize", lambda *_: pytest.fail("dx was not asked for"))
    y.sum().backward()
    assert bias.grad is not None


def test_no_gradient_no_operator(
    kernel: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager inference pays for no dispatcher, training does not lose its gradient."""
    w = weight(kernel, 40, 96, group_size=32, device=device)
    x = torch.randn(3, 96, device=device, dtype=HALF, requires_grad=True)
    assert kernel.w4a16_gemm(x, w).requires_grad
    monkeypatch.setattr(part(kernel, "ops"), "w4a16_gemm", lambda *_: pytest.fail("was called"))
    with torch.no_grad():
        assert not kernel.w4a16_gemm(x, w).requires_grad
    assert not kernel.w4a16_gemm(x.detach(), w).requires_grad


def test_operands_are_kept(kernel: ModuleType, device: str) -> None:
    """Case B20 for the backward pass, twice over one graph."""
    w = weight(kernel, 40, 96, group_size=32, zeros="integer", perm=True, device=device)
    x = torch.randn(3, 96, device=device, dtype=HALF, requires_grad=True)
    y = kernel.w4a16_gemm(x, w)
    dy = torch.randn_like(y)
    before = [memory(each) for each in (x.detach(), dy, y.detach(), *parts(w))]
    (first,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    (second,) = torch.autograd.grad(y, x, dy)
    after = [memory(each) for each in (x.detach(), dy, y.detach(), *parts(w))]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()
