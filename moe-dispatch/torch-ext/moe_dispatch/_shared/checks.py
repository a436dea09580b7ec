# Copied from shared/checks.py by scripts/sync_shared.py: edit it there.
"""Errors for arguments: each names the function, the argument, what was wanted and what came."""

import math

import torch

#: The dtypes that the kernels compute on.
FLOAT_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32))
#: The largest number that is finite in float32, in which kernels take their scalars.
_LARGEST = torch.finfo(torch.float32).max


def describe(value: object) -> str:
    """Return what an argument is, for an error message."""
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device}"
    return f"{value!r} ({type(value).__name__})"


def check_float_tensor(function: str, argument: str, value: object) -> None:
    """Raise TypeError unless `value` is a tensor of float16, bfloat16 or float32."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{function}: {argument} must be a tensor, got {describe(value)}")
    if value.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{function}: {argument} must be float16, bfloat16 or float32, got {describe(value)}"
        )


def check_float_dtype(function: str, argument: str, value: object) -> None:
    """Raise TypeError unless `value` is float16, bfloat16 or float32."""
    if not isinstance(value, torch.dtype) or value not in FLOAT_DTYPES:
        raise TypeError(
            f"{function}: {argument} must be torch.float16, torch.bfloat16 or torch.float32, "
            f"got {describe(value)}"
        )


def check_like(
    function: str, argument: str, value: object, shape: tuple[int, ...], like: torch.Tensor
) -> None:
    """Raise unless `value` is a float tensor of `shape` on the device of `like`."""
    check_float_tensor(function, argument, value)
    assert isinstance(value, torch.Tensor)
    if value.shape != shape:
        raise ValueError(
            f"{function}: {argument} must have shape {tuple(shape)} to go with x of shape "
            f"{tuple(like.shape)}, got {describe(value)}"
        )
    if value.device != like.device:
        raise ValueError(
            f"{function}: {argument} must be on {like.device} with x, got {describe(value)}"
        )


def check_finite(function: str, argument: str, value: object, minimum: float) -> None:
    """Raise unless `value` is a Python number, finite in float32, of at least `minimum`."""
    # The usual case first: this runs at every call. A NaN fails both comparisons.
    if type(value) is float and minimum <= value <= _LARGEST and value >= -_LARGEST:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{function}: {argument} must be a number, got {describe(value)}")
    if not -_LARGEST <= value <= _LARGEST or value < minimum:
        wanted = "finite in float32"
        if minimum > -math.inf:
            wanted += f" and at least {minimum:g}"
        raise ValueError(f"{function}: {argument} must be {wanted}, got {value!r}")
