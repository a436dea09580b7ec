"""The stages of the predecessor one by one, on any device, and their operators."""

import itertools

import torch
from torch import Tensor

from . import config, layouts, ops, reference
from ._ops import add_op_namespace_prefix
from ._shared.device import device_guard, has_triton, uses_triton

if has_triton():
    from . import launch


def router(
    x: Tensor, weight: Tensor, bias: Tensor | None, routing: ops.Routing
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the chosen experts, their weights and the logits, both in float32, on any device."""
    tokens, top_k = x.shape[0], routing.top_k
    if not uses_triton(x) or not tokens:
        logits = reference.linear(x, weight, bias)
        return (*reference.route(logits, *routing[:3], None, *routing[3:]), logits)
    sizes = config.Sizes(weight.shape[0], top_k, x.shape[1], 0, x.element_size())
    ids = x.new_empty(tokens, top_k, dtype=torch.int64)
    mix = x.new_empty(tokens, top_k, dtype=torch.float32)
    x = layouts.rows(x)
    found = []
    with device_guard(x):
        for first in range(0, tokens, config.MOST_TOKENS):
            part = slice(first, min(first + config.MOST_TOKENS, tokens))
            bucket = config.bucket(part.stop - first)
            block = config.block_tokens(bucket, top_k)
            logits = ops.score(
                x[part], weight, bias, routing, block, ids[part], mix[part], None, None, None, sizes
            )
            found.append(logits)
    return ids, mix, found[0] if len(found) == 1 else torch.cat(found)


def unpermute(y: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """Return the sum of each token's rows of y, whose places are given by slot."""
    tokens, top_k = weights.shape
    if not uses_triton(y) or not tokens or not y.shape[1]:
        y = y[places].view(tokens, top_k, y.shape[1])
        return reference.combine(y, torch.zeros_like(weights), weights).to(y.dtype)
    out = y.new_empty(tokens, y.shape[1])
    with device_guard(y):
        launch.combine(
            y.contiguous(), None, places.contiguous(), weights, out, *ops.combine_block(y.shape[1])
        )
    return out


def _cut(
    offsets: Tensor, rows: int, experts: int, tile: config.GemmConfig
) -> tuple[Tensor, Tensor, int]:
    """Return tiles of rows in order, how many there are, and how many there may be."""
    most = config.most_tiles(rows, experts, tile.tokens)
    tables = offsets.new_empty(4 * most + 4, dtype=torch.int32)
    tiles, counted = tables[4:], tables[:4]
    # Each program cuts every so-manieth tile of all experts.
    programs = min(64, most)
    launch.cut(
        offsets.contiguous(), tiles, counted, rows, tile.tokens, programs,
        config.power_of_two(max(experts, 16)),
    )  # fmt: skip
    return tiles, counted, most


def grouped_gemm(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Return the product of rows in order with their expert's weight, on any device."""
    rows, experts = x.shape[0], weights.shape[0]
    y = x.new_zeros(rows, weights.shape[1])
    if not rows:
        return y
    if not uses_triton(x):
        if x.is_meta:  # offsets have no values
            return y
        bounds = reference.bounds(offsets, rows).tolist()
        for expert, (first, last) in enumerate(itertools.pairwise(bounds)):
            y[first:last] = reference.linear(x[first:last], weights[expert], None).to(x.dtype)
        return y
    sizes = config.Sizes(experts, 1, weights.shape[1], x.shape[1], x.element_size())
    with device_guard(x):
        tile = config.whole(config.gemm_config(False, config.bucket(rows), sizes, x.device))
        tiles, counted, most = _cut(offsets, rows, experts, tile)
        device = config.of_device(x.device)
        ops.down(layouts.rows(x), weights, None, y, None, tiles, counted, most, tile, device)
    return y


@torch.library.custom_op(add_op_namespace_prefix("grouped_gemm"), mutates_args=())
def grouped_gemm_operator(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Return the product of rows in order with their expert's weight."""
    return grouped_gemm(x, weights, offsets)


@torch.library.register_fake(add_op_namespace_prefix("grouped_gemm"))
def _(x, weights, offsets):
    return x.new_empty(x.shape[0], weights.shape[1])


def expert_ffn(
    x: Tensor, gate: Tensor, up_weight: Tensor, down_weight: Tensor, offsets: Tensor,
    router_weights: Tensor, slots: Tensor,
) -> Tensor:  # fmt: skip
    """Return the weighted sum of rows in order after their experts; `slots` are the rows' own."""
    tokens, top_k = router_weights.shape
    weights = layouts.Weights(gate, up_weight, down_weight)
    sizes = ops.sizes_of(x, weights, top_k)
    gating = ops.Gating("silu", 1.702, 7.0, False)
    if not uses_triton(x) or not tokens:
        return _ffn_reference(x, weights, offsets, router_weights, slots, gating)
    rows, experts = x.shape[0], sizes.experts
    y = x.new_zeros(rows, sizes.hidden)
    out = x.new_empty(tokens, sizes.hidden)
    x = layouts.rows(x)
    with device_guard(x):
        device = config.of_device(x.device)
        bucket = config.bucket(tokens)
        tile = config.whole(config.gemm_config(True, bucket, sizes, x.device))
        tiles, counted, most = _cut(offsets, rows, experts, tile)
        h = x.new_empty(rows, sizes.inner)
        gates = layouts.gates(weights, False)
        ops.up(x, gates, h, None, tiles, counted, top_k, most, gating, tile, device)
        tile = config.whole(config.gemm_config(False, bucket, sizes, x.device))
        tiles, counted, most = _cut(offsets, rows, experts, tile)
        # A row whose slot is none would be written outside of y.
        places = slots.clamp(0, rows - 1)
        ops.down(h, down_weight, None, y, places, tiles, counted, most, tile, device)
        launch.combine(y, None, None, router_weights, out, *ops.combine_block(sizes.hidden))
    return out


def _ffn_reference(
    x: Tensor, weights: layouts.Weights, offsets: Tensor, router_weights: Tensor, slots: Tensor,
    gating: ops.Gating,
) -> Tensor:  # fmt: skip
    tokens, top_k = router_weights.shape
    row = torch.arange(x.shape[0], device=x.device)
    bounds = reference.bounds(offsets, x.shape[0])
    expert = torch.searchsorted(bounds, row, right=True) - 1
    expert = torch.where(expert < weights.down.shape[0], expert, -1)
    one = torch.ones_like(row, dtype=torch.float32).unsqueeze(1)
    y = torch.empty_like(x)
    y[slots] = ops.by_reference(x, weights, expert.unsqueeze(1), one, None, gating)
    y = y.view(tokens, top_k, x.shape[1])
    return reference.combine(y, torch.zeros_like(router_weights), router_weights).to(x.dtype)


@torch.library.custom_op(add_op_namespace_prefix("expert_ffn"), mutates_args=())
def expert_ffn_operator(
    x: Tensor,
    gate: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    offsets: Tensor,
    router_weights: Tensor,
    slots: Tensor,
) -> Tensor:
    """Return the weighted sum of rows in order after their experts."""
    return expert_ffn(x, gate, up_weight, down_weight, offsets, router_weights, slots)


@torch.library.register_fake(add_op_namespace_prefix("expert_ffn"))
def _(x, gate, up_weight, down_weight, offsets, router_weights, slots):
    return x.new_empty(router_weights.shape[0], down_weight.shape[1])
