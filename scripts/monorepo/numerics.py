"""Errors in units in the last place, and the one tolerance rule: computed, never chosen.

A result is right if its error against float64 is at most twice that of the same computation in
PyTorch at the input's dtype, with a floor of 2 ulp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FACTOR = 2.0
FLOOR_ULP = 2.0


def spacing(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance of `dtype`'s neighbouring numbers at each value, in float64."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(exact.double().abs().clamp_min(info.tiny))
    return torch.ldexp(torch.full_like(exponent, info.eps / 2, dtype=torch.float64), exponent)


def ulp_error(actual: Tensor, exact: Tensor) -> float:
    """Return the largest error of an element, in ulp of that element.

    Where `exact` is not finite, `actual` has to be the same; anything else is an infinite error.
    """
    exact = exact.double()
    same = (actual.double() == exact) | (actual.isnan() & exact.isnan())
    finite = exact.isfinite() & actual.isfinite()
    if not bool((finite | same).all()):
        return math.inf
    if actual.numel() == 0:
        return 0.0
    error = (actual.double() - exact).abs() / spacing(exact, actual.dtype)
    return float(torch.where(finite, error, torch.zeros_like(error)).max())


@dataclass(frozen=True)
class Error:
    """Errors relative to the whole tensor: for sums, where single elements cancel.

    Attributes:
        largest: The largest error, in ulp of the largest exact value.
        rms: The root mean square error, in ulp of the root mean square of the exact values.
    """

    largest: float
    rms: float


def tensor_error(actual: Tensor, exact: Tensor) -> Error:
    """Return the errors of `actual` against a finite `exact`."""
    if actual.numel() == 0:
        return Error(0.0, 0.0)
    if not bool(actual.isfinite().all()):
        return Error(math.inf, math.inf)
    exact = exact.double()
    difference = actual.double() - exact
    largest = spacing(exact.abs().max(), actual.dtype)
    rms = spacing(exact.pow(2).mean().sqrt(), actual.dtype)
    return Error(
        float(difference.abs().max() / largest), float(difference.pow(2).mean().sqrt() / rms)
    )


def check_elements(actual: Tensor, exact: Tensor, peer: Tensor) -> None:
    """Raise AssertionError unless each element keeps the rule; `peer` is PyTorch's result."""
    found, allowed = ulp_error(actual, exact), max(FACTOR * ulp_error(peer, exact), FLOOR_ULP)
    if not found <= allowed:
        raise AssertionError(f"off by {found:.3g} ulp, {allowed:.3g} allowed")


def check_tensor(actual: Tensor, exact: Tensor, peer: Tensor) -> None:
    """Raise AssertionError unless the tensor as a whole keeps the rule."""
    found, other = tensor_error(actual, exact), tensor_error(peer, exact)
    for name in ("largest", "rms"):
        got = getattr(found, name)
        allowed = max(FACTOR * getattr(other, name), FLOOR_ULP)
        if not got <= allowed:
            raise AssertionError(f"{name} error {got:.3g} ulp, {allowed:.3g} allowed")
