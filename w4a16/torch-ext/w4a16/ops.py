"""The operators: registered for autograd and torch.compile, called directly where neither is on.

A registered operator takes tensors and numbers only, so a weight travels as its parts.
"""

import functools

import torch
from torch import Tensor

from . import config, reference
from ._ops import add_op_namespace_prefix
from ._shared import arrivals
from ._shared.device import device_guard, has_triton, uses_triton
from .weight import W4Weight

if has_triton():
    from . import launch


def gemm(x: Tensor, weight: W4Weight, bias: Tensor | None) -> Tensor:
    """Return x [..., k] times the weight, on any device."""
    qweight, k = weight.qweight, weight.in_features
    n = qweight.shape[1]
    y = x.new_empty((*x.shape[:-1], n))
    tokens = x.numel() // k
    if not tokens:
        return y
    if bias is not None:
        bias = bias.contiguous()
    rows = x if x.dim() == 2 else x.reshape(tokens, k)
    if weight.perm is not None:
        rows = rows.index_select(1, weight.perm)
    if not uses_triton(x):
        return reference.gemm(rows, weight, bias).view_as(y)
    with device_guard(x):
        zeros = None if weight.zeros is None else weight.zeros.dtype
        tile = _tile(tokens, n, k, weight.scales.dtype, zeros, x.device)
        if tile is None:
            by_dequantizing(rows, weight, bias, y.view(tokens, n))
        else:
            fused(_in_place(rows), weight, bias, y, tile)
    return y


@functools.lru_cache(4096)
def _tile(
    tokens: int,
    n: int,
    k: int,
    scales: torch.dtype,
    zeros: torch.dtype | None,
    device: torch.device,
) -> config.GemmConfig | None:
    """Return the tile of the fused product, or None where the weight is dequantised first."""
    # Such scales and zero points can only be applied after the product.
    after_only = torch.float32 in (scales, zeros)
    if tokens > (config.MOST_FUSED_AFTER if after_only else config.MOST_FUSED):
        return None
    return config.gemm_config(config.bucket(tokens), n, k, after_only, device)


def _in_place(x: Tensor) -> Tensor:
    """Return x [m, k] with rows that the kernel can read 16 bytes at a time, copied if need be."""
    stride = x.stride(0)
    if (
        x.stride(1) == 1
        and (stride % 16 == 0 or x.shape[0] == 1)
        # Offsets inside a tile of 128 tokens have 32 bits; overlapping rows have any stride.
        and 0 <= stride < 2**24
        and x.data_ptr() % 16 == 0
    ):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def fused(
    x: Tensor, weight: W4Weight, bias: Tensor | None, y: Tensor, tile: config.GemmConfig
) -> None:
    """Convert the weight inside the product: y [m, n] = x [m, k] W^T + bias."""
    m = x.shape[0]
    steps, n, _ = weight.qweight.shape
    per, shared, size = _shares(m, n, steps, tile)
    counters = arrivals.counters(x.device, shared)
    parts = x.new_empty(size, dtype=torch.int32) if size else counters
    launch.gemm(x, weight, bias, y, parts, counters, per, tile)


@functools.lru_cache(4096)
def _shares(m: int, n: int, steps: int, tile: config.GemmConfig) -> tuple[int, int, int]:
    """Return steps a program, tiles that may be shared, and the size of the workspace."""
    per = config.steps_per_program(m, n, steps, tile)
    tiles = config.tiles(m, n, tile)
    if tiles > arrivals.MOST:
        per = -(-per // steps) * steps  # so many tiles need not be shared
    if per % steps == 0:
        return per, 1, 0  # none is shared, but a pointer has to be passed
    programs = -(-tiles * steps // per)
    return per, tiles, 2 * programs * tile.block_m * tile.block_n


def by_dequantizing(x: Tensor, weight: W4Weight, bias: Tensor | None, y: Tensor) -> None:
    """Dequantise the weight, slice by slice, and let the vendor's library multiply."""
    n, k = weight.out_features, weight.in_features
    if bias is not None:
        bias = bias.to(x.dtype)
    rows = config.slice_rows(n, k, x.dtype.itemsize)
    # A product of more than 2^31 elements ended in an illegal access (torch 2.11, H200).
    tokens = (2**31 - 1) // max(n, k)
    for first in range(0, n, rows):
        last = min(first + rows, n)
        scratch = torch.empty((last - first, k), dtype=x.dtype, device=x.device)
        launch.dequantize(weight, scratch, first, config.DEQUANTIZE)
        for start in range(0, y.shape[0], tokens):
            part, out = x[start : start + tokens], y[start : start + tokens, first:last]
            if bias is None:
                torch.mm(part, scratch.T, out=out)
            else:
                torch.addmm(bias[first:last], part, scratch.T, out=out)


def dequantize(weight: W4Weight, dtype: torch.dtype) -> Tensor:
    """Return the weight [n, k] in the order of the input features."""
    if uses_triton(weight.qweight):
        shape = weight.out_features, weight.in_features
        out = torch.empty(shape, dtype=dtype, device=weight.device)
        with device_guard(out):
            launch.dequantize(weight, out, 0, config.DEQUANTIZE)
    else:
        out = reference.dequantize(weight, dtype)
    if weight.perm is not None:
        out = out.index_select(1, torch.argsort(weight.perm))
    return out


@torch.library.custom_op(add_op_namespace_prefix("w4a16_gemm"), mutates_args=())
def w4a16_gemm(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    perm: Tensor | None,
    bias: Tensor | None,
    in_features: int,
    group_size: int,
) -> Tensor:
    """Return x times the weight. Which path runs is decided here, by the tokens that come."""
    return gemm(x, W4Weight(qweight, scales, zeros, perm, in_features, group_size), bias)


@torch.library.register_fake(add_op_namespace_prefix("w4a16_gemm"))
def _(x, qweight, scales, zeros, perm, bias, in_features, group_size):
    return x.new_empty((*x.shape[:-1], qweight.shape[1]))


@torch.library.custom_op(add_op_namespace_prefix("w4a16_gemm_dx"), mutates_args=())
def w4a16_gemm_dx(
    dy: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    perm: Tensor | None,
    in_features: int,
    group_size: int,
) -> Tensor:
    """Return dy [..., n] times the dequantised weight [n, k]."""
    weight = W4Weight(qweight, scales, zeros, perm, in_features, group_size)
    return dy @ dequantize(weight, dy.dtype)


@torch.library.register_fake(add_op_namespace_prefix("w4a16_gemm_dx"))
def _(dy, qweight, scales, zeros, perm, in_features, group_size):
    return dy.new_empty((*dy.shape[:-1], in_features))


def _setup(ctx, inputs, output):
    _, qweight, scales, zeros, perm, bias, in_features, group_size = inputs
    ctx.save_for_backward(qweight, scales, zeros, perm)
    ctx.sizes = in_features, group_size
    ctx.bias_dtype = None if bias is None else bias.dtype


def _gradient(ctx, dy):
    qweight, scales, zeros, perm = ctx.saved_tensors
    dx = dbias = None
    if ctx.needs_input_grad[0]:
        dx = w4a16_gemm_dx(dy, qweight, scales, zeros, perm, *ctx.sizes)
    if ctx.needs_input_grad[5]:
        dbias = dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
    return dx, None, None, None, None, dbias, None, None


w4a16_gemm.register_autograd(_gradient, setup_context=_setup)
