"""Public functions: what is computed, which arguments are taken, which path serves a call."""

import torch
from torch import Tensor

from . import ops
from ._shared.checks import check_float_tensor, describe
from ._shared.dispatch import needs_operator
from .weight import ACTIVATIONS, W4Weight, check_packable, group_count, pack, refusal


def w4a16_gemm(x: Tensor, weight: W4Weight, bias: Tensor | None = None) -> Tensor:
    """Multiply activations by a 4-bit weight.

    `y = x @ dequantize(weight).T + bias`, accumulated in float32 and rounded to the dtype of x at
    the end. Up to 512 tokens the weight is converted inside the product; above that it is
    dequantised, at most 128 MiB of it at a time, and the vendor's library multiplies.

    Args:
        x: `[..., in_features]`, float16 or bfloat16, 1 or more dimensions. Rows that are a
            multiple of 16 elements apart are read in place. Never changed.
        weight: The packed weight, on the device of x.
        bias: `[out_features]`, float16, bfloat16 or float32, or None for 0.

    Returns:
        `[..., out_features]`, contiguous, of the dtype of x. Differentiable in x and bias. The
        same bits for the same call every time, and for a token in any batch of up to 8, or of 9
        to 16, 17 to 32, 33 to 64, 65 to 128 (these last not with float32 scales or zero points).

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: A shape or device does not fit.
        NotImplementedError: An argument carries a forward-mode tangent.
        RuntimeError: A part of the weight wants a gradient.

    Example:
        >>> weight = quantize(torch.randn(4096, 4096), group_size=128)
        >>> y = w4a16_gemm(torch.randn(1, 4096).half(), weight)
    """
    if not isinstance(weight, W4Weight):
        raise TypeError(f"w4a16_gemm: weight must be a W4Weight, got {describe(weight)}")
    if not isinstance(x, Tensor) or x.dtype not in ACTIVATIONS:
        raise TypeError(f"w4a16_gemm: x must be float16 or bfloat16, got {describe(x)}")
    if not x.dim() or x.shape[-1] != weight.in_features:
        raise ValueError(
            f"w4a16_gemm: x must have a last dimension of {weight.in_features}, the weight's "
            f"in_features, got {describe(x)}"
        )
    if x.device != weight.qweight.device:
        raise ValueError(
            f"w4a16_gemm: x must be on {weight.device} with the weight, got {describe(x)}"
        )
    if bias is not None:
        check_float_tensor("w4a16_gemm", "bias", bias)
        if bias.shape != (weight.out_features,):
            raise ValueError(
                f"w4a16_gemm: bias must have shape ({weight.out_features},), the weight's "
                f"out_features, got {describe(bias)}"
            )
        if bias.device != x.device:
            raise ValueError(f"w4a16_gemm: bias must be on {x.device} with x, got {describe(bias)}")
    if weight.scales.requires_grad or (weight.zeros is not None and weight.zeros.requires_grad):
        raise RuntimeError("w4a16_gemm: scales and zeros have no gradient; detach them")
    if needs_operator("w4a16_gemm", x, bias):
        y: Tensor = ops.w4a16_gemm(
            x,
            weight.qweight,
            weight.scales,
            weight.zeros,
            weight.perm,
            bias,
            weight.in_features,
            weight.group_size,
        )
        return y
    return ops.gemm(x, weight, bias)


def dequantize(weight: W4Weight, dtype: torch.dtype) -> Tensor:
    """Return the weight `(code - zero) * scale`, computed in float32 and rounded once.

    Args:
        weight: The packed weight.
        dtype: float16, bfloat16 or float32.

    Returns:
        `[out_features, in_features]`, features in the order of x, on the weight's device.

    Raises:
        TypeError: An argument is of another type or dtype.

    Example:
        >>> dense = dequantize(weight, torch.bfloat16)
    """
    if not isinstance(weight, W4Weight):
        raise TypeError(f"dequantize: weight must be a W4Weight, got {describe(weight)}")
    if dtype not in (*ACTIVATIONS, torch.float32):
        raise TypeError(
            f"dequantize: dtype must be torch.float16, torch.bfloat16 or torch.float32, "
            f"got {describe(dtype)}"
        )
    return ops.dequantize(weight, dtype)


def quantize(weight: Tensor, group_size: int = 128, symmetric: bool = True) -> W4Weight:
    """Round a weight to the nearest 4-bit codes, group by group.

    Symmetric: `scale = 2 max|w| / 15`, zero point 8. Asymmetric: `scale = (max - min) / 15`,
    `zero = round(-min / scale)`, with a range that holds 0 (the min-max rule of
    compressed-tensors). Codes are those nearest under the scale as it is stored: in the dtype of
    a 16-bit weight; in bfloat16 for float32, and where a scale is below float16's normal range.

    Args:
        weight: `[out_features, in_features]`, float16, bfloat16 or float32, finite.
        group_size: Input features of a group: 32, 64, 128, 256, 512, 1024, or -1 for all. The
            last group may be partial.
        symmetric: Whether the zero point is 8 everywhere.

    Returns:
        The packed weight, on the device of `weight`.

    Raises:
        TypeError: weight is no float tensor.
        ValueError: A size cannot be packed (see `supports`), or a value is not finite.

    Example:
        >>> weight = quantize(linear.weight, group_size=64, symmetric=False)
    """
    check_float_tensor("quantize", "weight", weight)
    if weight.dim() != 2:
        raise ValueError(
            f"quantize: weight must be [out_features, in_features], got {describe(weight)}"
        )
    n, k = weight.shape
    check_packable("quantize", group_size, k, n)
    if not bool(weight.isfinite().all()):
        raise ValueError("quantize: weight must be finite, got infinities or NaN")
    groups = group_count(k, group_size)
    size = k if group_size == -1 else group_size
    values = torch.nn.functional.pad(weight.detach().float(), (0, groups * size - k))
    values = values.view(n, groups, size)
    if symmetric:
        low, zeros = None, None
        scales = values.abs().amax(-1) * (2 / 15)
    else:
        low = values.amin(-1).clamp(max=0)
        scales = (values.amax(-1).clamp(min=0) - low) / 15
    dtype = torch.bfloat16 if weight.dtype is torch.float32 else weight.dtype
    if bool(((scales > 0) & (scales < torch.finfo(dtype).tiny)).any()):
        dtype = torch.bfloat16  # subnormal in float16, a scale would be off by up to half
    stored = scales.to(dtype)
    # A scale of 0 belongs to a group of zeros.
    stored = torch.where(stored == 0, torch.ones_like(stored), stored)
    scales = stored.float().unsqueeze(-1)
    shift = torch.full_like(scales, 8.0)
    if low is not None:
        shift = (-low.unsqueeze(-1) / scales).round().clamp(0, 15)
        zeros = shift.squeeze(-1).to(torch.int16).T
    codes = ((values / scales).round() + shift).clamp(0, 15).to(torch.uint8)
    return pack("quantize", codes.view(n, -1)[:, :k], stored.T, zeros, group_size)


def supports(
    *,
    in_features: int,
    out_features: int,
    bits: int = 4,
    group_size: int = 128,
    symmetric: bool = True,
    desc_act: bool = False,
    dtype: torch.dtype = torch.float16,
) -> tuple[bool, str]:
    """Return whether such a weight can be packed and multiplied, and why not.

    The rules are the ones that the other functions check by; nothing is computed.

    Args:
        in_features: A multiple of 32.
        out_features: A multiple of 8.
        bits: 4.
        group_size: 32, 64, 128, 256, 512, 1024, or -1 for one group.
        symmetric: Either.
        desc_act: Either: act-order is a permutation of the input features.
        dtype: Of the activations: float16 or bfloat16.

    Returns:
        `(True, "")`, or `(False, reason)`.

    Example:
        >>> supports(in_features=4096, out_features=12)
        (False, 'out_features must be a multiple of 8 from 8 to 16777184, got 12')
    """
    reason = refusal(bits, group_size, in_features, out_features)
    if reason is None and dtype not in ACTIVATIONS:
        reason = f"dtype must be torch.float16 or torch.bfloat16, got {dtype}"
    return reason is None, reason or ""
