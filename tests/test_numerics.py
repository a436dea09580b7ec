"""The tolerance rule itself: a wrong one would let every other test pass."""

from __future__ import annotations

import math

import pytest
import torch

from monorepo.numerics import check_elements, check_tensor, spacing, tensor_error, ulp_error

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_spacing_is_the_distance_to_the_next_number(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, 1.5, 1.984375, 2.0, 3.0, 0.75, 100.0, 2.0**-10], dtype=dtype)
    following = torch.nextafter(values, torch.full_like(values, math.inf))
    assert torch.equal(spacing(values.double(), dtype), following.double() - values.double())
    assert torch.equal(spacing(-values.double(), dtype), spacing(values.double(), dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("steps", (0, 1, 3))
def test_ulp_error_counts_numbers_in_between(dtype: torch.dtype, steps: int) -> None:
    exact = torch.tensor([1.25, -0.3125, 40.0], dtype=dtype)
    actual = exact.clone()
    for _ in range(steps):
        actual[1] = torch.nextafter(actual[1], torch.tensor(-math.inf, dtype=dtype))
    assert ulp_error(actual, exact.double()) == steps


def test_infinite_and_missing_values() -> None:
    exact = torch.tensor([1.0, math.inf, math.nan], dtype=torch.float64)
    assert ulp_error(exact.half(), exact) == 0
    assert ulp_error(torch.tensor([math.nan, math.inf, math.nan]), exact) == math.inf
    assert ulp_error(torch.tensor([1.0, 1e30, math.nan]), exact) == math.inf
    assert ulp_error(torch.tensor([1.0, math.inf, 0.0]), exact) == math.inf
    assert ulp_error(torch.empty(0), torch.empty(0)) == 0
    assert tensor_error(torch.tensor([math.nan]), torch.ones(1)).largest == math.inf


def test_rule_allows_twice_the_peer_and_two_ulp_at_least() -> None:
    exact = torch.ones(4, dtype=torch.float64)
    ulp = torch.finfo(torch.float32).eps

    def off(count: float) -> torch.Tensor:
        return torch.tensor([1.0, 1.0, 1.0, 1.0 + count * ulp])

    check_elements(off(2), exact, off(0))
    check_elements(off(6), exact, off(3))
    with pytest.raises(AssertionError, match="off by 3 ulp, 2 allowed"):
        check_elements(off(3), exact, off(1))
    check_tensor(off(2), exact, off(0))
    with pytest.raises(AssertionError, match="largest error 7 ulp, 6 allowed"):
        check_tensor(off(7), exact, off(3))


def test_many_small_errors_are_seen() -> None:
    """One bound on the largest error would hide a wrong rounding of every element."""
    exact = torch.cat([torch.full((1,), 1000.0), torch.ones(999)]).double()
    ulp = torch.finfo(torch.float32).eps
    peer, actual = exact.float(), (exact * (1 + 64 * ulp)).float()
    actual[0] = 1000.0
    with pytest.raises(AssertionError, match="rms error"):
        check_tensor(actual, exact, peer)
