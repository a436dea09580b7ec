"""Problems of w4a16, their exact results, and the rule that results keep."""

from __future__ import annotations

import importlib
import sys
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


GUARD = 4096  # elements before and behind; more than a tile reads of a row


def poison(tensor: Tensor) -> Tensor:
    """Fill with what a result must not depend on: NaN, or integers that are NaN as float32."""
    return tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


def guarded(tensor: Tensor, lead: int = GUARD) -> Tensor:
    """Return a dense copy that has poison before and behind it in memory."""
    size = tensor.numel()
    whole = poison(tensor.new_empty(lead + size + GUARD))
    return whole[lead : lead + size].view(tensor.shape).copy_(tensor)


def memory(view: Tensor) -> Tensor:
    """Return a copy of all memory around a view, bit by bit."""
    whole = torch.empty(0, dtype=torch.uint8, device=view.device)
    return whole.set_(view.untyped_storage()).clone()


def parts(w) -> list[Tensor]:
    """Return the tensors of a weight."""
    return [each for each in (w.qweight, w.scales, w.zeros, w.perm) if each is not None]


class Allocations:
    """What `ops` allocates: poison instead of chance, with guards around it."""

    def __init__(self, kernel: ModuleType, patch) -> None:
        self._module = part(kernel, "ops").__name__
        self.given: list[Tensor] = []
        for owner, name in ((torch, "empty"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, name, self._instead_of(getattr(owner, name)))

    def _instead_of(self, allocate):
        def poisoned(*args: object, **kwargs: object) -> Tensor:
            plain = allocate(*args, **kwargs)
            if sys._getframe(1).f_globals["__name__"] != self._module or plain.is_meta:
                return plain
            size = plain.numel()
            whole = poison(torch.zeros(size + 2 * GUARD, dtype=plain.dtype, device=plain.device))
            self.given.append(whole[GUARD : GUARD + size].view(plain.shape))
            return self.given[-1]

        return poisoned

    def check(self) -> None:
        """Raise if memory beside an allocation was written."""
        assert self.given
        for tensor in self.given:
            check_guards(tensor)


def check_guards(tensor: Tensor) -> None:
    """Raise if memory beside a guarded tensor was written."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    whole.set_(tensor.untyped_storage())
    ends = torch.cat((whole[:GUARD], whole[-GUARD:]))
    assert bool((ends.isnan() if ends.is_floating_point() else ends == -1).all())
