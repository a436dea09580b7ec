"""Problems of w4a16, their exact results, and the rule that results keep."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from monorepo.numerics import FACTOR

ZEROS = ("eight", "integer", "float")


def part(kernel: ModuleType, name: str) -> ModuleType:
    """Return a submodule of the built package."""
    return importlib.import_module(f"{kernel.__name__}.{name}")


def weight(
    kernel: ModuleType,
    n: int,
    k: int,
    *,
    group_size: int = 128,
    zeros: str = "eight",
    scales: torch.dtype = torch.float16,
    perm: bool = False,
    device: str = "cpu",
):
    """Return a packed weight of random codes, scales and zero points."""
    groups = part(kernel, "weight").group_count(k, group_size)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    points = None
    if zeros == "integer":
        points = torch.randint(0, 16, (groups, n), device=device).to(torch.int16)
    elif zeros == "float":
        points = torch.rand(groups, n, device=device) * 15
    return kernel.W4Weight(
        part(kernel, "weight").pack_codes(codes),
        (torch.rand(groups, n, device=device) * 0.02 + 0.005).to(scales),
        points,
        torch.randperm(k, device=device).to(torch.int32) if perm else None,
        k,
        group_size,
    )


def exact_weight(kernel: ModuleType, w) -> Tensor:
    """Return the weight [n, k] in float64, in the order of the input features."""
    dense = part(kernel, "reference").dequantize(w, torch.float64)
    return dense if w.perm is None else dense[:, w.perm.long().argsort()]


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Return the error relative to the whole tensor; infinite where it is not finite."""
    if not bool(actual.isfinite().all()):
        return float("inf")
    return float((actual.double() - exact).norm() / exact.norm())


def check(
    kernel: ModuleType, x: Tensor, w, bias: Tensor | None, y: Tensor, dense: Tensor | None = None
) -> None:
    """Raise unless y is off by at most twice what PyTorch is on the dequantised weight.

    The floor is the rounding of the result, half an ulp in each element, twice.
    """
    if dense is None:
        dense = exact_weight(kernel, w)
    exact = x.double() @ dense.T
    if bias is not None:
        exact += bias.double()
    assert y.shape == exact.shape and y.dtype is x.dtype and y.is_contiguous()
    cast = None if bias is None else bias.to(x.dtype)
    peer = relative_error(F.linear(x, dense.to(x.dtype), cast), exact)
    allowed = FACTOR * max(peer, torch.finfo(x.dtype).eps / 2)
    found = relative_error(y, exact)
    assert found <= allowed, f"off by {found:.3g}, {allowed:.3g} allowed"
