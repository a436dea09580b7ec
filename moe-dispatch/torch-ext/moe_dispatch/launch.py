"""Grids and arguments of the Triton kernels. Allocates nothing, decides nothing.

A `layout` is one of `_kernels.experts`: "rows", "columns", "row boxes" or "column boxes";
configurations have the fields of the classes in `config`.
"""

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import _kernels
from ._shared.device import on_nvidia
from ._shared.launcher import launch


def _kind(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    return tuple(None if tensor is None else tensor.dtype for tensor in tensors)


def _long(*tensors: Tensor) -> tuple[bool, ...]:
    """Return which strides Triton takes as 64 bits, where it does not specialise on them."""
    return tuple(stride >= 2**31 for tensor in tensors for stride in tensor.stride())


def route(
    logits: Tensor, bias: Tensor | None, ids: Tensor, weights: Tensor, gate: tuple, constants: dict,
    num_warps: int,
) -> None:  # fmt: skip
    """Launch the choice of experts by logits [tokens, experts], of any strides.

    `gate` holds top_k, group_size, top_groups and scale, `constants` those of the kernel.
    """
    tokens, experts = logits.shape
    top_k, group_size, top_groups, scale = gate
    launch(
        (
            "route",
            logits.get_device(),
            *_kind(logits, bias),
            experts,
            *logits.stride(),
            num_warps,
            *constants.values(),
        ),
        _kernels.moe_route_kernel,
        -(-tokens // constants["TOKENS"]),
        (logits, bias, ids, weights),
        (tokens, experts, top_k, group_size, top_groups, scale, *logits.stride()),
        constants,
        num_warps,
    )


def score(
    x: Tensor, router: Tensor, router_bias: Tensor | None, logits: Tensor, parts: Tensor,
    arrivals: Tensor, bias: Tensor | None, ids: Tensor, weights: Tensor, rounded: Tensor | None,
    slots: Tensor | None, counts: Tensor | None, gate: tuple, constants: dict, block: int,
    splits: int, span: int, config,
) -> None:  # fmt: skip
    """Launch the router's product and the choice of experts by it.

    `counts` are of blocks of `block` tokens.
    """
    tokens, hidden = x.shape
    experts = router.shape[0]
    top_k, group_size, top_groups, scale = gate
    slabs = -(-experts // config.experts)
    tiles = -(-tokens // config.tokens) * slabs
    constants = constants | {
        "BLOCK_T": config.tokens, "BLOCK_E": config.experts, "BLOCK_K": config.block_k,
        "PARTS": config.parts, "BLOCK": block, "STAGES": config.num_stages,
    }  # fmt: skip
    sizes = (hidden, x.stride(0), router.stride(0))
    launch(
        (
            "score", x.get_device(), *_kind(x, router, router_bias, bias, rounded, slots), experts,
            *sizes, config.num_warps, *constants.values(),
        ),
        _kernels.moe_score_kernel,
        tiles * splits,
        (x, router, router_bias, logits, parts, arrivals, bias, ids, weights, rounded, slots,
         counts),
        (tokens, experts, top_k, group_size, top_groups, scale, splits, span, slabs, tiles, *sizes),
        constants,
        config.num_warps,
        # Two programs a multiprocessor: one chooses while the other multiplies.
        128 if config.tokens >= 64 and x.element_size() == 2 and on_nvidia() else 0,
    )  # fmt: skip


def count(
    ids: Tensor, expert_map: Tensor | None, slots: Tensor, counts: Tensor, experts: int, given: int,
    size: int, constants: dict, num_warps: int,
) -> None:  # fmt: skip
    """Launch the count of the slots [tokens, top_k] of each expert, in blocks of `size`."""
    top_k = ids.shape[1]
    launch(
        (
            "count",
            ids.get_device(),
            *_kind(ids, expert_map),
            _long(ids),
            num_warps,
            *constants.values(),
        ),
        _kernels.moe_count_kernel,
        -(-ids.numel() // size),
        (ids, expert_map, slots, counts),
        (ids.numel(), size, top_k, *ids.stride(), given, experts),
        constants,
        num_warps,
    )


def index(
    slots: Tensor, counts: Tensor, places: Tensor, up_tiles: Tensor, down_tiles: Tensor,
    counted: Tensor, size: int, blocks: int, experts: int, up, down, constants: dict,
    num_warps: int,
) -> None:  # fmt: skip
    """Launch the ordering of slots by expert, and the cut into tiles as high as up and down say."""
    heights = up.heights, down.heights
    constants = {"ONE": heights[0] == heights[1], **constants}
    launch(
        ("index", slots.get_device(), num_warps, *constants.values()),
        _kernels.moe_index_kernel,
        blocks,
        (slots, counts, places, up_tiles, down_tiles, counted),
        (slots.numel(), size, blocks, experts, *heights[0], *heights[1]),
        constants,
        num_warps,
    )


def cut(
    offsets: Tensor, tiles: Tensor, counted: Tensor, rows: int, height: int, programs: int,
    size: int,
) -> None:  # fmt: skip
    """Launch the cut of rows in order, from offsets [experts + 1] int64, into tiles."""
    launch(
        ("cut", offsets.get_device(), size),
        _kernels.moe_cut_kernel,
        programs,
        (offsets, tiles, counted),
        (rows, offsets.numel() - 1, height, programs),
        {"EXPERTS": size},
        4,
    )


def up(
    x: Tensor, gate: Tensor, up: Tensor | None, h: Tensor, gate_bias: Tensor | None,
    up_bias: Tensor | None, places: Tensor | None, tiles: Tensor, counted: Tensor, top_k: int,
    most: int, activation: str, alpha: float, limit: float, layout: str, gates: str, config,
) -> None:  # fmt: skip
    """Launch h = act(x gate^T, x up^T) on at most `most` tiles.

    For "pairs" `gate` is the weight of both [experts, 2 * inner, hidden], and `up` is None.
    """
    hidden, inner = x.shape[1], h.shape[1]
    weights = gate, gate if up is None else up
    up_first = False
    if gates == "halves":
        up_first = up.data_ptr() < gate.data_ptr()
        low, high = (up, gate) if up_first else (gate, up)
        # One box of rows of both, wherever they lie: their distance is a stride like any other.
        apart = (high.data_ptr() - low.data_ptr()) // low.element_size()
        box = TensorDescriptor(
            low,
            [gate.shape[0], 2, inner, hidden],
            [gate.stride(0), apart, gate.stride(1), 1],
            [1, 2, config.block_n, config.block_k],
        )
        weights = box, box
    elif layout.endswith("boxes"):
        n = config.block_n * (2 if gates == "pairs" else 1)
        weights = tuple(_box(weight, layout, n, config.block_k) for weight in weights)
    constants = {
        "ACTIVATION": activation, "LAYOUT": layout, "GATES": gates, "UP_FIRST": up_first,
        **_tile(config, hidden, True),
    }  # fmt: skip
    sizes = (
        inner, hidden, x.stride(0), *gate.stride(),
        *((0, 0) if gate_bias is None else gate_bias.stride()),
    )  # fmt: skip
    launch(
        (
            "up", x.get_device(), *_kind(x, gate_bias, places), *sizes, config.num_warps,
            *constants.values(),
        ),
        _kernels.moe_up_kernel,
        most * -(-inner // config.block_n),
        (x, *weights, h, gate_bias, up_bias, places, tiles, counted),
        (top_k, *sizes, alpha, limit),
        constants,
        config.num_warps,
    )  # fmt: skip


def down(
    h: Tensor, w: Tensor, y: Tensor, bias: Tensor | None, places: Tensor | None, tiles: Tensor,
    counted: Tensor, most: int, layout: str, config,
) -> None:  # fmt: skip
    """Launch y = h w^T + bias on at most `most` tiles."""
    inner, hidden = h.shape[1], y.shape[1]
    weight = _box(w, layout, config.block_n, config.block_k) if layout.endswith("boxes") else w
    rows = h
    if config.rows_by_box:
        block = [config.tokens, config.block_k]
        rows = TensorDescriptor(h, list(h.shape), list(h.stride()), block)
    constants = {"LAYOUT": layout, "H_BOXES": config.rows_by_box, **_tile(config, inner, False)}
    sizes = (hidden, inner, h.stride(0), *w.stride(), *((0, 0) if bias is None else bias.stride()))
    launch(
        (
            "down", h.get_device(), *_kind(h, bias, places), *sizes, config.num_warps,
            *constants.values(),
        ),
        _kernels.moe_down_kernel,
        most * -(-hidden // config.block_n),
        (rows, h, weight, y, bias, places, tiles, counted),
        sizes,
        constants,
        config.num_warps,
    )  # fmt: skip


def _box(weight: Tensor, layout: str, n: int, k: int) -> TensorDescriptor:
    if layout == "row boxes":
        return TensorDescriptor(weight, list(weight.shape), list(weight.stride()), [1, n, k])
    flipped = weight.mT
    return TensorDescriptor(flipped, list(flipped.shape), list(flipped.stride()), [1, k, n])


def _tile(config, size: int, gates: bool) -> dict[str, object]:
    return {
        "TOKENS": config.tokens, "EXTRA": config.extra, "TALL": config.tall,
        "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "STAGES": config.num_stages,
        "TALL_STAGES": config.tall_stages(gates=gates), "SWAP": config.swap,
        "GROUP": config.group, "WHOLE": size % config.block_k == 0,
    }  # fmt: skip


def combine(
    y: Tensor, slots: Tensor | None, places: Tensor | None, weights: Tensor, out: Tensor,
    block: int, num_warps: int,
) -> None:  # fmt: skip
    """Launch the weighted sum of each token's outputs."""
    tokens, hidden = out.shape
    parts = -(-hidden // block)
    constants = {"TOP_K": weights.shape[1], "BLOCK": block}
    launch(
        (
            "combine", y.get_device(), *_kind(y, slots, places, weights, out), _long(weights),
            hidden, num_warps,
            *constants.values(),
        ),
        _kernels.moe_combine_kernel,
        tokens * parts,
        (y, slots, places, weights, out),
        (y.shape[0], parts, hidden, *weights.stride()),
        constants,
        num_warps,
    )  # fmt: skip


def decode_up(
    x: Tensor, gate: Tensor, up: Tensor | None, h: Tensor, gate_bias: Tensor | None,
    up_bias: Tensor | None, ids: Tensor, expert_map: Tensor | None, given: int, activation: str,
    alpha: float, limit: float, config,
) -> None:  # fmt: skip
    """Launch h = act(x gate^T, x up^T) slot by slot; without `up`, `gate` holds pairs of both.

    Weights are dense along their last dimension.
    """
    hidden, inner = x.shape[1], h.shape[1]
    columns = -(-inner // config.block_n)
    constants = {
        "ACTIVATION": activation, "GATES": "pairs" if up is None else "apart",
        **_decode(config, hidden),
    }  # fmt: skip
    sizes = (
        inner, hidden, x.stride(0), *gate.stride()[:2],
        *((0, 0) if gate_bias is None else gate_bias.stride()),
    )  # fmt: skip
    launch(
        (
            "decode up", x.get_device(), *_kind(x, gate_bias, ids, expert_map), _long(ids), *sizes,
            config.num_warps, *constants.values(),
        ),
        _kernels.moe_decode_up_kernel,
        ids.numel() * columns,
        (x, gate, gate if up is None else up, h, gate_bias, up_bias, ids, expert_map),
        (columns, ids.shape[1], given, gate.shape[0], *ids.stride(), alpha, limit, *sizes),
        constants,
        config.num_warps,
    )  # fmt: skip


def decode_down(
    h: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, ids: Tensor,
    expert_map: Tensor | None, given: int, weights: Tensor, config,
) -> None:  # fmt: skip
    """Launch the weighted sum of h w^T + bias over each token's choices."""
    inner, hidden = h.shape[1], out.shape[1]
    columns = -(-hidden // config.block_n)
    constants = _decode(config, inner)
    sizes = (hidden, inner, *w.stride()[:2], *((0, 0) if bias is None else bias.stride()))
    launch(
        (
            "decode down", h.get_device(), *_kind(h, bias, ids, expert_map, weights),
            _long(ids, weights), *sizes,
            config.num_warps, *constants.values(),
        ),
        _kernels.moe_decode_down_kernel,
        out.shape[0] * columns,
        (h, w, out, bias, ids, expert_map, weights),
        (columns, ids.shape[1], given, w.shape[0], *ids.stride(), *weights.stride(), *sizes),
        constants,
        config.num_warps,
    )  # fmt: skip


def _decode(config, size: int) -> dict[str, object]:
    return {
        "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "STAGES": config.num_stages,
        "WHOLE": size % config.block_k == 0,
    }  # fmt: skip
