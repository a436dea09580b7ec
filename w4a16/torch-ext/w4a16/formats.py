"""Checkpoint formats: each becomes a `W4Weight`, code for code.

What tensors cannot tell is asked for. Sizes of groups are read off the number of scales, so they
have to be among `GROUP_SIZES`: with two groups for 192 features they are of 128 and 64, not of 96.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ._shared.checks import check_float_tensor, describe
from .weight import BITS, GROUP_SIZES, W4Weight, check_packable, group_count, pack

#: Codes in a 32-bit word.
_IN_WORD = 32 // BITS
#: Where AWQ keeps the eight codes of a word: output feature n is nibble _AWQ_NIBBLES[n].
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def from_gptq(
    qweight: Tensor,
    qzeros: Tensor | None,
    scales: Tensor,
    g_idx: Tensor | None = None,
    *,
    zero_offset: int | str = "auto",
) -> W4Weight:
    """Convert a GPTQ layer (AutoGPTQ, GPTQModel, AutoRound), in act-order or not.

    With nibble i of a word in bits 4i to 4i + 3, `weight[n, k] = (code - zero) * scales[g, n]`,
    where code is nibble k % 8 of `qweight[k // 8, n]`, g is `g_idx[k]`, and zero is
    `(nibble n % 8 of qzeros[g, n // 8] + zero_offset) & 15`.

    Args:
        qweight: `[in_features / 8, out_features]` int32.
        qzeros: `[groups, out_features / 8]` int32, or None for 8 everywhere. A tensor is always
            used: pass None for a symmetric checkpoint whose qzeros are not to be trusted.
        scales: `[groups, out_features]` float16, bfloat16 or float32; kept in their dtype.
        g_idx: `[in_features]` int32 or int64, the group of each input feature; None or empty for
            contiguous groups.
        zero_offset: 1 if qzeros hold zero - 1 (`checkpoint_format` "gptq", the usual one), 0 if
            they hold the zero itself ("gptq_v2"). "auto" takes qzeros that are all 7 or all 8 for
            a symmetric checkpoint, whatever its config says. Any others can be either: it takes
            them for the first and warns.

    Returns:
        The packed weight.

    Raises:
        TypeError: A tensor is of another dtype, or no tensor; floating-point qweight for instance,
            which is a layer that was not quantised.
        ValueError: Shapes or devices do not fit each other; groups are of no size in
            `GROUP_SIZES`; g_idx leaves the groups or shares features out unevenly, as a shard
            along in_features of an act-order layer does; zero_offset is none of the three.
        NotImplementedError: The layer has 2, 3 or 8 bits.

    Example:
        >>> weight = from_gptq(*(t[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales")))
    """
    function = "from_gptq"
    _check_words(function, "qweight", qweight, "[in_features / 8, out_features]")
    _check_scales(function, "scales", scales, qweight)
    g_idx = _check_g_idx(function, "g_idx", g_idx, qweight)
    if isinstance(zero_offset, bool) or zero_offset not in (0, 1, "auto"):
        raise ValueError(f"{function}: zero_offset must be 0, 1 or 'auto', got {zero_offset!r}")
    rows, n = qweight.shape
    groups = scales.shape[0]
    _check_shape(function, "scales", scales, (groups, n))
    if qzeros is not None:
        _check_words(function, "qzeros", qzeros, "[groups, out_features / 8]", qweight)
        _check_bits(function, "qzeros", qzeros.shape[1], n)
        _check_shape(function, "qzeros", qzeros, (groups, n // _IN_WORD))
    elif g_idx is not None:
        _check_bits(function, "qweight", rows, g_idx.numel())
    k = rows * _IN_WORD
    group_size = _group_size(function, "scales", groups, k, n)
    perm = _order(function, "g_idx", g_idx, k, groups, group_size)
    zeros = None if qzeros is None else _nibbles(qzeros)
    if zeros is not None:
        # Each by itself: added to the word, a stored 15 would carry into its neighbour.
        zeros = (zeros + _offset(zeros, zero_offset)) & 15
    return _pack(function, _nibbles(qweight.T), scales, zeros, group_size, perm)


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> W4Weight:
    """Convert an AWQ layer of the GEMM layout (AutoAWQ, version "gemm").

    `weight[n, k] = (code - zero) * scales[g, n]` with contiguous groups, where code and zero are
    nibble `[0, 4, 1, 5, 2, 6, 3, 7][n % 8]` of `qweight[k, n // 8]` and `qzeros[g, n // 8]`.

    Args:
        qweight: `[in_features, out_features / 8]` int32.
        qzeros: `[groups, out_features / 8]` int32.
        scales: `[groups, out_features]` float16, bfloat16 or float32; kept in their dtype.

    Returns:
        The packed weight.

    Raises:
        TypeError: A tensor is of another dtype, or no tensor.
        ValueError: Shapes or devices do not fit each other; groups are of no size in
            `GROUP_SIZES`.
        NotImplementedError: The layer has 2, 3 or 8 bits.
    """
    function = "from_awq"
    _check_words(function, "qweight", qweight, "[in_features, out_features / 8]")
    _check_words(function, "qzeros", qzeros, "[groups, out_features / 8]", qweight)
    _check_scales(function, "scales", scales, qweight)
    k, (groups, n) = qweight.shape[0], scales.shape
    _check_bits(function, "qweight", qweight.shape[1], n)
    _check_shape(function, "qweight", qweight, (k, n // _IN_WORD))
    _check_shape(function, "qzeros", qzeros, (groups, n // _IN_WORD))
    group_size = _group_size(function, "scales", groups, k, n)
    codes, zeros = (
        _nibbles(words).view(-1, n // _IN_WORD, _IN_WORD)[..., _AWQ_NIBBLES].flatten(1)
        for words in (qweight, qzeros)
    )
    return _pack(function, codes.T, scales, zeros, group_size)


def from_compressed_tensors(
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None = None,
    *,
    shape: Sequence[int] | Tensor,
    g_idx: Tensor | None = None,
) -> W4Weight:
    """Convert a layer of compressed-tensors' format "pack-quantized" (llm-compressor).

    `weight[n, k] = (code - zero) * weight_scale[n, g]`, where code is nibble k % 8 of
    `weight_packed[n, k // 8]`, g is `g_idx[k]`, and zero is nibble n % 8 of
    `weight_zero_point[n // 8, g]`.

    Args:
        weight_packed: `[out_features, in_features / 8]` int32.
        weight_scale: `[out_features, groups]` float16, bfloat16 or float32, `[out_features, 1]`
            for one per channel; kept in their dtype.
        weight_zero_point: `[out_features / 8, groups]` int32; or not packed, int8 of -8 to 7
            `[out_features, groups]`, to which 8 is added; or None for 8 everywhere.
        shape: (out_features, in_features), or the checkpoint's `weight_shape` that holds them.
        g_idx: `weight_g_idx`, `[in_features]` int32 or int64, the group of each input feature;
            None, empty or -1 everywhere for contiguous groups.

    Returns:
        The packed weight.

    Raises:
        TypeError: A tensor is of another dtype, or no tensor.
        ValueError: Shapes or devices do not fit each other or `shape`; groups are of no size in
            `GROUP_SIZES`; g_idx leaves the groups or shares features out unevenly; an int8 zero
            point is not of 4 bits.
        NotImplementedError: The layer has 2, 3 or 8 bits.
    """
    function = "from_compressed_tensors"
    _check_words(function, "weight_packed", weight_packed, "[out_features, in_features / 8]")
    _check_scales(function, "weight_scale", weight_scale, weight_packed)
    g_idx = _check_g_idx(function, "g_idx", g_idx, weight_packed)
    n, k = _sizes(function, shape)
    _check_bits(function, "weight_packed", weight_packed.shape[1], k)
    groups = weight_scale.shape[1]
    group_size = _group_size(function, "weight_scale", groups, k, n)
    _check_shape(function, "weight_packed", weight_packed, (n, k // _IN_WORD))
    _check_shape(function, "weight_scale", weight_scale, (n, groups))
    if g_idx is not None and bool((g_idx == -1).all()):
        g_idx = None
    perm = _order(function, "g_idx", g_idx, k, groups, group_size)
    zeros = None
    if weight_zero_point is not None:
        zeros = _signed_zeros(function, weight_zero_point, weight_packed, n, groups)
    return _pack(function, _nibbles(weight_packed), weight_scale.T, zeros, group_size, perm)


def from_hqq(
    W_q: Tensor, scale: Tensor, zero: Tensor, *, shape: Sequence[int] | Tensor, axis: int = 1
) -> W4Weight:
    """Convert a layer of HQQ's packing "4bit_u8" with axis=1.

    W_q, unpacked, is `[out_features * in_features / g, g]`: the high nibbles of W_q, then the low
    ones below. `weight = (that - zero) * scale`, seen as `[out_features, in_features]`.

    Args:
        W_q: `[out_features * in_features / g / 2, g]` uint8; or `[out_features / 2, in_features]`
            if a row is one group.
        scale: float16, bfloat16 or float32, one a group: `[out_features * in_features / g, 1]` or
            any shape of as many elements; kept in their dtype.
        zero: Like scale. Kept in float32, or as integers if all are integers from 0 to 15.
        shape: (out_features, in_features), HQQ's `meta["shape"]`.
        axis: The axis along which HQQ grouped: 1. With 0 the scale varies along each input
            feature's outputs, and differs from one input feature to the next: no group of the
            kernel's stands for that.

    Returns:
        The packed weight.

    Raises:
        TypeError: A tensor is of another dtype, or no tensor; quantised scales for instance.
        ValueError: Shapes or devices do not fit each other or `shape`; groups do not divide
            in_features or are of no size in `GROUP_SIZES`; axis is neither 0 nor 1.
        NotImplementedError: axis is 0, or the layer has 2, 3 or 8 bits.
    """
    function = "from_hqq"
    if axis not in (0, 1):
        raise ValueError(f"{function}: axis must be 0 or 1, got {axis!r}")
    if axis == 0:
        raise NotImplementedError(
            f"{function}: axis must be 1: with the other one, the scale of an output feature "
            "changes from one input feature to the next, and no group stands for that; got 0"
        )
    n, k = _sizes(function, shape)
    if not isinstance(W_q, Tensor) or W_q.dtype not in (torch.uint8, torch.int32):
        raise TypeError(f"{function}: W_q must be a torch.uint8 tensor, got {describe(W_q)}")
    # HQQ keeps only 3-bit codes in int32.
    bits = 3 if W_q.dtype is torch.int32 else 8 * W_q.numel() / max(n * k, 1)
    if bits in (2, 3, 8):
        raise NotImplementedError(
            f"{function}: W_q must hold 4-bit codes, no others are supported, got "
            f"{describe(W_q)} for {n * k} weights: codes of {bits:g} bits"
        )
    for name, value in (("scale", scale), ("zero", zero)):
        check_float_tensor(function, name, value)
        _check_device(function, name, value, W_q)
    check_packable(function, -1, k, n)
    groups, rest = divmod(scale.numel(), n)
    if rest or groups == 0 or k % groups:
        raise ValueError(
            f"{function}: scale must have one element for each group of g input features, with g "
            f"a divisor of in_features {k}, got {describe(scale)} for {n} output features"
        )
    group_size = _group_size(function, "scale", groups, k, n)
    _check_shape(function, "W_q", W_q, (n * groups // 2, k // groups))
    if zero.numel() != scale.numel():
        raise ValueError(
            f"{function}: zero must have as many elements as scale, {scale.numel()}, "
            f"got {describe(zero)}"
        )
    codes = torch.cat((W_q >> 4, W_q & 15)).view(n, k)
    scales, zeros = (tensor.reshape(n, groups).T for tensor in (scale, zero.float()))
    if bool(((zeros == zeros.round()) & (zeros >= 0) & (zeros <= 15)).all()):
        zeros = zeros.to(torch.int16)
    return _pack(function, codes, scales, zeros, group_size)


def _nibbles(words: Tensor) -> Tensor:
    """Return int32 `[rows, words]` as uint8 `[rows, 8 * words]`, the lowest nibble first."""
    # The low byte of a word comes first on the machines torch runs on. A single column counts as
    # contiguous with any stride, but only a copy of it can be viewed as bytes.
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return torch.stack((octets & 15, octets >> 4), -1).flatten(1)


def _pack(
    function: str,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
    perm: Tensor | None = None,
) -> W4Weight:
    """Return the packed weight of codes in the checkpoint's order; it shares no memory with it."""
    codes = codes.contiguous() if perm is None else codes.index_select(1, perm)
    scales = scales.clone(memory_format=torch.contiguous_format)
    if zeros is not None and zeros.is_floating_point():
        zeros = zeros.clone(memory_format=torch.contiguous_format)
    return pack(function, codes, scales, zeros, group_size, perm)


def _offset(stored: Tensor, zero_offset: int | str) -> int:
    """Return what to add to the zeros that a GPTQ checkpoint stores."""
    if isinstance(zero_offset, int):
        return zero_offset
    if bool((stored == 8).all()):
        return 0
    if not bool((stored == 7).all()):
        warnings.warn(
            "from_gptq: these zero points are not symmetric, and the tensors do not tell whether "
            "they are stored less one; taken to be (zero_offset=1). Pass zero_offset=1 for "
            "checkpoint_format 'gptq', zero_offset=0 for 'gptq_v2'",
            stacklevel=3,
        )
    return 1


def _signed_zeros(
    function: str, weight_zero_point: Tensor, like: Tensor, n: int, groups: int
) -> Tensor:
    """Return the zeros `[groups, n]` of compressed-tensors, packed or not."""
    name = "weight_zero_point"
    if isinstance(weight_zero_point, Tensor) and weight_zero_point.dtype is torch.int8:
        _check_device(function, name, weight_zero_point, like)
        _check_shape(function, name, weight_zero_point, (n, groups))
        lowest, highest = (int(value) for value in weight_zero_point.aminmax())
        if lowest < -8 or highest > 7:
            raise ValueError(
                f"{function}: {name} in int8 must be from -8 to 7, "
                f"got values from {lowest} to {highest}"
            )
        return weight_zero_point.T + 8
    sizes = "[out_features / 8, groups], or torch.int8 [out_features, groups]"
    _check_words(function, name, weight_zero_point, sizes, like)
    _check_bits(function, name, weight_zero_point.shape[0], n)
    _check_shape(function, name, weight_zero_point, (n // _IN_WORD, groups))
    return _nibbles(weight_zero_point.T)


def _group_size(function: str, name: str, groups: int, in_features: int, out_features: int) -> int:
    """Return the size of the groups of a weight that can be packed; raise ValueError otherwise."""
    check_packable(function, -1, in_features, out_features)
    # Only one size gives a number of groups above 1; for 1, any that covers all features is it.
    for size in GROUP_SIZES:
        if group_count(in_features, size) == groups:
            return size
    raise ValueError(
        f"{function}: {name} must have ceil(in_features / g) groups with g one of {GROUP_SIZES} "
        f"(-1: a single group); in_features is {in_features}, got {groups} groups"
    )


def _order(
    function: str,
    name: str,
    g_idx: Tensor | None,
    in_features: int,
    groups: int,
    group_size: int,
) -> Tensor | None:
    """Return the order of input features in which groups are contiguous; None for their own."""
    if g_idx is None:
        return None
    _check_shape(function, name, g_idx, (in_features,))
    lowest, highest = (int(value) for value in g_idx.aminmax())
    if lowest < 0 or highest >= groups:
        raise ValueError(
            f"{function}: {name} must be from 0 to {groups - 1}, with {groups} groups of scales, "
            f"got values from {lowest} to {highest}"
        )
    wanted = torch.arange(in_features, device=g_idx.device, dtype=g_idx.dtype)
    wanted = wanted // (in_features if group_size == -1 else group_size)
    if torch.equal(g_idx, wanted):
        return None
    perm = torch.argsort(g_idx, stable=True)
    if not torch.equal(g_idx[perm], wanted):
        sizes = torch.bincount(g_idx, minlength=groups)
        raise ValueError(
            f"{function}: {name} must give each group {group_size} input features, the last one "
            f"what is left of {in_features} (a shard along the input features of an act-order "
            f"layer does not), got groups of {int(sizes.min())} to {int(sizes.max())}"
        )
    return perm


def _sizes(function: str, shape: Sequence[int] | Tensor) -> tuple[int, int]:
    """Return (out_features, in_features)."""
    try:
        n, k = (operator.index(size) for size in shape)
    except (TypeError, ValueError):
        raise ValueError(
            f"{function}: shape must be (out_features, in_features), got {describe(shape)}"
        ) from None
    return n, k


def _check_words(
    function: str, name: str, value: object, sizes: str, like: Tensor | None = None
) -> None:
    """Raise unless `value` is a matrix of int32, on the device of `like`."""
    wanted = f"{function}: {name} must be a torch.int32 tensor {sizes}"
    if not isinstance(value, Tensor) or value.dtype is not torch.int32:
        hint = ""
        if isinstance(value, Tensor) and value.is_floating_point():
            hint = " (a layer that is not quantised?)"
        raise TypeError(f"{wanted}, got {describe(value)}{hint}")
    if value.dim() != 2:
        raise ValueError(f"{wanted}, got {describe(value)}")
    if like is not None:
        _check_device(function, name, value, like)


def _check_scales(function: str, name: str, value: object, like: Tensor) -> None:
    """Raise unless `value` is a matrix of floating-point numbers, on the device of `like`."""
    check_float_tensor(function, name, value)
    assert isinstance(value, Tensor)
    if value.dim() != 2:
        raise ValueError(f"{function}: {name} must have 2 dimensions, got {describe(value)}")
    _check_device(function, name, value, like)


def _check_g_idx(function: str, name: str, value: object, like: Tensor) -> Tensor | None:
    """Return None if there is no `value` or an empty one; raise unless it is of integers."""
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{function}: {name} must be a torch.int32 or torch.int64 tensor [in_features], or "
            f"None, got {describe(value)}"
        )
    if value.numel() == 0:
        return None
    _check_device(function, name, value, like)
    return value


def _check_device(function: str, name: str, value: Tensor, like: Tensor) -> None:
    if value.device != like.device:
        raise ValueError(
            f"{function}: {name} must be on {like.device} with the codes, got {describe(value)}"
        )


def _check_shape(function: str, name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if value.shape != shape:
        raise ValueError(
            f"{function}: {name} must have shape {shape} to go with the other arguments, "
            f"got {describe(value)}"
        )


def _check_bits(function: str, name: str, words: int, features: int) -> None:
    """Raise NotImplementedError if so many words for so many features mean another precision."""
    for bits in (2, 3, 8):
        if features > 0 and words * 32 == features * bits:
            raise NotImplementedError(
                f"{function}: {name} must hold 4-bit numbers, no others are supported, "
                f"got {words} words for {features} features: numbers of {bits} bits"
            )
