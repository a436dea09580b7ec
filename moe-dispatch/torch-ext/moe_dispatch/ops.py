"""The operators: registered for autograd and torch.compile, called directly where neither is on."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from . import config, layouts, reference
from ._ops import add_op_namespace_prefix
from ._shared import arrivals
from ._shared.device import device_guard, has_triton, uses_triton
from .layouts import Weights

if has_triton():
    from . import launch


class Routing(NamedTuple):
    """How experts are chosen and weighed: the arguments of `api.route`."""

    top_k: int
    scoring: str
    renormalize: bool
    num_groups: int
    top_groups: int
    scale: float


class Gating(NamedTuple):
    """What happens between the products: the arguments of `api.fused_experts`."""

    activation: str
    alpha: float
    limit: float
    interleaved: bool


# ---------------------------------------------------------------------------------------- routing
@functools.lru_cache(4096)
def _gate(experts: int, tokens: int, routing: Routing) -> tuple[tuple, dict[str, object]]:
    """Return the numbers and the constants of the choice, for blocks of so many tokens."""
    size = experts // routing.num_groups
    numbers = routing.top_k, size, routing.top_groups, float(routing.scale)
    constants = {
        "SCORING": routing.scoring,
        "RENORMALIZE": routing.renormalize,
        "TOKENS": tokens,
        "GROUPS": config.power_of_two(routing.num_groups),
        "GROUP": config.power_of_two(size),
    }
    return numbers, constants


def route_block(experts: int, groups: int) -> tuple[int, int]:
    """Return tokens and warps of a program that chooses by logits that are there."""
    columns = config.power_of_two(groups) * config.power_of_two(experts // groups)
    # A warp has a line or two: each choice waits for the one before, tokens do not.
    return max(1, min(64, 1024 // columns)), 8 if columns > 512 else 4


def choose(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return the experts chosen by logits [tokens, experts], and their weights, on any device."""
    tokens, experts = logits.shape
    if not uses_triton(logits) or not tokens:
        return reference.route(logits, *routing[:3], bias, *routing[3:])
    ids = logits.new_empty(tokens, routing.top_k, dtype=torch.int64)
    weights = logits.new_empty(tokens, routing.top_k, dtype=torch.float32)
    block, warps = route_block(experts, routing.num_groups)
    numbers, constants = _gate(experts, block, routing)
    with device_guard(logits):
        bias = None if bias is None else bias.contiguous()
        launch.route(logits, bias, ids, weights, numbers, constants, warps)
    return ids, weights


@torch.library.custom_op(add_op_namespace_prefix("route"), mutates_args=())
def route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    num_groups: int,
    top_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the experts chosen by logits [tokens, experts], and their weights."""
    return choose(logits, bias, Routing(top_k, scoring, renormalize, num_groups, top_groups, scale))


@torch.library.register_fake(add_op_namespace_prefix("route"))
def _(logits, bias, top_k, scoring, renormalize, num_groups, top_groups, scale):
    shape = logits.shape[0], top_k
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=torch.float32)


def _route_setup(ctx, inputs, output):
    logits, _, _, ctx.scoring, ctx.renormalize, _, _, ctx.scale = inputs
    ctx.save_for_backward(logits, output[0])
    ctx.mark_non_differentiable(output[0])


def _route_gradient(ctx, _, dweights):
    logits, ids = ctx.saved_tensors
    grad = reference.weigh_backward(
        dweights, logits.float(), ids, ctx.scoring, ctx.renormalize, ctx.scale
    )
    # The bias only takes part in the choice, which has no gradient.
    return grad.to(logits.dtype), None, None, None, None, None, None, None


route.register_autograd(_route_gradient, setup_context=_route_setup)


# --------------------------------------------------------------------------------------- workspace
class _Dispatch(NamedTuple):
    """The tables of one pass, parts of one allocation of int32.

    Attributes:
        slots: `[slots]`, each one's expert, or -1.
        counts: `[blocks, experts]`, slots of each expert in a block.
        places: `[slots]`, the slot of each row.
        up_tiles: `[up_most, 4]`.
        down_tiles: `[down_most, 4]`.
        counted: `[2]`, the tiles that there are.
    """

    slots: Tensor
    counts: Tensor
    places: Tensor
    up_tiles: Tensor
    down_tiles: Tensor
    counted: Tensor


class _Plan(NamedTuple):
    """How one pass over so many tokens runs."""

    block: int  # tokens
    blocks: int
    up: config.GemmConfig
    down: config.GemmConfig
    up_most: int
    down_most: int


@functools.lru_cache(4096)
def _plan(tokens: int, sizes: config.Sizes, device: torch.device) -> _Plan:
    bucket, slots = config.bucket(tokens), tokens * sizes.top_k
    block = config.block_tokens(bucket, sizes.top_k)
    up, down = (config.gemm_config(gates, bucket, sizes, device) for gates in (True, False))
    most = (config.most_tiles(slots, sizes.experts, each.tokens) for each in (up, down))
    return _Plan(block, -(-tokens // block), up, down, *most)


def _tables(like: Tensor, slots: int, experts: int, plan: _Plan) -> _Dispatch:
    """Allocate the tables of one pass; every part is aligned to 16 bytes."""
    numbers = (slots, plan.blocks * experts, slots, 4 * plan.up_most, 4 * plan.down_most, 2)
    aligned = [-(-number // 4) * 4 for number in numbers]
    parts = like.new_empty(sum(aligned), dtype=torch.int32).split(aligned)
    return _Dispatch(*(part[:number] for part, number in zip(parts, numbers, strict=True)))


@functools.lru_cache(4096)
def dispatch_constants(experts: int, size: int) -> tuple[dict[str, object], dict[str, object], int]:
    """Return the constants of count and index for blocks of so many slots, and their warps."""
    padded = config.power_of_two(max(experts, 16))
    count = {"EXPERTS": padded, "SIZE": config.power_of_two(max(size, 16))}
    index = {
        **count,
        "CHUNK": 16,
        "ROWS": max(2, min(16, 4096 // padded)),
    }
    return count, index, 8 if experts > 64 else 4


def _index(tables: _Dispatch, experts: int, top_k: int, plan: _Plan) -> None:
    """Fill places and tiles from slots and counts."""
    size = plan.block * top_k
    _, constants, warps = dispatch_constants(experts, size)
    launch.index(
        tables.slots, tables.counts, tables.places, tables.up_tiles, tables.down_tiles,
        tables.counted, size, plan.blocks, experts, plan.up, plan.down, constants, warps,
    )  # fmt: skip


def _count(
    tables: _Dispatch, ids: Tensor, expert_map: Tensor | None, experts: int, plan: _Plan
) -> None:
    """Fill slots and counts from ids [tokens, top_k]."""
    size = plan.block * ids.shape[1]
    constants, _, warps = dispatch_constants(experts, size)
    given = experts if expert_map is None else expert_map.numel()
    launch.count(
        ids, expert_map, tables.slots, tables.counts, experts, given, size, constants, warps
    )


# ----------------------------------------------------------------------------------------- experts
def sizes_of(x: Tensor, weights: Weights, top_k: int) -> config.Sizes:
    """Return what a configuration depends on."""
    experts, hidden, inner = weights.down.shape
    return config.Sizes(experts, top_k, hidden, inner, x.element_size())


def _decodes(tokens: int, sizes: config.Sizes, weights: Weights) -> bool:
    """Return whether slots are served one by one, which needs weights that are dense in rows."""
    return config.decodes(tokens, sizes) and "columns" not in (
        layouts.layout_of(weights.gate_up),
        layouts.layout_of(weights.down),
    )


def _decode(
    x: Tensor, weights: Weights, ids: Tensor, expert_map: Tensor | None, router: Tensor,
    gating: Gating, sizes: config.Sizes, out: Tensor,
) -> None:  # fmt: skip
    """Serve each slot by itself: two launches, no order."""
    gates = layouts.gates(weights, gating.interleaved)
    down, _ = layouts.dense(weights.down)
    bucket = config.bucket(x.shape[0])
    given = sizes.experts if expert_map is None else expert_map.numel()
    h = x.new_empty(ids.numel(), sizes.inner)
    launch.decode_up(
        x, gates.gate, gates.up, h, gates.gate_bias, gates.up_bias, ids, expert_map, given,
        gating.activation, gating.alpha, gating.limit,
        config.decode_config(True, bucket, sizes, x.device),
    )  # fmt: skip
    launch.decode_down(
        h, down, out, weights.down_bias, ids, expert_map, given, router,
        config.decode_config(False, bucket, sizes, x.device),
    )  # fmt: skip


def up(
    x: Tensor, gates: layouts.Gates, h: Tensor, places: Tensor | None, tiles: Tensor,
    counted: Tensor, top_k: int, most: int, gating: Gating, tile: config.GemmConfig,
    device: config.Device,
) -> None:  # fmt: skip
    """Launch gate and up with a tile, or what of it the operands allow."""
    layout = gates.layout
    if x.element_size() == 2:
        aligned = gates.aligned and layouts.aligned(x, *([x.stride(0)] if x.shape[0] > 1 else []))
        if aligned and tile.boxes and device.boxes:
            layout = layout[:-1] + " boxes"
        elif not aligned or layout == "columns":
            tile = config.small_steps(tile)
    how = "apart"
    if gates.up is None:
        how = "pairs"
    elif tile.wide and gates.halves and layout == "row boxes" and not tile.swap:
        how = "halves"
    launch.up(
        x, gates.gate, gates.up, h, gates.gate_bias, gates.up_bias, places, tiles, counted, top_k,
        most, gating.activation, gating.alpha, gating.limit, layout, how, tile,
    )  # fmt: skip


def down(
    h: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, places: Tensor | None,
    tiles: Tensor, counted: Tensor, most: int, tile: config.GemmConfig, device: config.Device,
) -> None:  # fmt: skip
    """Launch down with a tile, or what of it the operands allow."""
    weight, layout = layouts.dense(weight)
    if h.element_size() == 2:
        aligned = layouts.weight_aligned(weight, layout) and layouts.aligned(h, h.stride(0))
        if aligned and tile.boxes and device.boxes:
            layout = layout[:-1] + " boxes"
        elif not aligned or layout == "columns":
            tile = config.small_steps(tile)
    launch.down(h, weight, y, bias, places, tiles, counted, most, layout, tile)


def _grouped(
    x: Tensor, weights: Weights, router: Tensor, gating: Gating, sizes: config.Sizes,
    tables: _Dispatch, plan: _Plan, out: Tensor,
) -> None:  # fmt: skip
    """Order the slots that `tables` holds by expert, and run the two grouped products."""
    top_k = sizes.top_k
    device = config.of_device(x.device)
    _index(tables, sizes.experts, top_k, plan)
    h = x.new_empty(tables.slots.numel(), sizes.inner)
    up(
        x, layouts.gates(weights, gating.interleaved), h, tables.places, tables.up_tiles,
        tables.counted, top_k, plan.up_most, gating, plan.up, device,
    )  # fmt: skip
    y = x.new_empty(tables.slots.numel(), sizes.hidden)
    one = plan.up.heights == plan.down.heights
    tiles = tables.up_tiles if one else tables.down_tiles
    counted = tables.counted if one else tables.counted[1:]
    down(
        h, weights.down, weights.down_bias, y, tables.places, tiles, counted, plan.down_most,
        plan.down, device,
    )  # fmt: skip
    launch.combine(y, tables.slots, None, router, out, *combine_block(sizes.hidden))


def combine_block(hidden: int) -> tuple[int, int]:
    """Return columns and warps of a program of the combination."""
    block = min(1024, config.power_of_two(hidden))
    return block, 4 if block > 256 else 1


def run(
    x: Tensor, weights: Weights, ids: Tensor, router: Tensor, expert_map: Tensor | None,
    gating: Gating,
) -> Tensor:  # fmt: skip
    """Return the weighted sum of the experts that ids [tokens, top_k] name, on any device."""
    tokens, top_k = ids.shape
    sizes = sizes_of(x, weights, top_k)
    out = x.new_empty(tokens, sizes.hidden)
    if not tokens:
        return out
    if not uses_triton(x):
        return by_reference(x, weights, ids, router, expert_map, gating)
    x = layouts.rows(x)
    with device_guard(x):
        if _decodes(tokens, sizes, weights):
            _decode(x, weights, ids, expert_map, router, gating, sizes, out)
            return out
        for first in range(0, tokens, config.MOST_TOKENS):
            part = slice(first, min(first + config.MOST_TOKENS, tokens))
            plan = _plan(part.stop - first, sizes, x.device)
            tables = _tables(x, (part.stop - first) * top_k, sizes.experts, plan)
            _count(tables, ids[part], expert_map, sizes.experts, plan)
            _grouped(x[part], weights, router[part], gating, sizes, tables, plan, out[part])
    return out


def _parts(weights: Weights, gating: Gating):
    """Return gate, up, down and their biases, as the reference takes them."""
    gate, up = weights.gate_up, weights.up
    if up is None:
        gate, up = reference.halves(gate, gating.interleaved)
    biases: tuple[Tensor | None, Tensor | None] = None, None
    if weights.gate_up_bias is not None:
        biases = reference.halves(weights.gate_up_bias, gating.interleaved)
    return (gate, up, weights.down), (*biases, weights.down_bias)


def by_reference(
    x: Tensor, weights: Weights, ids: Tensor, router: Tensor, expert_map: Tensor | None,
    gating: Gating,
) -> Tensor:  # fmt: skip
    """Return what `run` does, in PyTorch."""
    parts, biases = _parts(weights, gating)
    ids = reference.local_ids(ids, expert_map, weights.down.shape[0])
    return reference.experts(x, *parts, ids, router, *biases, *gating[:3])


@torch.library.custom_op(add_op_namespace_prefix("experts"), mutates_args=())
def experts(
    x: Tensor,
    gate_up: Tensor,
    up: Tensor | None,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    ids: Tensor,
    router: Tensor,
    expert_map: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    interleaved: bool,
) -> Tensor:
    """Return the weighted sum of the experts that ids [tokens, top_k] name."""
    weights = Weights(gate_up, up, down, gate_up_bias, down_bias)
    return run(x, weights, ids, router, expert_map, Gating(activation, alpha, limit, interleaved))


@torch.library.register_fake(add_op_namespace_prefix("experts"))
def _(x, gate_up, up, down, gate_up_bias, down_bias, ids, router, expert_map, *_):
    return x.new_empty(x.shape[0], down.shape[1])


#: Arguments of `experts` that have gradients, by their places.
_DIFFERENTIABLE = (0, 1, 2, 3, 4, 5, 7)


@torch.library.custom_op(add_op_namespace_prefix("experts_backward"), mutates_args=())
def experts_backward(
    dout: Tensor,
    x: Tensor,
    gate_up: Tensor,
    up: Tensor | None,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    ids: Tensor,
    router: Tensor,
    expert_map: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    interleaved: bool,
    wanted: list[bool],
) -> list[Tensor]:
    """Return the gradients that are wanted of x, the weights, the biases and the router weights.

    Computed again in PyTorch, expert by expert: it waits for the device.
    """
    weights = Weights(gate_up, up, down, gate_up_bias, down_bias)
    gating = Gating(activation, alpha, limit, interleaved)
    named = (x, *weights, router)
    found = [
        torch.zeros(each.shape, dtype=each.dtype, device=each.device) if want else None
        for each, want in zip(named, wanted, strict=True)
    ]
    if x.shape[0]:
        dx, dgate_up, dup, ddown, dgate_up_bias, ddown_bias, drouter = found
        grads = {"x": dx, "gate": dgate_up, "up": dup, "down": ddown, "weights": drouter}
        if up is None and dgate_up is not None:
            grads["gate"], grads["up"] = reference.halves(dgate_up, interleaved)
        if dgate_up_bias is not None:
            both = reference.halves(dgate_up_bias, interleaved)
            grads["gate_bias"], grads["up_bias"] = both
        grads["down_bias"] = ddown_bias
        if dx is not None and dx.dtype is not torch.float32:
            grads["x"] = torch.zeros_like(dx, dtype=torch.float32)
        parts, biases = _parts(weights, gating)
        with reference.full_precision(x):
            reference.experts_backward(
                dout, x, *parts, reference.local_ids(ids, expert_map, down.shape[0]), router,
                *biases, *gating[:3],
                {name: grad for name, grad in grads.items() if grad is not None},
            )  # fmt: skip
        if dx is not None and grads["x"] is not dx:
            dx.copy_(grads["x"])
    return [grad for grad in found if grad is not None]


@torch.library.register_fake(add_op_namespace_prefix("experts_backward"))
def _(
    dout, x, gate_up, up, down, gate_up_bias, down_bias, ids, router, expert_map, activation,
    alpha, limit, interleaved, wanted,
):  # fmt: skip
    named = (x, gate_up, up, down, gate_up_bias, down_bias, router)
    return [
        torch.empty(each.shape, dtype=each.dtype, device=each.device)
        for each, want in zip(named, wanted, strict=True)
        if want
    ]


def _experts_setup(ctx, inputs, output):
    *tensors, ctx.activation, ctx.alpha, ctx.limit, ctx.interleaved = inputs
    ctx.save_for_backward(*tensors)


def _experts_gradient(ctx, dout):
    wanted = [ctx.needs_input_grad[i] for i in _DIFFERENTIABLE]
    found = iter(
        experts_backward(
            dout, *ctx.saved_tensors, ctx.activation, ctx.alpha, ctx.limit, ctx.interleaved, wanted
        )
    )
    grads: list[Tensor | None] = [None] * 13
    for place, want in zip(_DIFFERENTIABLE, wanted, strict=True):
        grads[place] = next(found) if want else None
    return tuple(grads)


experts.register_autograd(_experts_gradient, setup_context=_experts_setup)


# ----------------------------------------------------------------------------------- router and all
def score(
    x: Tensor, router: Tensor, router_bias: Tensor | None, routing: Routing, block: int,
    ids: Tensor, weights: Tensor, rounded: Tensor | None, slots: Tensor | None,
    counts: Tensor | None, sizes: config.Sizes,
) -> Tensor:  # fmt: skip
    """Choose experts for x [tokens, hidden]; return the logits [tokens, experts] in float32."""
    itemsize = max(x.element_size(), router.element_size())
    tile = config.score_config(config.bucket(x.shape[0]), block, itemsize, sizes, x.device)
    return score_with(
        x, router, router_bias, routing, block, ids, weights, rounded, slots, counts, tile
    )


def score_with(
    x: Tensor, router: Tensor, router_bias: Tensor | None, routing: Routing, block: int,
    ids: Tensor, weights: Tensor, rounded: Tensor | None, slots: Tensor | None,
    counts: Tensor | None, tile: config.ScoreConfig,
) -> Tensor:  # fmt: skip
    """Do what `score` does, with a tile of the router's product."""
    tokens, hidden = x.shape
    experts = router.shape[0]
    steps = -(-hidden // tile.block_k)
    span = -(-steps // tile.splits)
    splits = -(-steps // span)
    slabs = -(-experts // tile.experts)
    blocks = -(-tokens // tile.tokens)
    assert blocks * slabs + blocks <= arrivals.MOST, (tokens, experts, tile)
    logits = x.new_empty(tokens, experts, dtype=torch.float32)
    parts = logits
    if splits > 1:
        programs = blocks * slabs * splits
        parts = x.new_empty(programs * tile.tokens * tile.experts, dtype=torch.float32)
    numbers, constants = _gate(experts, config.gate_tokens(block, experts, tile.num_warps), routing)
    if router_bias is not None:
        router_bias = router_bias.contiguous()
    launch.score(
        x, layouts.rows(router), router_bias, logits, parts,
        arrivals.counters(x.device, blocks * slabs + blocks), None, ids, weights, rounded, slots,
        counts, numbers, constants, block, splits, span, tile,
    )  # fmt: skip
    return logits


def moe(
    x: Tensor, router: Tensor, router_bias: Tensor | None, weights: Weights, routing: Routing,
    gating: Gating,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the output, the chosen experts and their weights in the dtype of x.

    Five launches in all, three for a few tokens.
    """
    tokens, top_k = x.shape[0], routing.top_k
    sizes = sizes_of(x, weights, top_k)
    out = x.new_empty(tokens, sizes.hidden)
    ids = x.new_empty(tokens, top_k, dtype=torch.int64)
    mix = x.new_empty(tokens, top_k, dtype=torch.float32)
    rounded = mix if x.dtype is torch.float32 else x.new_empty(tokens, top_k)
    if not tokens:
        return out, ids, rounded
    if not uses_triton(x):
        logits = reference.linear(x, router, router_bias)
        ids, mix = reference.route(logits, *routing[:3], None, *routing[3:])
        return by_reference(x, weights, ids, mix, None, gating), ids, mix.to(x.dtype)
    x = layouts.rows(x)
    other = None if rounded is mix else rounded
    with device_guard(x):
        if _decodes(tokens, sizes, weights):
            block = config.block_tokens(config.bucket(tokens), top_k)
            score(x, router, router_bias, routing, block, ids, mix, other, None, None, sizes)
            _decode(x, weights, ids, None, mix, gating, sizes, out)
            return out, ids, rounded
        for first in range(0, tokens, config.MOST_TOKENS):
            part = slice(first, min(first + config.MOST_TOKENS, tokens))
            plan = _plan(part.stop - first, sizes, x.device)
            tables = _tables(x, (part.stop - first) * top_k, sizes.experts, plan)
            score(
                x[part], router, router_bias, routing, plan.block, ids[part], mix[part],
                None if other is None else other[part], tables.slots, tables.counts, sizes,
            )  # fmt: skip
            _grouped(x[part], weights, mix[part], gating, sizes, tables, plan, out[part])
    return out, ids, rounded


@torch.library.custom_op(add_op_namespace_prefix("moe"), mutates_args=())
def moe_operator(
    x: Tensor,
    router: Tensor,
    router_bias: Tensor | None,
    gate_up: Tensor,
    up: Tensor | None,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    activation: str,
    alpha: float,
    limit: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the chosen experts and their weights in the dtype of x."""
    out, ids, mix = moe(
        x, router, router_bias, Weights(gate_up, up, down, gate_up_bias, down_bias),
        Routing(top_k, scoring, renormalize, 1, 1, 1.0),
        Gating(activation, alpha, limit, interleaved),
    )  # fmt: skip
    return out, ids, mix


@torch.library.register_fake(add_op_namespace_prefix("moe"))
def _(x, router, router_bias, gate_up, up, down, gate_up_bias, down_bias, top_k, *_):
    shape = x.shape[0], top_k
    return (
        x.new_empty(x.shape[0], down.shape[1]),
        x.new_empty(shape, dtype=torch.int64),
        x.new_empty(shape),
    )
