"""Grids and arguments of the Triton kernels. Allocates nothing, decides nothing.

A `weight` is any object with the parts of `weight.W4Weight`, a `config` one with the fields of
`config.GemmConfig` or `config.DequantizeConfig`.
"""

import functools

import torch

from . import _kernels
from ._shared.device import on_nvidia
from ._shared.launcher import launch


def gemm(
    x: torch.Tensor,
    weight,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    parts: torch.Tensor,
    arrivals: torch.Tensor,
    per: int,
    config,
) -> None:
    """Launch the product y = x W^T + bias.

    Args:
        x: `[m, k]`, dense in its last dimension, rows a multiple of 16 elements apart.
        weight: The packed weight; its `perm` is not looked at.
        bias: `[n]` or None.
        y: `[m, n]`, contiguous.
        parts: int32, as large as `ops` says for `per`.
        arrivals: int32 zeros, one a tile.
        per: Steps that each program takes.
        config: The tile.
    """
    m, k = x.shape
    qweight, scales, zeros = weight.qweight, weight.scales, weight.zeros
    steps, n, _ = qweight.shape
    m_tiles = -(-m // config.block_m)
    items = m_tiles * -(-n // config.block_n) * steps
    constants, shift = _constants(weight.group_size, zeros is None or zeros.dtype, k % 128, config)
    key = (
        x.get_device(), x.dtype, scales.dtype, None if bias is None else bias.dtype,
        # Stands for all constants; the same object as long as the process lives.
        id(constants),
    )  # fmt: skip
    launch(
        key,
        _kernels.w4a16_gemm_kernel,
        -(-items // per),
        (x, qweight, scales, zeros, bias, y, parts, arrivals),
        (
            m, n // 8, k // 32, x.stride(0) // 16 if m > 1 else 0, shift, scales.shape[0],
            steps, per, items, m_tiles,
        ),
        constants,
        config.num_warps,
        config.max_registers,
    )  # fmt: skip


@functools.cache
def _constants(
    group_size: int, zeros: bool | torch.dtype, odd: int, config
) -> tuple[dict[str, object], int]:
    """Return the constants of the product and its shift: kept, since every call asks for them."""
    group, shift = _group(group_size)
    # Scales of 16 bits and less than two a thread cannot be copied ahead.
    few = 32 * config.num_warps <= config.block_n < 64 * config.num_warps
    constants = {
        "GROUP": group,
        "ZEROS": _zeros(zeros),
        "SCALE_BEFORE": config.scale_before,
        "WHOLE": odd == 0,
        "PREFETCH": group == 128 and few,
        "ASM": on_nvidia(),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.num_stages,
    }
    return constants, shift


def dequantize(weight, out: torch.Tensor, first: int, config) -> None:
    """Launch the dequantisation of rows `first`, `first + 1`, ... into out `[rows, k]`."""
    steps, n, _ = weight.qweight.shape
    rows, k = out.shape
    group, shift = _group(weight.group_size)
    constants = {
        "GROUP": group,
        "ZEROS": _zeros(weight.zeros is None or weight.zeros.dtype),
        "ASM": on_nvidia(),
        "BLOCK_N": config.block_n,
    }
    key = (
        _kernels.w4a16_dequantize_kernel, out.get_device(), out.dtype, weight.scales.dtype,
        config.num_warps, *constants.values(),
    )  # fmt: skip
    launch(
        key,
        _kernels.w4a16_dequantize_kernel,
        -(-rows // config.block_n) * steps,
        (weight.qweight, weight.scales, weight.zeros, out),
        (first, rows, n // 8, k // 32, shift, weight.scales.shape[0], steps),
        constants,
        config.num_warps,
    )


def _group(group_size: int) -> tuple[int, int]:
    """Return the kernel's GROUP and shift; a shift of 31 makes one group of all blocks."""
    if group_size == -1:
        return 128, 31
    return min(group_size, 128), max(group_size // 128, 1).bit_length() - 1


def _zeros(zeros: bool | torch.dtype) -> str:
    """Return the kernel's ZEROS for a dtype of zero points, or True for none."""
    if zeros is True:
        return "eight"
    return "float" if zeros is torch.float32 else "integer"
